# SPDX-License-Identifier: Apache-2.0
"""What all actors of one supervisor share: its loop, processes, tensor memory, ids and settings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

from actorserve.actors.answers import Answerer
from actorserve.actors.crash import CrashStore
from actorserve.actors.device_drivers import DeviceDrivers
from actorserve.actors.metric_store import MetricStore
from actorserve.config import PythonBackendConfig, Settings
from actorserve.errors import NotFound
from actorserve.ids import Ids, Serial
from actorserve.runtime.child import Spawner
from actorserve.runtime.exchange import Exchange


class Node:
    """Built by the supervisor when it starts; everything in it belongs to its loop's thread."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        settings: Settings,
        backend: PythonBackendConfig,
        spawner: Spawner,
        executor: ThreadPoolExecutor,
    ) -> None:
        self.loop = loop
        self.settings = settings
        self.backend = backend
        self.spawner = spawner
        self.executor = executor
        self.arenas = Serial()
        self.ids = Ids()
        self.exchange = Exchange(
            self.arenas.next(),
            first_segment_bytes=backend.shm_default_bytes,
            growth_bytes=backend.shm_growth_bytes,
        )
        self.drivers = DeviceDrivers(spawner, self.exchange, settings.device_quarantine_s)
        self.crashes = CrashStore(settings.crash_dir)
        self.metrics = MetricStore(settings)
        self.route: Callable[[str, str], Any] = _no_route
        self.answerers: dict[type, Answerer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.watch_call: Callable[[Any], None] = lambda call: None

    def run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something in a task of its own, which is kept alive until it ends."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def end_tasks(self) -> None:
        """Cancel what `run` has started and has not ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.drivers.close()


def _no_route(name: str, version: str) -> NoReturn:
    raise NotFound(f"Request for unknown model: '{name}' is not found")
