# SPDX-License-Identifier: Apache-2.0
"""How a loop waits for a lane: a lane of one flag, and a loop that is turned by hand."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from actorserve.runtime.lookout import Lookout


class Loop:
    """What is called soon, one at a turn."""

    def __init__(self) -> None:
        self.soon: deque[Callable[[], Any]] = deque()

    def call_soon(self, callback: Callable[[], Any]) -> None:
        self.soon.append(callback)

    def turn(self) -> None:
        for _ in range(len(self.soon)):
            self.soon.popleft()()


class Lane:
    """Whether there is news, and whether the reader would be rung for more."""

    def __init__(self) -> None:
        self.news = self.parked = False

    def has_news(self) -> bool:
        return self.news

    def park(self) -> bool:
        self.parked = not self.news
        return self.parked

    def unpark(self) -> None:
        self.parked = False


class World:
    """A lookout, and a reader that is owed an answer as long as `is_due` says so."""

    def __init__(self) -> None:
        self.loop, self.lane = Loop(), Lane()
        self.read = 0
        self.is_due = False
        self.lookout = Lookout(self.loop, self.lane, self.on_news)  # type: ignore[arg-type]

    def on_news(self) -> None:
        self.lookout.patience.end()
        self.read += self.lane.news
        self.lane.news = False
        self.lookout.rest(is_due=self.is_due)

    def pays(self, monkeypatch: pytest.MonkeyPatch, *, lasts: bool = True) -> None:
        """Let looking pay, and patience last or not."""
        monkeypatch.setattr(type(self.lookout.patience), "begin", lambda _: True)
        monkeypatch.setattr(type(self.lookout.patience), "lasts", lambda _: lasts)


@pytest.fixture
def world() -> World:
    """Return a lookout that rests, parked."""
    made = World()
    made.lookout.rest(is_due=False)
    return made


def test_nothing_is_done_while_nothing_is_due(world: World, monkeypatch) -> None:
    """An idle loop is parked and has no callback of ours, even where looking would pay."""
    world.pays(monkeypatch)
    world.lookout.rest(is_due=False)
    assert world.lane.parked
    assert not world.loop.soon


def test_it_looks_once_a_turn_for_what_is_due(world: World, monkeypatch) -> None:
    """The lane is not parked meanwhile, so nobody rings; what comes is read in the next turn."""
    world.pays(monkeypatch)
    world.lookout.expect()
    for _ in range(5):
        world.loop.turn()
    assert not world.lane.parked
    assert len(world.loop.soon) == 1
    world.lane.news = True
    world.loop.turn()
    assert world.read == 1
    assert world.lane.parked
    assert not world.loop.soon


def test_it_goes_on_while_more_is_due(world: World, monkeypatch) -> None:
    """After news it looks on without parking."""
    world.pays(monkeypatch)
    world.is_due = True
    world.lookout.expect()
    for number in range(3):
        world.lane.news = True
        world.loop.turn()
        assert world.read == number + 1
        assert not world.lane.parked
        assert len(world.loop.soon) == 1


def test_it_parks_when_patience_ends(world: World, monkeypatch) -> None:
    """Then the bell brings the answer."""
    world.pays(monkeypatch, lasts=False)
    world.lookout.expect()
    world.loop.turn()
    assert world.lane.parked
    assert not world.loop.soon


def test_what_comes_before_the_park_is_read(world: World, monkeypatch) -> None:
    """A park that finds something is followed by a read."""
    world.pays(monkeypatch, lasts=False)
    world.lookout.expect()
    park = world.lane.park

    def park_too_late() -> bool:
        world.lane.news = world.read == 0
        return park()

    world.lane.park = park_too_late  # type: ignore[method-assign]
    world.loop.turn()
    world.loop.turn()
    assert world.read == 1
    assert world.lane.parked


def test_a_bell_that_still_rings_does_not_look_twice(world: World, monkeypatch) -> None:
    """One callback at a time, however often it rests or expects."""
    world.pays(monkeypatch)
    world.is_due = True
    world.lookout.expect()
    world.lookout.expect()
    world.on_news()
    assert len(world.loop.soon) == 1


def test_after_its_close_it_touches_nothing(world: World, monkeypatch) -> None:
    """The last callback does nothing."""
    world.pays(monkeypatch)
    world.lookout.expect()
    world.lookout.close()
    world.lane.news = True
    world.loop.turn()
    assert world.read == 0
    assert not world.loop.soon
