# SPDX-License-Identifier: Apache-2.0
"""Requests that wait for an instance: in which order, for how long, and how many at most.

Levels of priority (1 is the highest), each first in, first out, each with a policy of its own:

    level 1:  waiting ──► delayed ──► level 2:  waiting ──► delayed ──► …
                 │           ▲
                 └── its timeout passed, and the policy says DELAY (with REJECT: out, expired)

No clock: whoever has one calls `expire` at `next_deadline_s`, so that a request is rejected at
its deadline and not when an instance gets free (a public bug elsewhere: Triton #7512).

Adding, removing, taking and expiring cost O(1), or O(log n) where a timeout is set, times the
number of levels in use. Nothing is left behind by a request that has gone: deadlines of gone
requests are swept out as soon as they outnumber the others.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Generic, Literal, Protocol, TypeVar

import msgspec

from actorserve.errors import ConfigError, Unavailable

EXPIRED_MESSAGE = "Request timeout expired"
FULL_MESSAGE = "Exceeds maximum queue size"
RETRY_AFTER_FULL_S = 1.0

_MANY = 64  # below this many deadlines nobody counts the stale ones


class Queued(Protocol):
    """What a queue has to know of a request. None of it may change while it is queued."""

    @property
    def key(self) -> int:
        """The request's number, never used for another; later requests have higher ones."""

    @property
    def rows(self) -> int:
        """Its size in the batch dimension."""

    @property
    def signature(self) -> object:
        """Equal for requests that may share a batch."""

    @property
    def arrival_s(self) -> float:
        """When it came, in monotonic seconds."""

    @property
    def priority(self) -> int:
        """Its level, 1 the highest; 0 for the default."""

    @property
    def timeout_us(self) -> int:
        """How long it may wait; 0 for no limit of its own."""


T = TypeVar("T", bound=Queued)


class QueuePolicy(msgspec.Struct, frozen=True):
    """What happens to a request that waits too long or is one too many; 0 is no limit.

    A request's own timeout counts if `allow_timeout_override` is set and it is shorter than the
    default. Raises ConfigError for values that make no sense.
    """

    timeout_action: Literal["REJECT", "DELAY"] = "REJECT"
    default_timeout_us: int = 0
    allow_timeout_override: bool = False
    max_queue_size: int = 0

    def __post_init__(self) -> None:
        if self.timeout_action not in ("REJECT", "DELAY"):
            raise ConfigError(
                f"queue policy: timeout_action is {self.timeout_action!r},"
                " expected 'REJECT' or 'DELAY'"
            )
        if self.default_timeout_us < 0 or self.max_queue_size < 0:
            raise ConfigError(
                "queue policy: default_timeout_microseconds and max_queue_size must be 0 or more"
            )

    @property
    def is_timed(self) -> bool:
        """Whether a request may have a timeout at all."""
        return self.allow_timeout_override or self.default_timeout_us > 0

    def timeout_us(self, requested_us: int) -> int:
        """Return the timeout of a request that asks for `requested_us`; 0 is none."""
        default_us = self.default_timeout_us
        if self.allow_timeout_override and requested_us > 0:
            return min(requested_us, default_us) if default_us else requested_us
        return default_us


class BacklogStats(msgspec.Struct, frozen=True):
    """How many requests wait now, and what became of those that came."""

    queued: int
    added: int
    put_back: int
    taken: int
    removed: int
    expired: int
    delayed: int
    refused: int


class _Level(Generic[T]):
    """One level of priority: those that wait, and those whose timeout passed but who still wait."""

    __slots__ = ("delayed", "is_timed", "max_size", "number", "policy", "waiting")

    def __init__(self, number: int, policy: QueuePolicy) -> None:
        self.number = number
        self.policy = policy
        self.max_size = policy.max_queue_size
        self.is_timed = policy.is_timed
        self.waiting: OrderedDict[int, T] = OrderedDict()
        self.delayed: OrderedDict[int, T] = OrderedDict()

    def __lt__(self, other: _Level[T]) -> bool:
        return self.number < other.number


