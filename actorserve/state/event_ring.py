# SPDX-License-Identifier: Apache-2.0
"""The newest of a numbered row of things, bounded; readers see what they missed.

One thread adds, any may read: each event lies there together with its number, so that a reader
which comes in between numbers nothing wrongly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec


class Replay(msgspec.Struct, frozen=True):
    """What a reader gets: `events` from the number `first` on; `next` is where to go on.

    `missed` events between what was asked for and `first` are not there any more.
    """

    first: int
    events: list[Any]
    next: int
    missed: int


class EventRing:
    """Keep the `kept` newest events."""

    def __init__(self, kept: int) -> None:
        self._events: deque[tuple[int, Any]] = deque(maxlen=kept)
        self.next = 0  # the number that the next event has

    def add(self, first: int, events: Iterable[Any]) -> None:
        """Add events; the first has the number `first`. A number that was skipped is a gap.

        A number that goes back (the source has begun anew) empties the ring.
        """
        if first != self.next:
            self._events.clear()
            self.next = first
        for event in events:
            self._events.append((self.next, event))
            self.next += 1

    def since(self, number: int) -> Replay:
        """Return the events from this number on."""
        events = list(self._events)
        end = events[-1][0] + 1 if events else self.next
        begin = end - len(events)
        first = min(max(number, begin), end)
        newer = [event for _, event in events[first - begin :]]
        return Replay(first, newer, end, max(0, first - number))
