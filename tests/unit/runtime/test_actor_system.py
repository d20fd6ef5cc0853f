# SPDX-License-Identifier: Apache-2.0
"""Systems beside each other, in any loop and thread, and their ends."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

import actorserve
from actorserve import (
    ActorDead,
    ActorRef,
    ActorStopped,
    ActorSystem,
    Loop,
    Process,
    Thread,
)
from actorserve.errors import (
    AlreadyExists,
    DeadlineExceeded,
    InvalidArgument,
    Unavailable,
)
from actorserve.runtime.placement import Placement
from tests.unit.runtime.patience import until
from tests.unit.runtime.sample_actors import (
    Add,
    Append,
    AsyncWorker,
    Block,
    Count,
    Forward,
    Read,
    Spawned,
    Where,
    Worker,
)

Run = Callable[[Callable[[], Any]], Any]
Warm = Callable[[Callable[[ActorSystem], Any]], Any]
place = pytest.mark.parametrize(
    "where", [Loop(), Thread(), Process()], ids=["loop", "thread", "process"]
)


@place
def test_synchronous_callers_get_the_same(where: Placement):
    """Without any event loop of their own: spawn, ask, tell, stream, stop."""
    with ActorSystem.start("sync") as system:
        ref = system.spawn(AsyncWorker, 10, where=where).result()
        assert ref.ask(Add(1, 2)).result(timeout_s=20) == 13
        ref.tell(Append("one")).result()
        ref.tell_nowait(Append("two"))
        assert ref.ask(Read()).result() == ["started", "one", "two"]
        assert list(ref.stream(Count(200))) == list(range(200))
        with pytest.raises(Exception, match="too far"):
            list(ref.stream(Count(2000)))
        for item in ref.stream(Count(900)):
            if item == 100:
                break
        never = ref.ask(Add(1, 2), timeout_s=0.0)
        with pytest.raises(DeadlineExceeded):
            never.result()
        ref.stop().result()
        with pytest.raises(ActorStopped):
            ref.ask(Add(1, 2)).result()
    with pytest.raises(ActorStopped, match="'sync' was stopped"):
        system.spawn(Worker)
    system.stop().result()


def test_result_may_be_waited_for_in_pieces():
    """A wait that was too short can be taken up again; the answer is not lost."""
    with ActorSystem.start() as system:
        gate = threading.Event()
        ref = system.spawn(Gate, gate, where=Thread()).result()
        answer = ref.ask(Add(1, 2))
        with pytest.raises(DeadlineExceeded, match=r"Add for 'gate-1': nothing came in 0.01 s"):
            answer.result(timeout_s=0.01)
        gate.set()
        assert answer.result(timeout_s=20) == 3
        assert answer.is_over()
        assert not answer.cancel()


class Gate(actorserve.Actor):
    """Waits for an event that it was given."""

    def __init__(self, event: threading.Event) -> None:
        self.event = event

    def receive(self, message: Add) -> int:
        self.event.wait(30)
        return message.a + message.b


@pytest.mark.parametrize(
    ("run", "where"),
    [("asyncio", Loop()), ("asyncio", Thread()), ("uvloop", Loop()), ("uvloop", Process())],
    indirect=["run"],
)
def test_several_systems_live_side_by_side(run: Run, where: Placement):
    """In one loop, in two threads; a reference of each from everywhere in the process."""

    async def main() -> None:
        async with ActorSystem("one") as one, ActorSystem("two") as two:
            with ActorSystem.start("three") as three:
                refs = [
                    await one.spawn(Worker, 1, where=where),
                    await two.spawn(Worker, 2, where=where),
                    await three.spawn(Worker, 3, where=where),
                ]
                answers = await asyncio.gather(*[ref.ask(Add(0, 0)) for ref in refs])
                assert answers == [1, 2, 3]
                assert len({ref.id for ref in refs}) == 3
                found: list[int] = []
                thread = threading.Thread(
                    target=lambda: found.extend(ref.ask(Add(0, 0)).result() for ref in refs[2:])
                )
                thread.start()
                while thread.is_alive():
                    await asyncio.sleep(0.001)
                assert found == [3]

    run(main)


def test_a_system_off_the_main_thread(run_plain: Run):
    """Its loop in another thread, asked from this one."""
    ready = threading.Event()
    done: list[Any] = []

    async def main() -> None:
        async with ActorSystem() as system:
            done.append(await system.spawn(Worker, where=Process()))
            done.append(asyncio.get_running_loop())
            done.append(stop := asyncio.Event())
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert ready.wait(30)
    ref, loop, stop = done
    assert ref.ask(Add(1, 2)).result(timeout_s=20) == 3
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    with pytest.raises(ActorStopped):
        ref.ask(Add(1, 2)).result()


@pytest.mark.parametrize("where", [Loop(), Thread()], ids=["loop", "thread"])
def test_leaving_the_block_works_off_what_waits(run: Run, where: Placement):
    """Messages that actors send each other in the meantime as well."""

    async def main() -> None:
        async with ActorSystem() as system:
            last = await system.spawn(Worker, where=where)
            first = await system.spawn(Passer, last, where=where)
            for number in range(100):
                first.tell(Append(str(number)))
        assert received == [str(number) for number in range(100)]

    received: list[str] = []
    Passer.received = received
    run(main)


class Passer(actorserve.Actor):
    """Sends on what it gets, and to itself once more."""

    received: ClassVar[list[str]] = []

    def __init__(self, to: ActorRef) -> None:
        self.to = to

    def receive(self, message: Append) -> None:
        if message.text.startswith("again "):
            self.received.append(message.text.partition(" ")[2])
        else:
            self.to.tell(message)
            self.context.ref.tell(Append(f"again {message.text}"))


def test_leaving_by_an_error_works_off_nothing(run_plain: Run):
    """The error passes; what waits fails."""

    async def main() -> None:
        ref = None
        with pytest.raises(KeyError):
            async with ActorSystem() as system:
                ref = await system.spawn(AsyncWorker)
                asks = [ref.ask(Count(1)) for _ in range(3)] + [ref.ask(Add(1, 1))]
                raise KeyError
        assert all(ask.is_over() for ask in asks)

    run_plain(main)


def test_a_system_is_used_once(run_plain: Run):
    """A second start is refused; stopping twice is fine."""

    async def main() -> None:
        system = ActorSystem("mine")
        async with system:
            with pytest.raises(AlreadyExists):
                await system.__aenter__()
        await system.stop()
        with pytest.raises(ActorStopped, match="'mine' was stopped"):
            await system.spawn(Worker)

    run_plain(main)


def test_a_loop_that_is_closed_under_the_actors_fails_their_asks():
    """Whoever asks afterwards is told, and does not wait."""
    loop = asyncio.new_event_loop()
    system = ActorSystem()
    loop.run_until_complete(system.__aenter__())

    async def spawn() -> ActorRef:
        return await system.spawn(Worker)

    ref = loop.run_until_complete(spawn())
    loop.close()
    with pytest.raises(ActorDead, match="the event loop of the actor system was closed"):
        ref.ask(Add(1, 2)).result(timeout_s=20)
    with pytest.raises(ActorDead, match="was closed"):
        ref.ask(Add(1, 2)).result(timeout_s=20)


def test_a_fork_of_the_host_has_no_actors():
    """Asks and spawns there fail at once, and the parent's actors do not notice."""
    with ActorSystem.start() as system:
        refs = [system.spawn(Worker, where=where).result() for where in (Loop(), Process())]
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                for ref in refs:
                    with pytest.raises(ActorStopped, match="fork"):
                        ref.ask(Add(1, 2)).result(timeout_s=20)
                with pytest.raises(Unavailable, match="is a fork"):
                    system.spawn(Worker)
                system.stop().result()
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        assert status == 0
        for ref in refs:
            assert ref.ask(Add(1, 2)).result(timeout_s=20) == 3


