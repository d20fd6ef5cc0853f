# SPDX-License-Identifier: Apache-2.0
"""Which requests are executed next, together or alone."""

from __future__ import annotations

import random
from typing import Any

import pytest

from actorserve.errors import ConfigError, InvalidArgument
from actorserve.state.backlog import QueuePolicy
from actorserve.state.batching import Batch, BatchPolicy, BatchQueue, Item, WaitUntil


def _dynamic(size: int = 8, **values: Any) -> BatchPolicy:
    return BatchPolicy(max_batch_size=size, is_dynamic=True, **values)


def _queue(policy: BatchPolicy, *rows: int, arrival_s: float = 0.0) -> BatchQueue[Item]:
    """Return a queue with requests 0, 1, … of the given rows."""
    queue = BatchQueue[Item](policy)
    for key, each in enumerate(rows):
        queue.add(Item(key, each, arrival_s=arrival_s))
    return queue


def _keys(batch: Batch[Item] | WaitUntil | None) -> list[int]:
    assert isinstance(batch, Batch)
    return [item.key for item in batch.items]


def _all(queue: BatchQueue[Item], now_s: float = 0.0) -> list[list[int]]:
    """Return the keys of all batches that can be had now."""
    batches = []
    while isinstance(batch := queue.next(now_s), Batch):
        assert batch.rows == sum(item.rows for item in batch.items)
        batches.append(_keys(batch))
    return batches


def test_default_scheduler_runs_each_request_alone() -> None:
    """Without a dynamic batcher each execute gets one request, first in, first out."""
    queue = _queue(BatchPolicy(max_batch_size=8), 1, 2, 8)
    assert _all(queue) == [[0], [1], [2]]
    assert queue.next(0.0) is None


@pytest.mark.parametrize("policy", [BatchPolicy(), _dynamic(), _dynamic(max_queue_delay_us=5)])
def test_nothing_is_given_without_a_free_instance(policy: BatchPolicy) -> None:
    """A batch is made when somebody can run it, and not before."""
    queue = _queue(policy, 1, 1)
    assert queue.next(100.0, free_instances=0) is None
    assert queue.count == len(queue) == 2
    assert isinstance(queue.next(100.0), Batch)


