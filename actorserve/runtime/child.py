# SPDX-License-Identifier: Apache-2.0
"""A supervised child process, as the rooms above see it: how it is started, and how it ends.

    Spawner.spawn(SpawnSpec) ─► Child ─► Exit       here
    entry(BootSocket) ─► … ─► PeerGone              there

These names belong to process/; rooms above this one take them from here and know nothing else of
zygotes, pidfds and guards.
"""

from __future__ import annotations

from actorserve.process.boot import BootSocket, PeerGone
from actorserve.process.exit import Exit
from actorserve.process.spawn import Child, Spawner, SpawnerStats, SpawnSpec

__all__ = ["BootSocket", "Child", "Exit", "PeerGone", "SpawnSpec", "Spawner", "SpawnerStats"]
