# SPDX-License-Identifier: Apache-2.0
"""Actors in processes that die, hang, hold arrays, fork; the same asks afterwards work."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actorserve import (
    Actor,
    ActorDead,
    ActorDied,
    ActorRestarting,
    ActorSystem,
    Message,
    Process,
    Restart,
)
from actorserve.errors import TooLarge, Unavailable
from actorserve.process.spawn import Spawner
from actorserve.runtime import outbox
from actorserve.state.lifecycle import Budgets
from tests.unit.runtime.patience import until
from tests.unit.runtime.sample_actors import (
    Add,
    Append,
    AsyncWorker,
    Block,
    Count,
    Fail,
    Forward,
    Keep,
    Read,
    Scale,
    Spawned,
    Where,
    Worker,
)

Run = Callable[[Callable[[], Any]], Any]
Warm = Callable[[Callable[[ActorSystem], Any]], Any]
AT_ONCE = Restart(first_s=0.0, base_s=0.0, max_s=0.0)
kind = pytest.mark.parametrize("actor", [Worker, AsyncWorker], ids=["plain", "async"])


@kind
@pytest.mark.parametrize("death", ["kill", "exit0"])
def test_a_dead_process_fails_what_it_had_begun_and_only_that(
    warm: Warm, actor: type[Actor], death: str
):
    """The ask in hand fails once with the reason; what waited, sent ahead or not, goes on."""

    async def main(system: ActorSystem) -> None:
        ref = await system.spawn(actor, where=Process(restart=AT_ONCE), name="w")
        first, _ = await ref.ask(Where())
        waits = [ref.ask(Add(number, 1)) for number in range(3)]
        dies = ref.ask(Fail(death))
        waits += [ref.ask(Add(number, 1)) for number in range(3, 300)]
        reason = "killed by SIGKILL" if death == "kill" else "exited with code 0"
        with pytest.raises(ActorDied, match=f"'w' died while it had the message: {reason}"):
            await dies
        assert [await answer for answer in waits] == list(range(1, 301))
        second, _ = await ref.ask(Where())
        assert second != first
        stats = system.stats().actors[0]
        assert (stats.restarts, stats.deaths, stats.pid) == (1, 1, second)

    warm(main)


@kind
def test_an_idle_process_that_is_killed_comes_back(warm: Warm, actor: type[Actor]):
    """Again and again; the state is that of a fresh actor."""

    async def main(system: ActorSystem) -> None:
        ref = await system.spawn(actor, where=Process(restart=AT_ONCE))
        for _ in range(3):
            await ref.tell(Append("lost"))
            pid, _thread = await ref.ask(Where())
            os.kill(pid, signal.SIGKILL)
            await until(lambda pid=pid: system.stats().actors[0].pid not in (0, pid))
            (text,) = await ref.ask(Read())
            assert text == "restarted: killed by SIGKILL (perhaps out of memory)"

    warm(main)


@kind
def test_a_stream_of_a_dead_process_ends_with_the_reason(warm: Warm, actor: type[Actor]):
    """What came before stays; no clean end is made up."""

    async def main(system: ActorSystem) -> None:
        ref = await system.spawn(actor, where=Process(restart=AT_ONCE))
        pid, _ = await ref.ask(Where())
        seen = []
        with pytest.raises(ActorDied, match="SIGKILL"):
            async for item in ref.stream(Count(900)):
                seen.append(item)
                if item == 70:
                    os.kill(pid, signal.SIGKILL)
        assert seen == list(range(len(seen)))
        assert 71 <= len(seen) < 900

    warm(main)


def test_a_process_that_may_not_be_restarted_is_dead_for_good(warm: Warm):
    """A temporary actor: its asks fail, now and later, with the reason."""

    async def main(system: ActorSystem) -> None:
        where = Process(restart=Restart(kind="temporary"))
        ref = await system.spawn(Worker, where=where)
        answers = [ref.ask(Fail("kill")), *[ref.ask(Add(1, 1)) for _ in range(5)]]
        for answer in answers:
            with pytest.raises(ActorDead, match="SIGKILL"):
                await answer
        with pytest.raises(ActorDead, match="SIGKILL"):
            await ref.ask(Add(1, 1))
        assert system.stats().actors == ()

    warm(main)


def test_an_actor_that_is_not_back_soon_says_when(warm: Warm):
    """In a long back-off an ask fails at once; one that is short is waited for."""

    async def main(system: ActorSystem) -> None:
        restart = Restart(first_s=20.0, jitter=0.0)
        ref = await system.spawn(Worker, where=Process(restart=restart))
        with pytest.raises(ActorDied):
            await ref.ask(Fail("kill"))
        with pytest.raises(ActorRestarting, match=r"started again in (19|20)") as seen:
            await ref.ask(Add(1, 1))
        assert 15 < (seen.value.retry_after_s or 0) <= 20
        assert system.stats().actors[0].state == "BACKOFF"
        await ref.stop()
        quick = Restart(first_s=0.3)
        ref = await system.spawn(Worker, where=Process(restart=quick))
        with pytest.raises(ActorDied):
            await ref.ask(Fail("kill"))
        assert await ref.ask(Add(1, 1)) == 2

    warm(main)


def test_too_many_deaths_give_an_actor_up(warm: Warm, caplog: pytest.LogCaptureFixture):
    """With an intensity in its own policy; the tree goes on showing it, with the reason."""

    async def main(system: ActorSystem) -> None:
        restart = Restart(first_s=0.0, base_s=0.0, max_s=0.0, intensity=(2, 60.0))
        ref = await system.spawn(Worker, where=Process(restart=restart), name="w")
        for _ in range(3):
            with pytest.raises(ActorDied):
                await ref.ask(Fail("kill"))
        await until(lambda: system.stats().actors[0].state == "FATAL")
        with pytest.raises(ActorDead, match="'w' is given up: restarted more than 2 times in 60"):
            await ref.ask(Add(1, 1))
        await ref.stop()
        assert system.stats().actors == ()

    warm(main)
    assert "is given up" in caplog.text


@kind
def test_a_stopped_process_is_replaced(
    warm: Warm, actor: type[Actor], monkeypatch: pytest.MonkeyPatch
):
    """SIGSTOP beyond its budget: aborted, continued, replaced; its ask fails once."""
    monkeypatch.setattr("actorserve.runtime.placement.Budgets", lambda **_: Budgets(stopped_s=0.2))

    async def main(system: ActorSystem) -> None:
        ref = await system.spawn(actor, where=Process(restart=AT_ONCE), name="w")
        with pytest.raises(ActorDied, match=r"stopped \(state T\)|SIGABRT"):
            await ref.ask(Fail("stop"))
        assert await ref.ask(Add(1, 1), timeout_s=30) == 2

    warm(main)


def test_a_hanging_end_is_cut_short(warm: Warm, tmp_path: Path):
    """stop(timeout_s) kills a process whose actor does not let go; its ask fails."""

    async def main(system: ActorSystem) -> None:
        gate = tmp_path / "never"
        ref = await system.spawn(Worker, where=Process())
        blocked = ref.ask(Block(str(gate)))
        await until(Path(f"{gate}.begun").exists)
        await ref.stop(timeout_s=0.2)
        with pytest.raises(ActorDead, match="killed"):
            await blocked
        assert system.stats().actors == ()

    warm(main)


@pytest.mark.parametrize("nbytes", [100, 100_000, 8 << 20])
def test_arrays_come_back_as_views_and_their_memory_is_given_back(warm: Warm, nbytes: int):
    """Received without a copy and read-only; when the last view dies, nothing is held."""

    async def main(system: ActorSystem) -> None:
        ref = await system.spawn(Worker, where=Process())
        sent = np.arange(nbytes // 8, dtype=np.float64)
        for _ in range(20):
            back = await ref.ask(Scale(1.0, sent))
            assert not back.flags.writeable
            np.testing.assert_array_equal(back, sent)
            part = back[1:3]
            del back
            twice = await ref.ask(Scale(2.0, part))
            np.testing.assert_array_equal(twice, sent[1:3] * 2)
            del part, twice
        gc.collect()
        await until(lambda: held_blocks(system) == 0)

    warm(main)


def test_a_kill_while_large_arrays_are_copied_leaves_nothing_behind(
    run_plain: Run, monkeypatch: pytest.MonkeyPatch
):
    """The copy that is under way ends first, then its memory is free; asks go to the next life."""
    copy, gate = outbox._copy, threading.Event()

    def slow_copy(*arguments: Any) -> None:
        gate.wait(20)
        copy(*arguments)

    async def main() -> None:
        async with ActorSystem() as system:
            ref = await system.spawn(Worker, where=Process(restart=AT_ONCE))
            pid, _thread = await ref.ask(Where())
            monkeypatch.setattr(outbox, "_copy", slow_copy)
            asks = [ref.ask(Scale(2.0, np.ones(1 << 20)), timeout_s=40) for _ in range(4)]
            await until(lambda: held_blocks(system) > 0)
            os.kill(pid, signal.SIGKILL)
            await until(lambda: system.stats().actors[0].restarts == 1)
            gate.set()
            for ask in asks:
                assert (await ask).sum() == 2 << 20
            del ask, asks
            gc.collect()
            await until(lambda: held_blocks(system) == 0)

    run_plain(main)


def held_blocks(system: ActorSystem) -> int:
    """Return how many blocks of shared memory somebody holds, in the system's eyes."""
    processes = system.stats().processes
    assert processes is not None
    return processes.exchange.held_blocks + processes.exchange.live_views