def test_batches_form_from_what_waits() -> None:
    """Without a delay, whatever waits when an instance gets free goes together."""
    assert _all(_queue(_dynamic(4), *[1] * 10)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_request_larger_than_the_room_starts_the_next_batch() -> None:
    """Requests are never split and never overtake."""
    assert _all(_queue(_dynamic(8), 5, 4, 3, 8, 1)) == [[0], [1, 2], [3], [4]]


def test_requests_of_other_shapes_do_not_mix() -> None:
    """A different signature ends the run; order is kept."""
    queue = BatchQueue[Item](_dynamic(8, max_queue_delay_us=1_000_000))
    for key, signature in enumerate("aabba"):
        queue.add(Item(key, signature=signature))
    assert _all(queue) == [[0, 1], [2, 3]]
    assert queue.next(0.5) == WaitUntil(1.0)
    assert _all(queue, 1.0) == [[4]]


def test_delay_is_that_of_the_oldest() -> None:
    """A run waits for company until its oldest request has waited long enough."""
    queue = BatchQueue[Item](_dynamic(8, max_queue_delay_us=10_000))
    queue.add(Item(0, arrival_s=1.0))
    assert queue.next(1.0) == WaitUntil(1.01)
    queue.add(Item(1, arrival_s=1.009))
    assert queue.next(1.009) == WaitUntil(1.01)
    assert _keys(queue.next(1.01)) == [0, 1]


def test_full_batch_does_not_wait() -> None:
    """A run that cannot grow is executed at once, whatever the delay."""
    policy = _dynamic(4, max_queue_delay_us=10**9)
    assert _all(_queue(policy, 1, 1, 1, 1)) == [[0, 1, 2, 3]]
    assert _all(_queue(policy, 3, 2)) == [[0]]


@pytest.mark.parametrize(
    ("rows", "batches"),
    [
        ([1] * 3, []),  # none reached: wait
        ([1] * 4, [4]),
        ([1] * 5, [4]),  # the largest one reached now, not "wait for 6"
        ([1] * 6, [6]),
        ([1] * 9, [6]),
        ([1] * 16, [6, 6, 4]),
        ([3, 3], [2]),  # 3 + 3 make 6
        ([3, 2, 3], [3]),  # 3, 5, 8: no preferred size is met, but the batch is full
        ([3, 4, 8], [2, 1]),  # 3, 7, and 8 does not fit any more
        ([4, 3, 8], [1, 1, 1]),  # 4 is preferred, then 3 and 8 do not fit together
    ],
)
def test_preferred_sizes_go_without_waiting(rows: list[int], batches: list[int]) -> None:
    """The largest preferred size that the run reaches is executed, the rest waits."""
    queue = _queue(_dynamic(8, preferred_batch_sizes=(4, 6), max_queue_delay_us=1_000_000), *rows)
    assert [len(keys) for keys in _all(queue)] == batches
    left = len(rows) - sum(batches)
    assert queue.count == left
    if left:
        assert _all(queue, 1.0) == [list(range(len(rows) - left, len(rows)))]


def test_preferred_size_without_delay_beats_whatever_waits() -> None:
    """With no delay, a preferred size goes first and the rest follows at once."""
    queue = _queue(_dynamic(8, preferred_batch_sizes=(4,)), *[1] * 7)
    assert [len(keys) for keys in _all(queue)] == [4, 3]


def test_after_the_delay_all_of_the_run_goes() -> None:
    """An old request does not wait for the next preferred size."""
    policy = _dynamic(8, preferred_batch_sizes=(2, 6), max_queue_delay_us=1000)
    assert _all(_queue(policy, *[1] * 5), 1.0) == [[0, 1, 2, 3, 4]]
    assert _all(_queue(policy, *[1] * 5), 0.0) == [[0, 1], [2, 3]]


def test_36_neighbours_of_a_killer_are_run_one_by_one() -> None:
    """Requests whose stub died go first, in order, and take nobody with them again."""
    queue = _queue(_dynamic(8), *[1] * 6)
    batch = queue.next(0.0)
    assert isinstance(batch, Batch)
    for key in (10, 11):
        queue.add(Item(key))
    queue.put_back(batch.items[:3])
    assert _all(queue) == [[0], [1], [2], [10, 11]]


def test_requests_that_no_stub_began_are_batched_again() -> None:
    """What only waited in a dead stub's lane has done no harm."""
    queue = _queue(_dynamic(8), *[1] * 4)
    batch = queue.next(0.0)
    assert isinstance(batch, Batch)
    queue.add(Item(10))
    queue.put_back(batch.items, is_alone=False)
    assert _all(queue) == [[0, 1, 2, 3, 10]]
    assert queue.stats().put_back == 4


def test_lone_request_is_remembered_only_while_it_is_queued() -> None:
    """No key is left behind by requests that were taken, removed or expired."""
    policy = _dynamic(8, default_policy=QueuePolicy(default_timeout_us=1000))
    queue = _queue(policy, *[1] * 3)
    batch = queue.next(0.0)
    assert isinstance(batch, Batch)
    queue.put_back(batch.items)
    queue.remove(1)
    assert _keys(queue.next(0.0)) == [0]
    assert [item.key for item in queue.expire(1.0)] == [2]
    assert not queue._alone


def test_higher_priority_goes_first() -> None:
    """A request that arrives later at a higher level is in the next batch."""
    queue = BatchQueue[Item](_dynamic(2, priority_levels=3, default_priority_level=2))
    for key, priority in enumerate([3, 0, 2, 1, 99]):
        queue.add(Item(key, priority=priority))
    assert _all(queue) == [[3, 1], [2, 4], [0]]


def test_oldest_of_a_run_may_be_of_a_lower_level() -> None:
    """The delay counts for the oldest request in the run, not for the first."""
    queue = BatchQueue[Item](
        _dynamic(8, priority_levels=2, default_priority_level=2, max_queue_delay_us=1_000_000)
    )
    queue.add(Item(0, priority=2, arrival_s=0.0))
    queue.add(Item(1, priority=1, arrival_s=0.9))
    assert queue.next(0.9) == WaitUntil(1.0)


def test_removed_request_leaves_the_run() -> None:
    """A run that shrinks may have room again."""
    queue = _queue(_dynamic(4, max_queue_delay_us=1_000_000), 2, 2, 1)
    queue.remove(0)
    assert queue.next(0.0) == WaitUntil(1.0)
    queue.add(Item(9, 1))
    assert _all(queue) == [[1, 2, 9]]


def test_expired_request_is_never_dispatched() -> None:
    """Even if nobody called expire in time, it is rejected and not executed."""
    for policy in (
        BatchPolicy(default_policy=QueuePolicy(default_timeout_us=1000)),
        _dynamic(8, default_policy=QueuePolicy(default_timeout_us=1000)),
    ):
        queue = _queue(policy, 1, 1)
        queue.add(Item(2, arrival_s=0.5))
        assert _all(queue, 0.5) == [[2]]
        assert queue.next_deadline_s() == 0.0
        assert [item.key for item in queue.expire(0.5)] == [0, 1]
        assert queue.next_deadline_s() is None


def test_lone_request_bypasses_the_queue_where_nothing_waits_for_company() -> None:
    """`is_immediate` says that an empty queue and a free instance need no queue."""
    assert BatchQueue(BatchPolicy()).is_immediate
    assert BatchQueue(_dynamic(8, preferred_batch_sizes=(4,))).is_immediate
    assert not BatchQueue(_dynamic(8, max_queue_delay_us=1)).is_immediate


def test_request_that_no_batch_can_hold_is_refused() -> None:
    """It would wait for ever."""
    with pytest.raises(InvalidArgument, match="batch size 9 exceeds max_batch_size 8"):
        _queue(_dynamic(8), 9)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"preferred_batch_sizes": (4, 9)}, "preferred_batch_size 9"),
        ({"preferred_batch_sizes": (0,)}, "preferred_batch_size 0"),
        ({"priority_levels": 2}, "default_priority_level is 0"),
        ({"priority_levels": 2, "default_priority_level": 3}, "expected 1 to priority_levels"),
        ({"level_policies": {1: QueuePolicy()}}, "priority_queue_policy for level 1"),
        ({"max_queue_delay_us": -1}, "0 or more"),
    ],
)
def test_senseless_policy_is_refused(values: dict[str, Any], says: str) -> None:
    """A configuration that cannot be meant is an error of the configuration."""
    with pytest.raises(ConfigError, match=says):
        _dynamic(8, **values)


