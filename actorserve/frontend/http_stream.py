# SPDX-License-Identifier: Apache-2.0
"""POST …/generate_stream: the responses to one request as server-sent events, while they come.

    door ─► on_response ─► _events ─ once a turn of the loop ─► transport ─► peer
              ▲                                                    │
              └── the model's credit ◄── consumed ◄── the peer keeps up

The first response decides the status: an error as the first one is an error reply, and ends the
request; a later one is an event. What has come in one turn of the loop leaves with one write. A
response counts as consumed when the transport has taken its event and is not over its high-water
mark, so a peer that does not read stops its own sender, a window of responses later, and nobody
else's.
"""

from __future__ import annotations

from collections import deque

from actorserve.errors import ActorserveError
from actorserve.frontend.http_exchange import Connection
from actorserve.frontend.http_generate import GenerateIntake, is_slow
from actorserve.frontend.http_head import InferHead, stream_head
from actorserve.frontend.http_outbox import JOIN_BYTES, PIECE_BYTES
from actorserve.frontend.http_route import ModelPath
from actorserve.frontend.v2_generate import GenerateEncoder, error_event, event
from actorserve.frontend.v2_values import View
from actorserve.triton.inference import InferResponse

_LAST_CHUNK = b"0\r\n\r\n"


class StreamExchange(GenerateIntake):
    """One stream on a connection.

    `_events` are encoded and not written, `_backlog` holds responses behind one whose encoding
    runs beside the loop. `_unconsumed` counts what is written and the model has no credit for.
    """

    is_stream = True
    _is_open = False
    _is_head_sent = False
    _is_ended = False
    _is_flush_due = False
    _is_encoding = False
    _unconsumed = 0

    def __init__(
        self, connection: Connection, keep_alive: bool, route: ModelPath, head: InferHead
    ) -> None:
        super().__init__(connection, keep_alive, route, head)
        self._encoder = GenerateEncoder(connection.front.settings.strict_json)
        self._events: deque[View] = deque()
        self._backlog: deque[InferResponse] = deque()

    def release(self) -> None:
        """Give back what the exchange holds."""
        super().release()
        self._events.clear()
        self._backlog.clear()

    # --- responses come in ---

    def on_response(self, response: InferResponse) -> None:
        """Make an event of a response, in its turn."""
        if self._is_encoding:
            self._backlog.append(response)
        elif response.error is None and is_slow(response):
            self._is_encoding = True
            self.run_step(self._encode_slowly(response))
        else:
            self._take(response)

    async def _encode_slowly(self, response: InferResponse) -> None:
        front = self.connection.front
        try:
            self._add(await front.off_loop(self._encode, response), response.final)
        except ActorserveError as error:
            self._add_error(error, response.final)
        finally:
            self._is_encoding = False
        while self._backlog and not self._is_encoding and not self._is_given_up:
            self.on_response(self._backlog.popleft())

    def _take(self, response: InferResponse) -> None:
        if response.error is not None:
            self._add_error(response.error, response.final)
            return
        if response.is_empty:
            self._add(b"", response.final)
            return
        try:
            text = self._encode(response)
        except ActorserveError as error:
            self._add_error(error, response.final)
        else:
            self._add(text, response.final)

    def _encode(self, response: InferResponse) -> bytes:
        """Return the response's event. Pure: may run in a codec thread, one at a time."""
        return event(self._encoder.encode(response))

    def _add_error(self, error: ActorserveError, final: bool) -> None:
        if self._is_open:
            self.connection.front.errors += 1
            self._add(error_event(error.message), final)
        else:
            self.give_up()
            self.reply_error(error)

    def _add(self, text: bytes, final: bool) -> None:
        """Put an event (none where it is empty) behind the others."""
        self._is_open = True
        if text:
            self._events.append(text)
        self._is_ended |= final
        if not self._is_flush_due:
            self._is_flush_due = True
            self.connection.front.loop.call_soon(self._flush)

    def on_failure(self, error: ActorserveError) -> None:
        """A step failed; where the status is out already, an event says so."""
        if not self._is_open:
            super().on_failure(error)
            return
        self.give_up()
        self._backlog.clear()
        self._add_error(error, True)

    # --- events go out ---

    def on_writable(self) -> None:
        """Go on: the peer has caught up."""
        if not self._is_flush_due:
            self._flush()

    def _flush(self) -> None:
        """Write what there is, as far as the peer keeps up, and give the model credit for it."""
        self._is_flush_due = False
        connection = self.connection
        if not self._is_open or self.disconnected or self._is_answered:
            return
        while not connection.is_write_paused:
            data = self._next_part()
            if self._is_ended and not self._events:
                self._is_answered = True
                end = _LAST_CHUNK if self._head.takes_chunks else b""
                connection.send_reply(self, data + end, [], 0)
                return
            if not data:
                break
            connection.send_part(data)
        if self._unconsumed and not connection.is_write_paused:
            count, self._unconsumed = self._unconsumed, 0
            if self._in_flight is not None:
                self._in_flight.consumed(count)

    def _next_part(self) -> bytes:
        """Take some events, or a piece of a large one, as they go out; behind the head at first."""
        events = self._events
        if len(events) == 1 and len(events[0]) <= JOIN_BYTES:
            part = bytes(events.popleft())
            self._unconsumed += 1
        else:
            part = self._join_part()
        if self._head.takes_chunks and part:
            part = b"%x\r\n%b\r\n" % (len(part), part)
        if not self._is_head_sent:
            self._is_head_sent = True
            part = stream_head(self.keep_alive, self._head.takes_chunks) + part
        return part

    def _join_part(self) -> bytes:
        events = self._events
        pieces: list[View] = []
        nbytes = 0
        while events and nbytes < JOIN_BYTES:
            piece = events.popleft()
            if nbytes + len(piece) > PIECE_BYTES:
                view, room = memoryview(piece), PIECE_BYTES - nbytes
                events.appendleft(view[room:])
                piece = view[:room]
            else:
                self._unconsumed += 1
            pieces.append(piece)
            nbytes += len(piece)
        return b"".join(pieces)
