# SPDX-License-Identifier: Apache-2.0
"""The same actors in the loop, in a thread and in a process: what strangers rely on."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actorserve import (
    Actor,
    ActorDead,
    ActorDied,
    ActorRef,
    ActorStopped,
    ActorSystem,
    Loop,
    Message,
    Process,
    ReceiveError,
    Restart,
    Thread,
)
from actorserve.errors import (
    ActorserveError,
    AlreadyExists,
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    NotFound,
    ProtocolError,
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
    Delegate,
    Fail,
    Forward,
    Leave,
    Liar,
    Read,
    Restarts,
    Scale,
    Spawned,
    Stubborn,
    Typed,
    Where,
    Worker,
)

Run = Callable[[Callable[[], Any]], Any]
Warm = Callable[[Callable[[ActorSystem], Any]], Any]
AT_ONCE = Restart(first_s=0.0, base_s=0.0, max_s=0.0, kind="transient")

PLACES = [Loop(restart=AT_ONCE), Thread(restart=AT_ONCE), Process(restart=AT_ONCE)]
place = pytest.mark.parametrize("where", PLACES, ids=["loop", "thread", "process"])
kind = pytest.mark.parametrize("actor", [Worker, AsyncWorker], ids=["plain", "async"])


@place
@kind
def test_an_ask_is_answered_and_a_tell_is_not(
    warm_each: Warm, actor: type[Actor], where: Placement
):
    """Messages arrive in their order, whatever mixture of tell and ask."""

    async def main(system: ActorSystem) -> None:
        ref = await system.spawn(actor, 100, where=where)
        assert await ref.ask(Add(1, 2), timeout_s=20) == 103
        assert await ref.tell(Append("one")) is None
        ref.tell(Append("two"))
        ref.tell_nowait(Append("three"))
        assert await ref.ask(Read()) == ["started", "one", "two", "three"]

    warm_each(main)


@place
@kind
def test_an_actor_lives_where_it_was_placed(warm: Warm, actor: type[Actor], where: Placement):
    """The loop's thread, a thread of its own, or a process of its own."""

    async def main(system: ActorSystem) -> None:
        ref = await system.spawn(actor, where=where, name="here")
        pid, thread = await ref.ask(Where())
        assert (pid == os.getpid()) is not isinstance(where, Process)
        assert thread == ("actorserve-here" if isinstance(where, Thread) else "MainThread")
        stats = system.stats().actors[0]
        assert (stats.name, stats.actor, stats.state) == ("here", actor.__name__, "RUNNING")
        assert stats.where == type(where).__name__.lower()
        assert stats.pid == (pid if isinstance(where, Process) else 0)
        assert stats.handled == 1

    warm(main)


@place
@kind
def test_an_exception_is_the_answer_and_the_actor_goes_on(
    warm: Warm, actor: type[Actor], where: Placement, caplog: pytest.LogCaptureFixture
):
    """Whatever is raised: the caller of an ask gets it, that of a tell is logged, state stays."""

    async def main(system: ActorSystem) -> None:
        ref = await system.spawn(actor, where=where, name="w")
        await ref.tell(Append("kept"))
        with pytest.raises(ReceiveError, match="'w' failed on Fail: ValueError: no g") as seen:
            await ref.ask(Fail("value"))
        assert (seen.value.kind, seen.value.detail) == ("ValueError", "no good")
        assert "in fail" in seen.value.stack
        assert isinstance(seen.value.__cause__, ValueError) is not isinstance(where, Process)
        for what in ("memory", "recursion", "strange"):
            with pytest.raises(ReceiveError):
                await ref.ask(Fail(what))
        with pytest.raises(NotFound, match="no such thing"):
            await ref.ask(Fail("ours"))
        await ref.tell(Append("raise"))
        assert await ref.ask(Read()) == ["started", "kept"]
        assert system.stats().actors[0].restarts == 0

    warm(main)
    assert "'w' failed on Append" in caplog.text
    assert "ValueError: bad text" in caplog.text


