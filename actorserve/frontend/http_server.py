# SPDX-License-Identifier: Apache-2.0
"""Start and stop of the HTTP front end inside a running loop, on sockets that are bound already.

No signal handlers, no thread of its own, nothing that ticks: uvicorn contributes its protocol and
configuration, while accepting and draining are done here. A stop refuses new connections, answers
what was accepted, closes idle connections at once, and cuts off what is left after a grace time.
"""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Coroutine, Sequence
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from actorserve.frontend.http_app import HttpApp
from actorserve.frontend.http_front import HttpFront, HttpStats
from actorserve.frontend.http_protocol import HttpConnection
from actorserve.frontend.http_settings import HttpSettings
from actorserve.triton.inference import Door

BACKLOG = 2048
DEFAULT_GRACE_S = 5.0
_LAST_WAIT_S = 5.0


class HttpServer:
    """The HTTP front end of one door.

    `sockets` are bound, non-blocking or not, and belong to the server from `start()` on: `stop()`
    closes them. Everything runs on the loop that `start()` is called on.
    """

    def __init__(
        self,
        door: Door,
        settings: HttpSettings | None = None,
        sockets: Sequence[socket.socket] = (),
    ) -> None:
        self._door = door
        self._settings = settings or HttpSettings()
        self._sockets = list(sockets)
        self._state = ServerState()
        self._listeners: list[asyncio.AbstractServer] = []
        self._front: HttpFront | None = None

    async def start(self) -> None:
        """Accept connections. Raises OSError where a socket cannot listen."""
        if self._front is not None:
            raise RuntimeError("this HTTP server has been started already")
        loop = asyncio.get_running_loop()
        front = self._front = HttpFront(self._door, self._settings, loop)
        config = uvicorn.Config(
            HttpApp(front),
            loop="none",
            http=functools.partial(HttpConnection, front),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
        )
        config.load()
        protocol: Any = config.http_protocol_class
        connect = functools.partial(
            protocol,
            config=config,
            server_state=self._state,
            app_state={},
            _loop=loop,
        )
        for sock in self._sockets:
            server = await loop.create_server(connect, sock=sock, backlog=BACKLOG)
            self._listeners.append(server)

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Host and port of each socket, as the kernel knows them."""
        return [tuple(sock.getsockname()[:2]) for sock in self._sockets]

    async def stop(self, grace_s: float = DEFAULT_GRACE_S) -> None:
        """Drain and close; idempotent. Connections that last longer than `grace_s` are cut off."""
        front = self._front
        for listener in self._listeners:
            listener.close()
        self._listeners = []
        for sock in self._sockets:
            sock.close()
        if front is None:
            return
        for connection in list(self._state.connections):
            connection.shutdown()
        if not await _within(front.wait_no_connections(), grace_s):
            for connection in list(self._state.connections):
                connection.transport.abort()
            await _within(front.wait_no_connections(), _LAST_WAIT_S)
        tasks = [*front.tasks, *self._state.tasks]
        if tasks:
            await asyncio.wait(tasks, timeout=_LAST_WAIT_S)
        front.close()

    def stats(self) -> HttpStats:
        """Return the counts. Raises RuntimeError before `start()`."""
        if self._front is None:
            raise RuntimeError("this HTTP server has not been started")
        return self._front.stats()


async def _within(condition: Coroutine[Any, Any, None], seconds: float) -> bool:
    """Wait for a condition; False where it takes too long."""
    try:
        await asyncio.wait_for(condition, seconds)
    except asyncio.TimeoutError:
        return False
    return True
