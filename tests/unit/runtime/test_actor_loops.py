# SPDX-License-Identifier: Apache-2.0
"""Event loops that end under an actor, are closed under a system, or run tasks at once."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import types
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actorserve import (
    Actor,
    ActorDead,
    ActorDied,
    ActorStopped,
    ActorSystem,
    Loop,
    Process,
    Thread,
)
from actorserve.errors import ActorserveError, Unavailable
from actorserve.process.spawn import Spawner
from tests.unit.runtime.family_actors import (
    AT_ONCE,
    Background,
    Die,
    Escalating,
    Kid,
    Say,
)
from tests.unit.runtime.patience import until
from tests.unit.runtime.sample_actors import (
    Add,
    AsyncWorker,
    Block,
    Count,
    Forward,
    Scale,
    Worker,
)

Warm = Callable[[Callable[[ActorSystem], Any]], Any]
SOON_S = 15.0


# --- a thread whose loop ends --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "reason"), [("exit", r"sys\.exit\(3\)"), ("stop", "loop was stopped")]
)
def test_an_actor_whose_loop_ends_has_died(warm: Warm, how: str, reason: str):
    """Whatever ended it, a task in the background for one: asks fail, and there is a next life."""

    async def main(system: ActorSystem) -> None:
        ref = await system.spawn(Background, how, where=Thread(restart=AT_ONCE))
        with pytest.raises(ActorDied, match=reason):
            await ref.ask(Die(), timeout_s=SOON_S)
        assert await ref.ask(Say(), timeout_s=SOON_S) == "here"
        assert system.stats().actors[0].restarts == 1

    warm(main)


def test_an_actor_whose_loop_ends_in_its_first_hook_has_died(warm: Warm):
    """It is started again, as one would be whose process ends there."""

    async def main(system: ActorSystem) -> None:
        ref = await asyncio.wait_for(
            _wait(system.spawn(Background, "start", where=Thread(restart=AT_ONCE))), SOON_S
        )
        assert await ref.ask(Say(), timeout_s=SOON_S) == "here"

    warm(main)


def test_what_an_actor_leaves_behind_does_not_keep_its_end_a_secret(warm: Warm):
    """A task that raises SystemExit when it is cancelled, at the very end of the thread."""

    async def main(system: ActorSystem) -> None:
        ref = await system.spawn(Background, "leftover", where=Thread(restart=AT_ONCE))
        assert await ref.ask(Die(), timeout_s=SOON_S) == "left something"
        await asyncio.wait_for(_wait(ref.stop()), SOON_S)

    warm(main)


async def _wait(answer: Any) -> Any:
    return await answer


# --- a system whose loop is closed ---------------------------------------------------------------


def outcomes(orders: list[Callable[[], Any]]) -> list[str]:
    """Return what each order, given in a thread that is not the loop's, comes to."""
    said: list[str] = []

    def give() -> None:
        for order in orders:
            try:
                said.append(repr(order().result(SOON_S)))
            except ActorserveError as error:
                said.append(type(error).__name__)

    thread = threading.Thread(target=give)
    thread.start()
    thread.join()
    return said


def test_a_loop_closed_before_the_turn_of_what_was_posted_leaves_nobody_waiting():
    """What was posted last is told, and so is everybody who comes later."""
    loop = asyncio.new_event_loop()

    async def begin() -> tuple[ActorSystem, Any]:
        system = await ActorSystem().__aenter__()
        return system, await system.spawn(Kid)

    system, ref = loop.run_until_complete(begin())
    posted: list[Any] = []
    poster = threading.Thread(
        target=lambda: posted.extend([ref.stop(), system.spawn(Kid), system.stop()])
    )
    poster.start()
    poster.join()
    loop.close()
    assert not any(answer.is_over() for answer in posted), "there was no turn to notice it in"
    orders = [lambda: ref.ask(Say()), lambda: system.spawn(Kid), ref.stop, system.stop]
    assert outcomes(orders) == ["ActorStopped", "ActorStopped", "None", "None"]
    assert outcomes([lambda answer=answer: answer for answer in posted]) == [
        "None",
        "ActorStopped",
        "None",
    ]


class Ender(Actor):
    """Ends the loop that it lives in, and does not hear that it should go."""

    async def receive(self, message: Die | Say) -> str:
        if isinstance(message, Die):
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.stop)
            for _ in range(2):
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
        return "here"


def test_a_thread_of_a_system_that_ends_leaves_nobody_waiting():
    """Who is in the mailbox already is told, without anybody else coming along."""
    system = ActorSystem.start()
    ref = system.spawn(Ender).result()
    ref.tell(Die()).result()
    waiting = ref.ask(Say())
    with pytest.raises(ActorStopped, match="loop of the actor system was closed"):
        waiting.result(SOON_S)
    system.stop().result(SOON_S)


