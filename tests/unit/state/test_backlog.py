# SPDX-License-Identifier: Apache-2.0
"""Requests that wait: order, timeouts, limits."""

from __future__ import annotations

import random

import pytest

from actorserve.errors import ConfigError, Unavailable
from actorserve.state.backlog import Backlog, QueuePolicy
from actorserve.state.batching import Item

SECOND_US = 1_000_000


def _keys(items: list[Item]) -> list[int]:
    return [item.key for item in items]


@pytest.mark.parametrize(
    ("default_us", "is_allowed", "requested_us", "timeout_us"),
    [
        (0, False, 0, 0),
        (0, False, 5, 0),
        (7, False, 5, 7),
        (7, False, 0, 7),
        (0, True, 0, 0),
        (0, True, 5, 5),
        (7, True, 5, 5),
        (7, True, 9, 7),
        (7, True, 0, 7),
    ],
)
def test_timeout_of_a_request_counts_if_allowed_and_shorter(
    default_us: int, is_allowed: bool, requested_us: int, timeout_us: int
) -> None:
    """The rule of the model configuration's queue policy."""
    policy = QueuePolicy("REJECT", default_us, is_allowed)
    assert policy.timeout_us(requested_us) == timeout_us


def test_71_request_expires_at_its_deadline() -> None:
    """The deadline is known, and at that time the request comes out, whoever is busy."""
    backlog = Backlog[Item](QueuePolicy(default_timeout_us=SECOND_US))
    for key in range(3):
        backlog.push(Item(key, arrival_s=key * 0.25))
    assert backlog.next_deadline_s() == 1.0
    assert backlog.expire(0.999) == []
    assert _keys(backlog.expire(1.25)) == [0, 1]
    assert backlog.next_deadline_s() == 1.5
    assert backlog.count == 1


def test_shorter_timeout_of_a_later_request_expires_first() -> None:
    """Deadlines are kept in their own order."""
    backlog = Backlog[Item](QueuePolicy(allow_timeout_override=True))
    for key, timeout_s in enumerate([5, 1, 0, 3]):
        backlog.push(Item(key, timeout_us=timeout_s * SECOND_US))
    assert _keys(backlog.expire(3.0)) == [1, 3]
    assert _keys(backlog.expire(100.0)) == [0]
    assert _keys(backlog.take(10)) == [2]


def test_delayed_request_goes_behind_its_level_and_is_not_lost() -> None:
    """With DELAY an expired request waits behind the others of its level, before the next one."""
    policy = QueuePolicy("DELAY", SECOND_US)
    backlog = Backlog[Item](policy, priority_levels=2, default_level=1)
    for key, (priority, arrival_s) in enumerate([(1, 0.0), (2, 5.0), (1, 5.0)]):
        backlog.push(Item(key, arrival_s=arrival_s, priority=priority))
    assert backlog.expire(1.0) == []
    assert _keys(list(backlog)) == [2, 0, 1]
    assert not backlog.push(Item(3, arrival_s=5.0, priority=1))
    assert _keys(backlog.take(10)) == [2, 3, 0, 1]
    assert backlog.stats().delayed == 1


def test_70_full_queue_refuses_and_says_when_to_come_back() -> None:
    """The limit counts what waits now, at this level."""
    backlog = Backlog[Item](QueuePolicy(max_queue_size=2))
    backlog.push(Item(0))
    backlog.push(Item(1))
    with pytest.raises(Unavailable, match="Exceeds maximum queue size") as caught:
        backlog.push(Item(2))
    assert caught.value.retry_after_s
    backlog.remove(0)
    backlog.push(Item(3))
    assert backlog.count == 2 and backlog.stats().refused == 1


def test_each_level_has_its_own_policy() -> None:
    """A level's limit and timeout do not touch the others."""
    backlog = Backlog[Item](
        QueuePolicy(),
        priority_levels=2,
        default_level=2,
        level_policies={1: QueuePolicy("REJECT", SECOND_US, max_queue_size=1)},
    )
    backlog.push(Item(0, priority=1))
    with pytest.raises(Unavailable):
        backlog.push(Item(1, priority=1))
    for key in range(10, 15):
        backlog.push(Item(key, priority=2))
    assert _keys(backlog.expire(100.0)) == [0]
    assert backlog.count == 5


