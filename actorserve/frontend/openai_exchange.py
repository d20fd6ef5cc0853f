# SPDX-License-Identifier: Apache-2.0
"""POST /v1/completions and /v1/chat/completions on a connection.

    body ─► Asked ─► one request to the model for each prompt ─► door
                                                                  │ pieces
    one document, when the last choice has ended ◄──┬── Whole ◄───┤
    events, once a turn of the loop            ◄────┴── Chunks ◄──┘

As in http_stream.py, the first response decides the status of a stream, a later error is an event,
and a response counts as consumed when the transport has taken its event and keeps up. A peer that
goes ends all requests that were sent for it.
"""

from __future__ import annotations

import functools
import secrets
from collections import Counter, deque

from actorserve.errors import ActorserveError
from actorserve.frontend.http_exchange import Refusal, unexpected
from actorserve.frontend.http_head import stream_head
from actorserve.frontend.http_infer import ENCODE_OFF_LOOP_BYTES
from actorserve.frontend.http_intake import DONE, Intake
from actorserve.frontend.openai_errors import (
    body_of_status,
    encode_body,
    error_body,
    retry_after_of,
    status_of,
)
from actorserve.frontend.openai_models import generating_model, now_s
from actorserve.frontend.openai_request import Asked, read_chat, read_completion
from actorserve.frontend.openai_response import Chunks, Whole, error_events
from actorserve.frontend.openai_tensors import piece_of, requests_of
from actorserve.frontend.v2_compression import compress, inflate
from actorserve.frontend.v2_response import EncodedBody, body_bytes
from actorserve.frontend.v2_values import View
from actorserve.triton.inference import InferRequest, InferResponse, InFlight

_LAST_CHUNK = b"0\r\n\r\n"


class OpenAIRefusal(Refusal):
    """As Refusal, for a request to this API: in the form that its clients read."""

    def reply_status(self, status: int, message: str, extra: bytes = b"") -> None:
        """Send an error as the reply."""
        self.connection.front.errors += 1
        text = encode_body(body_of_status(status, message))
        self.reply(EncodedBody([text], len(text), None), status, extra)