@place
@kind
@pytest.mark.parametrize("what", ["crash", "exit"])
def test_a_crash_restarts_the_actor(warm: Warm, actor: type[Actor], where: Placement, what: str):
    """Crash and SystemExit end it: the ask fails once, what waits is for the next life."""

    async def main(system: ActorSystem) -> None:
        ref = await system.spawn(actor, where=where, name="w")
        await ref.tell(Append("lost"))
        crash = ref.ask(Fail(what))
        waits = ref.ask(Add(1, 2))
        with pytest.raises(ActorDied, match=r"crashed: lost the connection|sys.exit\(3\)"):
            await crash
        assert await waits == 3
        (texts,) = await ref.ask(Read())
        assert texts.startswith("restarted: ")
        restarts, last_end = await ref.ask(Restarts())
        assert restarts == 1
        assert last_end in texts
        assert system.stats().actors[0].restarts == 1

    warm(main)


@place
@kind
def test_a_stream_brings_items_and_its_error_last(
    warm_each: Warm, actor: type[Actor], where: Placement
):
    """Far more items than the window, in order; an exception comes behind those before it."""

    async def main(system: ActorSystem) -> None:
        ref = await system.spawn(actor, where=where)
        assert [item async for item in ref.stream(Count(500))] == list(range(500))
        seen = []
        with pytest.raises(ReceiveError, match="too far"):
            async for item in ref.stream(Count(2000)):
                seen.append(item)
        assert seen == list(range(1000))
        assert [item async for item in ref.stream(Add(1, 2))] == [3]  # one answer: one item
        with pytest.raises(InvalidArgument, match=r"use stream\(\)"):
            await ref.ask(Count(3))
        assert await ref.ask(Add(1, 2)) == 3

    warm_each(main)


@place
@kind
def test_a_reader_that_stops_reading_stops_only_its_sender(
    warm: Warm, actor: type[Actor], where: Placement
):
    """The actor serves others while a reader is behind; an abandoned stream is closed."""

    async def main(system: ActorSystem) -> None:
        ref = await system.spawn(actor, where=where)
        slow = ref.stream(Count(900))
        assert await anext_(slow) == 0
        for number in range(5):
            assert await ref.ask(Add(number, 1), timeout_s=20) == number + 1
        async for item in ref.stream(Count(900)):
            if item == 100:
                break
        assert [item async for item in slow] == list(range(1, 900))
        third = ref.stream(Count(900))
        await anext_(third)
        third.close()
        assert [item async for item in third] == []
        assert await ref.ask(Add(1, 1)) == 2
        await ref.stop()  # drains: no stream is open any more

    warm(main)


async def anext_(stream: Any) -> Any:
    """Return the next item (`anext` is there from 3.10 on, but not for what has no __anext__)."""
    return await stream.__anext__()


@place
def test_an_ask_that_waits_too_long_fails_and_is_taken_back(
    warm: Warm, where: Placement, tmp_path: Path
):
    """The deadline covers mailbox and work; a message that was not begun is never done."""

    async def main(system: ActorSystem) -> None:
        gate = tmp_path / "gate"
        ref = await system.spawn(AsyncWorker, where=where, name="w")
        blocked = ref.ask(Block(str(gate)))
        with pytest.raises(DeadlineExceeded, match="Append for 'w'"):
            await ref.ask(Append("late"), timeout_s=0.05)
        task = asyncio.ensure_future(wait_for(ref.ask(Append("cancelled"))))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        given_up = ref.ask(Append("given up"))
        assert given_up.cancel()
        with pytest.raises(Cancelled):
            await given_up
        gate.touch()
        assert await blocked == "done"
        assert await ref.ask(Read()) == ["started"]

    warm(main)


async def wait_for(answer: Any) -> Any:
    """Turn an answer into a coroutine."""
    return await answer


