# SPDX-License-Identifier: Apache-2.0
"""How a parameter of a model's configuration is read: a rule for each, in one table a backend.

parameters { key: "EXECUTE_TIMEOUT_S" value { string_value: "5" } }
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from actorserve.errors import ConfigError
from actorserve.triton.model_config import ModelConfig

_MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"


class ParameterRule(msgspec.Struct, frozen=True):
    """One parameter: its name, the field it sets, how its text is read and what it is for.

    `read` raises ValueError with what it expected.
    """

    name: str
    field: str
    read: Callable[[str], Any]
    help: str


def read_parameters(
    rules: Iterable[ParameterRule], config: ModelConfig, model_directory: str
) -> dict[str, Any]:
    """Return what the configuration gives, by field. Raises ConfigError that names the wrong one.

    `model_directory` is the model's folder in its repository, which `$$TRITON_MODEL_DIRECTORY` in
    a text stands for.
    """
    values = {}
    for rule in rules:
        parameter = config.parameters.get(rule.name)
        if parameter is None:
            continue
        text = parameter.string_value
        try:
            values[rule.field] = rule.read(text.replace(_MODEL_DIRECTORY, model_directory))
        except ValueError as error:
            raise ConfigError(
                f"parameter {rule.name} of model '{config.name}': expected {error}, got '{text}'"
            ) from None
    return values


# --- what several rules read: ValueError says what was expected -----------------------------------


def seconds(text: str) -> float:
    """Read a time span."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (value > 0 and math.isfinite(value)):
        raise ValueError("a number of seconds greater than 0")
    return value


def seconds_or_none(text: str) -> float | None:
    """Read a limit, or `none`."""
    if text.strip() == "none":
        return None
    try:
        return seconds(text)
    except ValueError as error:
        raise ValueError(f"{error}, or none") from None
