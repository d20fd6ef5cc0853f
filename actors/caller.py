# SPDX-License-Identifier: Apache-2.0
"""Who waits for a call's answer: a thread, a coroutine, or a process that the model has forked.

Whichever thread reads a lane calls `put`; everything else is the waiting side's.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Protocol

from actorserve.runtime.stub_end import StubEnd
from actorserve.triton.error import TritonModelException
from actorserve.triton.response import InferenceResponse
from actorserve.wire.messages import CallResponded, WireResponse

REPORT_EVERY = 256
"""Responses of a stream after which the supervisor hears how many were taken."""


class Switchboard(Protocol):
    """The stub's calls (calls.py), as one of them needs it."""

    end: StubEnd
    after_main_wait: Callable[[], None]
    main_loop: asyncio.AbstractEventLoop | None

    def is_on_main(self) -> bool:
        """Whether this is the main thread."""

    def next_number(self) -> int:
        """Return a number that no other call of this stub has."""

    def response(self, wire: WireResponse) -> InferenceResponse:
        """Turn what came into a response, whose death gives its tensors back."""

    def with_bodies(self, wire: WireResponse) -> WireResponse:
        """Return a response whose bodies are in the message."""

    def taken(self, number: int, count: int) -> None:
        """Say that so many more responses of a stream were looked at."""

    def cancel(self, number: int) -> None:
        """Ask for the end of a call."""

    def move(self, number: int) -> None:
        """Have the control thread read a call's answers."""

    def drop(self, number: int) -> None:
        """Want nothing more of a call."""


class WaitedCall:
    """A call whose responses a thread waits for; see triton.response_iterator.Source.

    One thread at a time. What is in the queue when nobody wants it any more goes with it.
    """

    __slots__ = ("_calls", "_is_over", "_queue", "_taken", "number", "on_control")

    def __init__(self, calls: Switchboard, *, on_control: bool) -> None:
        self.number = calls.next_number()
        self.on_control = on_control
        self._calls = calls
        self._queue: SimpleQueue[tuple[InferenceResponse, bool]] = SimpleQueue()
        self._is_over = False
        self._taken = 0

    def put(self, wire: WireResponse) -> None:
        """Take a response."""
        self._queue.put((self._calls.response(wire), wire.final))

    def next(self) -> InferenceResponse | None:
        """Return the next response, waiting for it; None after the last."""
        if self._is_over:
            return None
        if self._calls.end.is_severed:
            raise TritonModelException(
                "The responses to a call come to the process that made it, not to a fork of it."
            )
        response, self._is_over = self._take()
        self._taken += 1
        if self._taken == REPORT_EVERY:
            self._calls.taken(self.number, REPORT_EVERY)
            self._taken = 0
        return response

    def _take(self) -> tuple[InferenceResponse, bool]:
        if self.on_control or not self._queue.empty():
            return self._queue.get()
        if self._calls.is_on_main():
            return self._read()
        self.on_control = True
        self._calls.move(self.number)
        return self._queue.get()

    def _read(self) -> tuple[InferenceResponse, bool]:
        """Read the work lane until a response is there. Main thread only."""
        end, queue = self._calls.end, self._queue
        try:
            while True:
                end.take_in()
                try:
                    return queue.get_nowait()
                except Empty:
                    end.wait(lambda: not queue.empty())
        finally:
            self._calls.after_main_wait()

    def cancel(self) -> None:
        """Ask for the end."""
        self._calls.cancel(self.number)

    def drop(self) -> None:
        """Want nothing more."""
        if not self._is_over:
            self._calls.drop(self.number)


class AwaitedCall:
    """A call whose one response a coroutine awaits."""

    __slots__ = ("_calls", "_loop", "_thread", "future", "number", "on_control")

    def __init__(self, calls: Switchboard, loop: asyncio.AbstractEventLoop) -> None:
        self.number = calls.next_number()
        # The work lane is read for this loop only if the stub's own loop is this one.
        self.on_control = loop is not calls.main_loop
        self.future: asyncio.Future[InferenceResponse] = loop.create_future()
        self.future.add_done_callback(self._on_done)
        self._calls = calls
        self._loop = loop
        self._thread = threading.get_ident()

    def put(self, wire: WireResponse) -> None:
        """Take the response, in the future's own loop."""
        response = self._calls.response(wire)
        if threading.get_ident() == self._thread:
            self._resolve(response)
            return
        # Where the loop is closed nobody waits.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._resolve, response)

    def _resolve(self, response: InferenceResponse) -> None:
        if not self.future.done():
            self.future.set_result(response)

    def _on_done(self, future: asyncio.Future[InferenceResponse]) -> None:
        if future.cancelled():
            self._calls.drop(self.number)


class RelayedCall:
    """A call that the stub makes for a process which its model has forked."""

    __slots__ = ("_calls", "_respond", "number", "on_control")

    def __init__(self, calls: Switchboard, respond: Callable[[CallResponded], None]) -> None:
        self.number = calls.next_number()
        self.on_control = True
        self._calls = calls
        self._respond = respond

    def put(self, wire: WireResponse) -> None:
        """Send the response on, with its bodies."""
        self._respond(CallResponded([self._calls.with_bodies(wire)]))
