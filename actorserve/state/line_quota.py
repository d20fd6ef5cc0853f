# SPDX-License-Identifier: Apache-2.0
"""How many lines a process may have in the log: a burst, then so many a second, the rest counted.

A line costs the supervisor's loop some 30 µs, whoever wrote it; without a limit, one model that
logs in a tight loop would take the time of all the others. No clock, no I/O.
"""

from __future__ import annotations

BURST_LINES = 5000
LINES_PER_S = 1000.0
NOTICE_S = 1.0
"""How often a flood is told of, at most."""


class LineQuota:
    """A token bucket, full at first. Not locked: a lost count changes little."""

    __slots__ = ("_burst", "_left", "_noticed_s", "_per_s", "_then_s", "refused")

    def __init__(self, burst: int = BURST_LINES, per_s: float = LINES_PER_S) -> None:
        self._burst = float(burst)
        self._left = 0.0
        self._per_s = per_s
        self._then_s = float("-inf")  # so that the first line finds the whole burst
        self._noticed_s = float("-inf")
        self.refused = 0
        """How many lines were refused and have not been told of yet."""

    def admit(self, count: int, now_s: float) -> int:
        """Return how many of `count` lines are let through; the others are refused, and counted."""
        if self._left < count:
            self._refill(now_s)
            if self._left < count:
                admitted = int(self._left)
                self._left -= admitted
                self.refused += count - admitted
                return admitted
        self._left -= count
        return count

    def take_refused(self, now_s: float) -> int:
        """Return how many lines were refused since the last time, where it is time to say so."""
        if not self.refused or now_s - self._noticed_s < NOTICE_S:
            return 0
        self._noticed_s = now_s
        refused, self.refused = self.refused, 0
        return refused

    def _refill(self, now_s: float) -> None:
        gained = (now_s - self._then_s) * self._per_s
        if gained > 0:
            self._left = min(self._burst, self._left + gained)
            self._then_s = now_s
