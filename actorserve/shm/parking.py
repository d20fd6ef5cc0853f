# SPDX-License-Identifier: Apache-2.0
"""Sleeping and waking among several processes: one word and one doorbell for each sleeper.

    sleeper   park (its word), fence, look again ─► sleep on its bell ─► unpark
    anybody   write the news,  fence, read the word ─► ring, if it sleeps

A word holds the number of its sleeper's nap, 0 while that is awake, and has that one writer. A
waker rings at most once for a nap, so that whoever is awake costs no system call. Bells say "look
again" and nothing else: whoever wakes looks at everything that it waits for.
"""

from __future__ import annotations

from collections.abc import Sequence

from actorserve.shm.doorbell import Doorbell
from actorserve.shm.fence import new_fence


class Parking:
    """One process's hold on all the sleepers of a group; used by one thread at a time.

    `words` is a view of 8-byte words in which sleeper i has the word `places[i]`.
    """

    __slots__ = ("_acquire", "_bells", "_nap", "_places", "_release", "_rung", "_words")

    def __init__(self, words: memoryview, places: Sequence[int], bells: Sequence[Doorbell]) -> None:
        self._words = words
        self._places = places
        self._bells = bells
        self._nap = 0
        self._rung = [0] * len(bells)
        self._release, self._acquire = new_fence()

    def park(self, sleeper: int) -> None:
        """Announce sleep; look at everything that is waited for after this, and before sleeping."""
        self._nap += 1
        self._words[self._places[sleeper]] = self._nap
        self.fence()

    def unpark(self, sleeper: int) -> None:
        """Take the announcement back."""
        self._words[self._places[sleeper]] = 0

    def wake(self, sleeper: int) -> None:
        """Ring one sleeper, if it sleeps. The news has been written before."""
        self.fence()
        self._ring(sleeper)

    def wake_others(self, own: int = -1) -> None:
        """Ring everybody who sleeps, but for `own`. The news has been written before."""
        self.fence()
        for sleeper in range(len(self._bells)):
            if sleeper != own:
                self._ring(sleeper)

    def fence(self) -> None:
        """Order this thread's stores before its later loads."""
        self._release()
        self._acquire(False)

    def _ring(self, sleeper: int) -> None:
        nap = self._words[self._places[sleeper]]
        if nap and nap != self._rung[sleeper]:
            self._rung[sleeper] = nap
            self._bells[sleeper].ring()
