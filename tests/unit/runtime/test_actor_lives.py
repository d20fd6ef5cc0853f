# SPDX-License-Identifier: Apache-2.0
"""One life ends before another begins: children, counts and deadlines go with it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from actorserve import (
    Actor,
    ActorDead,
    ActorRef,
    ActorStopped,
    ActorSystem,
    Crash,
    Loop,
    Message,
    Restart,
    Thread,
)
from actorserve.errors import ActorserveError
from tests.unit.runtime.family_actors import (
    AT_ONCE,
    PLACES,
    BusyParent,
    Die,
    Escalating,
    FaultyParent,
    Kid,
    LateParent,
    Say,
    SpawnKid,
)
from tests.unit.runtime.patience import until

Warm = Callable[[Callable[[ActorSystem], Any]], Any]
SOON_S = 15.0  # less than an actor has for its last hook


def names(system: ActorSystem) -> set[str]:
    """Return the actors that the system knows."""
    assert system._core is not None
    return {cell.name for cell in system._core.cells.values()}


async def soon(answer: Any) -> Any:
    """Wait for what has to come at once."""
    return await asyncio.wait_for(wait(answer), SOON_S)


async def wait(answer: Any) -> Any:
    """Turn anything that can be awaited into a coroutine."""
    return await answer


def is_long(log: list[str], count: int) -> bool:
    """Whether so much has been noted."""
    return len(log) >= count


# --- children ------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["loop", "thread"])
@pytest.mark.parametrize("parent", ["loop", "thread", "process"])
def test_a_child_of_the_last_hook_ends_with_its_parent(warm: Warm, parent: str, place: str):
    """When the parent's end is announced, the child is gone as well."""

    async def main(system: ActorSystem) -> None:
        before = names(system)
        ref = await system.spawn(LateParent, place, where=PLACES[parent]())
        await soon(ref.ask(Say()))
        await soon(ref.stop())
        assert names(system) == before
        assert "actorserve-late" not in [thread.name for thread in threading.enumerate()]

    warm(main)


def test_a_child_of_the_message_in_hand_ends_with_its_parent(warm: Warm):
    """The message was begun before the parent was told to stop, the child is born after it."""

    async def main(system: ActorSystem) -> None:
        is_in, may_go_on = threading.Event(), threading.Event()
        ref = await system.spawn(BusyParent, is_in, may_go_on, where=Thread())
        answer = ref.ask(SpawnKid())
        await until(is_in.is_set)
        end = ref.stop(drain=False)
        await until(lambda: system.stats().actors[0].state == "STOPPING")
        may_go_on.set()
        await soon(answer)
        await soon(end)
        assert "late" not in names(system)

    warm(main)


@pytest.mark.parametrize("place", PLACES)
def test_a_hook_that_fails_once_leaves_no_child_behind(warm: Warm, place: str):
    """The next life has the name for its own child."""

    async def main(system: ActorSystem) -> None:
        log: list[str] = []
        ref = await system.spawn(FaultyParent, place, 1, log, where=Loop(restart=AT_ONCE))
        with pytest.raises(ActorserveError):
            await ref.ask(Die(), timeout_s=20)
        assert await ref.ask(Say(), timeout_s=20) == "here"
        (parent,) = system.stats().actors
        assert (parent.state, parent.restarts) == ("RUNNING", 2)
        assert [(each.name, each.state) for each in parent.children] == [("kid", "RUNNING")]
        assert [text for text in log if text.startswith("life")] == ["life 0", "life 1", "life 2"]
        if place != "process":
            assert log.count("kid: stopping") == 2

    warm(main)


def test_a_first_hook_that_fails_leaves_no_child_behind(warm: Warm):
    """The parent never is; its child ends before the system does."""

    async def main(system: ActorSystem) -> None:
        before, log = names(system), []
        with pytest.raises(ActorDead, match="database"):
            await system.spawn(FaultyParent, "thread", 0, log)
        await until(lambda: names(system) == before)
        assert log == ["kid: started", "life 0", "kid: stopping"]

    warm(main)