def test_the_hosts_own_children_and_handlers_are_left_alone(run_plain: Run):
    """Asyncio subprocesses, subprocess and SIGCHLD handlers go on beside process actors."""
    seen: list[int] = []
    before = signal.signal(signal.SIGCHLD, lambda number, _frame: seen.append(number))

    async def main() -> None:
        async with ActorSystem() as system:
            ref = await system.spawn(Worker, where=Process())
            child = await asyncio.create_subprocess_exec(sys.executable, "-c", "print('hello')")
            assert await child.wait() == 0
            assert await ref.ask(Add(1, 2)) == 3
            code = [sys.executable, "-c", "raise SystemExit(7)"]
            assert subprocess.run(code, check=False).returncode == 7
            pid, _ = await ref.ask(Where())
            os.kill(pid, signal.SIGKILL)
            assert await ref.ask(Add(1, 2), timeout_s=30) == 3

    try:
        run_plain(main)
        assert seen
        gc.collect()
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_plain_actor_may_spawn_and_wait_in_a_thread(run_plain: Run):
    """`result()` is for threads: from there everything works synchronously."""

    async def main() -> None:
        async with ActorSystem() as system:
            ref = await system.spawn(Worker, where=Thread())
            child = await ref.ask(Spawned("loop"))
            assert await ref.ask(Forward(child, 1, 2)) == 1003

    run_plain(main)


