# SPDX-License-Identifier: Apache-2.0
"""From the bytes of a body, as they arrive, to a request that can go through the server's door.

    COLLECT ── document complete ──► (BUSY) ──► SCATTER ── body complete ──► DONE
       │                               │           │
       └────────── any error ──────────┴───────────┴──► DISCARD ── body complete ──► error reply

BUSY means that something waits beside the loop (large JSON, decompression, the arena growing, a
large copy); the socket is not read meanwhile, and what had arrived already is kept in order. A
client's mistake is reported only when its body has been read to the end, so that the connection
stays usable. Slabs are given back on every way that does not lead to DONE.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from actorserve.errors import (
    ActorserveError,
    InvalidArgument,
    ResourceExhausted,
    TooLarge,
    Unavailable,
)
from actorserve.frontend.http_body import Scatter
from actorserve.frontend.http_exchange import Connection, Exchange, unexpected
from actorserve.frontend.http_head import CONTINUE, InferHead
from actorserve.frontend.http_route import ModelPath
from actorserve.frontend.v2_compression import inflate
from actorserve.frontend.v2_request import Draft, parse_request, raw_request
from actorserve.frontend.v2_values import View
from actorserve.triton.inference import ModelInfo, Slab
from actorserve.wire.messages import INLINE_BYTES

COLLECT, BUSY, SCATTER, DISCARD, DONE = range(5)

JSON_OFF_LOOP_BYTES = 256 * 1024
COMPRESSED_OFF_LOOP_BYTES = 4 * 1024
COPY_OFF_LOOP_BYTES = 1024 * 1024
DIRECT_BYTES = 128 * 1024
_GROW_ATTEMPTS = 16


class Intake(Exchange):
    """The receiving half of an inference. Until it is its turn it only holds what arrives.

    `received` counts the bytes as they came; `wants_direct` is true while the rest of the body
    may go past the parser, straight into `scatter`. `_needs_info` says that no request can be
    read without the model's description.
    """

    received = 0
    wants_direct = False
    _needs_info = False
    scatter: Scatter | None = None
    _state = COLLECT
    _is_started = False
    _held: bytes | bytearray = b""
    _stash: tuple[bytes, ...] = ()
    _error: ActorserveError | None = None
    _info: ModelInfo | None = None
    _draft: Draft | None = None

    def __init__(
        self, connection: Connection, keep_alive: bool, route: ModelPath, head: InferHead
    ) -> None:
        self.connection = connection
        self.keep_alive = keep_alive
        self._route = route
        self._head = head
        self._limit = connection.front.settings.max_input_bytes
        self._bodies: list[bytearray | Slab] = []

    def on_draft(self, draft: Draft) -> None:
        """The request is complete; its slabs are the receiver's now."""
        raise NotImplementedError

    # --- bytes come in ---

    def start(self) -> None:
        """Begin: look at what has arrived while others were answered."""
        self._is_started = True
        if self._head.expects_continue and not self.received and not self.is_received:
            if self._error is not None:
                self.keep_alive = False  # nobody knows whether the body will still come
                self.reply_error(self._error)
                return
            self.connection.send_interim(CONTINUE)
        if self.is_received:
            self.on_end()
        elif (self.received or self._head.json_bytes == 0) and self._has_document():
            self._parse()

    def start_whole(self, body: bytes) -> None:
        """Begin with a request that is complete already."""
        self._is_started = self.is_received = True
        self.received = len(body)
        self._held = body
        self._parse()

    @property
    def is_stalled(self) -> bool:  # type: ignore[override]
        """Whether no more of the body should be read now."""
        return self._state == BUSY

    def on_body(self, chunk: bytes) -> None:
        """Take the next bytes of the body."""
        self.received += len(chunk)
        state = self._state
        if state == COLLECT:
            if self._held:
                self._hold(chunk)
            else:
                self._held = chunk
            if self.received != self._head.content_length and self._has_document():
                self._parse()
        elif state == SCATTER:
            self._place(chunk)
        elif state == BUSY:
            self._stash += (chunk,)
        if self.received > self._limit and self._is_started and self._state != BUSY:
            self.refuse(413, too_large(self._limit).message)

    def on_end(self) -> None:
        """The body is complete."""
        self.is_received = True
        if not self._is_started:
            return
        if self._state == COLLECT:
            self._parse()
        elif self._state == SCATTER:
            self._finish()
        elif self._state == DISCARD and self._error is not None:
            self.reply_error(self._error)

    def fail(self, error: ActorserveError) -> None:
        """Drop what there is; the error is sent as soon as the body has been read."""
        self.release()
        self._error = error
        if self.is_received and self._is_started:
            self.reply_error(error)

    def refuse(self, status: int, message: str) -> None:
        """Reply that the rest of this request cannot be read; the connection ends with it."""
        self.keep_alive = False
        if not self._steps:
            self.release()
        self.reply_status(status, message)
        self.abandon()  # a step that still runs ends and gives back what it has

    def on_failure(self, error: ActorserveError) -> None:
        """A step failed."""
        self.fail(error)

    def release(self) -> None:
        """Give back every slab, forget the body, and drop the bytes that still come."""
        bodies, self._bodies = self._bodies, []
        self._state = DISCARD
        self.wants_direct = False
        self._held = b""
        self._stash = ()
        if self.scatter is not None:
            self.scatter.forget()
        for body in bodies:
            if not isinstance(body, bytearray):
                body.release()

    def _hold(self, chunk: bytes) -> None:
        if isinstance(self._held, bytes):
            self._held = bytearray(self._held)
        self._held += chunk

    def _has_document(self) -> bool:
        """Whether the document is here although the body is not complete."""
        head = self._head
        if head.json_bytes is None or head.encoding or not self._is_started:
            return False
        if self.received == head.content_length:
            return False
        if head.json_bytes == 0 and head.content_length < 0:
            return False  # the size of a raw body is known at its end only
        return self._state == COLLECT and self.received >= head.json_bytes

    # --- the document ---

    def _parse(self) -> None:
        held, self._held = self._held, b""
        try:
            self._look_up()
            if self._is_slow(held):
                self._stall(self._read_slowly(held))
            else:
                self._plan(*self._read(held))
        except ActorserveError as error:
            self.fail(error)
        except Exception:
            self.fail(unexpected())

    def _look_up(self) -> None:
        """Fail early for a model that is not there, or cannot be asked in this way."""
        try:
            self._info = self.connection.front.door.model_info(
                self._route.model, self._route.version
            )
        except Unavailable:
            if self._needs_info or self._head.json_bytes == 0:
                raise
            return  # perhaps the request can be queued: the door decides
        self._check_info(self._info)

    def _check_info(self, info: ModelInfo) -> None:
        """Raise for a model that cannot be asked in this way."""

    def _is_slow(self, held: View) -> bool:
        if self._head.encoding:
            return len(held) > COMPRESSED_OFF_LOOP_BYTES
        json_bytes = self._head.json_bytes
        return (len(held) if json_bytes is None else json_bytes) > JSON_OFF_LOOP_BYTES

    def _read(self, held: bytes | bytearray) -> tuple[Draft, View]:
        """Return the draft and the bytes behind the document. Pure: may run in a codec thread."""
        head, route = self._head, self._route
        body: View = inflate(held, head.encoding, self._limit) if head.encoding else held
        size = head.json_bytes
        if size is None:
            return parse_request(body, route.model, route.version, self._limit), b""
        if size > len(body):
            raise InvalidArgument(
                f"Inference-Header-Content-Length is {size}, "
                f"but the whole body has only {len(body)} bytes"
            )
        if size == 0:
            assert self._info is not None  # else `_look_up` has raised
            known = not head.encoding and head.content_length >= 0
            nbytes = head.content_length if known else len(body)
            return raw_request(self._info, route.version, nbytes), body
        if len(body) - size > INLINE_BYTES:
            body = memoryview(body)
        return parse_request(body[:size], route.model, route.version, self._limit), body[size:]

    async def _read_slowly(self, held: bytes | bytearray) -> None:
        draft, rest = await self.connection.front.off_loop(self._read, held)
        if not self.disconnected:
            self._plan(draft, rest)

    # --- the blocks ---

    def _plan(self, draft: Draft, rest: View) -> None:
        """Find a place for every block, and put there what has arrived of them."""
        head = self._head
        self._draft = draft
        if head.encoding or self.is_received:
            draft.check_blocks(len(rest) + sum(map(len, self._stash)))
        elif head.content_length >= 0:
            draft.check_blocks(head.content_length - (head.json_bytes or 0))
        elif draft.block_bytes > self._limit:
            raise too_large(self._limit)
        if self.is_received and len(rest) <= INLINE_BYTES and not self._stash:
            self._finish_small(draft, rest)
        elif self._reserve():
            self._stall(self._grow_slowly(rest))
        else:
            self._begin_blocks(rest)

    def _finish_small(self, draft: Draft, rest: View) -> None:
        """Take the blocks of a request that is complete and travels inside a message anyway."""
        at = 0
        for block in draft.blocks:
            end = at + block.nbytes
            draft.request.inputs[block.index].data = block.prefix + bytes(rest[at:end])
            at = end
        self._state = DONE
        self.on_draft(draft)

    def _reserve(self) -> int:
        """Allocate for the next blocks; return 0, or the bytes that the arena has no room for."""
        assert self._draft is not None
        for block in self._draft.blocks[len(self._bodies) :]:
            nbytes = len(block.prefix) + block.nbytes
            body: bytearray | Slab | None = (
                bytearray(nbytes)
                if nbytes <= INLINE_BYTES
                else self.connection.front.door.allocate(nbytes)
            )
            if body is None:
                return nbytes
            self._bodies.append(body)
            if block.prefix:
                _view_of(body)[: len(block.prefix)] = block.prefix
        return 0

    async def _grow_slowly(self, rest: View) -> None:
        for _ in range(_GROW_ATTEMPTS):
            lack = self._reserve()
            if not lack:
                self._begin_blocks(rest)
                return
            await self.connection.front.door.grow(lack)
            if self.disconnected:
                return
        raise ResourceExhausted(
            f"no shared memory for a tensor of {self._reserve()} bytes: "
            "other requests took all that was made"
        )

    def _begin_blocks(self, rest: View) -> None:
        assert self._draft is not None
        places = zip(self._draft.blocks, self._bodies, strict=True)
        self.scatter = Scatter([_view_of(body)[len(block.prefix) :] for block, body in places])
        if len(rest) >= COPY_OFF_LOOP_BYTES:
            self._stall(self._copy_slowly(rest))
            return
        self._state = SCATTER
        self._place(rest)
        self._unstash()

    async def _copy_slowly(self, rest: View) -> None:
        assert self.scatter is not None
        taken = await self.connection.front.off_loop(self.scatter.feed, rest)
        if self.disconnected:
            return
        self._state = SCATTER
        if taken < len(rest):
            raise self._too_much()
        self._unstash()

    def _unstash(self) -> None:
        """Go on with what arrived while the intake was busy."""
        stash, self._stash = self._stash, ()
        for chunk in stash:
            if self._state == SCATTER:
                self._place(chunk)
        if self._state != SCATTER or self.scatter is None:
            return
        if self.is_received:
            self._finish()
        elif self._head.content_length >= 0 and self.scatter.remaining >= DIRECT_BYTES:
            self.wants_direct = True
            self.connection.consider_direct()

    def _place(self, chunk: View) -> None:
        assert self.scatter is not None
        if self.scatter.feed(chunk) < len(chunk):
            self.fail(self._too_much())

    def _too_much(self) -> InvalidArgument:
        return InvalidArgument(f"unexpected additional input data for model '{self._route.model}'")

    def _finish(self) -> None:
        """Hand the bodies to their inputs and the request to the owner."""
        assert self._draft is not None and self.scatter is not None
        draft = self._draft
        if self.scatter.remaining:
            try:
                draft.check_blocks(draft.block_bytes - self.scatter.remaining)
            except ActorserveError as error:
                self.fail(error)
            return
        for block, body in zip(draft.blocks, self._bodies, strict=True):
            draft.request.inputs[block.index].data = body
        self._state = DONE
        self._bodies, self._draft = [], None
        self.scatter.forget()
        self.on_draft(draft)

    def _stall(self, step: Coroutine[Any, Any, None]) -> None:
        self._state = BUSY
        self.run_step(step)
        self.connection.sync_reading()


def _view_of(body: bytearray | Slab) -> memoryview:
    return memoryview(body) if isinstance(body, bytearray) else body.buffer


def too_large(limit_bytes: int) -> TooLarge:
    """Return the error of a body beyond the limit."""
    return TooLarge(
        f"the body exceeds the maximum allowed input size of {limit_bytes} bytes. "
        "Use --http-max-input-size to increase the limit."
    )