@place
@kind
def test_a_stopped_actor_refuses_at_once_with_the_reason(
    warm: Warm, actor: type[Actor], where: Placement, tmp_path: Path
):
    """While it stops, and afterwards; what waited is worked off with drain, and fails without."""

    async def main(system: ActorSystem) -> None:
        if actor is Worker and isinstance(where, Loop):
            return  # it would block the loop
        for drain in (True, False):
            gate = tmp_path / f"gate-{drain}"
            ref = await system.spawn(actor, where=where, name="w")
            blocked = ref.ask(Block(str(gate)))
            waits = ref.ask(Add(1, 2))
            await until(Path(f"{gate}.begun").exists)
            end = ref.stop(drain=drain)
            await asyncio.sleep(0)
            with pytest.raises(ActorStopped, match="'w' is stopping"):
                await ref.ask(Add(1, 2))
            gate.touch()
            assert await blocked == "done"
            if drain:
                assert await waits == 3
            else:
                with pytest.raises(ActorStopped):
                    await waits
            await end
            await ref.stop()
            for late in (ref.ask(Add(1, 2)), ref.tell(Append("late"))):
                with pytest.raises(ActorStopped, match="'w' is not there any more"):
                    await late
            with pytest.raises(ActorStopped):
                ref.tell_nowait(Append("late"))
            with pytest.raises(ActorStopped):
                await anext_(ref.stream(Count(3)))
            assert system.stats().actors == ()

    warm(main)


@place
@kind
def test_an_actor_may_end_itself(warm: Warm, actor: type[Actor], where: Placement):
    """A transient one (the default) is not started again; a permanent one is."""

    async def main(system: ActorSystem) -> None:
        ref = await system.spawn(actor, where=where, name="w")
        await ref.ask(Leave())
        await gone(system, ref)
        with pytest.raises(ActorStopped, match="ended of itself"):
            await ref.ask(Add(1, 2))
        lasting = type(where)(restart=Restart(first_s=0.0, kind="permanent"))
        ref = await system.spawn(actor, where=lasting, name="again")
        await ref.ask(Leave())
        assert await ref.ask(Restarts(), timeout_s=20) == (1, "ended of itself")

    warm(main)


async def gone(system: ActorSystem, ref: ActorRef) -> None:
    """Wait until an actor has left the tree."""
    await until(lambda: all(actor.name != ref.name for actor in system.stats().actors))


@place
@pytest.mark.parametrize("hook", ["init", "started"])
def test_an_actor_that_does_not_start_says_why(warm: Warm, where: Placement, hook: str):
    """At the first start an exception is final: whoever spawns gets the reason."""

    async def main(system: ActorSystem) -> None:
        with pytest.raises(ActorDead, match="did not start: ValueError: no good"):
            await system.spawn(Stubborn, hook, where=where)
        await until(lambda: not system.stats().actors)

    warm(main)


@place
def test_an_exception_in_the_last_hook_is_logged(
    warm: Warm, where: Placement, caplog: pytest.LogCaptureFixture
):
    """The actor ends all the same."""

    async def main(system: ActorSystem) -> None:
        await system.spawn(Stubborn, "stopping", where=where, name="s")

    warm(main)
    assert "stopping of 's' failed" in caplog.text


@place
@kind
def test_an_actor_asks_another_wherever_it_lives(warm: Warm, actor: type[Actor], where: Placement):
    """References travel in messages; nine pairs of places."""

    async def main(system: ActorSystem) -> None:
        others = [await system.spawn(Worker, 10, where=each) for each in PLACES]
        if actor is AsyncWorker or not isinstance(where, Loop):
            ref = await system.spawn(actor, where=where)
            for other in others:
                assert await ref.ask(Forward(other, 1, 2), timeout_s=20) == 13
            await others[0].stop()
            with pytest.raises(ActorStopped):
                await ref.ask(Forward(others[0], 1, 2), timeout_s=20)
        delegate = await system.spawn(Delegate, where=where)
        assert await delegate.ask(Forward(others[2], 3, 4), timeout_s=20) == 17

    warm(main)