class Slow(Actor):
    """Takes its time to stop."""

    def __init__(self, may_end: threading.Event) -> None:
        self._may_end = may_end

    def stopping(self) -> None:
        self._may_end.wait()

    def receive(self, _message: Say) -> str:
        return "here"


class Failing(Actor):
    """Has a slow child, and never is."""

    async def started(self) -> None:
        await self.context.spawn(Slow, MAY_END, name="slow", where=Thread())
        raise RuntimeError("no")

    def receive(self, _message: Say) -> str:
        return "here"


MAY_END = threading.Event()


def test_a_system_ends_after_the_children_of_a_parent_that_never_was(run_plain):
    """Whoever waits for its end finds no thread of it."""

    async def main() -> None:
        MAY_END.clear()
        async with ActorSystem() as system:
            with pytest.raises(ActorDead):
                await system.spawn(Failing)
            end = system.stop()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not end.is_over()
            MAY_END.set()
            await soon(end)
            assert "actorserve-slow" not in [each.name for each in threading.enumerate()]

    run_plain(main)


class Keeper(Actor):
    """Lends its context to others."""

    contexts: list[Any] = []  # noqa: RUF012

    def started(self) -> None:
        self.contexts.append(self.context)

    def receive(self, message: Die | Say) -> Any:
        if isinstance(message, Die):
            raise Crash("told to")
        return "here"


def test_nobody_is_born_between_two_lives(warm: Warm):
    """Such a child would belong to none, and have the name that the next life wants."""

    async def main(system: ActorSystem) -> None:
        restart = Restart(first_s=20.0)
        ref = await system.spawn(Keeper, where=Loop(restart=restart))
        with pytest.raises(ActorserveError):
            await ref.ask(Die(), timeout_s=20)
        await until(lambda: system.stats().actors[0].state == "BACKOFF")
        with pytest.raises(ActorStopped, match="the parent"):
            await soon(Keeper.contexts.pop().spawn(Kid, name="kid"))

    warm(main)


# --- counts --------------------------------------------------------------------------------------


def test_a_family_is_supervised_again_after_it_was_given_up(warm: Warm):
    """An escalation is final for one life of the parent; the next has a group of its own."""

    async def main(system: ActorSystem) -> None:
        log: list[str] = []
        kids: dict[str, ActorRef] = {}
        await system.spawn(Escalating, log, kids, where=Loop(restart=AT_ONCE))
        first = ["a: started", "b: started", "parent: started"]
        together = ["b: stopping", "a: restarted", "b: started"]
        up_again = [*together[:1], *first]  # the limit is passed: all of it begins anew
        expected = list(first)
        for what in (together, up_again, together, up_again, together):
            assert log == expected
            expected += what
            with pytest.raises(ActorserveError):
                await kids["a"].ask(Die(), timeout_s=20)
            await until(partial(is_long, log, len(expected)))
        assert log == expected

    warm(main)


# --- deadlines -----------------------------------------------------------------------------------


class Wait(Message[str]):
    """Wait for an event."""


class Waiter(Actor):
    """Blocks its thread until it may go on."""

    def __init__(self, may_go_on: threading.Event) -> None:
        self._may_go_on = may_go_on

    def receive(self, _message: Wait) -> str:
        self._may_go_on.wait()
        return "done"


@pytest.mark.parametrize("first", [{}, {"timeout_s": 600.0}, {"drain": False}], ids=str)
@pytest.mark.parametrize("is_drained", [True, False], ids=["drained", "hurried"])
def test_the_soonest_deadline_of_all_stops_counts(warm: Warm, first: Any, is_drained: bool):
    """A stop that is given again may make it sooner."""

    async def main(system: ActorSystem) -> None:
        may_go_on = threading.Event()
        ref = await system.spawn(Waiter, may_go_on, where=Thread())
        answer = ref.ask(Wait())
        try:
            ends = [ref.stop(**first), ref.stop(drain=is_drained, timeout_s=0.05)]
            ends.append(ref.stop(timeout_s=600.0))
            for end in ends:
                await soon(end)
            with pytest.raises(ActorserveError):
                await soon(answer)
        finally:
            may_go_on.set()

    warm(main)