@kind
def test_an_actor_may_keep_arrays(warm: Warm, actor: type[Actor]):
    """What it keeps stays as it was; what it drops goes back, also while it is idle."""

    async def main(system: ActorSystem) -> None:
        ref = await system.spawn(actor, where=Process())
        for number in range(50):
            assert await ref.ask(Keep(np.full(10_000, number, np.int64))) == number * 10_000
        await until(lambda: held_blocks(system) == 2)
        await ref.stop()
        await until(lambda: held_blocks(system) == 0)

    warm(main)


def test_an_array_passes_through_processes_without_a_copy_here(warm: Warm):
    """From one process to another by handle; and on after its maker has died."""

    async def main(system: ActorSystem) -> None:
        one = await system.spawn(Worker, where=Process(restart=AT_ONCE))
        two = await system.spawn(Worker, where=Process())
        made = await one.ask(Scale(3.0, np.ones(1 << 16)))
        before = system.stats().processes
        twice = await two.ask(Scale(2.0, made))
        after = system.stats().processes
        assert before is not None and after is not None
        assert after.exchange.arena.allocations == before.exchange.arena.allocations
        assert twice.sum() == 6 << 16
        with pytest.raises(ActorDied):
            await one.ask(Fail("kill"))
        assert made.sum() == 3 << 16
        assert (await two.ask(Scale(2.0, made))).sum() == 6 << 16
        assert (await one.ask(Scale(2.0, made))).sum() == 6 << 16

    warm(main)


