# SPDX-License-Identifier: Apache-2.0
"""The server's settings: one table of options that flags, environment and docs are made from.

Order: flag, then environment (`ACTORSERVE_` + the flag's name), then the default here, which is
tritonserver's where it has one. A model's own parameters beat all of them.
"""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from actorserve.errors import ConfigError

ENVIRONMENT_PREFIX = "ACTORSERVE_"
_OTHER_VARIABLES = frozenset({"ACTORSERVE_SHM", "ACTORSERVE_FAULT", "ACTORSERVE_EMULATED_DEVICES"})
_OF_KUBERNETES = ("ACTORSERVE_PORT", "ACTORSERVE_SERVICE_")
"""How the variables begin that a service of the name "actorserve" brings into every container."""
MIB = 1 << 20


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How a server runs. Times in seconds, sizes in bytes."""

    model_repository: tuple[str, ...] = ()
    id: str = "actorserve"
    host: str = "127.0.0.1"
    http_port: int = 8000
    http_max_input_bytes: int = 64 * MIB
    http_head_timeout_s: float = 30.0
    strict_json: bool = False
    model_control_mode: str = "none"
    load_model: tuple[str, ...] = ()
    repository_poll_s: float = 15.0
    model_load_thread_count: int = 4
    model_load_retry_count: int = 0
    auto_complete_config: bool = True
    exit_on_error: bool = True
    backend_directory: str = ""
    exit_timeout_s: float = 30.0
    strict_readiness: bool = True
    backend_config: tuple[str, ...] = ()
    restart_backoff_s: tuple[float, float] = (0.0, 30.0)
    device_driver: str = ""
    device_slab_bytes: int = 256 * MIB
    device_max_bytes: int = 0
    device_foreign: str = "copy"
    device_fence: str = "sync"
    device_full: str = "grow"
    device_quarantine_s: float = 0.1
    device_isolation: bool = False
    log_verbose: int = 0
    log_info: bool = True
    log_warning: bool = True
    log_error: bool = True
    log_format: str = "default"
    log_file: str = ""
    crash_dir: str = ""
    ready_file: str = ""
    admin_token_file: str = ""
    allow_metrics: bool = True
    metrics_address: str = ""
    metrics_port: int = 8002
    metrics_interval_ms: int = 2000
    metrics_config: tuple[str, ...] = ()
    allow_cpu_metrics: bool = True

    def __post_init__(self) -> None:
        """Hold settings that were made in Python to the rules of the flags. Raises ConfigError."""
        for option in OPTIONS:
            _check_value(option, getattr(self, option.field))
        _check_load_model(self)


class Option(msgspec.Struct, frozen=True):
    """One option: its flag, the field it sets, how its text is read and what it is for.

    `separator` stands between the values that a repeatable option's variable holds (None: space).
    A `metavar` with bars names the choices; `group` is the heading under which help lists it.
    """

    flag: str
    field: str
    parse: Callable[[str], Any]
    metavar: str
    help: str
    aliases: tuple[str, ...] = ()
    repeatable: bool = False
    separator: str | None = ","
    group: str = ""

    @property
    def variable(self) -> str:
        """The environment variable that sets it, too."""
        return ENVIRONMENT_PREFIX + self.flag[2:].upper().replace("-", "_")

    @property
    def default_text(self) -> str:
        """The default as one would write it, "" for none."""
        value = getattr(Settings(), self.field)
        if isinstance(value, bool):
            # A flag may say the opposite of the field that it sets.
            return "true" if self.parse("true") == value else "false"
        if isinstance(value, tuple):
            return ":".join(f"{part:g}" for part in value)
        return f"{value:g}" if isinstance(value, float) else str(value)


def parse_bool(text: str) -> bool:
    """Read true/false, yes/no, on/off, 1/0. Raises ValueError."""
    value = {"true": True, "yes": True, "on": True, "1": True}.get(text.lower())
    if value is None:
        value = {"false": False, "no": False, "off": False, "0": False}.get(text.lower())
    if value is None:
        raise ValueError(f"expected true or false, got {text!r}")
    return value


def _not(text: str) -> bool:
    return not parse_bool(text)


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise ValueError(f"expected a whole number from {low} to {high}, got {text!r}")
        return value

    return parse


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError(f"expected seconds, 0 or more, got {text!r}")
    return value


def _interval(text: str) -> float:
    value = _seconds(text)
    if value < 0.01:
        raise ValueError(f"expected seconds, 0.01 or more, got {text!r}")
    return value


def _choice(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"expected one of {', '.join(choices)}, got {text!r}")
        return text

    return parse


def parse_backoff(text: str) -> tuple[float, float]:
    """Read FIRST:MAX, seconds before the first restart and at most. Raises ValueError."""
    first, colon, most = text.partition(":")
    if not colon:
        raise ValueError(f"expected FIRST:MAX in seconds, got {text!r}")
    values = (_seconds(first), _seconds(most))
    if values[0] > values[1]:
        raise ValueError(f"FIRST must not be longer than MAX, got {text!r}")
    return values


def _group(title: str, *options: Option) -> tuple[Option, ...]:
    return tuple(msgspec.structs.replace(option, group=title) for option in options)


_PORT = _integer(0, 65535)

OPTIONS: tuple[Option, ...] = (
    *_group("models",
    Option("--model-repository", "model_repository", str, "DIR",
           "a repository to serve, beside those named without a flag",
           ("--model-store",), True),
    Option("--model-control-mode", "model_control_mode", _choice("none", "explicit", "poll"),
           "none|explicit|poll",
           "none: load every model at start; explicit: only those of --load-model, and others by "
           "request; poll: every model, and again when it changes on disk"),
    Option("--repository-poll-secs", "repository_poll_s", _interval, "S",
           "how often the repositories are looked at in poll mode; a change counts when two looks "
           "in a row have seen it"),
    Option("--load-model", "load_model", str, "NAME",
           "a model to load at start in explicit mode; '*' for all", (), True),
    Option("--model-load-thread-count", "model_load_thread_count", _integer(1, 256), "N",
           "how many models load at a time"),
    Option("--model-load-retry-count", "model_load_retry_count", _integer(0, 1000), "N",
           "how often a load that has failed is tried again"),
    Option("--disable-auto-complete-config", "auto_complete_config", _not, "BOOL",
           "do not call the models' auto_complete_config", ("--strict-model-config",)),
    Option("--backend-directory", "backend_directory", str, "DIR",
           "holds Python-based backends: with DIR/NAME/model.py, models may say backend: \"NAME\""),
    Option("--exit-on-error", "exit_on_error", parse_bool, "BOOL",
           "end with exit code 1 when a model fails to load at start"),
    ),
    *_group("server",
    Option("--id", "id", str, "NAME", "the server's name in its metadata"),
    Option("--exit-timeout-secs", "exit_timeout_s", _seconds, "S",
           "time for accepted requests and finalize to end after SIGTERM, and after an unload "
           "for senders that a model keeps"),
    Option("--strict-readiness", "strict_readiness", parse_bool, "BOOL",
           "ready only while all models have all their instances, and their is_ready says so; "
           "false: once the first loads are over, however they ended"),
    ),
    *_group("HTTP",
    Option("--host", "host", str, "ADDRESS",
           "address to listen on; beyond loopback the inference API is open to whoever gets there",
           ("--http-address",)),
    Option("--http-port", "http_port", _PORT, "PORT", "HTTP port; 0 lets the kernel pick"),
    Option("--http-max-input-size", "http_max_input_bytes", _integer(1, 1 << 40), "BYTES",
           "largest request body, as sent and decompressed; beyond it 413"),
    Option("--http-head-timeout-s", "http_head_timeout_s", _seconds, "S",
           "time for a request's head to arrive, then 408"),
    Option("--strict-json", "strict_json", parse_bool, "BOOL",
           "refuse NaN and infinity in JSON outputs instead of writing them bare"),
    ),
    *_group("metrics",
    Option("--allow-metrics", "allow_metrics", parse_bool, "BOOL",
           "serve /metrics for Prometheus, on the HTTP port and on a port of its own"),
    Option("--metrics-address", "metrics_address", str, "ADDRESS",
           "address of that port; that of --host unless it is named"),
    Option("--metrics-port", "metrics_port", _PORT, "PORT",
           "that port; 0 lets the kernel pick"),
    Option("--metrics-config", "metrics_config", str, "KEY=VALUE",
           "counter_latencies, histogram_latencies, summary_latencies: true or false; "
           "summary_quantiles: RANK:ERROR pairs with commas between", (), True, None),
    Option("--metrics-interval-ms", "metrics_interval_ms", _integer(1, 3_600_000), "MS",
           "the machine's CPU and memory are looked at no more often"),
    Option("--allow-cpu-metrics", "allow_cpu_metrics", parse_bool, "BOOL",
           "show the machine's CPU and memory among the metrics"),
    ),
    *_group("stubs and shared memory",
    Option("--backend-config", "backend_config", str, "python,KEY=VALUE",
           "bytes of shared memory that a process takes first (shm-default-byte-size) and each "
           "further time (shm-growth-byte-size) for its tensors", (), True, None),
    Option("--restart-backoff-s", "restart_backoff_s", parse_backoff, "FIRST:MAX",
           "seconds before the first restart of a dead stub, and at most before later ones"),
    Option("--crash-dir", "crash_dir", str, "DIR",
           "folder for the last output of the newest 50 stubs that died, by default "
           "actorserve/crashes in $XDG_STATE_HOME or ~/.local/state"),
    ),
    *_group("devices",
    Option("--device-driver", "device_driver", str, "NAME",
           "tensors may lie on its devices, and pass between models there; empty for none"),
    Option("--device-slab-bytes", "device_slab_bytes", _integer(1, 1 << 50), "BYTES",
           "device memory that an instance takes at a time"),
    Option("--device-max-bytes", "device_max_bytes", _integer(0, 1 << 50), "BYTES",
           "device memory that an instance may take in all, 0 for no limit"),
    Option("--device-foreign", "device_foreign", _choice("copy", "export"), "copy|export",
           "what a library has allocated is sent as a copy, or exported (no driver can yet)"),
    Option("--device-fence", "device_fence", _choice("sync", "event"), "sync|event",
           "the sender waits for the work on a tensor, or the receiver's stream does"),
    Option("--device-full", "device_full", _choice("grow", "host", "error"), "grow|host|error",
           "where there is no room: take more, send by host memory, or fail that request"),
    Option("--device-quarantine-s", "device_quarantine_s", _seconds, "S",
           "how long device memory that a dead stub knew is not used again"),
    Option("--device-isolation", "device_isolation", parse_bool, "BOOL",
           "show each GPU instance only its own device, by CUDA_VISIBLE_DEVICES"),
    ),
    *_group("log",
    Option("--log-verbose", "log_verbose", _integer(0, 100), "LEVEL",
           "more than 0 logs what is only of interest when looking for a fault"),
    Option("--log-info", "log_info", parse_bool, "BOOL",
           "log what happens: loads, restarts, what models print"),
    Option("--log-warning", "log_warning", parse_bool, "BOOL", "log what may be wrong"),
    Option("--log-error", "log_error", parse_bool, "BOOL", "log what went wrong"),
    Option("--log-format", "log_format", _choice("default", "ISO8601", "json"),
           "default|ISO8601|json", "default (Triton's), ISO8601 or json"),
    Option("--log-file", "log_file", str, "FILE", "log there instead of to stderr"),
    ),
    *_group("operators",
    Option("--admin-token-file", "admin_token_file", str, "FILE",
           "holds the bearer token with which other machines may ask what is for operators"),
    Option("--ready-file", "ready_file", str, "FILE",
           "write pid and address there as JSON when serving begins; for port 0"),
    ),
)  # fmt: skip


class PythonBackendConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What `--backend-config=python,…` sets; sizes in bytes."""

    shm_default_bytes: int = 4 * MIB
    shm_growth_bytes: int = 0


