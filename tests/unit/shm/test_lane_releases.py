# SPDX-License-Identifier: Apache-2.0
"""Tests of the release ring: bounded, in order, never overwritten, never a lost wake-up."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from actorserve.shm import consumer as consumer_module
from actorserve.shm import producer as producer_module
from actorserve.shm.doorbell import Doorbell, wait_for
from actorserve.shm.lane import Consumer, Lane, Producer
from actorserve.shm.layout import RELEASE_HEAD

PATIENCE_S = 20.0


class Ends:
    """A lane with both ends in one process."""

    def __init__(self, release_slots: int) -> None:
        self.lane = Lane.create(4096, release_slots)
        self.consumer_bell = Doorbell.create()
        self.producer_bell = Doorbell.create()
        self.producer = Producer(self.lane, self.consumer_bell)
        self.consumer = Consumer(self.lane, self.producer_bell)

    def close(self) -> None:
        self.lane.close()
        self.consumer_bell.close()
        self.producer_bell.close()


@pytest.fixture(params=[False, True], ids=["x86", "weakly-ordered"])
def ends(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Make a lane with 8 release slots, with the fences of either kind of machine."""
    monkeypatch.setattr(producer_module, "WEAKLY_ORDERED", request.param)
    monkeypatch.setattr(consumer_module, "WEAKLY_ORDERED", request.param)
    ends = Ends(8)
    yield ends
    ends.close()


def _is_rung(bell: Doorbell) -> bool:
    rung = bool(wait_for([bell.fileno()], [], 0.0))
    bell.clear()
    return rung


def test_releases_come_in_order_once_flushed(ends: Ends) -> None:
    """Pairs come out as they went in, after the flush and only once."""
    pairs = [(0, 0), (1, 2), ((1 << 64) - 1, (1 << 64) - 2)]
    for pair in pairs:
        assert ends.consumer.try_release(*pair)
    assert ends.producer.take_releases() == []
    ends.consumer.flush_releases()
    assert ends.producer.take_releases() == pairs
    assert ends.producer.take_releases() == []


def test_ring_wraps_for_every_start_and_length(ends: Ends) -> None:
    """Any number of releases from any start comes over, the full ring included."""
    number = 0
    for _ in range(8):
        for count in range(9):
            pairs = [(number + i, number + i + 1) for i in range(count)]
            number += count
            assert all(ends.consumer.try_release(*pair) for pair in pairs)
            ends.consumer.flush_releases()
            assert ends.producer.take_releases() == pairs
        assert ends.consumer.try_release(0, 0)
        ends.consumer.flush_releases()
        assert ends.producer.take_releases() == [(0, 0)]


def test_full_ring_overwrites_nothing(ends: Ends) -> None:
    """A release that finds no slot is refused, and everything before is published."""
    for number in range(8):
        assert ends.consumer.try_release(1, number)
    assert not ends.consumer.try_release(1, 8)
    assert not ends.consumer.try_release(1, 8)
    assert ends.producer.take_releases() == [(1, number) for number in range(8)]
    assert ends.consumer.try_release(1, 8)
    ends.consumer.flush_releases()
    assert ends.producer.take_releases() == [(1, 8)]
    assert ends.consumer.stats().releases_full == 2


def test_consumer_that_waits_for_slots_is_rung(ends: Ends) -> None:
    """Who was refused a slot is rung when slots come, once; who was not is left alone."""
    ends.consumer.try_release(1, 0)
    ends.consumer.flush_releases()
    ends.producer.take_releases()
    assert not _is_rung(ends.consumer_bell)
    for number in range(9):
        ends.consumer.try_release(1, number)
    assert not _is_rung(ends.consumer_bell)
    assert len(ends.producer.take_releases()) == 8
    assert _is_rung(ends.consumer_bell)
    assert ends.consumer.try_release(1, 8)
    ends.consumer.flush_releases()
    assert ends.producer.take_releases() == [(1, 8)]
    assert not _is_rung(ends.consumer_bell)


def test_producer_that_wants_memory_is_rung_by_a_release(ends: Ends) -> None:
    """The same announcement serves room and releases."""
    assert not ends.producer.want_room()
    ends.consumer.try_release(1, 1)
    assert not _is_rung(ends.producer_bell)
    ends.consumer.flush_releases()
    assert _is_rung(ends.producer_bell)
    assert ends.producer.want_room(), "a release is there"
    assert not ends.producer.want_room(), "nothing new since"
    assert ends.producer.take_releases() == [(1, 1)]
    assert not ends.producer.want_room()


