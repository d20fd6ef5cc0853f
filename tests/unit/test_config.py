# SPDX-License-Identifier: Apache-2.0
"""Settings: flags, then variables, then defaults; every wrong value is named with what is right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from actorserve.config import (
    MIB,
    OPTIONS,
    PythonBackendConfig,
    Settings,
    default_crash_dir,
    parse_backend_config,
    parse_backoff,
    parse_bool,
    settings_from,
    unknown_variables,
)
from actorserve.errors import ConfigError


def option(field: str):
    """Return the option that sets a field."""
    return next(each for each in OPTIONS if each.field == field)


# --- the table -----------------------------------------------------------------------------------


def test_every_setting_has_exactly_one_option():
    """And every option a setting, a flag of its own and a variable."""
    assert sorted(each.field for each in OPTIONS) == sorted(Settings.__struct_fields__)
    flags = [flag for each in OPTIONS for flag in (each.flag, *each.aliases)]
    assert len(set(flags)) == len(flags)
    assert all(flag.startswith("--") for flag in flags)
    assert option("http_port").variable == "ACTORSERVE_HTTP_PORT"
    assert option("exit_timeout_s").variable == "ACTORSERVE_EXIT_TIMEOUT_SECS"


def test_defaults_are_shown_as_one_would_write_them():
    """The one that says the opposite of its field, too; and each is a legal value."""
    assert option("auto_complete_config").default_text == "false"
    assert option("exit_on_error").default_text == "true"
    assert option("restart_backoff_s").default_text == "0:30"
    assert option("exit_timeout_s").default_text == "30"
    assert option("load_model").default_text == ""
    for each in OPTIONS:
        if each.default_text and not each.repeatable:
            assert each.parse(each.default_text) == getattr(Settings(), each.field), each.flag


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"load_model": "add_sub", "model_control_mode": "explicit"}, "Expected `array`"),
        ({"load_model": ("add_sub",)}, "--load-model needs --model-control-mode=explicit"),
        ({"model_control_mode": "explcit"}, "expected one of none, explicit, poll, got 'explcit'"),
        ({"model_load_thread_count": 0}, "expected a whole number from 1 to 256, got '0'"),
        ({"exit_timeout_s": float("nan")}, "expected seconds, 0 or more"),
        ({"exit_timeout_s": "30"}, "Expected `float`, got `str`"),
        ({"restart_backoff_s": 0.1}, "Expected `array`"),
        ({"restart_backoff_s": (2.0, 1.0)}, "FIRST must not be longer than MAX"),
        ({"exit_on_error": "false"}, "Expected `bool`, got `str`"),
    ],
)
def test_settings_made_in_python_are_held_to_the_same_rules(fields, reason):
    """A string where a tuple is meant would otherwise load a model for each of its letters."""
    with pytest.raises(ConfigError, match=re.escape(reason)):
        Settings(**fields)


def test_good_settings_made_in_python_are_taken():
    """Whole numbers for seconds and lists for tuples, too."""
    settings = Settings(
        model_control_mode="explicit",
        load_model=["add_sub"],  # type: ignore[arg-type]
        exit_timeout_s=5,
        restart_backoff_s=(0, 0.5),
        auto_complete_config=False,
    )
    assert settings.exit_timeout_s == 5


# --- the order -----------------------------------------------------------------------------------


def test_without_anything_all_is_default():
    """The environment that is not ours is not looked at."""
    assert settings_from({}, {"HTTP_PORT": "1", "ACTORSERVE_SHM": "memfd"}) == Settings()


def test_a_variable_that_is_none_of_ours_is_named():
    """A letter left out must not leave a server on another port in silence."""
    environment = {
        "ACTORSERVE_HTTPPORT": "1",
        "ACTORSERVE_HTTP_PORT": "2",
        "ACTORSERVE_SHM": "memfd",
        "ACTORSERVE_XYZZY_42": "",
        "ACTORSERVE_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "ACTORSERVE_SERVICE_HOST": "10.0.0.1",
        "HTTP_PORT": "3",
    }
    assert unknown_variables(environment) == [
        "the variable ACTORSERVE_HTTPPORT is unknown and is ignored; did you mean "
        "ACTORSERVE_HTTP_PORT?",
        "the variable ACTORSERVE_XYZZY_42 is unknown and is ignored",
    ]


def test_a_flag_beats_a_variable_and_a_variable_the_default():
    """For each option by itself."""
    environment = {"ACTORSERVE_HTTP_PORT": "1", "ACTORSERVE_ID": "env", "ACTORSERVE_HOST": ""}
    settings = settings_from({"http_port": "2"}, environment)
    assert (settings.http_port, settings.id, settings.host) == (2, "env", "127.0.0.1")


def test_a_variable_that_a_flag_beats_is_not_read():
    """So that a wrong one does no harm."""
    assert settings_from({"http_port": "2"}, {"ACTORSERVE_HTTP_PORT": "x"}).http_port == 2


def test_repeatable_options_are_lists():
    """Several flags, or one variable: with commas, or spaces where values have commas."""
    assert settings_from({"model_repository": ["a", "b"]}, {}).model_repository == ("a", "b")
    environment = {
        "ACTORSERVE_MODEL_REPOSITORY": "a,b,",
        "ACTORSERVE_BACKEND_CONFIG": " python,x=1  python,y=2 ",
    }
    settings = settings_from({}, environment)
    assert settings.model_repository == ("a", "b")
    assert settings.backend_config == ("python,x=1", "python,y=2")


def test_the_process_s_own_environment_is_the_default(monkeypatch):
    """As it is at the call."""
    monkeypatch.setenv("ACTORSERVE_HTTP_PORT", "4711")
    assert settings_from({}).http_port == 4711


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("http_port", "0", 0),
        ("http_port", "65535", 65535),
        ("exit_timeout_s", "0", 0.0),
        ("exit_timeout_s", "1e3", 1000.0),
        ("exit_on_error", "FALSE", False),
        ("auto_complete_config", "true", False),
        ("auto_complete_config", "no", True),
        ("restart_backoff_s", "0:0", (0.0, 0.0)),
        ("restart_backoff_s", ".5:2", (0.5, 2.0)),
        ("log_format", "ISO8601", "ISO8601"),
        ("http_max_input_bytes", str(1 << 33), 1 << 33),
    ],
)
def test_values_are_read(field, text, value):
    """Each in its own way."""
    assert getattr(settings_from({field: text}, {}), field) == value


@pytest.mark.parametrize(
    ("field", "text", "message"),
    [
        ("http_port", "65536", "--http-port: expected a whole number from 0 to 65535, got '65536'"),
        ("http_port", "-1", "--http-port: expected a whole number from 0 to 65535, got '-1'"),
        ("http_port", "8000.0", "--http-port: expected a whole number from 0 to 65535"),
        ("http_port", "", "--http-port: expected a whole number from 0 to 65535, got ''"),
        ("exit_timeout_s", "-1", "--exit-timeout-secs: expected seconds, 0 or more, got '-1'"),
        ("exit_timeout_s", "inf", "--exit-timeout-secs: expected seconds, 0 or more, got 'inf'"),
        ("exit_timeout_s", "nan", "--exit-timeout-secs: expected seconds, 0 or more, got 'nan'"),
        ("exit_on_error", "2", "--exit-on-error: expected true or false, got '2'"),
        ("restart_backoff_s", "1", "--restart-backoff-s: expected FIRST:MAX in seconds, got '1'"),
        ("restart_backoff_s", "2:1", "FIRST must not be longer than MAX, got '2:1'"),
        ("restart_backoff_s", "a:1", "--restart-backoff-s: expected seconds, 0 or more, got 'a'"),
        ("log_format", "xml", "--log-format: expected one of default, ISO8601, json, got 'xml'"),
        ("model_load_thread_count", "0", "expected a whole number from 1 to 256, got '0'"),
    ],
)
def test_wrong_values_are_named(field, text, message):
    """With the flag, or the variable where that was it."""
    with pytest.raises(ConfigError) as caught:
        settings_from({field: text}, {})
    assert message in caught.value.message
    if text:
        with pytest.raises(ConfigError) as caught:
            settings_from({}, {option(field).variable: text})
        assert caught.value.message.startswith(option(field).variable + ": ")


def test_models_to_load_need_their_mode():
    """They would be ignored otherwise."""
    with pytest.raises(ConfigError, match="--load-model needs --model-control-mode=explicit"):
        settings_from({"load_model": ["a"]}, {})
    explicit = {"model_control_mode": "explicit"}
    assert settings_from(explicit | {"load_model": ["a", "b"]}, {}).load_model == ("a", "b")
    assert settings_from(explicit | {"load_model": ["*"]}, {}).load_model == ("*",)
    with pytest.raises(ConfigError, match=r"--load-model=\* loads all models"):
        settings_from(explicit | {"load_model": ["*", "a"]}, {})


@pytest.mark.parametrize("text", ["true", "True", "YES", "on", "1"])
def test_words_for_yes(text):
    """As people write them."""
    assert parse_bool(text) is True
    assert parse_bool({"1": "0", "on": "off", "YES": "NO"}.get(text, "False")) is False


def test_a_back_off_is_two_numbers():
    """In seconds."""
    assert parse_backoff("0.1:30") == (0.1, 30.0)


# --- --backend-config ----------------------------------------------------------------------------


def test_sizes_of_shared_memory_are_set():
    """With the backend's name in front, or without; the last one counts."""
    config, warnings = parse_backend_config(
        ["python,shm-default-byte-size=2097152", "shm-growth-byte-size=65536"]
    )
    assert config == PythonBackendConfig(shm_default_bytes=2 * MIB, shm_growth_bytes=65536)
    assert warnings == []
    assert parse_backend_config([])[0] == PythonBackendConfig()


