# SPDX-License-Identifier: Apache-2.0
"""What all connections of one HTTP server share: the door, the limits, the codec threads, counts.

Lives in the server's loop. The codec threads run only pure functions; what is large is decoded
and encoded there, so that the loop turns meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import httptools
import msgspec

from actorserve.errors import InvalidArgument
from actorserve.frontend.http_memo import HeadMemo
from actorserve.frontend.http_route import INFERENCES, ModelPath, match_model_path
from actorserve.frontend.http_settings import HttpSettings
from actorserve.frontend.openai_route import ACTIONS
from actorserve.triton.inference import Door

T = TypeVar("T")

_ROUTES_KEPT = 1024
_ROUTE_BYTES_KEPT = 512

logger = logging.getLogger("actorserve.http")


class HttpStats(msgspec.Struct, frozen=True):
    """Counts since the start of a server; `connections` and `in_flight` are as of now."""

    connections: int
    accepted: int
    refused: int
    in_flight: int
    inferences: int
    errors: int
    disconnects: int
    timeouts: int


class Watched(Protocol):
    """A connection, as the sweep sees it."""

    def check(self, now_s: float) -> None:
        """Look at the connection's timeouts."""


class HttpFront:
    """The shared part of a server's connections."""

    def __init__(
        self, door: Door, settings: HttpSettings, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self.door = door
        self.settings = settings
        self.loop = loop or asyncio.get_running_loop()
        self.accepted = 0
        self.refused = 0
        self.in_flight = 0
        self.inferences = 0
        self.errors = 0
        self.disconnects = 0
        self.timeouts = 0
        self.tasks: set[asyncio.Task[None]] = set()
        self._connections: set[Watched] = set()
        self._turned_away: set[Watched] = set()
        self._emptied: asyncio.Event = asyncio.Event()
        self._emptied.set()
        self._sweep_timer: asyncio.TimerHandle | None = None
        self.memo = HeadMemo()
        self._routes: dict[bytes, ModelPath] = {}
        self._executor: ThreadPoolExecutor | None = None

    # --- connections ---

    def add_connection(self, connection: Watched) -> bool:
        """Count a connection in; False where there are too many of them already."""
        self.accepted += 1
        self._connections.add(connection)
        self._emptied.clear()
        if self._sweep_timer is None:
            self._arm_sweep()
        if len(self._connections) - len(self._turned_away) > self.settings.max_connections:
            self.refused += 1
            self._turned_away.add(connection)
            return False
        return True

    def remove_connection(self, connection: Watched) -> None:
        """Count a connection out."""
        self._connections.discard(connection)
        self._turned_away.discard(connection)
        if not self._connections:
            self._emptied.set()

    async def wait_no_connections(self) -> None:
        """Wait until the last connection is gone."""
        await self._emptied.wait()

    def _arm_sweep(self) -> None:
        self._sweep_timer = self.loop.call_later(self.settings.sweep_interval_s, self._sweep)

    def _sweep(self) -> None:
        self._sweep_timer = None
        now_s = self.loop.time()
        for connection in list(self._connections):
            connection.check(now_s)
        if self._connections:
            self._arm_sweep()

    # --- routes ---

    def infer_route(self, url: bytes) -> ModelPath | None:
        """Return where an inference goes, None for any other URL (or one that cannot be)."""
        route = self._routes.get(url)
        if route is not None:
            return route
        if self.settings.only_metrics:
            return None
        try:
            path = httptools.parse_url(url).path
            route = _route_of(path) if path else None
        except (httptools.HttpParserInvalidURLError, InvalidArgument):
            return None
        if route is None:
            return None
        if len(url) <= _ROUTE_BYTES_KEPT:
            if len(self._routes) >= _ROUTES_KEPT:
                self._routes.clear()
            self._routes[url] = route
        return route

    # --- work beside the loop ---

    def start_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine; the server waits for it when it stops."""
        task = self.loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def off_loop(self, function: Callable[..., T], *args: Any) -> T:
        """Run a pure function in a codec thread."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self.settings.codec_threads, "http-codec")
        return await self.loop.run_in_executor(self._executor, function, *args)

    def close(self) -> None:
        """End the codec threads and the sweep; idempotent."""
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
            self._sweep_timer = None
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None

    def stats(self) -> HttpStats:
        """Return the counts."""
        return HttpStats(
            connections=len(self._connections),
            accepted=self.accepted,
            refused=self.refused,
            in_flight=self.in_flight,
            inferences=self.inferences,
            errors=self.errors,
            disconnects=self.disconnects,
            timeouts=self.timeouts,
        )


def _route_of(path: bytes) -> ModelPath | None:
    """Return where a path's inferences go, None where it has none. Raises InvalidArgument."""
    action = ACTIONS.get(path)
    if action is not None:
        return ModelPath("", "", action)
    route = match_model_path(path)
    return route if route is not None and route.action in INFERENCES else None
