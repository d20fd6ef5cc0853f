# SPDX-License-Identifier: Apache-2.0
"""Who waits for a call's answer: a thread, a coroutine, or a process that the model has forked.

Whichever thread reads a lane calls `put`; everything else is the waiting side's.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Protocol

from actorserve.runtime.stub_end import StubEnd
from actorserve.triton.response import InferenceResponse
from actorserve.wire.messages import CallResponded, WireResponse


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
        """Turn what came into a response."""

    def with_bodies(self, wire: WireResponse) -> WireResponse:
        """Return a response whose bodies are in the message."""

    def give_back(self, wire: WireResponse) -> None:
        """Return the tensors of a response that nobody looks at."""

    def cancel(self, number: int) -> None:
        """Ask for the end of a call."""

    def move(self, number: int) -> None:
        """Have the control thread read a call's answers."""

    def drop(self, number: int) -> None:
        """Want nothing more of a call."""


class WaitedCall:
    """A call whose responses a thread waits for; see triton.response_iterator.Source."""

    __slots__ = ("_calls", "_is_over", "_queue", "number", "on_control")

    def __init__(self, calls: Switchboard, *, on_control: bool) -> None:
        self.number = calls.next_number()
        self.on_control = on_control
        self._calls = calls
        self._queue: SimpleQueue[WireResponse] = SimpleQueue()
        self._is_over = False

    def put(self, wire: WireResponse) -> None:
        """Take a response."""
        self._queue.put(wire)

    def next(self) -> InferenceResponse | None:
        """Return the next response, waiting for it; None after the last."""
        if self._is_over:
            return None
        wire = self._take()
        if wire.final:
            self._is_over = True
        return self._calls.response(wire)

    def _take(self) -> WireResponse:
        if self.on_control or not self._queue.empty():
            return self._queue.get()
        if self._calls.is_on_main():
            return self._read()
        self.on_control = True
        self._calls.move(self.number)
        return self._queue.get()

    def _read(self) -> WireResponse:
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

    def leave(self) -> list[WireResponse]:
        """Return what nobody has taken."""
        left = []
        while not self._queue.empty():
            left.append(self._queue.get())
        return left


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
        if threading.get_ident() == self._thread:
            self._resolve(wire)
            return
        try:
            self._loop.call_soon_threadsafe(self._resolve, wire)
        except RuntimeError:  # the loop is closed: nobody waits
            self._calls.give_back(wire)

    def _resolve(self, wire: WireResponse) -> None:
        if self.future.done():
            self._calls.give_back(wire)
            return
        try:
            self.future.set_result(self._calls.response(wire))
        except Exception as error:
            self.future.set_exception(error)

    def _on_done(self, future: asyncio.Future[InferenceResponse]) -> None:
        if future.cancelled():
            self._calls.drop(self.number)

    def leave(self) -> list[WireResponse]:
        """Nothing is kept here."""
        return []


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

    def leave(self) -> list[WireResponse]:
        """Nothing is kept here."""
        return []
