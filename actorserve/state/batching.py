# SPDX-License-Identifier: Apache-2.0
"""Which requests are executed next, together or alone. No clock, no I/O.

    add ──► [Backlog: order, timeouts, limits] ──► next(now_s, free_instances) ──► Batch
                                                                           └──► WaitUntil, None

The **default scheduler** runs each request by itself, in order. The **dynamic batcher** looks at
the **run**: the requests at the head of the order that fit together, which means that their
signatures are equal and their rows do not add up to more than `max_batch_size`. A run is closed
when its next neighbour does not fit, or it is as large as it can get: `max_batch_size`, or
exactly the largest preferred size. Then, if an instance is free:

    1. the run reached a preferred size, and its oldest request still has time
                                         ──► the part of it that is the largest preferred size
    2. the run is closed, or no delay is configured, or the delay of its oldest is over
                                         ──► all of it
    3. otherwise                         ──► wait until the delay of its oldest is over

(The rules are those of Triton's dynamic batcher. A request that is larger than the room that is
left starts the next run.) The run is remembered between calls and grows with each request that
is added, so that a call costs what the batch costs, however long the queue is.

With `is_immediate` a lone request never waits for company, so that a scheduler with an empty
queue and a free instance need not come here at all:

    if queue.is_immediate and not queue.count and instance_is_free:
        ...                                         # send it; the queue never hears of it
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

import msgspec

from actorserve.errors import ConfigError, InvalidArgument
from actorserve.state.backlog import Backlog, QueuePolicy, T

# What is known of the run.
_UNKNOWN = 0  # the order has changed at its head: look again
_OPEN = 1  # it is the whole queue, and the next request may still fit
_CLOSED = 2


class Item:
    """The least that can be queued; a request class with these attributes will do as well."""

    __slots__ = ("arrival_s", "key", "priority", "rows", "signature", "timeout_us")

    def __init__(
        self,
        key: int,
        rows: int = 1,
        signature: object = None,
        arrival_s: float = 0.0,
        priority: int = 0,
        timeout_us: int = 0,
    ) -> None:
        self.key = key
        self.rows = rows
        self.signature = signature
        self.arrival_s = arrival_s
        self.priority = priority
        self.timeout_us = timeout_us


class BatchPolicy(msgspec.Struct, frozen=True):
    """How a model's requests are queued and batched; the fields are those of its configuration.

    `is_dynamic` says that there is a dynamic batcher; without it only `max_batch_size` (0: the
    model does not batch), `default_policy` and the priorities mean anything. Raises ConfigError.

    `preserve_ordering` is done behind the instances (ordering.py): responses leave in the order in
    which the requests came. As in the reference there is one priority level at most then. DELAY
    moves nothing then: the responses to whatever overtook the delayed request would have to wait
    for it.
    """

    max_batch_size: int = 0
    is_dynamic: bool = False
    preferred_batch_sizes: tuple[int, ...] = ()
    max_queue_delay_us: int = 0
    priority_levels: int = 0
    default_priority_level: int = 0
    default_policy: QueuePolicy = QueuePolicy()
    level_policies: dict[int, QueuePolicy] = {}
    preserve_ordering: bool = False

    def __post_init__(self) -> None:
        if self.max_batch_size < 0 or self.max_queue_delay_us < 0 or self.priority_levels < 0:
            raise ConfigError(
                "max_batch_size, max_queue_delay_microseconds and priority_levels must be 0 or more"
            )
        largest = max(self.max_batch_size, 1)
        for size in self.preferred_batch_sizes:
            if not 0 < size <= largest:
                raise ConfigError(
                    f"dynamic batching: preferred_batch_size {size} is not between 1 and"
                    f" max_batch_size ({largest})"
                )
        levels = self.priority_levels
        if self.preserve_ordering and levels > 1:
            raise ConfigError(
                f"dynamic batching: preserve_ordering allows one priority level, not {levels}"
            )
        if levels and not 1 <= self.default_priority_level <= levels:
            raise ConfigError(
                f"dynamic batching: default_priority_level is {self.default_priority_level},"
                f" expected 1 to priority_levels ({levels})"
            )
        for level in self.level_policies:
            if not 1 <= level <= levels:
                raise ConfigError(
                    f"dynamic batching: priority_queue_policy for level {level}, expected 1 to"
                    f" priority_levels ({levels})"
                )

    def policy_of(self, level: int) -> QueuePolicy:
        """Return the queue policy of a priority level (0 where there are none), as it is meant."""
        policy = self.level_policies.get(level, self.default_policy)
        if self.preserve_ordering and policy.timeout_action == "DELAY":
            return QueuePolicy(max_queue_size=policy.max_queue_size)
        return policy


class Batch(msgspec.Struct, Generic[T]):
    """Requests to be executed together, in this order, and the sum of their rows."""

    items: list[T]
    rows: int


class WaitUntil(msgspec.Struct, frozen=True):
    """Nothing to run yet: ask again at `at_s`, or when something is added."""

    at_s: float


class BatchQueue(Backlog[T]):
    """The queue of one model.

    `is_immediate` is fixed: no request ever waits for others. So is `is_timed`: something may be
    due, a timeout or a delay, so that the time matters. `count` is how many are queued.
    """

    def __init__(self, policy: BatchPolicy | None = None) -> None:
        self.policy = policy = policy or BatchPolicy()
        super().__init__(
            policy.policy_of(0),
            policy.priority_levels,
            policy.default_priority_level if policy.priority_levels else 0,
            {level: policy.policy_of(level) for level in policy.level_policies},
        )
        self._is_dynamic = policy.is_dynamic
        self._delay_s = policy.max_queue_delay_us / 1e6
        self.is_timed = self.is_timed or self._delay_s > 0
        self.is_immediate = not policy.is_dynamic or self._delay_s == 0
        self._max_rows = max(policy.max_batch_size, 1)
        self._preferred = frozenset(policy.preferred_batch_sizes)
        self._full_rows = {self._max_rows, max(self._preferred, default=self._max_rows)}
        self._alone: set[int] = set()  # keys of requests that share no batch
        self._state = _UNKNOWN
        self._run_count = 0
        self._run_rows = 0
        self._run_oldest_s = 0.0
        self._run_signature: object = None
        self._best_count = 0  # that many of the run make the largest preferred size
        self._best_rows = 0

    def add(self, item: T) -> None:
        """Queue a request.

        Raises Unavailable if the queue is full, InvalidArgument if no batch could hold it.
        """
        if item.rows > self._max_rows:
            raise InvalidArgument(
                f"a request with batch size {item.rows} exceeds max_batch_size {self._max_rows}"
            )
        is_last = self.push(item)
        if self._state == _UNKNOWN:
            return
        if not is_last:
            self._state = _UNKNOWN
        elif self._state == _OPEN:
            self._extend(item)

    def put_back(self, items: Sequence[T], *, is_alone: bool = True) -> None:
        """Queue requests again whose stub died with them, at the front and in this order.

        They are executed one by one, unless `is_alone` is false: so the one that kills stubs
        does not take its neighbours with it a second time.
        """
        self.push_front(items)
        if is_alone:
            self._alone.update(item.key for item in items)
        self._state = _UNKNOWN

    def remove(self, key: int) -> T | None:
        """Take one request out, wherever it stands; None if it is not queued."""
        item = super().remove(key)
        if item is not None:
            self._state = _UNKNOWN
            self._alone.discard(key)
        return item

    def next(self, now_s: float, free_instances: int = 1) -> Batch[T] | WaitUntil | None:
        """Return the batch to execute now, when to ask again, or None: not before a change.

        Call it once for each free instance, until it returns no Batch. A request whose deadline
        has passed is never returned; `expire` has it.
        """
        if self._deadlines and self._sweep(now_s):
            self._state = _UNKNOWN
        if free_instances <= 0 or not self.count:
            return None
        if not self._is_dynamic:
            first = self.take_first()
            return None if first is None else Batch([first], first.rows or 1)
        if self._state == _UNKNOWN:
            self._find_run()
        due_s = self._run_oldest_s + self._delay_s
        is_over = self._delay_s > 0 and now_s >= due_s
        if self._best_count and not is_over:
            return self._cut(self._best_count, self._best_rows)
        if self._state == _CLOSED or is_over or self._delay_s == 0:
            return self._cut(self._run_count, self._run_rows)
        return WaitUntil(due_s)

    def expire(self, now_s: float) -> list[T]:
        """Take out and return the requests that are to be rejected because of their timeouts."""
        if self._sweep(now_s):
            self._state = _UNKNOWN
        expired = super().expire(now_s)
        if self._alone and expired:
            self._alone.difference_update(item.key for item in expired)
        return expired

    def _cut(self, count: int, rows: int) -> Batch[T]:
        """Take the head of the order out as a batch."""
        self._state = _UNKNOWN
        batch = Batch(self.take(count), rows)
        if self._alone:
            self._alone.difference_update(item.key for item in batch.items)
        return batch

    def _find_run(self) -> None:
        """Look for the run at the head of the order."""
        self._state = _OPEN
        self._run_count = self._run_rows = self._best_count = self._best_rows = 0
        for item in self:
            self._extend(item)
            if self._state == _CLOSED:
                break

    def _extend(self, item: T) -> None:
        """Let the run grow by the request that follows it, or close it."""
        rows = item.rows or 1
        is_alone = bool(self._alone) and item.key in self._alone
        if self._run_count == 0:
            self._run_signature = item.signature
            self._run_oldest_s = item.arrival_s
        elif (
            is_alone
            or self._run_rows + rows > self._max_rows
            or item.signature != self._run_signature
        ):
            self._state = _CLOSED
            return
        elif item.arrival_s < self._run_oldest_s:
            self._run_oldest_s = item.arrival_s
        self._run_count += 1
        self._run_rows += rows
        if self._run_rows in self._preferred:
            self._best_count, self._best_rows = self._run_count, self._run_rows
        if is_alone or self._run_rows in self._full_rows:
            self._state = _CLOSED
