# SPDX-License-Identifier: Apache-2.0
"""The queue against the slow model of its rules, in tens of thousands of random stories.

A story is a list of plain events that mean something in any state, so that a story that fails can
be cut down: to its shortest failing prefix, and then by whatever event is not needed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from actorserve.errors import InvalidArgument, Unavailable
from actorserve.state.backlog import QueuePolicy
from actorserve.state.batching import Batch, BatchPolicy, BatchQueue, Item, WaitUntil
from actorserve.state.plain_queue import PlainQueue, queue_for
from tests.unit.state.queue_model import QueueModel, Refused

TICK_US = 15_625  # 1/64 s: sums of it are exact, so that moments can be met exactly
STORIES = 5000

Event = tuple[Any, ...]
Queue = BatchQueue[Item] | PlainQueue[Item]


class Differs(Exception):
    """The queue did something else than the model."""


class Story:
    """A queue and the model side by side, with a clock and the stubs that run batches."""

    def __init__(self, policy: BatchPolicy, make: Callable[[BatchPolicy], Queue]) -> None:
        self.queue = make(policy)
        self.model = QueueModel(policy)
        self.now_s = 0.0
        self.keys = 0
        self.items: dict[int, Item] = {}
        self.batches: list[list[int]] = []  # at the stubs

    def play(self, events: Sequence[Event]) -> int | None:
        """Play until the two differ; returns the index of that event."""
        for index, (kind, *values) in enumerate(events):
            try:
                getattr(self, f"on_{kind}")(*values)
                self.compare()
            except Differs:
                return index
        return None

    def same(self, got: object, expected: object) -> None:
        """Raise Differs where they are not."""
        if got != expected:
            raise Differs(f"got {got}, expected {expected}")

    def compare(self) -> None:
        """Compare everything that can be seen."""
        queue, model = self.queue, self.model
        keys = model.keys()
        self.same([item.key for item in queue], keys)
        self.same((queue.count, len(queue)), (len(keys), len(keys)))
        self.same(queue.next_deadline_s(), model.next_deadline_s())
        stats = queue.stats()
        self.same(
            (stats.queued, stats.refused, stats.expired, stats.delayed),
            (len(keys), model.refused, model.expired, model.delayed),
        )
        came = stats.added + stats.put_back
        self.same(came, stats.taken + stats.removed + stats.expired + stats.queued)

    # --- events ----------------------------------------------------------------------------------

    def on_add(self, rows: int, signature: int, priority: int, timeout: int) -> None:
        """A request comes in."""
        self.keys += 1
        item = Item(self.keys, rows, signature, self.now_s, priority, timeout * TICK_US)
        self.items[item.key] = item
        outcomes = []
        for add in (self.queue.add, self.model.add):
            try:
                add(item)
                outcomes.append("")
            except (Unavailable, InvalidArgument, Refused) as error:
                outcomes.append(str(error))
        if outcomes[1] not in outcomes[0] or bool(outcomes[0]) != bool(outcomes[1]):
            raise Differs(str(outcomes))

    def on_tick(self, ticks: int) -> None:
        """Time goes on."""
        self.now_s += ticks * TICK_US / 1e6

    def on_wait(self) -> None:
        """Time goes on to the next deadline exactly."""
        deadline_s = self.model.next_deadline_s()
        if deadline_s is not None and deadline_s > self.now_s:
            self.now_s = deadline_s

    def on_expire(self) -> None:
        """The timer fires."""
        got = [item.key for item in self.queue.expire(self.now_s)]
        self.same(got, self.model.expire(self.now_s))

    def on_next(self, free: int) -> None:
        """An instance may be free."""
        expected = self.model.next(self.now_s, free)
        got = self.queue.next(self.now_s, free)
        if isinstance(got, WaitUntil):
            self.same(got.at_s, expected)
        elif isinstance(got, Batch):
            self.same([item.key for item in got.items], expected)
            self.same(got.rows, sum(max(item.rows, 1) for item in got.items))
            self.batches.append([item.key for item in got.items])
        else:
            self.same(got, expected)

    def on_cancel(self, pick: int) -> None:
        """A request is cancelled, wherever it is; most are queued."""
        keys = self.model.keys() or [self.keys]
        key = keys[pick % len(keys)]
        self.same(self.queue.remove(key) is not None, self.model.remove(key))

    def on_finish(self, pick: int) -> None:
        """A stub is done with a batch."""
        if self.batches:
            self.batches.pop(pick % len(self.batches))

    def on_die(self, pick: int, is_alone: bool) -> None:
        """A stub dies; what it had is put back, but for what was cancelled meanwhile."""
        if self.batches:
            keys = self.batches.pop(pick % len(self.batches))
            items = [self.items[key] for key in keys if (key + pick) % 4]
            self.queue.put_back(items, is_alone=is_alone)
            self.model.put_back(items, is_alone)


def random_events(dice: random.Random, count: int) -> list[Event]:
    """Return the events of a story: mostly requests and free instances, and all that goes wrong."""
    makers: list[tuple[int, Callable[[], Event]]] = [
        (
            40,
            lambda: (
                "add",
                dice.choice((0, 1, 1, 1, 1, 2, 2, 3, 5)),
                dice.choice((0, 0, 0, 1)),
                dice.randint(0, 4),
                dice.choice((0, 0, 1, 2, 5, 9)),
            ),
        ),
        (12, lambda: ("tick", dice.choice((1, 1, 2, 3, 8)))),
        (6, lambda: ("wait",)),
        (8, lambda: ("expire",)),
        (22, lambda: ("next", dice.choice((0, 1, 1, 2)))),
        (6, lambda: ("cancel", dice.randint(0, 9))),
        (3, lambda: ("finish", dice.randint(0, 9))),
        (4, lambda: ("die", dice.randint(0, 9), dice.random() < 0.5)),
    ]
    weights = [weight for weight, _ in makers]
    chosen = dice.choices([make for _, make in makers], weights, k=count)
    return [make() for make in chosen]


def random_policy(dice: random.Random) -> BatchPolicy:
    """Return any configuration that the product takes."""
    size = dice.choice((0, 1, 4, 8))
    is_ordered = dice.random() < 0.2
    levels = dice.choice((0, 0, 1) if is_ordered else (0, 0, 1, 2, 3))
    preferred = dice.sample(range(1, max(size, 1) + 1), dice.randint(0, min(2, max(size, 1))))
    return BatchPolicy(
        max_batch_size=size,
        is_dynamic=True,
        preferred_batch_sizes=tuple(preferred),
        max_queue_delay_us=dice.choice((0, 0, 2, 4)) * TICK_US,
        priority_levels=levels,
        default_priority_level=dice.randint(1, levels) if levels else 0,
        default_policy=random_queue_policy(dice),
        level_policies={
            level: random_queue_policy(dice)
            for level in range(1, levels + 1)
            if dice.random() < 0.5
        },
        preserve_ordering=is_ordered,
    )


def random_queue_policy(dice: random.Random) -> QueuePolicy:
    """Return a queue policy; half of them are without timeouts."""
    return QueuePolicy(
        dice.choice(("REJECT", "DELAY")),
        dice.choice((0, 0, 2, 6)) * TICK_US,
        dice.random() < 0.3,
        dice.choice((0, 0, 2, 4)),
    )


def shortened(
    events: list[Event], policy: BatchPolicy, make: Callable[[BatchPolicy], Queue]
) -> list[Event]:
    """Return a shorter list that still fails: a prefix, without the events that are not needed."""
    index = Story(policy, make).play(events)
    assert index is not None
    events = events[: index + 1]
    for size in (8, 4, 2, 1):
        start = 0
        while start < len(events):
            without = events[:start] + events[start + size :]
            index = Story(policy, make).play(without)
            if index is None:
                start += size
            else:
                events = without[: index + 1]
    return events


def search(
    policy_of: Callable[[random.Random], BatchPolicy],
    make: Callable[[BatchPolicy], Queue],
    seeds: Sequence[int],
    lengths: Sequence[int] = (6, 12, 24),
) -> tuple[int, BatchPolicy, list[Event]] | None:
    """Return the first seed whose story fails, its policy, and its events, shortened."""
    for seed in seeds:
        dice = random.Random(seed)
        policy = policy_of(dice)
        events = random_events(dice, dice.choice(lengths))
        if Story(policy, make).play(events) is not None:
            return seed, policy, shortened(events, policy, make)
    return None


def check(
    policy_of: Callable[[random.Random], BatchPolicy],
    make: Callable[[BatchPolicy], Queue],
    seeds: Sequence[int],
    lengths: Sequence[int] = (6, 12, 24),
) -> None:
    """Fail with the shortest story that shows the difference."""
    found = search(policy_of, make, seeds, lengths)
    if found is not None:
        seed, policy, events = found
        pytest.fail(f"seed {seed}, {policy}:\n" + "\n".join(map(str, events)))


# --- the tests -----------------------------------------------------------------------------------


@pytest.mark.parametrize("part", range(4))
def test_any_story_in_any_configuration_follows_the_rules(part: int) -> None:
    """Whatever comes, waits, is cancelled, expires, runs and dies, in any order."""
    check(random_policy, BatchQueue, range(part * STORIES, (part + 1) * STORIES))


def test_long_stories_end_as_they_should() -> None:
    """Long queues, with whatever is left in them by what is long gone."""
    check(random_policy, BatchQueue, range(10), lengths=(500,))


def test_queues_without_rules_follow_them_too() -> None:
    """The plain queue is indistinguishable from the other, and from the model."""
    policy = BatchPolicy(max_batch_size=3)
    assert isinstance(queue_for(policy), PlainQueue)
    check(lambda dice: policy, PlainQueue, range(500))
    check(lambda dice: policy, BatchQueue, range(500))


@pytest.mark.parametrize(
    "policy",
    [
        BatchPolicy(is_dynamic=True),
        BatchPolicy(default_policy=QueuePolicy(max_queue_size=1)),
        BatchPolicy(default_policy=QueuePolicy(allow_timeout_override=True)),
        BatchPolicy(priority_levels=1, default_priority_level=1),
    ],
)
def test_only_a_policy_without_rules_has_a_plain_queue(policy: BatchPolicy) -> None:
    """Any rule needs the queue that knows rules."""
    assert isinstance(queue_for(policy), BatchQueue)


class _Forgetful(BatchQueue[Item]):
    """A queue with a fault: after a cancelled request the run is not looked for again."""

    def remove(self, key: int) -> Item | None:
        """Take one request out."""
        state = self._state
        item = super().remove(key)
        self._state = state
        return item


def test_a_planted_fault_is_found_and_cut_down() -> None:
    """The search sees what it should, and what it reports is short enough to be read."""
    found = search(random_policy, _Forgetful, range(2000))
    assert found is not None
    _, policy, events = found
    assert len(events) <= 6
    assert Story(policy, _Forgetful).play(events) == len(events) - 1
    assert Story(policy, BatchQueue).play(events) is None
