# SPDX-License-Identifier: Apache-2.0
"""A supervised child process, as the rooms above see it: how it is started, and how it ends.

    Spawner.spawn(SpawnSpec) ─► Child ─► Exit       here
    entry(BootSocket) ─► … ─► PeerGone              there

These names belong to process/; rooms above this one take them from here and know nothing else of
zygotes, pidfds and guards.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from actorserve.process.boot import BootSocket, PeerGone
from actorserve.process.environment import UnpackedFolder
from actorserve.process.exit import Exit

if TYPE_CHECKING:
    from actorserve.process.spawn import Child, Spawner, SpawnerStats, SpawnSpec

__all__ = [
    "BootSocket",
    "Child",
    "Exit",
    "PeerGone",
    "SpawnSpec",
    "Spawner",
    "SpawnerStats",
    "UnpackedFolder",
    "is_archive",
]


_OF_THE_PARENT = ("Child", "SpawnSpec", "Spawner", "SpawnerStats")


def __getattr__(name: str) -> Any:
    """Import the parent's half on demand: a child in another environment may lack psutil."""
    if name not in _OF_THE_PARENT:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from actorserve.process import spawn

    return getattr(spawn, name)


def is_archive(path: Path) -> bool:
    """Whether this file begins as `Spawner.unpacked` needs it. Raises OSError."""
    from actorserve.process import archive  # its imports are of no use to children

    return archive.is_archive(path)
