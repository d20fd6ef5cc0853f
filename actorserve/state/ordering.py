# SPDX-License-Identifier: Apache-2.0
"""Responses leave in the order in which the requests came (`preserve_ordering`). No clock, no I/O.

    enqueue(1), enqueue(2), enqueue(3)
                              waiting for their turn
    put(2, b, is_final) ──► 1: ─        2: b, done     3: ─        take() ──► nothing
    put(3, c)           ──► 1: ─        2: b, done     3: c        take() ──► nothing
    put(1, a, is_final) ──► 1: a, done  2: b, done     3: c        take() ──► a, b, c, nothing

The oldest request that is not done has its turn: its responses leave as they come, those of all
others are held, each request's in their own order. A request is done with its final response, be
it an error or not; one that leaves the order (it was rejected, cancelled, or ran out of time, or
its client is gone) holds nobody back from then on.

This is the reference's rule. There, ordering goes with one priority level only, and with no
timeout that moves a request behind others (the configuration is refused, see
BatchPolicy), so that the order of arrival is all there is.

`take` gives one response at a time, so that whoever hears one may make others leave before the
next. Every operation costs O(1), and what is held is bounded by who asks `is_full` before more
work is begun; while the request whose turn it is waits in the queue itself, one must go on all
the same, or it would never get there.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")

MOST_HELD = 1024
MOST_HELD_BYTES = 256 << 20


class OrderingStats(msgspec.Struct, frozen=True):
    """How many requests have not left yet, and what is held of them."""

    waiting: int
    held: int
    held_bytes: int
    most_held: int


class _Turn(Generic[T]):
    """A request that has not left; `is_done` says that its last response is among the held."""

    __slots__ = ("held", "is_done")

    def __init__(self) -> None:
        self.held: deque[tuple[T, int]] = deque()
        self.is_done = False


class Ordering(Generic[T]):
    """The requests of one model that have not been answered yet, and the responses held for them.

    `most_held` and `most_held_bytes` are when it calls itself full; it refuses nothing.
    """

    def __init__(self, most_held: int = MOST_HELD, most_held_bytes: int = MOST_HELD_BYTES) -> None:
        self._limit = most_held
        self._limit_bytes = most_held_bytes
        self._turns: OrderedDict[int, _Turn[T]] = OrderedDict()  # a done one holds something
        self._held = self._held_bytes = self._most_held = 0

    def __len__(self) -> int:
        return len(self._turns)

    def __contains__(self, key: int) -> bool:
        """Whether a request has not left yet."""
        return key in self._turns

    def is_done(self, key: int) -> bool:
        """Whether a request has its final response, and only its turn is missing."""
        turn = self._turns.get(key)
        return turn is not None and turn.is_done

    @property
    def first(self) -> int | None:
        """The request whose turn it is."""
        return next(iter(self._turns), None)

    @property
    def is_full(self) -> bool:
        """Whether so much is held that no more work should be begun for now."""
        return self._held >= self._limit or self._held_bytes >= self._limit_bytes

    def enqueue(self, key: int) -> None:
        """Note that a request came in; keys are never used twice."""
        assert key not in self._turns, f"request {key} is in the order already"
        self._turns[key] = _Turn()

    def put(self, key: int, response: T, *, is_final: bool, nbytes: int = 0) -> None:
        """Take a response of a request that has not left; `take` says when it may go."""
        turn = self._turns[key]
        assert not turn.is_done, f"request {key} has had its final response"
        turn.held.append((response, nbytes))
        turn.is_done = is_final
        self._held += 1
        self._held_bytes += nbytes
        if self._held > self._most_held:
            self._most_held = self._held

    def leave(self, key: int) -> list[T]:
        """Take a request out of the order; returns what was held of it.

        Nothing is due to it any more, and nobody behind it waits for it. Harmless for one that is
        not there.
        """
        turn = self._turns.pop(key, None)
        if turn is None:
            return []
        self._held -= len(turn.held)
        self._held_bytes -= sum(nbytes for _, nbytes in turn.held)
        return [response for response, _ in turn.held]

    def take(self) -> T | None:
        """Return the next response that may leave, or None: not before a change."""
        key = self.first
        if key is None:
            return None
        turn = self._turns[key]
        if not turn.held:
            return None
        response, nbytes = turn.held.popleft()
        self._held -= 1
        self._held_bytes -= nbytes
        if turn.is_done and not turn.held:
            del self._turns[key]
        return response

    def stats(self) -> OrderingStats:
        """Return the counts; `most_held` is the highest number of responses held so far."""
        return OrderingStats(len(self._turns), self._held, self._held_bytes, self._most_held)