@place
@kind
def test_an_actor_spawns_children_and_peers(warm: Warm, actor: type[Actor], where: Placement):
    """Children stand below it in the tree and end with it, what it spawns at the top does not."""

    async def main(system: ActorSystem) -> None:
        ref = await system.spawn(actor, where=where, name="parent")
        places = ("loop", "thread", "process") if actor is AsyncWorker else ("process",)
        for each in places:
            if each == "process" and actor is Worker and isinstance(where, Loop):
                continue  # a plain function in the loop cannot wait for an answer
            child = await ref.ask(Spawned(each), timeout_s=20)
            assert await child.ask(Add(1, 1)) == 1002
            peer = await ref.ask(Spawned(each, is_child=False), timeout_s=20)
            assert await peer.ask(Add(1, 1)) == 2002
        stats = {actor.name: actor for actor in system.stats().actors}
        children = stats.pop("parent").children
        assert len(children) == len(stats)
        await ref.stop()
        assert {actor.name for actor in system.stats().actors} == set(stats)

    warm(main)


def test_a_plain_actor_in_the_loop_is_told_that_it_cannot_wait(warm: Warm):
    """`result()` in the loop's thread would wait for itself: one line says what to write."""

    async def main(system: ActorSystem) -> None:
        other = await system.spawn(Worker, where=Thread())
        ref = await system.spawn(Worker)
        with pytest.raises(InvalidArgument, match="`await` the answer"):
            await ref.ask(Forward(other, 1, 2))
        with pytest.raises(InvalidArgument, match="`await` the answer"):
            other.ask(Add(1, 2)).result()

    warm(main)


@place
def test_arguments_arrive_in_the_types_that_the_constructor_names(warm: Warm, where: Placement):
    """Structs, references and arrays as start arguments."""

    async def main(system: ActorSystem) -> None:
        peer = await system.spawn(Worker)
        array = np.ones(10_000)
        ref = await system.spawn(Typed, Add(1, 2), peers=[peer], array=array, where=where)
        assert await ref.ask(Read()) == ["Add", "ActorRef", "10000"]

    warm(main)


@place
def test_small_and_large_arrays_travel(warm: Warm, where: Placement):
    """Of any shape and dtype, empty and non-contiguous ones too."""
    arrays = [
        np.arange(10, dtype=np.int16),
        np.zeros((0, 3)),
        np.array(2.5),
        np.arange(100_000, dtype=">f4").reshape(10, 100, 100),
        np.asfortranarray(np.arange(20_000.0).reshape(100, 200))[::2, ::-1],
        np.array(["2020-01-01", "NaT"], "M8[D]"),
        np.array(["ab", "c"]),
        np.ones((3, 1 << 20), np.uint8),
    ]

    async def main(system: ActorSystem) -> None:
        ref = await system.spawn(Worker, where=where)
        for array in arrays:
            back = await ref.ask(Scale(1.0, array), timeout_s=20)
            assert back.dtype == array.dtype
            assert back.shape == array.shape
            np.testing.assert_array_equal(back, array)
        assert (await ref.ask(Scale(2.0, np.ones((300, 300))))).sum() == 180_000

    warm(main)


@pytest.mark.parametrize("where", PLACES[:2], ids=["loop", "thread"])
def test_a_message_within_the_process_is_handed_over_as_it_is(warm: Warm, where: Placement):
    """No copy and no check: it is the same array."""

    async def main(system: ActorSystem) -> None:
        ref = await system.spawn(Worker, where=where)
        array = np.ones(5)
        assert await ref.ask(Scale(1.0, array)) is array

    warm(main)


def test_an_answer_from_a_process_is_checked(warm: Warm):
    """Message[int] answered with a text, with what cannot travel, with a list."""

    async def main(system: ActorSystem) -> None:
        ref = await system.spawn(Liar, where=Process(), name="l")
        with pytest.raises(InternalError, match="Add for 'l' was answered with something else"):
            await ref.ask(Add(3, 0))
        with pytest.raises(InvalidArgument, match="object is neither msgspec data nor"):
            await ref.ask(Add(4, 0))
        with pytest.raises(InternalError, match="Expected `int`, got `array`"):
            await ref.ask(Add(5, 0))

    warm(main)