@pytest.mark.parametrize(
    "entry",
    [
        "python,stub-timeout-seconds=30",
        "python,shm-region-prefix-name=x",
        "python,thread-pool-size=4",
        "default-max-batch-size=8",
        "onnxruntime,anything=1",
    ],
)
def test_what_has_no_meaning_here_is_a_warning(entry):
    """With the reason; nothing changes."""
    config, warnings = parse_backend_config([entry])
    assert config == PythonBackendConfig()
    assert len(warnings) == 1
    assert warnings[0].startswith(f"--backend-config={entry} is ignored: ")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("python", "expected python,KEY=VALUE"),
        ("", "expected python,KEY=VALUE"),
        ("python,shm-size=1", "unknown key 'shm-size', expected one of shm-default-byte-size"),
        ("python,shm-default-byte-size=big", "expected a whole number from 1048576"),
        ("python,shm-default-byte-size=1048575", "expected a whole number from 1048576"),
        ("python,shm-growth-byte-size=0", "expected a whole number from 1 to"),
    ],
)
def test_wrong_entries_are_named(entry, message):
    """Whole, with what was expected."""
    with pytest.raises(ConfigError) as caught:
        parse_backend_config([entry])
    assert caught.value.message.startswith(f"--backend-config={entry}: ")
    assert message in caught.value.message


# --- places --------------------------------------------------------------------------------------


def test_crash_files_go_to_the_user_s_state(tmp_path):
    """XDG_STATE_HOME, else below the home folder."""
    found = default_crash_dir({"XDG_STATE_HOME": str(tmp_path)})
    assert found == tmp_path / "actorserve" / "crashes"
    assert default_crash_dir({}).parts[-4:] == (".local", "state", "actorserve", "crashes")


def test_crash_files_need_no_home(monkeypatch):
    """A container's user may have none."""

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    assert default_crash_dir({}) == Path("/tmp/actorserve/crashes")