def test_put_back_keeps_order_limit_and_deadline() -> None:
    """What was taken comes back to the front, also into a full queue, and still expires."""
    backlog = Backlog[Item](QueuePolicy("REJECT", SECOND_US, max_queue_size=3))
    for key in range(3):
        backlog.push(Item(key))
    taken = backlog.take(2)
    backlog.push(Item(3, arrival_s=0.5))
    backlog.push_front(taken)
    assert _keys(list(backlog)) == [0, 1, 2, 3]
    assert sorted(_keys(backlog.expire(1.0))) == [0, 1, 2]


def test_equal_deadlines_expire_in_the_order_of_arrival() -> None:
    """Also where some were put back meanwhile (found by test_queue_properties.py, seed 6503)."""
    backlog = Backlog[Item](QueuePolicy(default_timeout_us=SECOND_US))
    for key in (1, 2, 3):
        backlog.push(Item(key))
    first, second = backlog.take(2)
    backlog.push_front([first])
    backlog.push_front([second])
    assert _keys(list(backlog)) == [2, 1, 3]
    assert _keys(backlog.expire(1.0)) == [1, 2, 3]


def test_remove_finds_a_request_wherever_it_stands() -> None:
    """Waiting, delayed, or not there at all."""
    backlog = Backlog[Item](QueuePolicy("DELAY", SECOND_US))
    backlog.push(Item(0))
    backlog.expire(1.0)
    backlog.push(Item(1, arrival_s=1.0))
    assert _keys([item for key in (0, 1, 2) if (item := backlog.remove(key))]) == [0, 1]
    assert backlog.count == 0 and backlog.next_deadline_s() is None


def test_push_says_whether_the_request_is_the_last() -> None:
    """Who watches the head of the order need not look again if something joins its end."""
    backlog = Backlog[Item](priority_levels=3, default_level=2)
    assert backlog.push(Item(0, priority=2))
    assert backlog.push(Item(1, priority=3))
    assert not backlog.push(Item(2, priority=2))
    assert not backlog.push(Item(3, priority=1))
    assert backlog.push(Item(4, priority=3))


def test_72_gone_requests_leave_no_deadlines_behind() -> None:
    """Under steady load with long timeouts, memory follows what waits, not what came."""
    backlog = Backlog[Item](QueuePolicy(default_timeout_us=3600 * SECOND_US))
    for key in range(20_000):
        backlog.push(Item(key))
        if key >= 10:
            backlog.take(1)
    assert backlog.count == 10
    assert len(backlog._deadlines) < 200
    backlog.take(10)
    assert backlog.next_deadline_s() is None and not backlog._deadlines


def test_sweeping_out_deadlines_of_gone_requests_spares_the_others() -> None:
    """Between hundreds that come and go, those that stay expire when they should."""
    backlog = Backlog[Item](QueuePolicy(allow_timeout_override=True))
    staying = range(0, 1000, 100)
    for key in range(1000):
        backlog.push(Item(key, timeout_us=(2000 - key) * SECOND_US))
        if key not in staying:
            backlog.remove(key)
    assert len(backlog._deadlines) < 200
    for key in reversed(staying):
        assert backlog.next_deadline_s() == 2000.0 - key
        assert _keys(backlog.expire(2000.0 - key)) == [key]


def test_75_hundred_thousand_requests_come_and_go() -> None:
    """Every way out of the queue is quick however long it is, and the numbers add up."""
    dice = random.Random(1)
    backlog = Backlog[Item](QueuePolicy(allow_timeout_override=True))
    total = 100_000
    for key in range(total):
        backlog.push(Item(key, timeout_us=dice.choice([0, SECOND_US, 2 * SECOND_US])))
    keys = list(range(total))
    dice.shuffle(keys)
    for key in keys[: total // 4]:
        assert backlog.remove(key)
    expired = backlog.expire(1.0)
    taken = 0
    while backlog.take_first():
        taken += 1
    stats = backlog.stats()
    assert stats.removed + stats.expired + stats.taken == stats.added == total
    assert (stats.expired, stats.taken, stats.queued) == (len(expired), taken, 0)


@pytest.mark.parametrize(
    "values", [("PANIC", 0), ("REJECT", -1), ("REJECT", 0, False, -1)], ids=str
)
def test_senseless_queue_policy_is_refused(values: tuple[object, ...]) -> None:
    """A configuration that cannot be meant is an error of the configuration."""
    with pytest.raises(ConfigError, match="queue policy"):
        QueuePolicy(*values)  # type: ignore[arg-type]
