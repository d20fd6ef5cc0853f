# SPDX-License-Identifier: Apache-2.0
"""The parameters of a model's configuration that mean something to this server.

    parameters { key: "EXECUTE_TIMEOUT_S" value { string_value: "5" } }

They are in upper case, with their unit in the name. All others belong to the model, which reads
them from `args["model_config"]`. A parameter beats the server's flags and environment.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import TypeVar

import msgspec

from actorserve.errors import ConfigError
from actorserve.triton.model_config import ModelConfig

_MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"

T = TypeVar("T")


class ModelParameters(msgspec.Struct, frozen=True, kw_only=True):
    """How this server treats one model's stubs. Times are budgets in seconds.

    `spawn_timeout_s` reaches to the stub's hello; `initialize_timeout_s` holds for the import and
    for `initialize`, each; `stopped_timeout_s` is how long a stub may be stopped by a signal;
    `execute_timeout_s` is None for no limit. A request may kill `retry_on_stub_death` stubs and
    still be tried on the next one. `readonly_inputs` gives read-only views of inputs that others
    hold too, in place of copies. `execution_env_path` is absolute, "" for the server's own Python.
    """

    spawn_timeout_s: float = 10.0
    initialize_timeout_s: float = 600.0
    finalize_timeout_s: float = 30.0
    stopped_timeout_s: float = 10.0
    execute_timeout_s: float | None = None
    retry_on_stub_death: int = 0
    readonly_inputs: bool = False
    execution_env_path: str = ""
    force_cpu_only_input_tensors: bool = True


def read_model_parameters(config: ModelConfig, model_directory: str) -> ModelParameters:
    """Read the parameters of a configuration; raises ConfigError that names the wrong one.

    `model_directory` is the model's folder in its repository, for EXECUTION_ENV_PATH.
    """
    default = ModelParameters()
    reader = _Reader(config)
    return ModelParameters(
        spawn_timeout_s=reader.read("SPAWN_TIMEOUT_S", _seconds, default.spawn_timeout_s),
        initialize_timeout_s=reader.read(
            "INITIALIZE_TIMEOUT_S", _seconds, default.initialize_timeout_s
        ),
        finalize_timeout_s=reader.read("FINALIZE_TIMEOUT_S", _seconds, default.finalize_timeout_s),
        stopped_timeout_s=reader.read("STOPPED_TIMEOUT_S", _seconds, default.stopped_timeout_s),
        execute_timeout_s=reader.read(
            "EXECUTE_TIMEOUT_S", _seconds_or_none, default.execute_timeout_s
        ),
        retry_on_stub_death=reader.read("RETRY_ON_STUB_DEATH", _count, default.retry_on_stub_death),
        readonly_inputs=reader.read("SHARED_INPUTS", _is_readonly, default.readonly_inputs),
        execution_env_path=reader.read(
            "EXECUTION_ENV_PATH", lambda text: _env_path(text, model_directory), ""
        ),
        force_cpu_only_input_tensors=_force_cpu_only(config),
    )


class _Reader:
    """Reads parameters of one configuration, and says which of them is wrong."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    def read(self, name: str, convert: Callable[[str], T], default: T) -> T:
        """Convert a parameter, or return the default if it is not there."""
        parameter = self._config.parameters.get(name)
        if parameter is None:
            return default
        text = parameter.string_value
        try:
            return convert(text.strip())
        except ValueError as error:
            raise ConfigError(
                f"parameter {name} of model '{self._config.name}': expected {error}, got '{text}'"
            ) from None


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not (seconds > 0 and math.isfinite(seconds)):
        raise ValueError("a number of seconds greater than 0")
    return seconds


def _seconds_or_none(text: str) -> float | None:
    if text == "none":
        return None
    try:
        return _seconds(text)
    except ValueError as error:
        raise ValueError(f"{error}, or none") from None


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 3):
        raise ValueError("a whole number from 0 to 999")
    return int(text)


def _is_readonly(text: str) -> bool:
    if text not in ("copy", "readonly"):
        raise ValueError("copy or readonly")
    return text == "readonly"


def _env_path(text: str, model_directory: str) -> str:
    """Put the model's folder in; a relative path counts from the working directory."""
    if not text:
        return ""
    return os.path.abspath(text.replace(_MODEL_DIRECTORY, model_directory))  # noqa: PTH100


def _force_cpu_only(config: ModelConfig) -> bool:
    """Read the one parameter whose error has a text that clients know."""
    parameter = config.parameters.get("FORCE_CPU_ONLY_INPUT_TENSORS")
    if parameter is None:
        return True
    text = parameter.string_value
    if text not in ("yes", "no"):
        raise ConfigError(f"Incorrect value for FORCE_CPU_ONLY_INPUT_TENSORS: '{text}'")
    return text == "yes"