@kind
def test_arrays_and_streams_pass_between_two_process_actors(warm: Warm, actor: type[Actor]):
    """An actor in a process asks another in a process for arrays and for many items."""

    async def main(system: ActorSystem) -> None:
        other = await system.spawn(Worker, where=Process())
        ref = await system.spawn(Middle if actor is Worker else AsyncMiddle, other, where=Process())
        back = await ref.ask(Scale(2.0, np.ones(100_000)), timeout_s=20)
        assert back.sum() == 400_000
        assert [item async for item in ref.stream(Count(700))] == [2 * n for n in range(700)]
        assert await ref.ask(Total(3000), timeout_s=30) == sum(range(3000))
        del back

    warm(main)


class Total(Message[int]):
    asks: int


class Middle(Actor):
    """Asks another actor for everything that it is asked for, and doubles it."""

    def __init__(self, other: Any) -> None:
        self.other = other

    def receive(self, message: Any) -> Any:
        if isinstance(message, Scale):
            return self.other.ask(message).result() * 2
        if isinstance(message, Total):
            asks = [self.other.ask(Add(number, 0)) for number in range(message.asks)]
            return sum(ask.result() for ask in asks)
        return (item * 2 for item in self.other.stream(message))


class AsyncMiddle(Middle):
    """The same with async code."""

    async def receive(self, message: Any) -> Any:
        if isinstance(message, Scale):
            return await self.other.ask(message) * 2
        if isinstance(message, Total):
            asks = [self.other.ask(Add(number, 0)) for number in range(message.asks)]
            return sum([await ask for ask in asks])
        return self.double(message)

    async def double(self, message: Any) -> Any:
        async for item in self.other.stream(message):
            yield item * 2