# --- against the rules, written down the slow way -----------------------------------------------


def _reference(waiting: list[Item], policy: BatchPolicy, now_s: float) -> list[int] | float | None:
    """Return the keys of the next batch, or until when to wait, from the rules as they read."""
    if not waiting:
        return None
    if not policy.is_dynamic:
        return [waiting[0].key]
    preferred = policy.preferred_batch_sizes
    run: list[Item] = []
    best: list[Item] = []
    is_closed = False
    for item in waiting:
        rows = sum(each.rows for each in run)
        fits = rows + item.rows <= policy.max_batch_size
        is_closed = bool(run) and not (fits and item.signature == run[0].signature)
        if is_closed:
            break
        run = [*run, item]
        rows += item.rows
        if rows in preferred:
            best = run
        if rows == policy.max_batch_size or rows == max(preferred, default=0):
            is_closed = True
            break
    delay_s = policy.max_queue_delay_us / 1e6
    due_s = min(item.arrival_s for item in run) + delay_s
    is_over = delay_s > 0 and now_s >= due_s
    if best and not is_over:
        return [item.key for item in best]
    if is_closed or is_over or delay_s == 0:
        return [item.key for item in run]
    return due_s


POLICIES = {
    "default": BatchPolicy(max_batch_size=8),
    "dynamic": _dynamic(8),
    "delay": _dynamic(8, max_queue_delay_us=300_000),
    "preferred": _dynamic(8, preferred_batch_sizes=(3, 6), max_queue_delay_us=300_000),
    "preferred without delay": _dynamic(8, preferred_batch_sizes=(2, 5, 8)),
    "timeouts": _dynamic(
        8, max_queue_delay_us=300_000, default_policy=QueuePolicy("REJECT", 500_000)
    ),
    "priorities": _dynamic(
        8, priority_levels=3, default_priority_level=2, max_queue_delay_us=300_000
    ),
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_any_sequence_follows_the_rules(name: str, seed: int) -> None:
    """Adding, removing, expiring and taking in any order gives what the plain rules give."""
    policy, dice = POLICIES[name], random.Random(seed)
    queue, waiting, now_s = BatchQueue[Item](policy), list[Item](), 0.0
    timeout_s = policy.default_policy.default_timeout_us / 1e6
    for key in range(1500):
        now_s += dice.random() * 0.1
        if timeout_s:
            late = [item for item in waiting if item.arrival_s + timeout_s <= now_s]
            assert [item.key for item in queue.expire(now_s)] == [item.key for item in late]
            waiting = [item for item in waiting if item not in late]
        if dice.random() < 0.7:
            item = Item(key, dice.randint(1, 3), dice.random() < 0.9, now_s, dice.randint(0, 3))
            queue.add(item)
            waiting.append(item)
            if policy.priority_levels:
                waiting.sort(key=lambda each: each.priority or policy.default_priority_level)
        elif waiting and dice.random() < 0.3:
            gone = waiting.pop(dice.randrange(len(waiting)))
            assert queue.remove(gone.key) is gone
        if dice.random() < 0.6:
            expected = _reference(waiting, policy, now_s)
            batch = queue.next(now_s)
            if isinstance(batch, WaitUntil):
                assert batch.at_s == expected
            else:
                keys = _keys(batch) if batch is not None else None
                assert keys == expected
                waiting = waiting[len(keys or ()) :]
        assert queue.count == len(waiting)
        assert [item.key for item in queue] == [item.key for item in waiting]