class OpenAIExchange(Intake):
    """One such request, until its last choice has ended.

    `_left` are the prompts whose last response has not come, `_calls` what the door gave for
    them, `_kept` what has come for one document, `_events` what is not written yet. After
    `_give_up` nothing that comes is looked at.
    """

    _reply: Whole | Chunks | None = None
    _is_given_up = False
    _is_open = False
    _is_head_sent = False
    _is_ended = False
    _is_flush_due = False

    # --- the request ---

    def _parse(self) -> None:
        held, self._held = self._held, b""
        try:
            if self._is_slow(held):
                self._stall(self._read_slowly(held))
            else:
                self._begin(self._asked(held))
        except ActorserveError as error:
            self.fail(error)
        except Exception:
            self.fail(unexpected())

    def _asked(self, held: View) -> Asked:
        """Return what is asked. Pure: may run in a codec thread."""
        head = self._head
        body: View = inflate(held, head.encoding, self._limit) if head.encoding else held
        return read_chat(body) if self._route.action == "chat" else read_completion(body)

    async def _read_slowly(self, held: bytes | bytearray) -> None:
        asked = await self.connection.front.off_loop(self._asked, held)
        if not self.disconnected:
            self._begin(asked)

    def _begin(self, asked: Asked) -> None:
        """Send the prompts through the door."""
        front = self.connection.front
        requests = requests_of(asked, generating_model(front.door, asked.model))
        self._state = DONE
        self._events: list[bytes] = []
        self._unconsumed: Counter[int] = Counter()
        self._left = set(range(len(requests)))
        self._calls: dict[int, InFlight] = {}
        self._kept: deque[tuple[int, InferResponse]] = deque()
        make = Chunks if asked.stream else Whole
        self._reply = make(asked, secrets.token_hex(12), now_s())
        self.is_stream = asked.stream
        for prompt, request in enumerate(requests):
            self._submit(prompt, request)
        self.connection.sync_reading()

    def _submit(self, prompt: int, request: InferRequest) -> None:
        """Send one prompt, unless another one has failed already."""
        if self._is_given_up:
            return
        front = self.connection.front
        front.inferences += 1
        call = front.door.submit(request, functools.partial(self._on_response, prompt))
        if prompt in self._left:
            self._keep(prompt, call)

    def _keep(self, prompt: int, call: InFlight) -> None:
        """Keep what may have to be cancelled, or cancel it where that was decided meanwhile."""
        if self._is_given_up:
            call.disconnect()
        else:
            self._calls[prompt] = call
            self.connection.front.in_flight += 1

    # --- responses come in ---

    def _on_response(self, prompt: int, response: InferResponse) -> None:
        if response.final:
            self._left.discard(prompt)
            if self._calls.pop(prompt, None) is not None:
                self.connection.front.in_flight -= 1
        if self._is_given_up:
            return
        try:
            if response.error is not None:
                raise response.error
            self._take(prompt, response)
        except ActorserveError as error:
            self.on_failure(error)
        except Exception:
            self.on_failure(unexpected())

    def _take(self, prompt: int, response: InferResponse) -> None:
        if isinstance(self._reply, Chunks):
            text = b""
            if not response.is_empty:
                text = self._reply.take(prompt, piece_of(response))
            self._unconsumed[prompt] += 1
            self._add(text if self._left else text + self._reply.end(), not self._left)
            return
        if not response.is_empty:
            self._kept.append((prompt, response))
        call = self._calls.get(prompt)
        if call is not None:
            call.consumed()
        if not self._left:
            self._finish_whole()

    def _finish_whole(self) -> None:
        """Reply with one document: all has come."""
        kept = [response for _, response in self._kept]
        nbytes = sum(len(body_bytes(output)) for each in kept for output in each.outputs)
        if nbytes > ENCODE_OFF_LOOP_BYTES:
            self.run_step(self._reply_slowly())
        else:
            self.reply(self._encode())

    def _encode(self) -> EncodedBody:
        """Return the body. Pure: may run in a codec thread."""
        reply, kept = self._reply, self._kept
        assert isinstance(reply, Whole)
        while kept:
            prompt, response = kept.popleft()
            reply.take(prompt, piece_of(response))
        text = reply.document()
        body = EncodedBody([text], len(text))
        return compress(body, self._head.accepted) if self._head.accepted else body

    async def _reply_slowly(self) -> None:
        self.reply(await self.connection.front.off_loop(self._encode))

    # --- errors and ends ---

    def reply_status(self, status: int, message: str, extra: bytes = b"") -> None:
        """Send an error as the reply."""
        self._reply_with(status, encode_body(body_of_status(status, message)), extra)

    def reply_error(self, error: ActorserveError) -> None:
        """Send an error of the server's as the reply."""
        wait_s = retry_after_of(error)
        extra = b"" if wait_s is None else b"retry-after: %d\r\n" % wait_s
        self._reply_with(status_of(error), encode_body(error_body(error)), extra)

    def _reply_with(self, status: int, text: bytes, extra: bytes) -> None:
        self.connection.front.errors += 1
        self.reply(EncodedBody([text], len(text), None), status, extra)

    def fail(self, error: ActorserveError) -> None:
        """Drop what there is; the error is sent as soon as the body has been read."""
        self._give_up()
        super().fail(error)

    def on_failure(self, error: ActorserveError) -> None:
        """Something failed; where the status is out already, an event says so."""
        if self._is_given_up:
            return
        if self._reply is None:
            self.fail(error)
            return
        self._give_up()
        if not self._is_open:
            self.reply_error(error)
            return
        self.connection.front.errors += 1
        self._add(error_events(error), True)

    def abandon(self) -> None:
        """Stop: the peer is gone. Accepted work is cancelled now."""
        super().abandon()
        if self._reply is not None and self._calls:
            self.connection.front.disconnects += 1
        self._give_up()

    def _give_up(self) -> None:
        """Cancel what is still under way: nobody waits for it."""
        self._is_given_up = True
        if self._reply is None:
            return
        self._kept = deque()  # a codec thread may have the old one
        calls, self._calls = self._calls, {}
        for call in calls.values():
            self.connection.front.in_flight -= 1
            call.disconnect()

    # --- events go out ---

    def _add(self, text: bytes, is_last: bool) -> None:
        """Put events behind the others; all of one turn leave together."""
        self._is_open = True
        self._events.append(text)
        self._is_ended |= is_last
        if not self._is_flush_due:
            self._is_flush_due = True
            self.connection.front.loop.call_soon(self._flush)

    def on_writable(self) -> None:
        """Go on: the peer has caught up."""
        if not self._is_flush_due:
            self._flush()

    def _flush(self) -> None:
        """Write what there is, if the peer keeps up, and give the model credit for it."""
        self._is_flush_due = False
        connection = self.connection
        if not self._is_open or self.disconnected or self._is_answered:
            return
        if connection.is_write_paused:
            return
        data = b"".join(self._events)
        self._events.clear()
        if self._head.takes_chunks and data:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        if not self._is_head_sent:
            self._is_head_sent = True
            data = stream_head(self.keep_alive, self._head.takes_chunks) + data
        if self._is_ended:
            self._is_answered = True
            end = _LAST_CHUNK if self._head.takes_chunks else b""
            connection.send_reply(self, data + end, [], 0)
            return
        if data:
            connection.send_part(data)
        if not connection.is_write_paused:
            unconsumed, self._unconsumed = self._unconsumed, Counter()
            for prompt, count in unconsumed.items():
                call = self._calls.get(prompt)
                if call is not None:
                    call.consumed(count)
