# SPDX-License-Identifier: Apache-2.0
"""The parameters that the server itself reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from actorserve.errors import ConfigError
from actorserve.triton.model_config import ModelConfig, ModelParameter
from actorserve.triton.model_parameters import ModelParameters, read_model_parameters


def read(**parameters: str) -> ModelParameters:
    """Read parameters of a model called m in /repo/m."""
    config = ModelConfig(
        name="m",
        parameters={key: ModelParameter(string_value=text) for key, text in parameters.items()},
    )
    return read_model_parameters(config, "/repo/m")


def test_defaults_hold_without_parameters() -> None:
    """A model that says nothing gets the documented budgets, and its own parameters are ignored."""
    expected = ModelParameters(
        spawn_timeout_s=10,
        initialize_timeout_s=600,
        finalize_timeout_s=30,
        stopped_timeout_s=10,
        execute_timeout_s=None,
        retry_on_stub_death=0,
        readonly_inputs=False,
        execution_env_path="",
        force_cpu_only_input_tensors=True,
    )
    assert read() == read(my_own="x", spawn_timeout_s="1") == expected


def test_all_parameters_are_read() -> None:
    """Each parameter reaches its field."""
    assert read(
        SPAWN_TIMEOUT_S="1",
        INITIALIZE_TIMEOUT_S=" 2.5 ",
        FINALIZE_TIMEOUT_S="3",
        STOPPED_TIMEOUT_S="4e1",
        EXECUTE_TIMEOUT_S="5",
        RETRY_ON_STUB_DEATH="2",
        SHARED_INPUTS="readonly",
        EXECUTION_ENV_PATH="$$TRITON_MODEL_DIRECTORY/env.tar.gz",
        FORCE_CPU_ONLY_INPUT_TENSORS="no",
    ) == ModelParameters(
        spawn_timeout_s=1.0,
        initialize_timeout_s=2.5,
        finalize_timeout_s=3.0,
        stopped_timeout_s=40.0,
        execute_timeout_s=5.0,
        retry_on_stub_death=2,
        readonly_inputs=True,
        execution_env_path="/repo/m/env.tar.gz",
        force_cpu_only_input_tensors=False,
    )
    assert read(EXECUTE_TIMEOUT_S="none").execute_timeout_s is None
    assert not read(SHARED_INPUTS="copy").readonly_inputs
    assert read(FORCE_CPU_ONLY_INPUT_TENSORS="yes").force_cpu_only_input_tensors


def test_relative_environment_counts_from_the_working_directory() -> None:
    """A relative path is made absolute; an empty one means no environment."""
    assert read(EXECUTION_ENV_PATH="envs/a").execution_env_path == str(Path.cwd() / "envs" / "a")
    assert read(EXECUTION_ENV_PATH="").execution_env_path == ""


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("SPAWN_TIMEOUT_S", "0", "a number of seconds greater than 0"),
        ("INITIALIZE_TIMEOUT_S", "-1", "a number of seconds greater than 0"),
        ("FINALIZE_TIMEOUT_S", "10s", "a number of seconds greater than 0"),
        ("STOPPED_TIMEOUT_S", "nan", "a number of seconds greater than 0"),
        ("SPAWN_TIMEOUT_S", "none", "a number of seconds greater than 0"),
        ("EXECUTE_TIMEOUT_S", "inf", "a number of seconds greater than 0, or none"),
        ("EXECUTE_TIMEOUT_S", "", "a number of seconds greater than 0, or none"),
        ("RETRY_ON_STUB_DEATH", "-1", "a whole number from 0 to 999"),
        ("RETRY_ON_STUB_DEATH", "1.5", "a whole number from 0 to 999"),
        ("RETRY_ON_STUB_DEATH", "²", "a whole number from 0 to 999"),
        ("SHARED_INPUTS", "yes", "copy or readonly"),
    ],
)
def test_wrong_values_are_named(name: str, text: str, expected: str) -> None:
    """An error names the parameter, the model, what was expected and what was there."""
    with pytest.raises(ConfigError) as caught:
        read(**{name: text})
    assert str(caught.value) == (
        f"parameter {name} of model 'm': expected {expected}, got '{text}'"
    )


@pytest.mark.parametrize("text", ["", "Yes", "true", "x"])
def test_wrong_input_placement_has_the_known_text(text: str) -> None:
    """The one parameter of the reference server keeps its text."""
    with pytest.raises(ConfigError) as caught:
        read(FORCE_CPU_ONLY_INPUT_TENSORS=text)
    assert str(caught.value) == f"Incorrect value for FORCE_CPU_ONLY_INPUT_TENSORS: '{text}'"
