# SPDX-License-Identifier: Apache-2.0
"""Supervision as in OTP: who is restarted, in which order, and who has failed in the end."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
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
    Process,
    Restart,
    Strategy,
    Thread,
)
from actorserve.errors import ActorserveError
from actorserve.runtime.placement import Placement
from actorserve.state.restart import Kind
from tests.unit.runtime.patience import until
from tests.unit.runtime.sample_actors import Add, Append, Fail, Leave, Read, Witness, Worker

Warm = Callable[[Callable[[ActorSystem], Any]], Any]

KINDS: tuple[Kind, ...] = ("permanent", "transient", "temporary")
STRATEGIES = tuple(Strategy)
EXITS = ("normal", "ordered", "crash", "killed")  # the last only where there is a process
CASES = [
    *[("loop", *case) for case in itertools.product(EXITS[:3], KINDS, STRATEGIES)],
    # A place changes nothing of who is restarted: there, each pair of the three comes up once.
    *[
        ("process", exit_, kind, STRATEGIES[(at + number) % 3])
        for at, exit_ in enumerate(EXITS)
        for number, kind in enumerate(KINDS)
    ],
]
NAMES = ("a", "b", "c")


class Start(Message[list[ActorRef]]):
    """Start three children with this policy, in this place; answered with their references."""

    kind: Kind
    place: str
    log: ActorRef


class Supervisor(Actor):
    """Supervises what it is told to start."""

    async def receive(self, message: Start) -> list[ActorRef]:
        restart = Restart(first_s=0.0, base_s=0.0, max_s=0.0, kind=message.kind)
        where = {"loop": Loop, "thread": Thread, "process": Process}[message.place]
        return [
            await self.context.spawn(Witness, message.log, where=where(restart=restart), name=name)
            for name in NAMES
        ]


class OneForOne(Supervisor):
    """Nobody else is touched."""


class OneForAll(Supervisor):
    """All share one fate."""

    strategy = Strategy.ONE_FOR_ALL


class RestForOne(Supervisor):
    """The later ones depend on the earlier ones."""

    strategy = Strategy.REST_FOR_ONE


SUPERVISORS = {
    Strategy.ONE_FOR_ONE: OneForOne,
    Strategy.ONE_FOR_ALL: OneForAll,
    Strategy.REST_FOR_ONE: RestForOne,
}


def expected(kind: Kind, exit_: str, strategy: Strategy) -> tuple[list[str], set[str]]:
    """Return what OTP does after `b` has ended: the siblings' hooks in order, and who is left."""
    is_normal = exit_ == "normal"
    restarts = exit_ != "ordered" and (
        kind == "permanent" or (kind == "transient" and not is_normal)
    )
    first = ["b: stopping"] if exit_ in ("normal", "ordered") else []
    if not restarts:
        return first, {"a", "c"}
    if strategy is Strategy.ONE_FOR_ONE:
        return [*first, "b: restarted"], {"a", "b", "c"}
    if strategy is Strategy.REST_FOR_ONE:
        return [*first, "c: stopping", "b: restarted", "c: started"], {"a", "b", "c"}
    return (
        [*first, "c: stopping", "a: stopping", "a: started", "b: restarted", "c: started"],
        {"a", "b", "c"},
    )


@pytest.mark.parametrize(("place", "exit_", "kind", "strategy"), CASES)
def test_restart_type_and_exit_reason_and_strategy(
    warm: Warm, place: str, exit_: str, kind: Kind, strategy: Strategy
):
    """OTP's whole product in the loop, each of its pairs in processes (one of which is killed)."""

    async def main(system: ActorSystem) -> None:
        log = await system.spawn(Worker)
        parent = await system.spawn(SUPERVISORS[strategy], name="parent")
        _, victim, _ = await parent.ask(Start(kind, place, log), timeout_s=30)
        before = await log.ask(Read())
        assert before == ["started", *[f"{name}: started" for name in NAMES]]
        await end(victim, exit_)
        hooks, left = expected(kind, exit_, strategy)
        await until_asked(log, lambda texts: texts[len(before) :] == hooks)
        await until(lambda: children(system) == dict.fromkeys(sorted(left), "RUNNING"))
        assert (await log.ask(Read()))[len(before) :] == hooks
        if "b" in left:
            await victim.ask(Add(1, 1))
        else:
            with pytest.raises(ActorDead):
                await victim.ask(Add(1, 1))

    warm(main)


