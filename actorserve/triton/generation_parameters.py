# SPDX-License-Identifier: Apache-2.0
"""The parameters of a model that names the backend "generation": its engine and its limits.

    parameters { key: "ENGINE" value { string_value: "tinygpt" } }

The parameters of every model (model_parameters.py) count beside them; any other one is a mistake.
Paths are absolute, or relative to the version's folder; `$$TRITON_MODEL_DIRECTORY` stands for the
model's. Pure but for paths, which may be asked whether they exist.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from actorserve.errors import ConfigError
from actorserve.triton.model_config import ModelConfig
from actorserve.triton.model_parameters import PARAMETERS as MODEL_PARAMETERS
from actorserve.triton.parameter_rule import (
    ParameterRule,
    read_parameters,
    seconds,
    seconds_or_none,
)

MOST_IN_FLIGHT = 999
"""More the health page of a stub could not tell that they are cancelled."""
MOST_RANKS = 30
"""As many as a group's board has room for."""


class GenerationParameters(msgspec.Struct, frozen=True, kw_only=True):
    """What the parameters say. Times are in seconds.

    `options` are the engine's own, WEIGHTS and SLOTS among them; `adapters` maps names to paths.
    """

    engine: str
    options: dict[str, Any] = {}
    ranks: int = 1
    max_in_flight: int = 256
    max_beam_width: int = 4
    default_max_tokens: int = 128
    load_timeout_s: float = 600.0
    hang_timeout_s: float = 60.0
    adapters: dict[str, str] = {}


def read_generation_parameters(
    config: ModelConfig, model_directory: str, version_directory: str
) -> GenerationParameters:
    """Read the parameters of a configuration. Raises ConfigError that names the wrong one."""
    _refuse_unknown(config)
    values = read_parameters(PARAMETERS, config, model_directory)
    if "engine" not in values:
        raise ConfigError(
            f"model '{config.name}' names no engine: expected a parameter ENGINE, like 'tinygpt' "
            "or 'module:Class'"
        )
    return _finished(values, config.name, Path(version_directory))


def _refuse_unknown(config: ModelConfig) -> None:
    known = [rule.name for rule in (*PARAMETERS, *MODEL_PARAMETERS)]
    for name in config.parameters:
        if name not in known:
            close = difflib.get_close_matches(name.upper(), known, 1)
            hint = f"perhaps {close[0]}?" if close else "expected " + ", ".join(known)
            raise ConfigError(f"model '{config.name}' has an unknown parameter '{name}': {hint}")


def _finished(values: dict[str, Any], model: str, folder: Path) -> GenerationParameters:
    """Merge what belongs together, and make paths absolute."""
    options = dict(values.pop("options", {}))
    for name in ("weights", "slots"):
        if name not in values:
            continue
        if name in options:
            raise ConfigError(
                f"model '{model}': '{name}' is in ENGINE_OPTIONS and in {name.upper()}, expected "
                "one of them"
            )
        options[name] = values.pop(name)
    if isinstance(options.get("weights"), str):
        options["weights"] = _existing(options["weights"], folder, f"WEIGHTS of model '{model}'")
    adapters = {
        name: _existing(path, folder, f"adapter '{name}' of model '{model}'")
        for name, path in values.pop("adapters", {}).items()
    }
    return GenerationParameters(options=options, adapters=adapters, **values)


def _existing(text: str, folder: Path, what: str) -> str:
    """Return an absolute path. Raises ConfigError where nothing is there."""
    path = os.path.abspath(folder / text)  # noqa: PTH100 (links stay as they are)
    if not os.path.exists(path):  # noqa: PTH110
        raise ConfigError(f"{what}: there is nothing at '{path}'")
    return path


# --- how a text is read: ValueError says what was expected ----------------------------------------


def _name(text: str) -> str:
    text = text.strip()
    if not text:
        raise ValueError("the name of an engine")
    return text


def _path(text: str) -> str:
    text = text.strip()
    if not text or "\0" in text:
        raise ValueError("a path")
    return text


def _from_1_to(most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        text = text.strip()
        is_number = text.isascii() and text.isdigit() and len(text) <= 10
        if not is_number or not 1 <= int(text) <= most:
            raise ValueError(f"a whole number from 1 to {most}")
        return int(text)

    return read


def _limit(text: str) -> float:
    """Read a limit in seconds, where none is 0."""
    return seconds_or_none(text) or 0.0


def _options(text: str) -> dict[str, Any]:
    value = _object(text)
    if value is None:
        raise ValueError('a JSON object, like {"chunk_tokens": 64}')
    return value


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _paths(text: str) -> dict[str, str]:
    value = _object(text)
    if value is None or not all(
        isinstance(path, str) and path and name for name, path in value.items()
    ):
        raise ValueError('a JSON object of names and paths, like {"pirate": "pirate.npz"}')
    return value


PARAMETERS: tuple[ParameterRule, ...] = (
    ParameterRule("ENGINE", "engine", _name,
                  "the engine: `tinygpt`, `smollm2`, `llama_cpp`, `transformers`, `scripted`, one "
                  "of an installed package, or `module:Class`; has to be given"),
    ParameterRule("WEIGHTS", "weights", _path, "the engine's weights: a file or folder"),
    ParameterRule("SLOTS", "slots", _from_1_to(65536),
                  "how many sequences the engine works on at a time"),
    ParameterRule("RANKS", "ranks", _from_1_to(MOST_RANKS),
                  "processes that share the engine's work; with 1 it runs in the stub's own"),
    ParameterRule("MAX_IN_FLIGHT", "max_in_flight", _from_1_to(MOST_IN_FLIGHT),
                  "requests that the engine has at a time; others wait in the model's queue"),
    ParameterRule("MAX_BEAM_WIDTH", "max_beam_width", _from_1_to(1024),
                  "the widest beam search that a request may ask for"),
    ParameterRule("DEFAULT_MAX_TOKENS", "default_max_tokens", _from_1_to(1 << 30),
                  "for requests without `max_tokens`"),
    ParameterRule("LOAD_TIMEOUT_S", "load_timeout_s", seconds,
                  "for the engine to load, on every rank"),
    ParameterRule("HANG_TIMEOUT_S", "hang_timeout_s", _limit,
                  "for one iteration of the engine; `none` for no limit"),
    ParameterRule("ADAPTERS", "adapters", _paths,
                  "LoRA adapters: a JSON object of names and paths"),
    ParameterRule("ENGINE_OPTIONS", "options", _options,
                  "further options of the engine: a JSON object"),
)  # fmt: skip
