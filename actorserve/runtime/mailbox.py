# SPDX-License-Identifier: Apache-2.0
"""An actor's mailbox: bounded, first in first out, filled from any thread.

    put ─► room? ─► the queue ─► take ─► whoever runs the actor
            no └──► the line of senders, who move up in their order │ or Full, or the refusal

What always holds: nobody overtakes, for a sender joins the line while there is one. A mailbox
outlives its actor's deaths: what waits in it goes to the next life. It refuses, with the reason,
when there will be none.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from actorserve.errors import ActorserveError, DeadlineExceeded, Full
from actorserve.runtime.call import TELL, Call
from actorserve.runtime.failure import again

LINE_MOST = 65_536
"""Senders in line at one mailbox; more are refused even if they want to wait."""


class MailboxStats(msgspec.Struct, frozen=True):
    """What waits. `ahead` has been sent to the actor's process, but not been begun."""

    capacity: int
    queued: int
    ahead: int
    in_line: int


class Mailbox:
    """Calls that wait for one actor. `wake` is called, in any thread, when there is a new one."""

    def __init__(self, name: str, capacity: int, wake: Callable[[], None]) -> None:
        self.capacity = capacity
        self._name = name
        self._wake = wake
        self._lock = threading.Lock()
        self._queue: deque[Call] = deque()
        self._line: deque[Call] = deque()
        self._ahead = 0
        self._refusal: ActorserveError | None = None
        self.is_severed = False  # this process is a fork of the actor's

    # --- senders ---------------------------------------------------------------------------------

    def put(self, call: Call, *, is_nowait: bool = False) -> None:
        """Take the call, let its sender stand in line, or fail it at once. From any thread."""
        call.runner = self
        problem = self._refusal  # read once: another thread may open the mailbox meanwhile
        if problem is not None:  # before the lock, which a fork may have left taken
            call.fail(again(problem))
            return
        with self._lock:
            problem = self._refusal
            if problem is None:
                if not self._line and len(self._queue) + self._ahead < self.capacity:
                    self._queue.append(call)
                elif is_nowait:
                    problem = Full(f"the mailbox of {self._name!r} is full ({self.capacity})")
                elif len(self._line) >= LINE_MOST:
                    problem = Full(f"{LINE_MOST} senders wait for {self._name!r} already")
                else:
                    self._line.append(call)
                    return
        if problem is not None:
            call.fail(again(problem))
            return
        call.taken()
        self._wake()

    def grant(self, call: Call, count: int) -> None:
        """See Runner: no stream has begun here."""

    def revoke(self, call: Call) -> None:
        """Take a call out that nobody waits for any more. From any thread."""
        with self._lock:
            for calls in (self._queue, self._line):
                try:
                    calls.remove(call)
                    break
                except ValueError:
                    continue
            admitted = self._move_up()
        self._welcome(admitted)

    # --- the actor's side ------------------------------------------------------------------------

    def take(self, ahead: int = 0) -> Call | None:
        """Return the next call that somebody waits for, None if there is none now.

        `ahead` is how many calls wait in the actor's own process, with this one.
        """
        while True:
            with self._lock:
                call = self._queue.popleft() if self._queue else None
                if call is not None:
                    self._ahead = ahead
                admitted = self._move_up() if self._line else ()
            if admitted:
                self._welcome(admitted)
            if call is None or not (call.is_over or _expired(call)):
                return call

    def set_ahead(self, count: int) -> None:
        """Say how many calls wait in the actor's own process; they take room here."""
        if count == self._ahead:
            return
        with self._lock:
            self._ahead = count
            admitted = self._move_up() if self._line else ()
        if admitted:
            self._welcome(admitted)

    def put_back(self, calls: Iterable[Call]) -> None:
        """Put calls that were taken and not begun at the front, in their order."""
        calls = list(calls)
        for call in calls:
            call.runner = self
        with self._lock:
            self._queue.extendleft(reversed(calls))

    # --- the supervisor's side -------------------------------------------------------------------

    def open(self) -> None:
        """Refuse nobody from now on."""
        with self._lock:
            self._refusal = None

    def refuse(self, error: ActorserveError) -> None:
        """Fail whoever comes from now on; what is queued stays, and so does the line."""
        with self._lock:
            self._refusal = error

    def clear(self, error: ActorserveError) -> None:
        """Fail all that waits."""
        with self._lock:
            calls = [*self._queue, *self._line]
            self._queue.clear()
            self._line.clear()
        for call in calls:
            call.fail(again(error))

    def sever(self, error: ActorserveError) -> None:
        """Refuse from now on, in a forked child, where the lock may be taken for ever."""
        self._refusal = error
        self.is_severed = True

    def has_calls(self) -> bool:
        """Whether something is queued."""
        return bool(self._queue)

    def stats(self) -> MailboxStats:
        """Return the counts."""
        return MailboxStats(self.capacity, len(self._queue), self._ahead, len(self._line))

    # --- inside ----------------------------------------------------------------------------------

    def _move_up(self) -> list[Call]:
        """Let senders in as far as there is room; the lock is held."""
        admitted: list[Call] = []
        while self._line and len(self._queue) + self._ahead < self.capacity:
            call = self._line.popleft()
            self._queue.append(call)
            admitted.append(call)
        return admitted

    def _welcome(self, admitted: Iterable[Call]) -> None:
        woken = False
        for call in admitted:
            call.taken()
            woken = True
        if woken:
            self._wake()


def _expired(call: Call) -> bool:
    """Whether its deadline passed while it waited; it is told so. A tell's is for the line."""
    if call.kind == TELL or not call.is_late:
        return False
    call.fail(DeadlineExceeded(f"{call.describe()}: it waited in the mailbox until its deadline"))
    return True