_BACKEND_KEYS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "shm-default-byte-size": ("shm_default_bytes", _integer(1 * MIB, 1 << 40)),
    "shm-growth-byte-size": ("shm_growth_bytes", _integer(1, 1 << 40)),
}
_BACKEND_IGNORED = {
    "shm-region-prefix-name": "shared memory has no names here",
    "shm_message_queue_size": "queues are measured in bytes here",
    "thread-pool-size": "no threads wait here",
    "stub-timeout-seconds": "models have the parameters SPAWN_TIMEOUT_S and FINALIZE_TIMEOUT_S",
    "default-max-batch-size": "a Python model says its own in auto_complete_config",
}


def parse_backend_config(entries: Sequence[str]) -> tuple[PythonBackendConfig, list[str]]:
    """Read `python,KEY=VALUE` entries; returns the settings and warnings of what is ignored.

    Raises ConfigError for a value that cannot be read.
    """
    values: dict[str, Any] = {}
    warnings = []
    for entry in entries:
        backend, comma, setting = entry.rpartition(",")
        key, equals, text = setting.partition("=")
        if not equals:
            raise ConfigError(f"--backend-config={entry}: expected python,KEY=VALUE")
        if comma and backend != "python":
            warnings.append(
                f"--backend-config={entry} is ignored: there is no backend '{backend}' here"
            )
        elif key in _BACKEND_KEYS:
            field, parse = _BACKEND_KEYS[key]
            try:
                values[field] = parse(text)
            except ValueError as error:
                raise ConfigError(f"--backend-config={entry}: {error}") from None
        elif key in _BACKEND_IGNORED:
            warnings.append(f"--backend-config={entry} is ignored: {_BACKEND_IGNORED[key]}")
        else:
            raise ConfigError(
                f"--backend-config={entry}: unknown key '{key}', expected one of "
                f"{', '.join(_BACKEND_KEYS)}"
            )
    return PythonBackendConfig(**values), warnings


