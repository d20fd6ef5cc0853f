# SPDX-License-Identifier: Apache-2.0
"""What became of each request: the record of a run, and the judge over it. Pure.

    began ─► responded* ─► responded, final     answered: its end came once, and nothing after it
         └────────────────► left                 nobody waits any more: nothing may come then

A request is forgotten once it has ended, but for its end: so a run of any length needs little
memory, and what comes late is still found.
"""

from __future__ import annotations

import sys
from collections import Counter, deque

KEPT_ENDS = 20_000
"""Ended requests that are remembered; what comes for an older one is told as unknown."""


class History:
    """The record; `problems` says what was wrong so far, in words."""

    def __init__(self) -> None:
        self.ends: Counter[str] = Counter()
        self.problems: list[str] = []
        self._open: dict[int, tuple[str, int]] = {}
        self._ended: dict[int, str] = {}
        self._order: deque[int] = deque()
        self._number = 0

    def began(self, kind: str) -> int:
        """Note a request that is sent; returns its number here."""
        self._number += 1
        self._open[self._number] = (kind, 0)
        return self._number

    def responded(self, number: int, *, final: bool, end: str = "answered") -> None:
        """Note a response; with `final`, the request has ended in this way."""
        found = self._open.get(number)
        if found is None:
            self._tell(number, f"a {'final ' if final else ''}response")
            return
        kind, count = found
        if final:
            self._end(number, kind, end)
        else:
            self._open[number] = (kind, count + 1)

    def left(self, number: int) -> None:
        """Note that whoever sent it waits no more; nothing if it has ended."""
        found = self._open.get(number)
        if found is not None:
            self._end(number, found[0], "left")

    def wrong(self, what: str) -> None:
        """Note that an answer was not what it had to be."""
        self.problems.append(what)

    @property
    def count(self) -> int:
        """How many requests began."""
        return self._number

    @property
    def open(self) -> int:
        """How many have no end yet."""
        return len(self._open)

    def verdict(self) -> list[str]:
        """Return everything that is wrong, once no request can have an answer to come."""
        missing = [
            f"request {number} ({kind}) has no end after {count} responses"
            for number, (kind, count) in self._open.items()
        ]
        return [*self.problems, *missing]

    def _end(self, number: int, kind: str, end: str) -> None:
        del self._open[number]
        self.ends[f"{kind}: {end}"] += 1
        self._ended[number] = sys.intern(f"{kind}, {end}")  # a record must not look like a leak
        self._order.append(number)
        if len(self._order) > KEPT_ENDS:
            del self._ended[self._order.popleft()]

    def _tell(self, number: int, what: str) -> None:
        before = self._ended.get(number)
        if before is not None:
            self.problems.append(f"request {number} ({before}) got {what} after its end")
        else:
            self.problems.append(f"{what} came for request {number}, which nobody has sent")