def test_a_caller_that_dies_takes_its_asks_with_it(warm: Warm, tmp_path: Path):
    """The callee's answer is dropped, and both go on."""

    async def main(system: ActorSystem) -> None:
        callee = await system.spawn(AsyncWorker, where=Process(), name="callee")
        caller = await system.spawn(Worker, where=Process(restart=AT_ONCE))
        pid, _ = await caller.ask(Where())
        gate = tmp_path / "gate"
        blocked = callee.ask(Block(str(gate)))
        await until(Path(f"{gate}.begun").exists)
        forwarded = caller.ask(Forward(callee, 1, 2))
        await until(lambda: mailbox_of(system, "callee") > 0)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ActorDied):
            await forwarded
        gate.touch()
        assert await blocked == "done"
        assert await caller.ask(Forward(callee, 3, 4)) == 7

    warm(main)


def test_a_callee_that_dies_fails_the_ask_of_its_caller(warm: Warm):
    """The caller gets the reason, and lives."""

    async def main(system: ActorSystem) -> None:
        callee = await system.spawn(Breaker, where=Process(restart=AT_ONCE), name="callee")
        caller = await system.spawn(Worker, where=Process())
        with pytest.raises(ActorDied, match="'callee' died while it had the message"):
            await caller.ask(Forward(callee, 0, 0), timeout_s=20)
        assert await caller.ask(Forward(callee, 1, 0), timeout_s=20) == 1
        assert await caller.ask(Add(1, 1)) == 2

    warm(main)


class Breaker(Actor):
    """Kills its process for an Add of zero."""

    def receive(self, message: Add) -> int:
        if message.a == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return message.a


def test_what_a_process_sent_before_its_death_arrives(warm: Warm):
    """A tell that the system had taken is delivered, although its sender is gone at once."""

    async def main(system: ActorSystem) -> None:
        log = await system.spawn(Worker)
        ref = await system.spawn(LastWords, log, where=Process(restart=AT_ONCE))
        for number in range(4):
            with pytest.raises(ActorDied):
                await ref.ask(Add(number, 0), timeout_s=30)
        texts = await log.ask(Read())
        assert texts == ["started", *[str(number) for number in range(4)]]

    warm(main)


class LastWords(Actor):
    """Tells somebody a number, and dies."""

    def __init__(self, log: Any) -> None:
        self.log = log

    def receive(self, message: Add) -> int:
        self.log.tell(Append(str(message.a)))
        os.kill(os.getpid(), signal.SIGKILL)
        return 0


def mailbox_of(system: ActorSystem, name: str) -> int:
    """Return how many messages wait for an actor."""
    stats = next(actor for actor in system.stats().actors if actor.name == name)
    return stats.mailbox.queued + stats.mailbox.ahead


def test_children_end_with_a_parent_that_dies(warm: Warm):
    """A parent that is started again begins without children."""

    async def main(system: ActorSystem) -> None:
        parent = await system.spawn(AsyncWorker, where=Process(restart=AT_ONCE))
        child = await parent.ask(Spawned("process"), timeout_s=20)
        pid, _ = await child.ask(Where())
        with pytest.raises(ActorDied):
            await parent.ask(Fail("kill"))
        assert await parent.ask(Add(1, 1), timeout_s=20) == 2
        with pytest.raises(ActorDead):
            await child.ask(Add(1, 1))
        (stats,) = system.stats().actors
        assert (stats.restarts, stats.children) == (1, ())
        await until(lambda: not Path(f"/proc/{pid}").exists())

    warm(main)


def test_large_messages_travel_and_too_large_ones_say_so(warm: Warm):
    """Texts of megabytes go through shared memory; thirty thousand arrays do not go."""

    async def main(system: ActorSystem) -> None:
        ref = await system.spawn(Echo, where=Process())
        text = "x" * (3 << 20)
        assert await ref.ask(Say([text])) == [text]
        with pytest.raises(TooLarge, match="beside its arrays"):
            await ref.ask(Say([np.ones(1)] * 30_000))
        with pytest.raises(TooLarge):
            await ref.ask(Say("many"))
        assert await ref.ask(Say([1])) == [1]

    warm(main)


class Say(Message[Any]):
    what: Any