def unknown_variables(environment: Mapping[str, str] | None = None) -> list[str]:
    """Return a warning for each variable that looks like one of ours and is none."""
    if environment is None:
        environment = os.environ
    known = {option.variable for option in OPTIONS} | _OTHER_VARIABLES
    warnings = []
    for name in sorted(environment):
        is_ours = name.startswith(ENVIRONMENT_PREFIX) and not name.startswith(_OF_KUBERNETES)
        if is_ours and name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.8)
            hint = f"; did you mean {near[0]}?" if near else ""
            warnings.append(f"the variable {name} is unknown and is ignored{hint}")
    return warnings


def settings_from(
    flags: Mapping[str, str | Sequence[str]], environment: Mapping[str, str] | None = None
) -> Settings:
    """Build the settings from flag texts by field, then the environment, then the defaults.

    An empty variable counts as none. Raises ConfigError that names the flag or variable and what
    was expected.
    """
    if environment is None:
        environment = os.environ
    values: dict[str, Any] = {}
    for option in OPTIONS:
        given: str | Sequence[str] | None = flags.get(option.field)
        where = option.flag
        if given is None and environment.get(option.variable):
            where = option.variable
            given = environment[where]
            if option.repeatable:
                given = [part for part in given.split(option.separator) if part]
        if given is None:
            continue
        texts = [given] if isinstance(given, str) else list(given)
        try:
            parsed = [option.parse(text) for text in texts]
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
        values[option.field] = tuple(parsed) if option.repeatable else parsed[-1]
    return Settings(**values)


