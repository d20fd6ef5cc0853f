# SPDX-License-Identifier: Apache-2.0
"""What all process actors of one system share: the zygote, shared memory, and a watch.

Nothing of it exists before the first process actor: a system without any needs no process.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import msgspec

from actorserve.clock import monotonic_s
from actorserve.errors import ActorStopped
from actorserve.ids import Serial
from actorserve.process.spawn import Spawner, SpawnerStats, SpawnSpec
from actorserve.runtime.exchange import Exchange, ExchangeStats
from actorserve.runtime.import_path import import_path
from actorserve.runtime.placement import Placement, Process

CHILD_MODULE = "actorserve.runtime.process_main"
WATCH_INTERVAL_S = 1.0
IDLE_ARENA_BYTES = 64 << 20

_log = logging.getLogger("actorserve")
_LEVELS = {0: logging.DEBUG, 1: logging.WARNING, 2: logging.ERROR, 3: logging.DEBUG}


class Watched(Protocol):
    """A process that is looked at now and then."""

    def watch(self, now_s: float) -> None:
        """Judge whether it hangs."""


class ProcessesStats(msgspec.Struct, frozen=True):
    """The processes of a system and the memory that they share with it."""

    spawner: SpawnerStats
    exchange: ExchangeStats


class Processes:
    """Started by whoever needs it first. Belongs to the system's loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.arenas = Serial()
        self.exchange = Exchange(self.arenas.next())
        self.executor = ThreadPoolExecutor(2, "actorserve-memory")
        self.spawner = _spawner()
        self._starting: asyncio.Task[None] | None = None
        self._watched: set[Watched] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_stopped = False

    async def start(self) -> None:
        """Return when the zygote is up. Raises what Spawner.start raises."""
        if self._is_stopped:
            raise ActorStopped("the actor system was stopped")
        if self._starting is None:
            # Not by the loop's task factory: an eager one might end before `_starting` is known.
            self._starting = asyncio.Task(self._start(), loop=self.loop)
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        try:
            await self.spawner.start()
        except BaseException:
            self.spawner = _spawner()  # for another try: this one has stopped
            self._starting = None
            raise
        self._timer = self.loop.call_later(WATCH_INTERVAL_S, self._watch)

    def add(self, process: Watched) -> None:
        """Watch a process from now on."""
        self._watched.add(process)

    def remove(self, process: Watched) -> None:
        """Watch it no more."""
        self._watched.discard(process)

    def _watch(self) -> None:
        self._timer = self.loop.call_later(WATCH_INTERVAL_S, self._watch)
        now_s = monotonic_s()
        for process in list(self._watched):
            try:
                process.watch(now_s)
            except Exception:
                _log.exception("watching a process failed")
        self.exchange.settle()
        self.exchange.trim(IDLE_ARENA_BYTES)

    async def stop(self) -> None:
        """End every process and give all memory back."""
        self._is_stopped = True
        if self._starting is not None:
            await asyncio.wait([self._starting])
        if self._timer is not None:
            self._timer.cancel()
        await self.spawner.stop()
        self.exchange.settle()
        self.exchange.close()
        self.executor.shutdown(wait=False)

    def stats(self) -> ProcessesStats:
        """Return the counts."""
        return ProcessesStats(self.spawner.stats(), self.exchange.stats())


def _spawner() -> Spawner:
    return Spawner(preload=(CHILD_MODULE,), log=_log_process)


def child_spec(name: str, where: Placement) -> SpawnSpec:
    """Return how the process of an actor is started."""
    assert isinstance(where, Process)
    return SpawnSpec(
        f"{CHILD_MODULE}:main",
        name,
        where.python,
        dict(where.env),
        where.cwd,
        import_path(where.python),
    )


def print_line(stream: str, line: str) -> None:
    """Pass on what an actor printed in its process, as if it had done so here."""
    try:
        print(line, file=sys.stderr if stream == "stderr" else sys.stdout)
    except (OSError, ValueError):
        pass  # nobody listens


def _log_process(level: int, text: str) -> None:
    _log.log(_LEVELS.get(level, logging.INFO), "%s", text)