class Backlog(Generic[T]):
    """Requests in the order in which they are to be executed. `count` is how many wait.

    `is_timed` is fixed: where it is false, nothing is ever due, and `expire` need not be called.
    """

    def __init__(
        self,
        policy: QueuePolicy | None = None,
        priority_levels: int = 0,
        default_level: int = 0,
        level_policies: dict[int, QueuePolicy] | None = None,
    ) -> None:
        self.count = 0
        self._policy = policy or QueuePolicy()
        self._priority_levels = priority_levels
        self._level_policies = level_policies or {}
        self.is_timed = any(
            each.is_timed for each in (self._policy, *self._level_policies.values())
        )
        self._levels: list[_Level[T]] = []  # in order; each is made when it is needed
        self._by_number: dict[int, _Level[T]] = {}
        self._default = self._make_level(default_level)
        self._deadlines: list[tuple[float, int, _Level[T], T]] = []  # a heap: due, key, …
        self._expired: list[T] = []  # out of the queue, but not told to anybody yet
        self._added = self._put_back = self._taken = self._removed = 0
        self._expirations = self._delayed = self._refused = 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[T]:
        """Yield the requests in the order of execution."""
        for level in self._levels:
            yield from level.waiting.values()
            yield from level.delayed.values()

    def push(self, item: T) -> bool:
        """Add a request; return whether it is the last in the order now.

        Raises Unavailable if its level is full.
        """
        level = self._level_of(item) if self._priority_levels else self._default
        if level.max_size and len(level.waiting) + len(level.delayed) >= level.max_size:
            self._refused += 1
            raise Unavailable(FULL_MESSAGE, retry_after_s=RETRY_AFTER_FULL_S)
        level.waiting[item.key] = item
        self.count += 1
        self._added += 1
        if level.is_timed:
            self._set_deadline(item, level)
        return not level.delayed and (level is self._levels[-1] or self._is_last(level))

    def push_front(self, items: Sequence[T]) -> None:
        """Put requests that were taken back to the front of their levels, in this order.

        They were accepted before, so that no limit refuses them; their deadlines go on counting.
        """
        for item in reversed(items):
            level = self._level_of(item)
            level.waiting[item.key] = item
            level.waiting.move_to_end(item.key, last=False)
            if level.is_timed:
                self._set_deadline(item, level)
        self.count += len(items)
        self._put_back += len(items)

    def remove(self, key: int) -> T | None:
        """Take one request out, wherever it stands; None if it is not queued."""
        for level in self._levels:
            item = level.waiting.pop(key, None) or level.delayed.pop(key, None)
            if item is not None:
                self.count -= 1
                self._removed += 1
                return item
        return None

    def take(self, number: int) -> list[T]:
        """Take the first requests out."""
        taken: list[T] = []
        for level in self._levels:
            for queue in (level.waiting, level.delayed):
                while queue:
                    if len(taken) == number:
                        break
                    taken.append(queue.popitem(last=False)[1])
        self.count -= len(taken)
        self._taken += len(taken)
        return taken

    def take_first(self) -> T | None:
        """Take the first request out; None if there is none."""
        for level in self._levels:
            queue = level.waiting or level.delayed
            if queue:
                self.count -= 1
                self._taken += 1
                return queue.popitem(last=False)[1]
        return None

    def expire(self, now_s: float) -> list[T]:
        """Take out and return the requests that are to be rejected because of their timeouts."""
        self._sweep(now_s)
        expired = self._expired
        if expired:
            self._expired = []
        return expired

    def next_deadline_s(self) -> float | None:
        """Return when `expire` has to be called next; 0 (at once) if it has something already."""
        if self._expired:
            return 0.0
        deadlines = self._deadlines
        while deadlines and not _is_waiting(deadlines[0]):
            heapq.heappop(deadlines)
        return deadlines[0][0] if deadlines else None

    def stats(self) -> BacklogStats:
        """Return the counts."""
        return BacklogStats(
            queued=self.count,
            added=self._added,
            put_back=self._put_back,
            taken=self._taken,
            removed=self._removed,
            expired=self._expirations,
            delayed=self._delayed,
            refused=self._refused,
        )

    def _level_of(self, item: T) -> _Level[T]:
        if not 0 < item.priority <= self._priority_levels:
            return self._default
        return self._by_number.get(item.priority) or self._make_level(item.priority)

    def _make_level(self, number: int) -> _Level[T]:
        level = _Level[T](number, self._level_policies.get(number, self._policy))
        self._by_number[number] = level
        insort(self._levels, level)
        return level

    def _is_last(self, level: _Level[T]) -> bool:
        """Whether nothing waits behind this level."""
        return not any(
            other.waiting or other.delayed for other in self._levels if other.number > level.number
        )

    def _set_deadline(self, item: T, level: _Level[T]) -> None:
        timeout_us = level.policy.timeout_us(item.timeout_us)
        if not timeout_us:
            return
        deadlines = self._deadlines
        if len(deadlines) > 2 * self.count + _MANY:
            deadlines[:] = filter(_is_waiting, deadlines)
            heapq.heapify(deadlines)
        heapq.heappush(deadlines, (item.arrival_s + timeout_us / 1e6, item.key, level, item))

    def _sweep(self, now_s: float) -> bool:
        """Move what has expired out of the order; return whether there was anything."""
        deadlines = self._deadlines
        if not deadlines or deadlines[0][0] > now_s:
            return False
        while deadlines and deadlines[0][0] <= now_s:
            _, _, level, item = heapq.heappop(deadlines)
            if level.waiting.pop(item.key, None) is None:
                continue
            if level.policy.timeout_action == "DELAY":
                level.delayed[item.key] = item
                self._delayed += 1
            else:
                self._expired.append(item)
                self.count -= 1
                self._expirations += 1
        return True


def _is_waiting(entry: tuple[float, int, _Level[T], T]) -> bool:
    return entry[3].key in entry[2].waiting