def test_a_message_that_does_not_fit_names_its_field_and_its_author(warm: Warm):
    """Structs do not check what they are made of: the process that reads them does."""

    async def main(system: ActorSystem) -> None:
        ref = await system.spawn(Worker, where=Process(), name="w")
        with pytest.raises(ProtocolError) as caught:
            await ref.ask(Add("three", 4))  # type: ignore[arg-type]  # here
        text = str(caught.value)
        assert "Add for 'w'" in text
        assert "its field 'a' does not fit Add: expected `int`, got `str`" in text
        source = Path(__file__).read_text().splitlines()
        (line,) = [n for n, each in enumerate(source, 1) if "ref.ask(Add(" + '"three"' in each]
        assert f"sent at {__file__}:{line}: " in text
        assert await ref.ask(Add(3, 4)) == 7

    warm(main)


def test_an_interpreter_that_is_no_python_is_tried_once(tmp_path: Path):
    """The start fails at once, and says what is wrong."""
    shell = tmp_path / "python"
    shell.write_text(f"#!/bin/sh\necho again >> {tmp_path}/starts\nexec /bin/sh $*\n")
    shell.chmod(0o755)

    async def main() -> None:
        async with ActorSystem("shell") as system:
            with pytest.raises(ActorserveError, match="expected a Python of 3.10") as caught:
                await system.spawn(Worker, where=Process(python=str(shell)), name="w")
            assert f"interpreter '{shell}' exited with code" in str(caught.value)
            assert (tmp_path / "starts").read_text() == "again\n"

    asyncio.run(main())


class Odd(Message[int]):
    """Holds what no other process can read."""

    what: Any


def test_what_cannot_travel_is_refused_where_it_is_sent(warm: Warm):
    """The call itself raises, so that the traceback shows the author."""

    class Local(Actor):
        pass

    async def main(system: ActorSystem) -> None:
        async with ActorSystem("other") as other:
            ref = await system.spawn(Worker, where=Process())
            foreign = await other.spawn(Worker)
            with pytest.raises(InvalidArgument, match=r"Odd cannot be sent .*object is neither"):
                ref.ask(Odd(object()))
            with pytest.raises(InvalidArgument, match="holds more than plain elements"):
                ref.tell(Odd(np.array([object()])))
            with pytest.raises(InvalidArgument, match="belongs to another ActorSystem"):
                ref.stream(Odd(foreign))
            with pytest.raises(InvalidArgument, match="expected a Message, not int 3"):
                ref.ask(3)  # type: ignore[arg-type]
            with pytest.raises(InvalidArgument, match="timeout_s is -1"):
                ref.ask(Add(1, 2), timeout_s=-1)
            with pytest.raises(InvalidArgument, match="defined inside a function"):
                system.spawn(Local, where=Process())
            with pytest.raises(InvalidArgument, match="unexpected keyword argument 'stat'"):
                system.spawn(Worker, stat=3)
            with pytest.raises(InvalidArgument, match="cannot be sent to another process"):
                system.spawn(Worker, object(), where=Process())
            with pytest.raises(InvalidArgument, match="expected a class of actors"):
                system.spawn(Add)  # type: ignore[arg-type]
            with pytest.raises(InvalidArgument, match=r"expected Loop\(\)"):
                system.spawn(Worker, where=Process)  # type: ignore[arg-type]
            with pytest.raises(InvalidArgument, match="mailbox is 0"):
                system.spawn(Worker, mailbox=0)
            with pytest.raises(ConfigError, match="start_timeout_s is 0"):
                Process(start_timeout_s=0)

    warm(main)


def test_names_are_unique_among_siblings(warm: Warm):
    """A name that is taken is refused; one is made up for who has none."""

    async def main(system: ActorSystem) -> None:
        ref = await system.spawn(Worker)
        with pytest.raises(AlreadyExists, match=f"there is an actor '{ref.name}' here already"):
            await system.spawn(Worker, name=ref.name)
        assert (await system.spawn(Worker)).name not in ("", ref.name)
        with pytest.raises(InvalidArgument, match="cannot be named ''"):
            system.spawn(Worker, name="")

    warm(main)


def test_a_system_that_was_not_started_says_so():
    """Before, and after its end."""
    system = ActorSystem()
    with pytest.raises(Unavailable, match="was not started"):
        system.spawn(Worker)
    assert system.stats().actors == ()
    with pytest.raises(Unavailable, match="use `async with`"), system:
        pass
