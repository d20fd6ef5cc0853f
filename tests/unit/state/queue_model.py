# SPDX-License-Identifier: Apache-2.0
"""The rules of the queue, written down the slow way: lists, and everything anew at each event.

Nothing here is shared with the product but the configuration's classes. Where the two differ, one
of them is wrong; test_queue_properties.py looks for that.
"""

from __future__ import annotations

from dataclasses import dataclass

from actorserve.state.backlog import QueuePolicy
from actorserve.state.batching import BatchPolicy, Item


class Refused(Exception):
    """The request is not accepted; the text says why."""


@dataclass
class Entry:
    """A request in the queue. `since` orders those that came to be where they are."""

    item: Item
    since: int
    is_delayed: bool = False
    is_alone: bool = False


class QueueModel:
    """A queue of which every answer is computed from the list of what waits."""

    def __init__(self, policy: BatchPolicy) -> None:
        self.policy = policy
        self.entries: list[Entry] = []
        self.untold: list[Item] = []
        self.moment = 0  # counts up; requests that are put back to the front count down
        self.front = 0
        self.refused = self.expired = self.delayed = 0

    # --- the rules, one function each ------------------------------------------------------------

    def level(self, item: Item) -> int:
        """A priority of 0, or one that is not configured, is the default."""
        if 1 <= item.priority <= self.policy.priority_levels:
            return item.priority
        return self.policy.default_priority_level if self.policy.priority_levels else 0

    def queue_policy(self, item: Item) -> QueuePolicy:
        """Each level may have a policy of its own."""
        level = self.level(item)
        return self.policy.level_policies.get(level, self.policy.default_policy)

    def timeout_us(self, item: Item) -> int:
        """A request's own timeout counts where that is allowed, if it is shorter."""
        policy = self.queue_policy(item)
        if self.policy.preserve_ordering and policy.timeout_action == "DELAY":
            return 0
        candidates = [policy.default_timeout_us]
        if policy.allow_timeout_override:
            candidates.append(item.timeout_us)
        return min([each for each in candidates if each > 0], default=0)

    def deadline_s(self, entry: Entry) -> float | None:
        """A request that was delayed once has no deadline any more."""
        timeout_us = self.timeout_us(entry.item)
        if entry.is_delayed or not timeout_us:
            return None
        return entry.item.arrival_s + timeout_us / 1e6

    def order(self) -> list[Entry]:
        """By level; in it those in time first, and those that are delayed last."""
        return sorted(
            self.entries, key=lambda each: (self.level(each.item), each.is_delayed, each.since)
        )

    def sweep(self, now_s: float) -> None:
        """Whose deadline has come is rejected or delayed, in the order of the deadlines."""
        late = [each for each in self.entries if (self.deadline_s(each) or now_s + 1) <= now_s]
        for entry in sorted(late, key=lambda each: (self.deadline_s(each), each.item.key)):
            if self.queue_policy(entry.item).timeout_action == "DELAY":
                self.moment += 1
                entry.is_delayed, entry.since = True, self.moment
                self.delayed += 1
            else:
                self.entries.remove(entry)
                self.untold.append(entry.item)
                self.expired += 1

    # --- events ----------------------------------------------------------------------------------

    def add(self, item: Item) -> None:
        """A request arrives. Raises Refused."""
        if item.rows > max(self.policy.max_batch_size, 1):
            raise Refused("exceeds max_batch_size")
        limit = self.queue_policy(item).max_queue_size
        level = [each for each in self.entries if self.level(each.item) == self.level(item)]
        if limit and len(level) >= limit:
            self.refused += 1
            raise Refused("Exceeds maximum queue size")
        self.moment += 1
        self.entries.append(Entry(item, self.moment))

    def put_back(self, items: list[Item], is_alone: bool) -> None:
        """Requests come back from a dead stub, to the front."""
        for item in reversed(items):
            self.front -= 1
            self.entries.append(Entry(item, self.front, is_alone=is_alone))

    def remove(self, key: int) -> bool:
        """A request is cancelled."""
        found = [each for each in self.entries if each.item.key == key]
        for entry in found:
            self.entries.remove(entry)
        return bool(found)

    def expire(self, now_s: float) -> list[int]:
        """The deadlines are looked at."""
        self.sweep(now_s)
        told, self.untold = self.untold, []
        return [item.key for item in told]

    def next(self, now_s: float, free_instances: int) -> list[int] | float | None:
        """The next batch's keys, when to ask again, or None."""
        self.sweep(now_s)
        waiting = self.order()
        if not waiting or free_instances == 0:
            return None
        found = self.choose(waiting, now_s)
        if isinstance(found, float):
            return found
        for entry in found:
            self.entries.remove(entry)
        return [entry.item.key for entry in found]

    def choose(self, waiting: list[Entry], now_s: float) -> list[Entry] | float:
        """The rules of the batcher."""
        if not self.policy.is_dynamic:
            return waiting[:1]
        preferred = self.policy.preferred_batch_sizes
        full = {self.policy.max_batch_size or 1, max(preferred, default=0)}
        run = self.longest_run(waiting, full)
        is_closed = len(run) < len(waiting) or rows_of(run) in full or run[0].is_alone
        delay_s = self.policy.max_queue_delay_us / 1e6
        due_s = min(entry.item.arrival_s for entry in run) + delay_s
        heads = [run[:count] for count in range(1, len(run) + 1)]
        good = [head for head in heads if rows_of(head) in preferred]
        is_late = delay_s > 0 and now_s >= due_s
        if good and not is_late:
            return good[-1]
        if is_closed or is_late or delay_s == 0:
            return run
        return due_s

    def longest_run(self, waiting: list[Entry], full: set[int]) -> list[Entry]:
        """The longest head of the order that may share a batch and has no full head of its own."""
        best = waiting[:1]
        for count in range(2, len(waiting) + 1):
            head = waiting[:count]
            shorter = [rows_of(head[:each]) for each in range(1, count)]
            if (
                rows_of(head) > max(self.policy.max_batch_size, 1)
                or len({entry.item.signature for entry in head}) > 1
                or any(entry.is_alone for entry in head)
                or full.intersection(shorter)
            ):
                break
            best = head
        return best

    # --- looks -----------------------------------------------------------------------------------

    def keys(self) -> list[int]:
        """The requests in the order of execution."""
        return [entry.item.key for entry in self.order()]

    def next_deadline_s(self) -> float | None:
        """When the deadlines have to be looked at."""
        if self.untold:
            return 0.0
        deadlines = [self.deadline_s(entry) for entry in self.entries]
        return min([each for each in deadlines if each is not None], default=None)


def rows_of(entries: list[Entry]) -> int:
    """A request of no rows counts as one."""
    return sum(max(entry.item.rows, 1) for entry in entries)
