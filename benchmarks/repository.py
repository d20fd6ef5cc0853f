# SPDX-License-Identifier: Apache-2.0
"""Repositories made for a measurement: as many models, or instances of one, as it needs."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

IDENTITY = Path(__file__).with_name("models") / "identity"


def of_models(count: int) -> Path:
    """Return a new repository with so many copies of the identity model."""
    repository = Path(tempfile.mkdtemp(prefix="models-"))
    for number in range(count):
        shutil.copytree(IDENTITY, repository / f"identity_{number}")
    return repository


def of_instances(count: int) -> Path:
    """Return a new repository whose one model has so many instances."""
    repository = Path(tempfile.mkdtemp(prefix="models-"))
    shutil.copytree(IDENTITY, repository / "identity")
    config = repository / "identity" / "config.pbtxt"
    text = config.read_text()
    config.write_text(text.replace("count: 1", f"count: {count}"))
    return repository
