# SPDX-License-Identifier: Apache-2.0
"""Real servers for tests: `actorserve start` as a process, addressed through its ready file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.harness import Launcher


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Launcher]:
    """Return a function that starts a server: `start_server(repository, *flags, wait=True)`."""
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.stop_all()


@pytest.fixture(scope="module")
def start_shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """Return the same for servers that a whole module shares: they are up until its end."""
    launcher = Launcher(tmp_path_factory.mktemp("shared"))
    yield launcher
    launcher.stop_all()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return an empty repository."""
    path = tmp_path / "repository"
    path.mkdir()
    return path
