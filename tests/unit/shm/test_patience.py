# SPDX-License-Identifier: Apache-2.0
"""When a waiting side looks before it sleeps: with a clock that is told the time."""

from __future__ import annotations

import threading
import time

import pytest

from actorserve.shm import patience
from actorserve.shm.patience import CONTENDED_NS, LOOK_NS, Patience


class World:
    """A clock that moves when told to and with each yield; other threads have the real one."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self.now_ns = 1
        self.yield_ns = 1000
        self.yields = 0

    def time_ns(self) -> int:
        return self.now_ns if threading.get_ident() == self._thread else time.monotonic_ns()

    def sched_yield(self) -> None:
        if threading.get_ident() != self._thread:  # a system that other tests keep warm, perhaps
            return
        self.yields += 1
        self.now_ns += self.yield_ns


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Return what Patience takes for time and the scheduler."""
    made = World()
    monkeypatch.setattr(patience, "monotonic_ns", made.time_ns)
    monkeypatch.setattr(patience.os, "sched_yield", made.sched_yield)
    return made


def wait(world: World, side: Patience, waited_ns: int) -> bool:
    """Wait for so long; returns whether it would have been looked."""
    looks = side.begin()
    world.now_ns += waited_ns
    side.end()
    return looks


def test_nobody_looks_before_waits_have_been_short(world: World) -> None:
    """A new side sleeps, and looks after some tens of short waits."""
    side = Patience()
    assert not wait(world, side, LOOK_NS // 10)
    for _ in range(40):
        wait(world, side, LOOK_NS // 10)
    assert side.begin()


def test_an_idle_side_looks_no_more(world: World) -> None:
    """Long waits end the looking within two of them, however many short ones there were."""
    side = Patience()
    for _ in range(1000):
        wait(world, side, 1000)
    looked = [wait(world, side, 10**9) for _ in range(20)]
    assert looked[2:] == [False] * 18


def test_waits_that_are_slept_count_as_much(world: World) -> None:
    """What decides is how long waits last, not whether they were looked at: one limit both ways."""
    side = Patience()
    for _ in range(100):
        wait(world, side, LOOK_NS + LOOK_NS // 10)
    assert not side.begin()
    for _ in range(100):
        wait(world, side, LOOK_NS - LOOK_NS // 10)
    assert side.begin()


def test_a_look_ends(world: World) -> None:
    """Without news a look lasts LOOK_NS."""
    side = Patience()
    side.begin()
    assert not side.look(lambda: False)
    assert LOOK_NS <= world.now_ns - 1 <= LOOK_NS + world.yield_ns


def test_news_ends_a_look(world: World) -> None:
    """It ends as soon as there is news."""
    side = Patience()
    side.begin()
    assert side.look(lambda: world.yields == 3)
    assert world.yields == 3


def test_a_core_that_others_want_is_left_to_them(world: World) -> None:
    """The first yield that takes long is the last."""
    world.yield_ns = CONTENDED_NS
    side = Patience()
    side.begin()
    assert not side.look(lambda: False)
    assert world.yields == 1


def test_news_that_came_with_the_last_yield_counts(world: World) -> None:
    """Whoever had the core may have brought it."""
    world.yield_ns = CONTENDED_NS
    side = Patience()
    side.begin()
    assert side.look(lambda: world.yields > 0)
