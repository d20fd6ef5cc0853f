# SPDX-License-Identifier: Apache-2.0
"""What has come to the process of an actor, in its main thread: messages, grants, outcomes.

    work lane ─► read ─► Deliver ──► take, by the engine
                         Revoke, Grant, EndActor ──► the engine
                         Answered, Failed, … ──► the door: the actor's own calls

Whoever waits in the main thread reads, the actor in the middle of a message too; messages that
come meanwhile wait here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from actorserve.clock import monotonic_ns
from actorserve.errors import ActorserveError, DeadlineExceeded, ProtocolError
from actorserve.runtime.call import TELL
from actorserve.runtime.child_call import ChildCall
from actorserve.runtime.child_door import ChildDoor
from actorserve.runtime.child_end import ChildEnd
from actorserve.runtime.engine import Engine, end_fork
from actorserve.runtime.failure import error_of
from actorserve.wire.actors import (
    Answered,
    Begin,
    Deliver,
    Done,
    DropWaiting,
    EndActor,
    Failed,
    Grant,
    ItemSent,
    Progress,
    Revoke,
)

REPORT_EVERY = 32
"""Messages without an answer after which the system hears how far the actor has come."""


class Inbox:
    """See thread_engine.BlockingSource."""

    def __init__(self, end: ChildEnd, door: ChildDoor) -> None:
        self.engine: Engine | None = None
        self.begin: Begin | None = None
        self._end = end
        self._door = door
        self._calls: deque[ChildCall] = deque()
        self._open: dict[int, ChildCall] = {}  # asks and streams without an end
        self._begun = 0
        self._reported = 0
        self._is_marked = False  # the page says that a message is in hand
        self._has_handles = False

    # --- reading ---------------------------------------------------------------------------------

    def read(self) -> None:
        """Take in what has come."""
        if self._end.is_severed:
            end_fork()
        self._door.catch_up()
        for message in self._end.read():
            if isinstance(message, Deliver):
                call = ChildCall(self._end, self._door, message)
                self._calls.append(call)
                if call.kind != TELL:
                    self._open[message.number] = call
            elif isinstance(message, (Answered, ItemSent, Done, Failed)):
                self._door.take(message)
            elif isinstance(message, Revoke):
                self._revoke(message.number)
            elif isinstance(message, Grant):
                granted = self._open.get(message.number)
                if granted is not None and granted.runner is not None:
                    granted.runner.grant(granted, message.count)
            elif isinstance(message, DropWaiting):
                self._drop(error_of(message.failure))
            elif isinstance(message, EndActor):
                if self.engine is not None:
                    self.engine.end("stopped")
            elif isinstance(message, Begin):
                self.begin = message
            else:
                raise ProtocolError(f"{type(message).__name__} came on the work lane")

    def _revoke(self, number: int) -> None:
        call = self._open.get(number)
        if call is not None:
            call.revoke()
            if call.runner is not None:
                call.runner.revoke(call)

    def _drop(self, error: ActorserveError) -> None:
        """Fail what has not been begun."""
        calls = list(self._calls)
        self._calls.clear()
        for call in calls:
            call.skip()
            call.fail(error)
            self._open.pop(call.number, None)
            self._begun = call.number

    # --- Source ----------------------------------------------------------------------------------

    def take(self) -> ChildCall | None:
        """Return the next message that somebody waits for; what was before it is done with."""
        if self._has_handles:
            self._has_handles = False
            self._end.settle()
        self.read()
        while self._calls:
            call = self._calls.popleft()
            self._begun = call.number
            # Before any user code sees it: if we die now, it has not been lost unbegun.
            self._end.page.begin_batch(call.number, monotonic_ns())
            self._is_marked = True
            self._sweep()
            if call.is_late:
                call.fail(DeadlineExceeded(f"{call.what} waited until its deadline"))
            if call.is_over:
                self._open.pop(call.number, None)
                call.skip()
                continue
            self._has_handles = call.has_handles
            return call
        return None

    def _sweep(self) -> None:
        """Forget calls that have ended, and tell from time to time how far we are."""
        if len(self._open) > REPORT_EVERY + len(self._calls):
            over = [number for number, call in self._open.items() if call.is_over]
            for number in over:
                del self._open[number]
        if self._begun - self._reported > REPORT_EVERY:
            self._report(self._begun - 1)

    def rest(self) -> None:
        """Say that nothing is in hand, and give back what nobody uses."""
        if self._is_marked:
            self._is_marked = False
            self._end.page.end_batch()
        if self._begun != self._reported:
            self._report(self._begun)
        self._end.settle()

    def _report(self, number: int) -> None:
        if number > self._reported:
            self._reported = number
            self._end.send(Progress(number))

    def sleep(self, has_news: Callable[[], bool]) -> None:
        """See BlockingSource."""
        self.rest()
        self.read()
        if not self._calls and not has_news():
            self._end.doze(None)

    def ring(self) -> None:
        """See BlockingSource."""
        self._end.ring()
