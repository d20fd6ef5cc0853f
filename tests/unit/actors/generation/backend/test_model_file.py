# SPDX-License-Identifier: Apache-2.0
"""The model file of the backend "generation" is a module of the package, and loaded as that."""

from __future__ import annotations

import sys
from pathlib import Path

from actorserve.actors.python_backend import GENERATION_MODEL_FILE, find_backend
from actorserve.triton.importing import load_model_module
from actorserve.triton.model_config import ModelConfig

NAME = "actorserve.actors.generation.backend.model"


def test_the_file_is_imported_under_its_own_name(tmp_path: Path) -> None:
    """By whatever path the package is reached, and without a folder of it on sys.path."""
    before = list(sys.path)
    assert load_model_module(str(GENERATION_MODEL_FILE)).__name__ == NAME
    package = GENERATION_MODEL_FILE.parents[3]
    assert package.name == "actorserve"
    (tmp_path / "actorserve").symlink_to(package)
    linked = tmp_path / "actorserve" / GENERATION_MODEL_FILE.relative_to(package)
    assert load_model_module(str(linked)) is sys.modules[NAME]
    assert sys.path == before


def test_the_backend_needs_no_directory() -> None:
    """It is there wherever actorserve is."""
    backend = find_backend(ModelConfig(name="m", backend="generation"), "")
    assert backend is not None
    assert backend.model_file.is_file()
    assert backend.environment == ""
