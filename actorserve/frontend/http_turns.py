# SPDX-License-Identifier: Apache-2.0
"""The turns of one HTTP connection: whose request runs, when its reply is out, how it ends.

The base of http_protocol.py. Requests of one connection run one after the other, and so their
replies keep the order. `_active` is the exchange or ASGI cycle whose turn it is, `pipeline` holds
those behind it, `_receiving` is the one whose body is under way. Reading stops while something
waits in the pipeline or the active exchange is stalled, so what a peer can make the server hold is
bounded by one read. Behind a stream, which may last, reading goes on for a while, so that the
peer's end is noticed: what comes is held as it is until the stream has ended.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from actorserve.frontend.http_body import BodySink
from actorserve.frontend.http_exchange import Exchange, unexpected
from actorserve.frontend.http_front import HttpFront
from actorserve.frontend.http_head import reply_head
from actorserve.frontend.http_outbox import JOIN_BYTES, Outbox
from actorserve.frontend.v2_response import EncodedBody, encode_error
from actorserve.frontend.v2_values import View

HOLD_BYTES = 64 * 1024
"""How much is read behind a stream and a request that waits for its end."""


class HttpTurns(HttpToolsProtocol):
    """The serving half of a connection; the reading half is derived from it."""

    def __init__(
        self,
        front: HttpFront,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.front = front
        self._active: Exchange | RequestResponseCycle | None = None
        self._receiving: Exchange | RequestResponseCycle | None = None
        self._is_advancing = False
        self._is_broken = False
        self._is_ending = False
        self._sink: BodySink | None = None
        self._replying: Exchange | None = None
        self._outbox = Outbox()
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._linger_timer: asyncio.TimerHandle | None = None

    # --- the transport ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection, and turn it away if there are too many."""
        super().connection_made(transport)
        if not self.front.add_connection(self):
            self._is_broken = True
            text = encode_error("too many connections")
            body = EncodedBody([text], len(text))
            transport.write(reply_head(503, body, False, b"retry-after: 1\r\n") + text)
            self._linger()

    def connection_lost(self, exc: Exception | None) -> None:
        """Abandon whatever this connection still waits for."""
        super().connection_lost(exc)
        self.front.remove_connection(self)
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None
        cycles = [self._active, *(cycle for cycle, _ in self.pipeline)]
        self.pipeline.clear()
        self._outbox.clear()
        self._held.clear()
        self._active = self._receiving = self._replying = None
        self._sink = None
        for cycle in cycles:
            abandon(cycle)

    def resume_writing(self) -> None:
        """Go on with a large reply, or a stream."""
        super().resume_writing()
        if self._replying is not None:
            self._pump()
        elif isinstance(self._active, Exchange):
            self._active.on_writable()

    def eof_received(self) -> None:
        """End the connection, as uvicorn does; a stream's without sending what is left of it."""
        if self._is_streaming:
            self.transport.abort()

    def check(self, now_s: float) -> None:
        """Look at the connection's timeouts."""
        raise NotImplementedError

    # --- whose turn it is ---

    @property
    def _is_streaming(self) -> bool:
        active = self._active
        return isinstance(active, Exchange) and active.is_stream

    def _start(self, exchange: Exchange) -> None:
        try:
            exchange.start()
        except Exception:
            exchange.on_failure(unexpected())

    def on_response_complete(self) -> None:
        """The active request has been answered: it is the next one's turn."""
        self.server_state.total_requests += 1
        self._active = None
        if self.pipeline:
            self._advance()
        elif self.flow.read_paused and not self._is_ending:
            self.flow.resume_reading()

    def _advance(self) -> None:
        """Start the next request; in a loop, because it may be answered before `start` returns."""
        if self._is_advancing:
            return
        self._is_advancing = True
        while self.pipeline and self._active is None and not self._is_closing():
            entry: Any = self.pipeline.pop()
            cycle, app = entry
            self._active = cycle
            if isinstance(cycle, Exchange):
                self._start(cycle)
            else:
                task = self.loop.create_task(cycle.run_asgi(app))
                task.add_done_callback(self.tasks.discard)
                self.tasks.add(task)
        self._is_advancing = False
        if self._held and not self._is_closing():
            data = b"".join(self._held)
            self._held.clear()
            self._held_bytes = 0
            self.data_received(data)
        if not self._is_closing():
            self.sync_reading()

    def _hold(self, data: bytes) -> None:
        """Keep bytes for later."""
        self._held.append(data)
        self._held_bytes += len(data)
        self.sync_reading()

    def sync_reading(self) -> None:
        """Read, unless something waits already or the active exchange is stalled."""
        active = self._active
        if self.pipeline:
            is_full = not self._is_streaming or self._held_bytes >= HOLD_BYTES
        else:
            is_full = isinstance(active, Exchange) and active.is_stalled
        if is_full:
            self.flow.pause_reading()
        elif not self.transport.is_closing():
            self.flow.resume_reading()

    def shutdown(self) -> None:
        """Close when everything that was accepted has been answered."""
        if self._active is None and not self.pipeline:
            if self._linger_timer is None:
                self._is_ending = True
                self.transport.close()
        else:
            last = self.pipeline[0][0] if self.pipeline else self._active
            assert last is not None
            last.keep_alive = False

    # --- replies ---

    @property
    def is_write_paused(self) -> bool:
        """Whether the peer takes less than is written."""
        return self.flow.write_paused

    def send_part(self, data: bytes) -> None:
        """Write a part of a reply that `send_reply` ends."""
        if not self._is_closing():
            self.transport.write(data)

    def send_interim(self, head: bytes) -> None:
        """Write an interim response."""
        if not self.transport.is_closing():
            self.transport.write(head)

    def send_reply(self, exchange: Exchange, head: bytes, pieces: list[View], nbytes: int) -> None:
        """Write a reply: a small one in one piece, a large one as fast as the peer takes it."""
        if self._is_ending or self.transport.is_closing():
            return
        if nbytes <= JOIN_BYTES:
            self.transport.write(b"".join([head, *pieces]))
            if not self.flow.write_paused:
                self._finish(exchange)
                return
        else:
            self._outbox.put(head, pieces)
        self._replying = exchange
        self._pump()

    def _pump(self) -> None:
        is_sent = self._outbox.pump(self.transport, self.flow)
        exchange = self._replying
        if is_sent and exchange is not None:
            self._replying = None
            self._finish(exchange)

    def _finish(self, exchange: Exchange) -> None:
        """The transport has the whole reply, and the peer keeps up."""
        exchange.response_complete = True
        if not exchange.keep_alive:
            self._is_ending = True
            if exchange.is_received:
                self.transport.close()
            else:
                self._linger()
        self.on_response_complete()

    def _is_closing(self) -> bool:
        return self._is_ending or self.transport.is_closing()

    def _linger(self) -> None:
        """End the connection although the peer may still be sending.

        Closing now would reset it, and the peer might never see the reply: so the reply is
        followed by an end of file, and what still comes is dropped until the peer closes.
        """
        if self._linger_timer is not None or self.transport.is_closing():
            return
        self._is_broken = self._is_ending = True
        self._leave_sink()
        self._linger_timer = self.loop.call_later(
            self.front.settings.linger_s, self.transport.abort
        )
        try:
            if self.transport.can_write_eof():
                self.transport.write_eof()
        except OSError:  # asyncio's, where the peer has reset the connection already
            self.transport.abort()
            return
        self.flow.resume_reading()

    def _leave_sink(self) -> None:
        if self._sink is not None:
            self._sink = None
            self.transport.set_protocol(self)


def abandon(cycle: Exchange | RequestResponseCycle | None) -> None:
    """Tell an exchange, or an ASGI cycle, that its peer is gone."""
    if isinstance(cycle, Exchange):
        cycle.abandon()
    elif cycle is not None:
        cycle.disconnected = True
        cycle.message_event.set()
