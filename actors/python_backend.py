# SPDX-License-Identifier: Apache-2.0
"""Python-based backends: one model.py for every model that names the backend.

    <--backend-directory>/<backend>/model.py
    <--backend-directory>/<backend>/pb_exec_env_model.py.tar.gz     its environment, if any
    generation/backend/model.py                                     built in: "generation"

The models bring data alone: a configuration and version folders, which need no model file.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from actorserve.errors import ConfigError
from actorserve.triton.config_completion import MODEL_FILE, PYTHON
from actorserve.triton.generation_tensors import GENERATION
from actorserve.triton.model_config import ModelConfig

GENERATION_MODEL_FILE = Path(__file__).parent / "generation" / "backend" / MODEL_FILE
ENVIRONMENT_FILE = "pb_exec_env_model.py.tar.gz"


class PythonBackend(msgspec.Struct, frozen=True):
    """A backend that was found; `environment` is the path of its archive, or ""."""

    model_file: Path
    environment: str


def find_backend(config: ModelConfig, directory: str) -> PythonBackend | None:
    """Look up the backend of a configuration in `--backend-directory`.

    None where the configuration means another thing than a Python-based backend, or where no
    directory was named. Raises ConfigError for a backend that is not there or not Python-based.
    """
    name = config.backend
    is_ensemble = config.ensemble_scheduling is not None or config.platform == "ensemble"
    if name == GENERATION and not is_ensemble:
        return PythonBackend(GENERATION_MODEL_FILE, "")
    if not directory or name in ("", PYTHON) or is_ensemble:
        return None
    if "/" in name or "\0" in name or name.startswith("."):
        raise ConfigError(f"backend '{name}': expected the name of a folder in '{directory}'")
    folder = Path(directory).absolute() / name
    library = folder / f"libtriton_{name}.so"
    model_file = folder / MODEL_FILE
    if config.runtime not in ("", MODEL_FILE):
        raise ConfigError(
            f"runtime '{config.runtime}' of backend '{name}' is not supported: leave it out, or "
            f"set '{MODEL_FILE}'"
        )
    if not config.runtime and library.exists():
        raise ConfigError(
            f"backend '{name}' is a compiled one ('{library}'), which is not supported: only "
            f"'{PYTHON}' and backends written in Python are; runtime: \"{MODEL_FILE}\" takes the "
            f"{MODEL_FILE} beside it, if there is one"
        )
    if not model_file.is_file():
        raise ConfigError(
            f"there is no backend '{name}': neither is it '{PYTHON}', nor is there a file "
            f"'{model_file}' (--backend-directory)"
        )
    archive = folder / ENVIRONMENT_FILE
    return PythonBackend(model_file, str(archive) if archive.exists() else "")
