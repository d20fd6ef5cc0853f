# SPDX-License-Identifier: Apache-2.0
"""The queue of a model whose requests run one by one, as they came: nothing to decide. No clock.

    add ──► first in, first out, one request a batch ──► next

Without a dynamic batcher, timeouts, limits and priorities, which is how most models are
configured, a queue is little more than a dictionary in order; `queue_for` says which queue a
policy needs. Both kinds have the same methods, see batching.BatchQueue.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Generic

from actorserve.errors import InvalidArgument
from actorserve.state.backlog import BacklogStats, QueuePolicy, T
from actorserve.state.batching import Batch, BatchPolicy, BatchQueue

_NO_POLICY = QueuePolicy()


def queue_for(policy: BatchPolicy) -> BatchQueue[T] | PlainQueue[T]:
    """Return the cheapest queue that does what the policy says."""
    return PlainQueue(policy) if PlainQueue.can_do(policy) else BatchQueue(policy)


class PlainQueue(Generic[T]):
    """A queue without rules. `count` is how many are queued; nothing in it is ever due."""

    is_immediate = True
    is_timed = False

    def __init__(self, policy: BatchPolicy | None = None) -> None:
        self.policy = policy = policy or BatchPolicy()
        assert self.can_do(policy), "a policy with rules needs a BatchQueue"
        self.count = 0
        self._max_rows = max(policy.max_batch_size, 1)
        self._items: OrderedDict[int, T] = OrderedDict()
        self._added = self._put_back = self._removed = 0

    @staticmethod
    def can_do(policy: BatchPolicy) -> bool:
        """Whether a policy asks for nothing that this queue cannot do."""
        has_levels = policy.priority_levels > 0 or policy.level_policies
        return not (policy.is_dynamic or has_levels) and policy.default_policy == _NO_POLICY

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[T]:
        """Yield the requests in the order of execution."""
        yield from self._items.values()

    def add(self, item: T) -> None:
        """Queue a request. Raises InvalidArgument if it is larger than the model takes."""
        if item.rows > self._max_rows:
            raise InvalidArgument(
                f"a request with batch size {item.rows} exceeds max_batch_size {self._max_rows}"
            )
        self._items[item.key] = item
        self.count += 1
        self._added += 1

    def put_back(self, items: Sequence[T], *, is_alone: bool = True) -> None:
        """Queue requests again whose stub died with them, at the front and in this order."""
        queued = self._items
        for item in reversed(items):
            queued[item.key] = item
            queued.move_to_end(item.key, last=False)
        self.count = len(queued)
        self._put_back += len(items)

    def remove(self, key: int) -> T | None:
        """Take one request out, wherever it stands; None if it is not queued."""
        item = self._items.pop(key, None)
        if item is not None:
            self.count -= 1
            self._removed += 1
        return item

    def next(self, now_s: float, free_instances: int = 1) -> Batch[T] | None:
        """Return the request to execute now, or None where there is none, or no instance."""
        if free_instances <= 0 or not self.count:
            return None
        item = self._items.popitem(False)[1]
        self.count -= 1
        return Batch([item], item.rows or 1)

    def expire(self, now_s: float) -> list[T]:
        """Return nothing: no request has a timeout."""
        return []

    def next_deadline_s(self) -> float | None:
        """Return None: no request has a timeout."""
        return None

    def stats(self) -> BacklogStats:
        """Return the counts."""
        return BacklogStats(
            queued=self.count,
            added=self._added,
            put_back=self._put_back,
            taken=self._added + self._put_back - self._removed - self.count,
            removed=self._removed,
            expired=0,
            delayed=0,
            refused=0,
        )
