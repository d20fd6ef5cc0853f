# SPDX-License-Identifier: Apache-2.0
"""Which rank of a group stands still? From looks at what each says that it does. No clock, no I/O.

A rank has something to do while it is in a step, or behind rank 0. It stands still when it has had
something to do for too long without coming to another step. In a step, all ranks wait for the one
that stands still, and so do not move either: the one that is furthest behind is to blame, and of
several, one that does not wait for the others. Where nobody has looked for long, the parent itself
stood still, perhaps with everybody's messages unread: all times start anew then.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

_GAP_INTERVALS = 3.0
_GAP_SLACK_S = 1.0


class Doing(enum.Enum):
    """What a rank does; the values are for people."""

    LOADING = "in a call or loading"
    IDLE = "idle"
    BUSY = "in its engine"
    WAITING = "waiting for other ranks"
    CLOSED = "closed"


class Look(msgspec.Struct, frozen=True):
    """What one rank did when somebody looked; see shm/board.py for `told`."""

    step: int
    doing: Doing
    told: int = 0


class StallStats(msgspec.Struct, frozen=True):
    """How many looks there were, and for how long which rank has been in its step at the last."""

    looks: int
    slowest: int
    slowest_s: float


class StallJudge:
    """Judge one life of a group. 0 seconds is no limit.

    `step_s` is the time for a step, `call_s` that for one with a call in it, `interval_s` the
    usual one between two looks.
    """

    def __init__(self, size: int, *, step_s: float, call_s: float, interval_s: float = 1.0) -> None:
        self._max_gap_s = _GAP_INTERVALS * interval_s + _GAP_SLACK_S
        self._last_s = 0.0
        self._step_s = step_s
        self._call_s = call_s
        self._since: list[tuple[int, float]] = [(-1, 0.0)] * size  # step, and when it was new
        self._looks = 0
        self._slowest = 0
        self._slowest_s = 0.0

    def judge(self, now_s: float, looks: Sequence[Look]) -> tuple[int, str] | None:
        """Take a look at all ranks; return (rank, reason) where one stands still."""
        self._looks += 1
        self._slowest_s = 0.0
        is_gap = now_s - self._last_s > self._max_gap_s
        self._last_s = now_s
        late = []
        for rank, look in enumerate(looks):
            step, since_s = self._since[rank]
            is_behind = look.told < looks[0].told
            is_idle = look.doing is Doing.CLOSED or (look.doing is Doing.IDLE and not is_behind)
            if step != look.step or is_idle or is_gap:
                self._since[rank] = (look.step, now_s)
                continue
            still_s = now_s - since_s
            if still_s > self._slowest_s:
                self._slowest, self._slowest_s = rank, still_s
            is_in_call = any(each.doing is Doing.LOADING for each in looks)
            limit_s = self._call_s if is_in_call else self._step_s
            if limit_s and still_s > limit_s:
                late.append((look.step, look.doing is Doing.WAITING, rank, still_s))
        if not late:
            return None
        step, _, rank, still_s = min(late)
        return rank, f"stands still: {looks[rank].doing.value} in step {step} for {still_s:.1f} s"

    def stats(self) -> StallStats:
        """Return what the last look showed."""
        return StallStats(self._looks, self._slowest, self._slowest_s)
