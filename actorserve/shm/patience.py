# SPDX-License-Identifier: Apache-2.0
"""When it pays to look for news a while longer before sleeping.

Going to sleep and being woken costs each side tens of microseconds, and what the caches of its
core held. Where waits have been short lately, looking again is cheaper. Two things decide:

    the moving average of waits     how long they lasted, slept or not: it does not feed on itself
    a yield that takes long         somebody else wants this core: looking on would keep it waiting

So an idle process, whose waits are long, does not look at all, and whoever has more to run than
cores sleeps as ever.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from actorserve.clock import monotonic_ns

LOOK_NS = 300_000
"""How long a look lasts, and the average of waits up to which one pays."""

LONGEST_NS = 8 * LOOK_NS
"""What a longer wait counts as, so that some tens of short ones make up for it."""

CONTENDED_NS = 20_000
"""A yield that lasts longer has let somebody else run."""


class Patience:
    """What one side has learnt of one kind of wait. One thread at a time."""

    __slots__ = ("_average_ns", "_since_ns", "looks")

    def __init__(self) -> None:
        self.looks = 0  # how often it has been looked, for whoever counts
        self._average_ns = LONGEST_NS
        self._since_ns = 0  # when the wait began; 0 while there is none

    def begin(self) -> bool:
        """Note that a wait begins; returns whether to look for its end before sleeping."""
        self._since_ns = monotonic_ns()
        return self._average_ns < LOOK_NS

    def end(self) -> None:
        """Note that what was waited for is there."""
        if self._since_ns:
            waited_ns = min(monotonic_ns() - self._since_ns, LONGEST_NS)
            self._average_ns += (waited_ns - self._average_ns) >> 3
            self._since_ns = 0

    def lasts(self) -> bool:
        """Let others run for a moment; returns whether to look once more after that."""
        self.looks += 1
        begun_ns = monotonic_ns()
        os.sched_yield()
        now_ns = monotonic_ns()
        return now_ns - begun_ns < CONTENDED_NS and now_ns - self._since_ns < LOOK_NS

    def look(self, has_news: Callable[[], bool]) -> bool:
        """Look until there is news or patience ends; returns whether there is news."""
        while not has_news():
            if not self.lasts():
                return has_news()
        return True