async def end(victim: ActorRef, exit_: str) -> None:
    """Have the actor end in this way."""
    try:
        if exit_ == "ordered":
            await victim.stop()
        elif exit_ == "normal":
            await victim.ask(Leave())
        else:
            await victim.ask(Fail("kill" if exit_ == "killed" else "crash"))
    except ActorDead:
        pass


async def until_asked(log: ActorRef, holds: Callable[[list[str]], bool]) -> None:
    """Wait until the log says so."""
    for _ in range(4000):
        texts = await log.ask(Read())
        if holds(texts):
            return
        await asyncio.sleep(0.005)
    raise AssertionError(texts)


def children(system: ActorSystem) -> dict[str, str]:
    """Return the states of the parent's children, by name."""
    stats = next(actor for actor in system.stats().actors if actor.name == "parent")
    return {child.name: child.state for child in sorted(stats.children, key=lambda c: c.name)}


class Fragile(Supervisor):
    """Fails itself when its children do so twice in a minute."""

    intensity = (1, 60.0)


def test_a_family_that_restarts_too_often_fails_its_parent(warm: Warm):
    """The parent is started again, without children; its own restart counts above."""

    async def main(system: ActorSystem) -> None:
        log = await system.spawn(Worker)
        parent = await system.spawn(Fragile, name="parent")
        refs = await parent.ask(Start("permanent", "loop", log))
        await end(refs[1], "crash")
        assert await refs[1].ask(Add(1, 1)) == 0
        await end(refs[1], "crash")
        await until(lambda: stats_of(system, "parent").restarts == 1)
        await until(lambda: stats_of(system, "parent").state == "RUNNING")
        assert stats_of(system, "parent").children == ()
        for ref in refs:
            with pytest.raises(ActorDead):
                await ref.ask(Add(1, 1))
        texts = await log.ask(Read())
        assert texts[-2:] == ["c: stopping", "a: stopping"]
        fresh = await parent.ask(Start("permanent", "loop", log))
        assert len(fresh) == 3

    warm(main)


def stats_of(system: ActorSystem, name: str) -> Any:
    """Return what the tree says of an actor at the top."""
    return next(actor for actor in system.stats().actors if actor.name == name)


def test_a_child_that_is_given_up_fails_its_parent(warm: Warm):
    """Its own policy says that it is enough; that is the parent's failure too."""

    async def main(system: ActorSystem) -> None:
        parent = await system.spawn(Parent, name="parent")
        child = await parent.ask(Hire(Restart(first_s=0.0, intensity=(0, 60.0))))
        await end(child, "crash")
        await until(lambda: stats_of(system, "parent").restarts == 1)
        with pytest.raises(ActorDead):
            await child.ask(Add(1, 1))

    warm(main)


class Hire(Message[ActorRef]):
    restart: Restart


class Parent(Actor):
    """Starts one child at a time."""

    async def receive(self, message: Hire) -> ActorRef:
        return await self.context.spawn(Worker, where=Loop(restart=message.restart))


def test_the_top_may_have_a_strategy_and_a_limit_too(
    run: Callable[[Callable[[], Any]], Any], caplog: pytest.LogCaptureFixture
):
    """Beyond the limit the system has failed: all actors are stopped, and it says why."""

    async def main() -> None:
        async with ActorSystem(strategy=Strategy.ONE_FOR_ALL, intensity=(1, 60.0)) as system:
            restart = Restart(first_s=0.0)
            one = await system.spawn(Worker, where=Loop(restart=restart))
            two = await system.spawn(Worker, where=Thread(restart=restart))
            await two.ask(Append("lost"))
            await end(one, "crash")
            await until_asked(two, lambda texts: texts == ["started"])
            assert system.failure == ""
            await end(one, "crash")
            await until(lambda: system.failure)
            assert "restarted more than 1 times in 60 s" in system.failure
            assert system.stats().failure == system.failure
            for ref in (one, two):
                with pytest.raises(ActorDead):
                    await ref.ask(Add(1, 1))
            with pytest.raises(ActorStopped, match="the actor system has failed"):
                await system.spawn(Worker)

    run(main)
    assert "has failed" in caplog.text


