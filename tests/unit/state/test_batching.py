# SPDX-License-Identifier: Apache-2.0
"""Which requests are executed next, together or alone."""

from __future__ import annotations

from typing import Any

import pytest

from actorserve.errors import ConfigError, InvalidArgument, Unavailable
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


def test_nothing_is_moved_behind_others_where_the_order_is_to_be_kept() -> None:
    """DELAY does nothing with preserve_ordering; REJECT and the limit do what they always do."""
    delay = QueuePolicy("DELAY", 1000, allow_timeout_override=True, max_queue_size=2)
    queue = _queue(_dynamic(4, default_policy=delay, preserve_ordering=True), 4, 4)
    assert not queue.is_timed and queue.next_deadline_s() is None
    with pytest.raises(Unavailable):
        queue.add(Item(2))
    assert queue.expire(1.0) == []
    assert _all(queue, 1.0) == [[0], [1]]
    reject = QueuePolicy("REJECT", 1000)
    queue = _queue(_dynamic(4, default_policy=reject, preserve_ordering=True), 4, 4)
    assert [item.key for item in queue.expire(1.0)] == [0, 1]


@pytest.mark.parametrize(
    ("values", "is_timed"),
    [
        ({}, False),
        ({"default_policy": QueuePolicy(max_queue_size=3)}, False),
        ({"max_queue_delay_us": 1}, True),
        ({"default_policy": QueuePolicy("DELAY", 1)}, True),
        ({"default_policy": QueuePolicy(allow_timeout_override=True)}, True),
        (
            {
                "priority_levels": 2,
                "default_priority_level": 1,
                "level_policies": {2: QueuePolicy("REJECT", 5)},
            },
            True,
        ),
    ],
)
def test_queue_says_whether_the_time_matters_to_it(values: dict[str, Any], is_timed: bool) -> None:
    """Who knows that nothing is ever due need not look at a clock."""
    assert BatchQueue(_dynamic(8, **values)).is_timed is is_timed


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
        (
            {"preserve_ordering": True, "priority_levels": 2, "default_priority_level": 1},
            "preserve_ordering allows one priority level, not 2",
        ),
    ],
)
def test_senseless_policy_is_refused(values: dict[str, Any], says: str) -> None:
    """A configuration that cannot be meant is an error of the configuration."""
    with pytest.raises(ConfigError, match=says):
        _dynamic(8, **values)