@functools.cache
def _types() -> dict[str, Any]:
    return {each.name: each.type for each in msgspec.structs.fields(Settings)}


def _check_value(option: Option, value: Any) -> None:
    """Raise ConfigError for a value of the wrong type, or one that the option's flag refuses."""
    try:
        msgspec.convert(value, _types()[option.field])
        if not isinstance(value, bool):
            for each in value if option.repeatable else [value]:
                option.parse(":".join(map(str, each)) if isinstance(each, tuple) else str(each))
    except ValueError as error:
        raise ConfigError(f"Settings({option.field}={value!r}): {error}") from None


def _check_load_model(settings: Settings) -> None:
    """Refuse names of models that would be ignored."""
    if settings.load_model and settings.model_control_mode != "explicit":
        raise ConfigError("--load-model needs --model-control-mode=explicit: else all models load")
    if "*" in settings.load_model and len(set(settings.load_model)) > 1:
        raise ConfigError("--load-model=* loads all models: leave out the other --load-model")


def default_crash_dir(environment: Mapping[str, str] | None = None) -> Path:
    """Return where crash files go unless an option says otherwise."""
    if environment is None:
        environment = os.environ
    state = environment.get("XDG_STATE_HOME")
    if state:
        return Path(state) / "actorserve" / "crashes"
    try:
        return Path.home() / ".local" / "state" / "actorserve" / "crashes"
    except RuntimeError:  # no HOME, and a user that the system does not know
        return Path("/tmp/actorserve/crashes")