class Echo(Actor):
    """Answers with what it is sent."""

    def receive(self, message: Say) -> Any:
        if message.what == "many":
            return [np.ones(1)] * 30_000
        return message.what


def test_prints_and_logs_of_a_process_appear_here(
    warm: Warm, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    """On the same streams, and in the same log."""

    async def main(system: ActorSystem) -> None:
        ref = await system.spawn(Loud, where=Process())
        await ref.ask(Add(1, 2))
        await ref.stop()

    warm(main)
    captured = capfd.readouterr()
    assert "adding 1" in captured.out
    assert "to 2" in captured.err
    assert "added 1 and 2" in caplog.text


class Loud(Actor):
    """Prints and logs."""

    def receive(self, message: Add) -> int:
        import logging

        print(f"adding {message.a}")
        print(f"to {message.b}", file=sys.stderr)
        logging.getLogger("actorserve").warning("added %d and %d", message.a, message.b)
        return message.a + message.b


def test_a_fork_of_an_actors_process_is_not_the_actor(warm: Warm):
    """A fork that returns from receive ends quietly; the actor's own answer is the only one."""

    async def main(system: ActorSystem) -> None:
        ref = await system.spawn(Forker, where=Process())
        for number in range(3):
            assert await ref.ask(Add(number, 1), timeout_s=20) == number + 1

    warm(main)


class Forker(Actor):
    """Forks in receive, and both come back."""

    def receive(self, message: Add) -> int:
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
        return message.a + message.b


def test_another_interpreter_runs_the_same_actor(run_plain: Run):
    """Named by its path, with environment and folder of its own."""

    async def main() -> None:
        async with ActorSystem() as system:
            where = Process(python=sys.executable, env={"COLOUR": "blue"}, cwd="/")
            ref = await system.spawn(Environment, where=where)
            assert await ref.ask(Read(), timeout_s=30) == ["blue", "/", sys.executable]
            with pytest.raises(ActorDead, match="/no/such/python"):
                await system.spawn(Environment, where=Process(python="/no/such/python"))
            with pytest.raises(ActorDead, match="working directory '/no/such/folder'"):
                await system.spawn(Environment, where=Process(cwd="/no/such/folder"))

    run_plain(main)


def test_without_a_process_the_spawn_fails_and_the_next_may_work(
    run_plain: Run, monkeypatch: pytest.MonkeyPatch
):
    """No zygote, no room: whoever spawns is told, and can try again."""
    spawn, start = Spawner.spawn, Spawner.start

    async def fail(*_arguments: Any) -> None:
        raise Unavailable("no processes today")

    async def main() -> None:
        async with ActorSystem() as system:
            for name in ("start", "spawn"):
                monkeypatch.setattr(Spawner, name, fail)
                with pytest.raises(ActorDead, match="did not start: no processes today"):
                    await system.spawn(Worker, where=Process())
                monkeypatch.setattr(Spawner, "start", start)
                monkeypatch.setattr(Spawner, "spawn", spawn)
                ref = await system.spawn(Worker, where=Process())
                assert await ref.ask(Add(1, 2)) == 3

    run_plain(main)


class Environment(Actor):
    """Tells what surrounds it."""

    def receive(self, message: Read) -> list[str]:
        return [os.environ["COLOUR"], os.getcwd(), sys.executable]  # noqa: PTH109


@kind
def test_threads_of_an_actor_may_ask_too(warm: Warm, actor: type[Actor]):
    """While its main thread is busy, or waits for them."""

    async def main(system: ActorSystem) -> None:
        other = await system.spawn(Worker, where=Process())
        chosen = Threads if actor is Worker else AsyncThreads
        ref = await system.spawn(chosen, other, where=Process())
        assert await ref.ask(Add(5, 6), timeout_s=20) == 4 * 11

    warm(main)


class Threads(Actor):
    """Asks from four threads, and waits for them."""

    def __init__(self, other: Any) -> None:
        self.other = other

    def receive(self, message: Add) -> int:
        return self.work(message)

    def work(self, message: Add) -> int:
        found: list[int] = []
        threads = [
            threading.Thread(target=lambda: found.append(self.other.ask(message).result()))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(found)


class AsyncThreads(Threads):
    """The same from an event loop."""

    async def receive(self, message: Add) -> int:  # type: ignore[override]
        return await asyncio.get_running_loop().run_in_executor(None, self.work, message)