def test_references_are_values(run_plain: Run):
    """Equal and hashable by their actor, printable, never pickled."""
    import pickle

    async def main() -> None:
        async with ActorSystem() as system:
            ref = await system.spawn(Worker, name="w")
            twin = await (await system.spawn(AsyncWorker)).ask(Spawned("loop"))
            assert ref == ref
            assert ref != twin
            assert ref != "w"
            assert len({ref, ref, twin}) == 2
            assert repr(ref) == "<ActorRef 'w'>"
            with pytest.raises(InvalidArgument, match="never pickled"):
                pickle.dumps(ref)

    run_plain(main)


def test_idle_systems_cost_nothing_and_leave_nothing():
    """No process and no thread before somebody asks for one."""
    with ActorSystem.start() as system:
        ref = system.spawn(Worker).result()
        assert ref.ask(Add(1, 2)).result() == 3
        assert system.stats().processes is None
        names = {thread.name for thread in threading.enumerate()}
        assert "actorserve-actors" in names
        assert not any(name.startswith("actorserve-memory") for name in names)


def test_a_hung_thread_is_given_up_at_the_end(run_plain: Run):
    """stop(timeout_s): its ask fails, the system ends; the thread goes when its message does."""
    gate = threading.Event()

    async def main() -> None:
        async with ActorSystem() as system:
            ref = await system.spawn(Gate, gate, where=Thread(stop_timeout_s=0.2))
            blocked = ref.ask(Add(1, 2))
            await until(lambda: system.stats().actors[0].mailbox.queued == 0)
            await ref.stop(timeout_s=0.1)
            with pytest.raises(ActorDead, match="killed: it did not end in time"):
                await blocked
            assert system.stats().actors == ()

    run_plain(main)
    gate.set()


@place
def test_an_async_actor_that_hangs_is_cancelled(warm: Warm, where: Placement, tmp_path: Path):
    """stop(timeout_s): what it awaits is cancelled, wherever it lives; its ask fails."""

    async def main(system: ActorSystem) -> None:
        ref = await system.spawn(AsyncWorker, where=where)
        blocked = ref.ask(Block(str(tmp_path / "never")))
        await until((tmp_path / "never.begun").exists)
        await ref.stop(timeout_s=0.1)
        with pytest.raises(ActorDead, match="killed: it did not end in time"):
            await blocked
        assert system.stats().actors == ()

    warm(main)


def test_the_public_names_are_there():
    """Each from the room that defines it, without loading rooms above."""
    for name in actorserve.__all__:
        assert getattr(actorserve, name) is not None
    code = (
        "import sys, actorserve; actorserve.ActorSystem, actorserve.Process; "
        "assert not [m for m in sys.modules if m.startswith(('actorserve.triton', "
        "'actorserve.actors', 'actorserve.frontend'))]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
