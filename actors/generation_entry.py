# SPDX-License-Identifier: Apache-2.0
"""A repository entry that names the backend "generation": what it says, checked before a load.

Nothing of the engine is imported here: whether it loads is seen in its stub.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from actorserve.actors.generation.engines.registry import engine_names
from actorserve.errors import ConfigError
from actorserve.triton.generation_parameters import (
    GenerationParameters,
    read_generation_parameters,
)
from actorserve.triton.generation_tensors import GENERATION
from actorserve.triton.model_config import ModelConfig

LOAD_MARGIN_S = 10.0
"""What a stub has beyond its engine's time to load, to say itself what went wrong."""

_CONCURRENCY = "CONCURRENT_EXECUTES"


def is_generation(config: ModelConfig) -> bool:
    """Whether the configuration means an engine without a model file."""
    return config.backend == GENERATION and config.ensemble_scheduling is None


def read_entry(
    config: ModelConfig, directory: Path, versions: Sequence[int], *, has_own_python: bool
) -> GenerationParameters | None:
    """Read the parameters as each version understands them; returns those of the last one.

    None where there is no version. With an environment of its own, which engines are installed
    there cannot be told. Raises ConfigError with the first thing that is wrong.
    """
    found = None
    for version in versions:
        found = read_generation_parameters(config, str(directory), str(directory / str(version)))
    if found is None:
        return None
    if _CONCURRENCY in config.parameters:
        raise ConfigError(
            f"parameter {_CONCURRENCY} of model '{config.name}' is not for the backend "
            f"'{GENERATION}': use MAX_IN_FLIGHT"
        )
    if ":" not in found.engine and not has_own_python:
        names = engine_names()
        if found.engine not in names:
            raise ConfigError(
                f"parameter ENGINE of model '{config.name}': there is no engine "
                f"'{found.engine}', expected one of {', '.join(names)}, or 'module:Class'"
            )
    return found
