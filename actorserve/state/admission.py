# SPDX-License-Identifier: Apache-2.0
"""Which request an engine gets next, and which of its outputs count. No clock, no engine.

    submit ─► waiting ─── admit ──► running ─── sift: its final ──► gone
                 │                     │
                 ├─ abort, expire ─► gone (given back: it needs a final)
                                       └─ abort, expire ─► to be aborted ─► its final ─► gone
                                                                  └─ overdue ─► gone (given back)

What always holds: a request that was taken leaves exactly once, by its first final output or by
being given back; outputs for what has gone, or never was, are counted and dropped.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

import msgspec

_MANY = 64  # below this many deadlines nobody counts the stale ones


class Asked(Protocol):
    """What has to be known of a request."""

    @property
    def id(self) -> int:
        """Its number, never used for another."""

    @property
    def priority(self) -> int:
        """Of two that wait, the higher goes first; of equal ones, the older."""

    @property
    def deadline_s(self) -> float:
        """When it is late, in monotonic seconds; 0 for never."""


class Came(Protocol):
    """What has to be known of an output."""

    id: int
    finish: str | None
    final: bool


T = TypeVar("T", bound=Asked)
O = TypeVar("O", bound=Came)  # noqa: E741 (as short as T)


class AdmissionStats(msgspec.Struct, frozen=True):
    """How many requests wait and run now, and what became of those that came."""

    waiting: int
    running: int
    taken: int
    admitted: int
    finished: int
    cancelled: int
    expired: int
    late_outputs: int
    missing_finals: int


class _Running(Generic[T]):
    __slots__ = ("reason", "request")

    def __init__(self, request: T) -> None:
        self.request = request
        self.reason = ""  # why it is to end early: "cancelled" or "timeout"


class Admission(Generic[T]):
    """The requests of one engine. `rows_of` and `tokens_of` say how much room one takes."""

    def __init__(self, rows_of: Callable[[T], int], tokens_of: Callable[[T], int]) -> None:
        self._rows_of = rows_of
        self._tokens_of = tokens_of
        self._waiting: dict[int, T] = {}
        self._queue: list[tuple[int, int, int]] = []  # a heap: -priority, arrival, id
        self._running: dict[int, _Running[T]] = {}
        self._deadlines: list[tuple[float, int]] = []  # a heap: due, id
        self._to_abort: list[int] = []
        self._aborted: dict[int, float] = {}  # running ones, by when the engine was told
        self._taken = self._admitted = self._finished = 0
        self._cancelled = self._expired = self._late = self._missing = 0

    # --- what comes from clients -----------------------------------------------------------------

    def submit(self, request: T) -> bool:
        """Take a request; False, and nothing taken, if its id is in use."""
        number = request.id
        if number in self._waiting or number in self._running:
            return False
        self._taken += 1
        self._waiting[number] = request
        heapq.heappush(self._queue, (-request.priority, self._taken, number))
        if request.deadline_s:
            heapq.heappush(self._deadlines, (request.deadline_s, number))
        return True

    def abort(self, ids: Iterable[int]) -> list[T]:
        """End requests early; returns those that were waiting, and so are gone.

        Running ones are in `take_aborts` next; unknown ids and ended requests are no mistake.
        """
        gone = []
        for number in ids:
            request = self._waiting.pop(number, None)
            if request is not None:
                self._cancelled += 1
                gone.append(request)
            else:
                self._end_early(number, "cancelled")
        return gone

    def expire(self, now_s: float) -> list[T]:
        """End what is late; returns those that were waiting, and so are gone."""
        gone = []
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= now_s:
            _, number = heapq.heappop(deadlines)
            request = self._waiting.pop(number, None)
            if request is not None:
                self._expired += 1
                gone.append(request)
            else:
                self._end_early(number, "timeout")
        if len(deadlines) > _MANY and len(deadlines) > 2 * (len(self._waiting) + self.running):
            self._sweep()
        return gone

    def next_deadline_s(self) -> float | None:
        """Return when `expire` has something to do next, or may have; None for never."""
        return self._deadlines[0][0] if self._deadlines else None

    # --- what goes to the engine -----------------------------------------------------------------

    def admit(self, free: tuple[int, int] | None) -> list[T]:
        """Return the requests that the engine gets now, by its free rows and tokens; None: all.

        Strictly in order: what does not fit is not overtaken. When nothing runs, the first one
        goes whatever its size, since it would wait for ever; an engine refuses what it cannot do.
        """
        admitted: list[T] = []
        queue = self._queue
        rows, tokens = (0, 0) if free is None else free
        while queue:
            request = self._waiting.get(queue[0][2])
            if request is None:  # aborted or expired meanwhile
                heapq.heappop(queue)
                continue
            if free is not None:
                rows -= self._rows_of(request)
                tokens -= self._tokens_of(request)
                if (rows < 0 or tokens < 0) and self._running:
                    break
            heapq.heappop(queue)
            del self._waiting[request.id]
            self._running[request.id] = _Running(request)
            admitted.append(request)
        self._admitted += len(admitted)
        return admitted

    def take_aborts(self, now_s: float) -> list[int]:
        """Return the ids that the engine is to end; each is named once."""
        ids = [number for number in self._to_abort if number in self._running]
        self._to_abort.clear()
        for number in ids:
            self._aborted[number] = now_s
        return ids

    # --- what comes from the engine --------------------------------------------------------------

    def sift(self, outputs: Iterable[O]) -> list[O]:
        """Return the outputs that count; a "cancelled" final says "timeout" where that is why."""
        passed = []
        running = self._running
        for output in outputs:
            entry = running.get(output.id)
            if entry is None:
                self._late += 1
                continue
            if output.final:
                del running[output.id]
                self._finished += 1
                if entry.reason:
                    self._aborted.pop(output.id, None)
                    if entry.reason == "timeout" and output.finish == "cancelled":
                        output.finish = "timeout"
            passed.append(output)
        return passed

    def drop(self, number: int) -> T | None:
        """Take out a running request that the engine does not have; None if there is none."""
        entry = self._running.pop(number, None)
        self._aborted.pop(number, None)
        if entry is None:
            return None
        self._finished += 1
        return entry.request

    def overdue(self, now_s: float, grace_s: float) -> list[tuple[T, str]]:
        """Take out what was aborted `grace_s` ago and got no final, with the reason of its end."""
        found = []
        for number, since_s in list(self._aborted.items()):
            if now_s - since_s < grace_s:
                break  # they stand in the order of time
            entry = self._running.pop(number)
            del self._aborted[number]
            self._missing += 1
            found.append((entry.request, entry.reason))
        return found

    def clear(self) -> list[T]:
        """Take out everything."""
        gone = [*self._waiting.values(), *(each.request for each in self._running.values())]
        for each in (self._waiting, self._queue, self._running, self._deadlines, self._to_abort):
            each.clear()
        self._aborted.clear()
        return gone

    # --- for whoever looks -----------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """How many the engine has."""
        return len(self._running)

    @property
    def has_aborts(self) -> bool:
        """Whether `take_aborts` may have something, or a final is still missing."""
        return bool(self._to_abort or self._aborted)

    def stats(self) -> AdmissionStats:
        """Return the counts."""
        return AdmissionStats(
            waiting=len(self._waiting),
            running=len(self._running),
            taken=self._taken,
            admitted=self._admitted,
            finished=self._finished,
            cancelled=self._cancelled,
            expired=self._expired,
            late_outputs=self._late,
            missing_finals=self._missing,
        )

    # --- inside ----------------------------------------------------------------------------------

    def _end_early(self, number: int, reason: str) -> None:
        entry = self._running.get(number)
        if entry is None or entry.reason:
            return
        entry.reason = reason
        if reason == "timeout":
            self._expired += 1
        else:
            self._cancelled += 1
        self._to_abort.append(number)

    def _sweep(self) -> None:
        live = [each for each in self._deadlines if self._is_here(each[1])]
        heapq.heapify(live)
        self._deadlines = live

    def _is_here(self, number: int) -> bool:
        return number in self._waiting or number in self._running
