# SPDX-License-Identifier: Apache-2.0
"""The way back of one request in a stub: every request gets its end, whatever the model does.

    execute ─► send, send, FINAL                           in any thread, also after it returned
            ─► raises, returns None without a sender ─► fail
            ─► lets the sender and the request go ──► finalizer ─► the control thread ─► fail

A sender waits only while the client does not read: the health page says how many responses may be
sent in all. On a thread that runs an event loop it does not wait, as that would hold up every
other sender there: what may not go yet is kept and sent by the control thread.
"""

from __future__ import annotations

import threading
import weakref
from asyncio.events import _get_running_loop
from collections import deque

from actorserve.actors.bodies import Room
from actorserve.actors.replies import Replies, error_response, thread_errors
from actorserve.triton.response import InferenceResponse
from actorserve.triton.response_sender import InferenceResponseSender, check_sending
from actorserve.wire.messages import WireRequest, WireResponse

MOST_KEPT = 4096
"""Responses that one sender may keep on a thread with an event loop; then it waits after all."""


class Reply:
    """The way back of one request; see triton.response_sender.Reply."""

    __slots__ = (
        "__weakref__",
        "_gone",
        "_is_closed",
        "_is_ended",
        "_kept",
        "_lock",
        "_replies",
        "_sender",
        "_sent",
        "_woken",
        "is_done",
        "is_taken",
        "wire",
    )

    def __init__(self, replies: Replies, wire: WireRequest) -> None:
        self.wire = wire
        self.is_done = False  # its end is on its way
        self.is_taken = False  # the model has asked for the sender
        self._replies = replies
        self._is_ended = False  # its end is decided
        self._is_closed = False  # the model has sent FINAL, or may send nothing more
        self._sent = 0
        self._gone = 0
        self._lock = threading.RLock()
        self._sender: weakref.ref[InferenceResponseSender] | None = None
        self._kept: deque[WireResponse] = deque()
        self._woken: threading.Event | None = None

    # --- triton.response_sender.Reply ------------------------------------------------------------

    def sender(self) -> InferenceResponseSender:
        """Return the request's sender."""
        with self._lock:
            self.is_taken = True
            sender = self._sender() if self._sender is not None else None
            if sender is None:
                sender = InferenceResponseSender._of(self)
                self._sender = weakref.ref(sender)
            return sender

    def send(self, response: InferenceResponse | None, flags: int) -> None:
        """Send a response, or the bare end; see InferenceResponseSender.send."""
        replies = self._replies
        with self._lock:
            decoupled = replies.decoupled
            check_sending(
                response, flags, decoupled=decoupled, sent=self._sent, is_closed=self._is_closed
            )
            if flags:
                self._is_closed = True
            if self._is_ended:
                return  # the end of a model that is not decoupled, after its one response
            is_final = bool(flags) or not decoupled
            if response is None:
                wire = WireResponse(self.wire.id, [], None, "{}", True, True)
            else:
                wire = replies.wire_response(self.wire, response, Room(), final=is_final)
                wire = replies.settled(wire)
                self._sent += 1
            self._is_ended = is_final
            self._put(wire)

    def is_cancelled(self) -> bool:
        """Tell whether the client has given up: a look at the health page."""
        wire = self.wire
        return (
            self._replies.end.page.is_cancelled(wire.cancel_slot, wire.id)
            if (wire.cancel_slot >= 0)
            else False
        )

    # --- what runs the model ---------------------------------------------------------------------

    @property
    def is_ended(self) -> bool:
        """Whether its end is decided."""
        return self._is_ended

    def answered(self) -> bool:
        """Hear that the batch's answer is this request's; False where it has its end already."""
        with self._lock:
            if self._is_ended:
                return False
            self._is_ended = self._is_closed = self.is_done = True
            return True

    def fail(self, text: str) -> None:
        """End it with an error, if it has no end yet."""
        with self._lock:
            if not self._is_ended:
                self._is_ended = self._is_closed = True
                self._put(error_response(self.wire.id, text))

    def granted(self) -> None:
        """Hear that there is more credit. Control thread; never waits for a sender.

        Whoever holds the lock looks at the credit again before it leaves or sleeps.
        """
        woken = self._woken
        if woken is not None:
            woken.set()
        elif self._lock.acquire(blocking=False):
            try:
                self._flush()
            finally:
                self._lock.release()

    def __del__(self) -> None:
        if not self._is_ended and not self._replies.end.is_severed:
            self._replies.abandon(self.wire.id, getattr(thread_errors, "text", ""))

    # --- credit ----------------------------------------------------------------------------------

    def _put(self, wire: WireResponse) -> None:
        """Send, or keep, or wait until it may be sent; in order. The lock is held."""
        if not self._kept and self._may_go(wire):
            self._go(wire)
            return
        self._kept.append(wire)
        self._replies.wait_for(self)
        self._flush()
        if self._kept and (_get_running_loop() is None or len(self._kept) > MOST_KEPT):
            self._wait()

    def _may_go(self, wire: WireResponse) -> bool:
        slot = self.wire.cancel_slot
        if slot < 0 or not self._replies.decoupled or (wire.final and not wire.outputs):
            return True
        return self._gone < self._replies.end.page.granted(slot)

    def _go(self, wire: WireResponse) -> None:
        self._gone += 1
        self._replies.send(wire)
        if wire.final:
            self.is_done = True

    def _flush(self) -> None:
        """Send what may be sent of what is kept; what stays has been announced."""
        replies, kept, slot = self._replies, self._kept, self.wire.cancel_slot
        page = replies.end.page
        while kept:
            with replies.page_lock:
                granted = page.want_credit(slot, self.wire.id)
            if self._gone >= granted and not self._may_go(kept[0]):
                return
            while kept and self._may_go(kept[0]):
                self._go(kept.popleft())
        page.stop_wanting_credit(slot)
        replies.waits_no_more(self)

    def _wait(self) -> None:
        """Sleep until everything that is kept could be sent."""
        self._woken = threading.Event()
        try:
            while self._kept:
                self._flush()
                if self._kept:
                    self._woken.wait()
                    self._woken.clear()
        finally:
            self._woken = None
