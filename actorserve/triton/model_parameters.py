# SPDX-License-Identifier: Apache-2.0
"""The parameters of a model's configuration that mean something to this server.

    parameters { key: "EXECUTE_TIMEOUT_S" value { string_value: "5" } }

They are in upper case, with their unit in the name. All others belong to the model, which reads
them from `args["model_config"]`. A parameter beats the server's flags and environment.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec

from actorserve.errors import ConfigError
from actorserve.triton.model_config import ModelConfig
from actorserve.triton.parameter_rule import (
    ParameterRule,
    read_parameters,
    seconds,
    seconds_or_none,
)


class ModelParameters(msgspec.Struct, frozen=True, kw_only=True):
    """How this server treats one model's stubs. Times are budgets in seconds.

    `spawn_timeout_s` reaches to the stub's hello; `initialize_timeout_s` holds for the import and
    for `initialize`, each; `stopped_timeout_s` is how long a stub may be stopped by a signal;
    `execute_timeout_s` is None for no limit. A request may kill `retry_on_stub_death` stubs and
    still be tried on the next one. `readonly_inputs` gives read-only views of inputs that others
    hold too, in place of copies. `execution_env_path` is absolute, "" for the server's own Python.
    What begins with `device_` is None where the server's settings count.
    """

    spawn_timeout_s: float = 10.0
    initialize_timeout_s: float = 600.0
    finalize_timeout_s: float = 30.0
    stopped_timeout_s: float = 10.0
    execute_timeout_s: float | None = None
    retry_on_stub_death: int = 0
    readonly_inputs: bool = False
    concurrent_executes: int = 0
    execution_env_path: str = ""
    force_cpu_only_input_tensors: bool = True
    device_driver: str | None = None
    device_slab_bytes: int | None = None
    device_max_bytes: int | None = None
    device_foreign: str | None = None
    device_fence: str | None = None
    device_full: str | None = None
    device_isolation: bool | None = None


def read_model_parameters(config: ModelConfig, model_directory: str) -> ModelParameters:
    """Read the parameters of a configuration; raises ConfigError that names the wrong one.

    `model_directory` is the model's folder in its repository, for EXECUTION_ENV_PATH.
    """
    return ModelParameters(**read_parameters(PARAMETERS, config, model_directory))


def _count(text: str) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 3):
        raise ValueError("a whole number from 0 to 999")
    return int(text)


def _is_readonly(text: str) -> bool:
    text = text.strip()
    if text not in ("copy", "readonly"):
        raise ValueError("copy or readonly")
    return text == "readonly"


def _env_path(text: str) -> str:
    """Return the absolute path; a relative one counts from the working directory."""
    text = text.strip()
    return os.path.abspath(text) if text else ""  # noqa: PTH100 (links stay as they are)


def _force_cpu_only(text: str) -> bool:
    """Read the one parameter whose error has a text that clients know."""
    if text not in ("yes", "no"):
        raise ConfigError(f"Incorrect value for FORCE_CPU_ONLY_INPUT_TENSORS: '{text}'")
    return text == "yes"


def _driver(text: str) -> str:
    """Read a driver's name; `none` switches the server's off."""
    text = text.strip()
    return "" if text == "none" else text


def _bytes(text: str) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise ValueError("a whole number of bytes")
    return int(text)


def _one_of(*choices: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text.strip() not in choices:
            raise ValueError(" or ".join(choices))
        return text.strip()

    return read


def _is_yes(text: str) -> bool:
    return _one_of("yes", "no")(text) == "yes"


PARAMETERS: tuple[ParameterRule, ...] = (
    ParameterRule("SPAWN_TIMEOUT_S", "spawn_timeout_s", seconds,
                  "from the start of a stub's process until it has its channel"),
    ParameterRule("INITIALIZE_TIMEOUT_S", "initialize_timeout_s", seconds,
                  "for the import of `model.py` and for `initialize`, each"),
    ParameterRule("EXECUTE_TIMEOUT_S", "execute_timeout_s", seconds_or_none,
                  "for one batch: beyond it its requests fail and the stub is replaced"),
    ParameterRule("FINALIZE_TIMEOUT_S", "finalize_timeout_s", seconds,
                  "for `finalize`; then the stub is killed"),
    ParameterRule("STOPPED_TIMEOUT_S", "stopped_timeout_s", seconds,
                  "how long a stub may be stopped by a signal before it is replaced"),
    ParameterRule("RETRY_ON_STUB_DEATH", "retry_on_stub_death", _count,
                  "how often a request whose stub died is tried again: for work that may be done "
                  "twice"),
    ParameterRule("CONCURRENT_EXECUTES", "concurrent_executes", _count,
                  "how many batches an `async def execute` may have at a time, 0 for the default: "
                  "256 in a decoupled model, else 1"),
    ParameterRule("SHARED_INPUTS", "readonly_inputs", _is_readonly,
                  "`copy` or `readonly`: what the model sees of an input that others hold too, a "
                  "copy of its own or a read-only view"),
    ParameterRule("EXECUTION_ENV_PATH", "execution_env_path", _env_path,
                  "another Python environment for this model's stubs: its directory, or an "
                  "archive of it (conda-pack's, or any tar), see below; "
                  "`$$TRITON_MODEL_DIRECTORY` stands for the model's folder"),
    ParameterRule("FORCE_CPU_ONLY_INPUT_TENSORS", "force_cpu_only_input_tensors", _force_cpu_only,
                  "`yes`: inputs are brought to the CPU's memory; `no`: they stay on the device "
                  "where they come there"),
    ParameterRule("DEVICE_DRIVER", "device_driver", _driver,
                  "the device driver of this model's stubs, `none` for no device; as the flags "
                  "of this name, also the next ones"),
    ParameterRule("DEVICE_SLAB_BYTES", "device_slab_bytes", _bytes,
                  "device memory that a stub takes at a time"),
    ParameterRule("DEVICE_MAX_BYTES", "device_max_bytes", _bytes,
                  "device memory that a stub may take in all, 0 for no limit"),
    ParameterRule("DEVICE_FOREIGN", "device_foreign", _one_of("copy", "export"),
                  "`copy` or `export` (no driver can yet): how a library's memory is sent"),
    ParameterRule("DEVICE_FENCE", "device_fence", _one_of("sync", "event"),
                  "`sync` or `event`: who waits for the model's work on a tensor"),
    ParameterRule("DEVICE_FULL", "device_full", _one_of("grow", "host", "error"),
                  "`grow`, `host` or `error`: what happens where device memory has no room"),
    ParameterRule("DEVICE_ISOLATION", "device_isolation", _is_yes,
                  "`yes` or `no`: whether a stub is shown only its own device, by "
                  "CUDA_VISIBLE_DEVICES"),
)  # fmt: skip