def test_one_that_is_given_up_leaves_others_alone(warm: Warm):
    """At the top, one for one: the rest of the tree goes on."""

    async def main(system: ActorSystem) -> None:
        one = await system.spawn(Worker, where=Loop(restart=Restart(intensity=(0, 60.0))))
        two = await system.spawn(Worker)
        await end(one, "crash")
        with pytest.raises(ActorDead, match="given up"):
            await one.ask(Add(1, 1))
        assert await two.ask(Add(1, 1)) == 2
        assert system.failure == ""

    warm(main)


def test_another_child_fails_while_siblings_are_restarted(warm: Warm):
    """OTP's other_child_fails_restart: all of them are there in the end, nothing hangs."""

    async def main(system: ActorSystem) -> None:
        log = await system.spawn(Worker)
        parent = await system.spawn(OneForAll, name="parent")
        refs = await parent.ask(Start("permanent", "loop", log))
        await asyncio.gather(*[end(ref, "crash") for ref in refs])
        await until(lambda: children(system) == dict.fromkeys(NAMES, "RUNNING"))
        for ref in refs:
            await ref.ask(Add(1, 1), timeout_s=20)

    warm(main)


@pytest.mark.parametrize("where", [Loop(), Thread(), Process()], ids=["loop", "thread", "process"])
def test_one_that_does_not_come_back_is_tried_and_given_up(warm: Warm, where: Placement):
    """A first hook that fails only in the second life: tried as often as the policy says."""

    async def main(system: ActorSystem) -> None:
        restart = Restart(first_s=0.0, base_s=0.0, max_s=0.0, deaths_before_ready=3)
        place = type(where)(restart=restart)
        ref = await system.spawn(OnlyOnce, where=place, name="once")
        await end(ref, "crash")
        await until(lambda: stats_of(system, "once").state == "FATAL")
        with pytest.raises(ActorDead, match="died 3 times in a row before it was ready"):
            await ref.ask(Add(1, 1))

    warm(main)


class OnlyOnce(Actor):
    """Cannot live twice."""

    def restarted(self, reason: str) -> None:
        raise ValueError("never again")

    def receive(self, message: Any) -> Any:
        raise Crash("told to")


def test_a_system_stops_its_actors_in_reverse_order(run: Callable[[Callable[[], Any]], Any]):
    """The latest first, and children before their parents' last hook."""
    order: list[str] = []

    class Last(Actor):
        def __init__(self, *children: str) -> None:
            self.children = children

        async def started(self) -> None:
            for child in self.children:
                await self.context.spawn(Last, name=child)

        async def stopping(self) -> None:
            await asyncio.sleep(0)
            order.append(self.context.name)

        def receive(self, message: Any) -> Any:
            return None

    async def main() -> None:
        async with ActorSystem() as system:
            await system.spawn(Last, name="one")
            await system.spawn(Last, "three", "four", name="two")
            await system.spawn(Last, name="five", where=Thread())

    run(main)
    assert order == ["five", "four", "three", "two", "one"]


def test_the_tree_shows_who_is_below_whom(warm: Warm):
    """Names, places, states and counts, as a frozen structure and as text."""

    async def main(system: ActorSystem) -> None:
        log = await system.spawn(Worker, name="log")
        parent = await system.spawn(OneForOne, name="parent")
        refs = await parent.ask(Start("permanent", "thread", log))
        await end(refs[0], "crash")
        await refs[0].ask(Add(1, 1))
        stats = system.stats()
        with pytest.raises(AttributeError):
            stats.name = "x"  # type: ignore[misc]
        assert str(stats).splitlines() == [
            "actors",
            "  log: Worker in loop, RUNNING",
            "  parent: OneForOne in loop, RUNNING",
            "    a: Witness in thread, RUNNING, restarted 1 times",
            "    b: Witness in thread, RUNNING",
            "    c: Witness in thread, RUNNING",
        ]

    warm(main)


def test_a_start_that_takes_too_long_is_given_up(warm: Warm):
    """In the loop, where it is cancelled: the reason says what it was doing."""

    async def main(system: ActorSystem) -> None:
        once = Restart(deaths_before_ready=1)
        with pytest.raises(ActorserveError, match="timed out: still in its first hook"):
            await system.spawn(Sleeper, where=Loop(restart=once, start_timeout_s=0.1))

    warm(main)


class Sleeper(Actor):
    """Never gets ready."""

    async def started(self) -> None:
        await asyncio.get_running_loop().create_future()
