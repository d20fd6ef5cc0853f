# SPDX-License-Identifier: Apache-2.0
"""Which slots of the key-value cache are free, how full the others are, what happened to them."""

from __future__ import annotations

import heapq
from collections import deque

import numpy as np

from actorserve.actors.generation.engines.decoder import IntArray

__all__ = ["KvEvent", "SlotTable"]

KvEvent = tuple[str | int, ...]
"""("allocated", slot, request), ("stored", slot, request, position, tokens of the prompt),
("copied", slot, to slot, tokens) or ("freed", slot, request, tokens that it had)."""

_EVENTS_KEPT = 10_000  # until somebody fetches them


class SlotTable:
    """The slots: `last` is the token of each that runs next, `length` its positions in memory."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.last: IntArray = np.zeros(slots, np.int64)
        self.length: IntArray = np.zeros(slots, np.int64)
        self._free = list(range(slots))  # a heap: low numbers first keep neighbours together
        self._events: deque[KvEvent] = deque(maxlen=_EVENTS_KEPT)

    @property
    def free(self) -> int:
        """How many slots are free."""
        return len(self._free)

    def take(self, count: int, request: int) -> list[int]:
        """Give slots to a request; there must be so many."""
        slots = [heapq.heappop(self._free) for _ in range(count)]
        self._events += [("allocated", slot, request) for slot in slots]
        return slots

    def give_back(self, slot: int, request: int) -> None:
        """Free a slot."""
        self._events.append(("freed", slot, request, int(self.length[slot])))
        self.length[slot] = 0
        heapq.heappush(self._free, slot)

    def note_prompt(self, slot: int, request: int, position: int, tokens: int) -> None:
        """Take note that a piece of a prompt is in memory."""
        self.length[slot] = position + tokens
        self._events.append(("stored", slot, request, position, tokens))

    def note_copy(self, source: int, target: int) -> int:
        """Take note of a copy; returns how many positions there are to copy."""
        tokens = int(self.length[source])
        self.length[target] = tokens
        self._events.append(("copied", source, target, tokens))
        return tokens

    def take_events(self) -> list[KvEvent]:
        """Return what happened since the last call, oldest first."""
        events = list(self._events)
        self._events.clear()
        return events
