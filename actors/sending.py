# SPDX-License-Identifier: Apache-2.0
"""What a request's sender has sent and may send: in order, within the client's credit.

    put ─► has credit ─► sent at once
       └─► has none ───► kept ─► sent by whoever hears of more credit: mostly the control thread

The health page says how many responses may be sent in all. A thread whose response is kept waits
until it has gone. A thread that runs an event loop does not wait, as that would hold up every
other sender there, unless it keeps too much.

`lock` is held to put, and never while anybody waits: an end that execute gives to its requests must
not wait for the reader of one of them. Whoever lets go of it looks whether there is news, of credit
or of what was kept meanwhile (`look`), so that none is ever lost.

A finalizer or signal handler of the model's may send while its own thread is in the middle of a
sending, so the lock lets it in: what it sends is kept, and it does not wait.
"""

from __future__ import annotations

import threading
import weakref
from asyncio.events import _get_running_loop
from collections import deque
from collections.abc import Callable

from actorserve.actors.replies import UNLIMITED, Replies
from actorserve.triton.response_sender import InferenceResponseSender
from actorserve.wire.messages import Handle, WireRequest, WireResponse

MOST_KEPT = 4096
MOST_KEPT_BYTES = 64 << 20
"""What one sender may keep on a thread with an event loop; beyond that it waits after all."""


class Sending:
    """See the module's head. One for each request whose sender the model has asked for."""

    __slots__ = (
        "__weakref__",
        "_gone",
        "_has_news",
        "_is_free",
        "_kept",
        "_kept_bytes",
        "_on_drained",
        "_replies",
        "_waiting",
        "is_closed",
        "is_done",
        "is_over",
        "lock",
        "sender",
        "sent",
        "wire",
    )

    def __init__(self, replies: Replies, wire: WireRequest, *, is_over: bool) -> None:
        self.wire = wire
        self.lock = threading.RLock()
        self.sender: weakref.ref[InferenceResponseSender] | None = None
        self.sent = 0  # responses that the model has given
        self.is_over = is_over  # the request's end is decided
        self.is_closed = is_over  # the model has sent FINAL, or may send nothing more
        self.is_done = is_over  # the end is on its way
        self._replies = replies
        self._is_free = not replies.decoupled or wire.cancel_slot < 0
        self._gone = 0
        self._kept: deque[WireResponse] = deque()
        self._kept_bytes = 0
        self._on_drained: list[Callable[[], None]] = []
        self._waiting: list[threading.Lock] = []
        self._has_news = False

    def put(self, wire: WireResponse) -> int:
        """Send a response or keep it; returns its place, for `leave`. The lock is held."""
        if not self._kept and self._may_go(wire, self._granted()):
            self._go(wire)
            return self._gone
        self.keep(wire)
        self._has_news = False
        self._flush()
        return self._gone + len(self._kept)

    @property
    def is_mine(self) -> bool:
        """Whether this thread has the lock: it is in the middle of something here."""
        return self.lock._is_owned()  # type: ignore[attr-defined, no-any-return]

    def keep(self, wire: WireResponse) -> None:
        """Keep a response for whoever looks next. The lock is held."""
        self._kept.append(wire)
        self._kept_bytes += _bytes_of(wire)
        self._has_news = True

    def leave(self, place: int, *, waits: bool = False) -> None:
        """Do what is left after `put`, the lock being free again.

        `waits` until the response at that place has gone, where the thread may.
        """
        if self._has_news:
            self.look()
        if not waits or self._gone >= place:
            return
        if _get_running_loop() is not None and self._kept_bytes <= MOST_KEPT_BYTES:
            place -= MOST_KEPT
        self._wait(place)

    def when_drained(self, on_drained: Callable[[], None]) -> bool:
        """Have it called when nothing is kept any more, by whoever sends the last; else False."""
        with self.lock:
            is_kept = bool(self._kept)
            if is_kept:
                self._on_drained.append(on_drained)
        self.catch_up()
        return is_kept

    def catch_up(self) -> None:
        """Look if credit came while the lock was held: whoever brought it did not wait."""
        if self._has_news:
            self.look()

    def granted(self) -> None:
        """Hear that there is more credit. Control thread; never waits."""
        self._has_news = True
        self.look()

    def look(self) -> None:
        """Send what new credit allows, unless somebody holds the lock, who will look then."""
        while self._has_news and not self.is_mine and self.lock.acquire(blocking=False):
            try:
                self._has_news = False
                self._flush()
            finally:
                self.lock.release()

    def end(self, wire: WireResponse) -> None:
        """Put the end after everything else; never waits for credit. The lock is free."""
        with self.lock:
            self.is_over = self.is_closed = True
            self.keep(wire)
        self.look()

    def disown(self, wire: WireResponse) -> None:
        """End what nobody hears any more; what the model still sends goes nowhere."""
        with self.lock:
            if self.is_over:
                return  # its end is on its way
            self.is_over = self._is_free = True
            self.keep(wire)
        self.look()

    # --- credit ----------------------------------------------------------------------------------

    def _granted(self) -> int:
        return UNLIMITED if self._is_free else self._replies.end.page.granted(self.wire.cancel_slot)

    def _may_go(self, wire: WireResponse, granted: int) -> bool:
        return self._gone < granted or (wire.final and not wire.outputs)

    def _go(self, wire: WireResponse) -> None:
        self._gone += 1
        self._replies.send(wire)
        if wire.final:
            self.is_done = True

    def _flush(self) -> None:
        """Send what may be sent of what is kept; what stays has been announced on the page."""
        kept = self._kept
        while kept:
            granted = self._replies.want_credit(self)
            if not self._may_go(kept[0], granted):
                break
            while kept and self._may_go(kept[0], granted):
                if len(kept) == 1:
                    # Before the end goes: the slot may have another owner at once.
                    self._replies.want_no_credit(self)
                wire = kept.popleft()
                self._kept_bytes -= _bytes_of(wire)
                self._go(wire)
        if not kept and self._on_drained:
            drained, self._on_drained = self._on_drained, []
            for on_drained in drained:
                on_drained()
        waiting, self._waiting = self._waiting, []
        for gate in waiting:
            gate.release()

    def _wait(self, place: int) -> None:
        """Sleep until the response at that place has gone."""
        while True:
            with self.lock:
                if self._gone >= place:
                    return
                gate = threading.Lock()  # an Event could not be set within a handler
                gate.acquire()
                self._waiting.append(gate)
            if self._has_news:
                self.look()
            gate.acquire()


def _bytes_of(wire: WireResponse) -> int:
    """What a response keeps in use beyond its message, here or on a device."""
    nbytes = 0
    for tensor in wire.outputs:
        if isinstance(tensor.data, Handle):
            nbytes += tensor.data.nbytes
        elif tensor.device is not None:
            nbytes += tensor.device.nbytes
    return nbytes