class _Between:
    """The lane's words; when the releases have been counted, somebody else acts first."""

    def __init__(self, words: memoryview, act: Callable[[], object]) -> None:
        self._words = words
        self._act: Callable[[], object] | None = act

    def __getitem__(self, at: Any) -> Any:
        value = self._words[at]
        act, self._act = (self._act, None) if at == RELEASE_HEAD else (None, self._act)
        if act is not None:
            act()
        return value

    def __setitem__(self, at: int, value: int) -> None:
        self._words[at] = value


def test_who_wants_room_bears_that_another_thread_takes_releases(ends: Ends) -> None:
    """A count that is behind what has been taken meanwhile is no lie of the peer."""

    def release(*blocks: int) -> None:
        for block in blocks:
            ends.consumer.try_release(1, block)
        ends.consumer.flush_releases()

    def take() -> None:
        release(2, 3)
        assert len(ends.producer.take_releases()) == 4

    release(0, 1)
    ends.producer._words = _Between(ends.lane.words, take)
    assert ends.producer.want_room()
    while ends.producer.want_room():
        pass
    release(4)
    assert _is_rung(ends.producer_bell)
    assert ends.producer.take_releases() == [(1, 4)]


def test_mark_limits_what_is_taken(ends: Ends) -> None:
    """Releases published after the mark wait for the next look."""
    ends.consumer.try_release(1, 1)
    ends.consumer.flush_releases()
    mark = ends.producer.release_mark()
    ends.consumer.try_release(1, 2)
    ends.consumer.flush_releases()
    assert ends.producer.take_releases(mark) == [(1, 1)]
    assert ends.producer.take_releases(mark) == []
    assert ends.producer.want_room(), "the second is still to be seen"
    assert ends.producer.take_releases() == [(1, 2)]
    assert ends.producer.take_releases(mark) == []
    assert ends.producer.take_releases() == []


def test_numbers_that_are_no_words_are_refused(ends: Ends) -> None:
    """A number outside 64 bits is the caller's mistake, and nothing is published for it."""
    for pair in ((-1, 0), (0, -1), (1 << 64, 0), (0, 1 << 64)):
        with pytest.raises(ValueError):
            ends.consumer.try_release(*pair)
    ends.consumer.flush_releases()
    assert ends.producer.take_releases() == []


def test_flood_of_releases_with_both_ends_asleep_loses_none(fork) -> None:
    """A tiny release ring, both ends sleeping whenever they can: every release comes, in order."""
    ends = Ends(4)
    count = 20_000

    def releaser() -> None:
        bell = ends.consumer_bell
        for number in range(count):
            while not ends.consumer.try_release(number, number + 1):
                assert wait_for([bell.fileno()], [], PATIENCE_S), "lost wake-up"
                bell.clear()
            if number % 3 == 0:
                ends.consumer.flush_releases()
        ends.consumer.flush_releases()

    child = fork(releaser)
    taken: list[tuple[int, int]] = []
    while len(taken) < count:
        taken += ends.producer.take_releases()
        if len(taken) < count and not ends.producer.want_room():
            assert wait_for([ends.producer_bell.fileno()], [], PATIENCE_S), "lost wake-up"
            ends.producer_bell.clear()
    assert taken == [(number, number + 1) for number in range(count)]
    assert child.wait() == 0
    ends.close()


def test_kill_while_releasing_leaves_a_prefix(fork) -> None:
    """Whenever the releaser is killed, what was published is whole, in order, and no more."""
    reader, writer = os.pipe()
    for _ in range(10):
        ends = Ends(64)

        def releaser(ends: Ends = ends) -> None:
            os.write(writer, b"x")
            number = 0
            while True:
                if ends.consumer.try_release(number, ~number & 0xFFFFFFFF):
                    number += 1
                    if number % 5 == 0:
                        ends.consumer.flush_releases()

        child = fork(releaser)
        os.read(reader, 1)
        taken: list[tuple[int, int]] = []
        while len(taken) < 500:
            taken += ends.producer.take_releases()
        child.kill()
        taken += ends.producer.take_releases()
        assert taken == [(number, ~number & 0xFFFFFFFF) for number in range(len(taken))]
        assert ends.producer.take_releases() == []
        ends.close()
    os.close(reader)
    os.close(writer)