# --- tasks that begin at once --------------------------------------------------------------------


def eager(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> Any:
    """Stand for asyncio.eager_task_factory (Python 3.12): the first step is the caller's."""
    try:
        awaited = coroutine.send(None)
    except StopIteration as stop:
        done = loop.create_future()
        done.set_result(stop.value)
        return done
    except Exception as error:
        done = loop.create_future()
        done.set_exception(error)
        return done
    return asyncio.Task(_rest(coroutine, awaited), loop=loop, **options)


async def _rest(coroutine: Coroutine[Any, Any, Any], awaited: Any) -> Any:
    return await _steps(coroutine, awaited)


@types.coroutine
def _steps(coroutine: Coroutine[Any, Any, Any], awaited: Any) -> Generator[Any, Any, Any]:
    while True:
        try:
            value = yield awaited
        except BaseException as error:
            step, value = coroutine.throw, error
        else:
            step = coroutine.send
        try:
            awaited = step(value)
        except StopIteration as stop:
            return stop.value


@pytest.fixture
def system_in_haste() -> Any:
    """Run a coroutine function with a system in a loop whose tasks begin at once."""

    def run(main: Callable[[ActorSystem], Any]) -> None:
        async def all_of_it() -> None:
            async with ActorSystem() as system:
                factory = getattr(asyncio, "eager_task_factory", eager)
                asyncio.get_running_loop().set_task_factory(factory)
                await asyncio.wait_for(main(system), 40.0)

        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(all_of_it())
        finally:
            loop.close()

    return run


def test_actors_live_where_tasks_begin_at_once(system_in_haste: Any, tmp_path: Path):
    """A task that is over before its creator knows it leaves the actor free for the next."""

    async def main(system: ActorSystem) -> None:
        ref = await system.spawn(AsyncWorker)
        for number in range(5):
            assert await ref.ask(Add(number, 1), timeout_s=SOON_S) == number + 1
        blocked = ref.ask(Block(str(tmp_path / "go")), timeout_s=SOON_S)
        added = ref.ask(Add(1, 1), timeout_s=SOON_S)
        (tmp_path / "go").touch()
        assert (await blocked, await added) == ("done", 2)
        for _ in range(2):
            assert [item async for item in ref.stream(Count(200))] == list(range(200))
        async for item in ref.stream(Count(900)):
            if item == 100:
                break
        assert await ref.ask(Add(2, 1), timeout_s=SOON_S) == 3
        other = await system.spawn(AsyncWorker)
        assert await ref.ask(Forward(other, 1, 2), timeout_s=SOON_S) == 3
        await asyncio.wait_for(_wait(ref.stop()), SOON_S)
        with pytest.raises(ActorStopped):
            await ref.ask(Add(1, 1), timeout_s=SOON_S)

    system_in_haste(main)


def test_actors_have_processes_where_tasks_begin_at_once(system_in_haste: Any):
    """Large arrays go on their way one after the other."""

    async def main(system: ActorSystem) -> None:
        ref = await system.spawn(Worker, where=Process())
        large = np.ones(4 << 20, np.uint8)
        scaled = [ref.ask(Scale(1.0, large), timeout_s=SOON_S) for _ in range(3)]
        for each in scaled:
            assert len(await each) == len(large)
        await asyncio.wait_for(_wait(ref.stop()), SOON_S)

    system_in_haste(main)


def test_a_spawner_that_fails_at_once_is_tried_again(system_in_haste: Any, monkeypatch: Any):
    """What fails in its first step has failed before anybody knows of its task."""
    start, tries = Spawner.start, [1]

    async def fail_once(self: Spawner) -> None:
        if tries:
            tries.pop()
            raise Unavailable("not now")
        await start(self)

    monkeypatch.setattr(Spawner, "start", fail_once)

    async def main(system: ActorSystem) -> None:
        refs = [system.spawn(Worker, where=Process()) for _ in range(2)]
        for ref in refs:
            with contextlib.suppress(ActorDead):
                await asyncio.wait_for(_wait(ref), SOON_S)
        ref = await asyncio.wait_for(_wait(system.spawn(Worker, where=Process())), SOON_S)
        assert await ref.ask(Add(1, 1), timeout_s=SOON_S) == 2

    system_in_haste(main)


def test_families_are_supervised_where_tasks_begin_at_once(system_in_haste: Any):
    """One death is dealt with after the other all the same."""

    async def main(system: ActorSystem) -> None:
        log: list[str] = []
        kids: dict[str, Any] = {}
        await system.spawn(Escalating, log, kids, where=Loop(restart=AT_ONCE))
        for count in (6, 10):
            with contextlib.suppress(ActorserveError):
                await kids["a"].ask(Die(), timeout_s=SOON_S)
            await until(lambda count=count: len(log) >= count)

    system_in_haste(main)
