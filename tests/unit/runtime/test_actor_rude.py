# SPDX-License-Identifier: Apache-2.0
"""Actors and callers that do what nobody should: each gets a clear end, and nobody else does."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actorserve import (
    Actor,
    ActorDead,
    ActorDied,
    ActorStopped,
    ActorSystem,
    Loop,
    Process,
    ReceiveError,
    Restart,
    Thread,
)
from actorserve.errors import InternalError, InvalidArgument, NotFound
from actorserve.runtime.placement import Placement
from tests.unit.runtime.patience import until
from tests.unit.runtime.rude_actors import ERRORS, AsyncRude, Do, Give, Giver, Rude

Run = Callable[[Callable[[], Any]], Any]
Warm = Callable[[Callable[[ActorSystem], Any]], Any]
AT_ONCE = Restart(first_s=0.0, base_s=0.0, max_s=0.0, kind="transient")

PLACES = [Loop(restart=AT_ONCE), Thread(restart=AT_ONCE), Process(restart=AT_ONCE)]
place = pytest.mark.parametrize("where", PLACES, ids=["loop", "thread", "process"])
kind = pytest.mark.parametrize("actor", [Rude, AsyncRude], ids=["plain", "async"])
EXPECTED: dict[str, type[Exception]] = {
    "interrupt": ActorDied,
    "huge of ours": NotFound,
    "surrogate of ours": NotFound,
    "huge crash": ActorDied,
    "surrogate crash": ActorDied,
    "huge exit": ActorDied,
}


@place
@kind
def test_whatever_is_raised_is_an_answer(warm: Warm, actor: type[Actor], where: Placement):
    """However long, unreadable or base it is; a tell of it does no harm either."""

    async def main(system: ActorSystem) -> None:
        ref = await system.spawn(actor, where=where)
        for what in ERRORS:
            if what == "interrupt" and isinstance(where, Loop):
                continue  # in the loop of the main thread it is a Ctrl-C
            with pytest.raises(EXPECTED.get(what, ReceiveError)) as caught:
                await ref.ask(Do(what), timeout_s=20)
            if not isinstance(where, Loop | Thread) or not isinstance(caught.value, NotFound):
                assert len(str(caught.value)) < 20_000
            await ref.tell(Do(what))
            assert await ref.ask(Do("nothing"), timeout_s=20) == "well"

    warm(main)


@place
@pytest.mark.parametrize("error", ["huge", "surrogate", "strange", "huge of ours"])
def test_whatever_is_raised_at_the_start_is_the_reason(warm: Warm, where: Placement, error: str):
    """The spawn fails with it."""

    async def main(system: ActorSystem) -> None:
        with pytest.raises(ActorDead, match="did not start") as caught:
            await system.spawn(Rude, "init", error, where=where)
        assert len(str(caught.value)) < 20_000

    warm(main)


@pytest.mark.parametrize("what", ["huge", "huge of ours"])
def test_a_long_error_fits_into_the_control_lane(warm: Warm, what: str):
    """A thread of a process actor asks, and its answers come there."""

    async def main(system: ActorSystem) -> None:
        asker = await system.spawn(Rude, where=Process())
        other = await system.spawn(AsyncRude)
        said = await asker.ask(Do("ask_in_thread", other, what), timeout_s=30)
        assert said == [EXPECTED.get(what, ReceiveError).__name__]

    warm(main)


@kind
def test_an_interrupt_of_its_own_does_not_end_the_thread_of_a_system(actor: type[Actor]):
    """No Ctrl-C can strike there; the actor crashes like any other, and everybody goes on."""
    with ActorSystem.start() as system:
        ref = system.spawn(actor, where=Loop(restart=AT_ONCE)).result()
        with pytest.raises(ActorDied, match="KeyboardInterrupt: from within"):
            ref.ask(Do("interrupt")).result(timeout_s=20)
        assert ref.ask(Do("nothing")).result(timeout_s=20) == "well"
        with pytest.raises(ActorDead, match="did not start: KeyboardInterrupt"):
            system.spawn(actor, "init", "interrupt").result(timeout_s=20)
        assert ref.ask(Do("nothing")).result(timeout_s=20) == "well"


@pytest.mark.parametrize("hook", ["", "started"])
def test_a_message_that_is_cut_before_its_first_step_leaves_no_warning(
    run_plain: Run, recwarn: pytest.WarningsRecorder, hook: str
):
    """Its coroutine has been made, but nothing of it has run."""

    async def main() -> None:
        async with ActorSystem() as system:
            once = Loop(restart=Restart(kind="temporary"))
            starting = system.spawn(Slow, hook, where=once)
            if not hook:
                answer = (await starting).ask(Do("nothing"))
            while not (cells := list(system._core.cells.values())):
                await asyncio.sleep(0)
            while cells[0]._host is None or cells[0]._host._engine._unbegun is None:
                await asyncio.sleep(0)
            cells[0]._host.kill("told to")
            with pytest.raises(ActorDead, match="told to"):
                await (starting if hook else answer)

    run_plain(main)
    gc.collect()
    assert [str(warning.message) for warning in recwarn] == []


class Slow(Actor):
    """Never gets further than the first step."""

    def __init__(self, hook: str) -> None:
        if hook:
            self.started = self.wait  # type: ignore[method-assign]

    async def wait(self) -> None:
        await asyncio.sleep(1000)

    async def receive(self, message: Do) -> None:
        await self.wait()


# --- waiting for the wrong thing -----------------------------------------------------------------


ENDS = [
    *[(AsyncRude, where, whose) for where in PLACES for whose in ("self", "parent")],
    *[(Rude, where, "self") for where in PLACES[1:]],  # in the loop, plain functions do not wait
]


@pytest.mark.parametrize(("actor", "where", "whose"), ENDS)
def test_nobody_waits_for_an_end_that_waits_for_its_own(
    warm: Warm, actor: type[Actor], where: Placement, whose: str
):
    """It is told so, and the end comes all the same."""

    async def main(system: ActorSystem) -> None:
        ref = parent = await system.spawn(actor, where=where)
        if whose == "parent":
            ref = await parent.ask(Do("child"))
        with pytest.raises(InvalidArgument, match="cannot end while the message in hand waits"):
            await ref.ask(Do(f"stop_{whose}"), timeout_s=20)
        await asyncio.gather(as_coroutine(ref.stop()), as_coroutine(parent.stop()))
        with pytest.raises(ActorStopped):
            await parent.ask(Do("nothing"))

    warm(main)


@pytest.mark.parametrize("where", PLACES[:2], ids=["loop", "thread"])
def test_nobody_waits_for_the_end_of_the_system_it_is_in(run_plain: Run, where: Placement):
    """The system stops when the message has ended."""

    async def main() -> None:
        async with ActorSystem() as system:
            ref = await system.spawn(AsyncRude, where=where)
            with pytest.raises(InvalidArgument, match="do not wait for it here"):
                await ref.ask(Do("stop_system"), timeout_s=20)
            await system.stop()
            with pytest.raises(ActorStopped):
                await ref.ask(Do("nothing"))

    run_plain(main)


async def as_coroutine(answer: Any) -> Any:
    """Wait for an Answer."""
    return await answer


def test_a_closed_loop_has_no_actors_to_start_or_stop():
    """Whatever is ordered ends at once."""
    system = ActorSystem()

    async def start() -> Any:
        await system.__aenter__()
        return await system.spawn(AsyncRude)

    loop = asyncio.new_event_loop()
    ref = loop.run_until_complete(start())
    loop.close()

    async def main() -> None:
        assert await ref.stop() is None
        with pytest.raises(ActorStopped, match="loop of the actor system was closed"):
            await system.spawn(Rude)
        assert await system.stop() is None

    asyncio.run(main())
    with ActorSystem.start() as other:
        ref = other.spawn(Rude).result()
    assert ref.stop().result(timeout_s=20) is None


NONSENSE = [-1, float("nan"), float("-inf"), "1", "x", object()]
FOREVER = [float("inf"), 1e300, 1e12]


@place
def test_timeouts_are_checked_and_may_be_endless(warm: Warm, where: Placement):
    """The same words for each of them, wherever the actor lives."""

    async def main(system: ActorSystem) -> None:
        ref = await system.spawn(AsyncRude, where=where)
        for timeout_s in NONSENSE:
            for call in (ref.ask, ref.tell, ref.stream):
                with pytest.raises(InvalidArgument, match="timeout_s is .* expected seconds, 0 or"):
                    call(Do("nothing"), timeout_s=timeout_s)
            for stop in (ref.stop, system.stop):
                with pytest.raises(InvalidArgument, match="timeout_s is"):
                    stop(timeout_s=timeout_s)
            with pytest.raises(InvalidArgument, match="timeout_s is"):
                ref.ask(Do("nothing")).result(timeout_s)
        loop = asyncio.get_running_loop()
        for timeout_s in FOREVER:
            assert await ref.ask(Do("nothing"), timeout_s=timeout_s) == "well"
            await ref.tell(Do("nothing"), timeout_s=timeout_s)
            assert [item async for item in ref.stream(Do("nothing"), timeout_s=timeout_s)]
            answer = ref.ask(Do("nothing"))
            assert await loop.run_in_executor(None, answer.result, timeout_s) == "well"
        await ref.stop(timeout_s=float("inf"))

    warm(main)


@pytest.mark.parametrize("timeout_s", [None, float("inf")])
def test_a_system_may_drain_without_a_limit(run: Run, timeout_s: float | None):
    """Neither is a number that a clock could reach."""

    async def main() -> None:
        async with ActorSystem() as system:
            await system.spawn(AsyncRude)
            await system.stop(timeout_s=timeout_s)

    run(main)


# --- streams, answers, references ----------------------------------------------------------------


@place
def test_a_generator_that_waits_is_closed_when_its_reader_leaves(
    warm: Warm, where: Placement, tmp_path: Path
):
    """In the middle of its wait, once; what it does at its end is not disturbed."""

    async def main(system: ActorSystem) -> None:
        ref = await system.spawn(AsyncRude, where=where)
        for number in range(2):
            closed = tmp_path / str(number)
            async for _ in ref.stream(Do("wait_in_stream", path=str(closed))):
                break
            await until(closed.exists)
            assert await ref.ask(Do("nothing"), timeout_s=20) == "well"

    warm(main)


@place
def test_an_async_actor_may_return_the_answer_of_another(warm: Warm, where: Placement):
    """It is waited for, not handed over as it is."""

    async def main(system: ActorSystem) -> None:
        ref, other = await system.spawn(AsyncRude, where=where), await system.spawn(AsyncRude)
        assert await ref.ask(Do("hand_on", other), timeout_s=20) == "well"

    warm(main)


def test_a_stream_may_be_dropped_within_any_lock_of_ours(warm: Warm):
    """The garbage collector does, in the middle of whatever this thread is doing."""

    async def main(system: ActorSystem) -> None:
        ref = await system.spawn(AsyncRude, mailbox=1)
        mailbox = ref.target.mailbox
        streams = [ref.stream(Do("count")) for _ in range(3)]
        with mailbox._lock:
            streams.clear()
            gc.collect()
        assert await ref.ask(Do("nothing"), timeout_s=20) == "well"

    warm(main)


def test_a_stream_that_a_process_drops_ends(warm: Warm):
    """Its actor hears of it, and the one that it came from goes on."""

    async def main(system: ActorSystem) -> None:
        asker = await system.spawn(Rude, where=Process())
        other = await system.spawn(AsyncRude)
        host = other.target._host
        for _ in range(3):
            await asker.ask(Do("drop_stream", other), timeout_s=20)
        await until(lambda: not host._engine._streams)

    warm(main)


def test_a_reference_may_be_copied_but_not_pickled(warm: Warm):
    """A copy, deep or not, is the reference itself."""

    async def main(system: ActorSystem) -> None:
        ref = await system.spawn(AsyncRude)
        assert copy.copy(ref) is ref
        assert copy.deepcopy({"one": [ref]})["one"][0] is ref
        with pytest.raises(InvalidArgument, match="never pickled"):
            pickle.dumps(ref)

    warm(main)


# --- forks ---------------------------------------------------------------------------------------


@place
@kind
def test_a_fork_of_an_actor_that_exits_harms_nobody(
    warm: Warm, actor: type[Actor], where: Placement
):
    """It leaves with the code that it wanted; loop, rings and messages are its parent's."""

    async def main(system: ActorSystem) -> None:
        ref = await system.spawn(actor, where=where)
        assert await ref.ask(Do("fork_and_exit"), timeout_s=20) == 3
        assert await ref.ask(Do("nothing"), timeout_s=20) == "well"
        await ref.stop(timeout_s=20)

    warm(main)


@pytest.mark.parametrize("where", PLACES[1:], ids=["thread", "process"])
@kind
def test_a_fork_of_an_actor_that_returns_ends(warm: Warm, actor: type[Actor], where: Placement):
    """There is nothing for it to go on with."""

    async def main(system: ActorSystem) -> None:
        ref = await system.spawn(actor, where=where)
        assert await ref.ask(Do("fork_and_return"), timeout_s=20) == 0
        assert await ref.ask(Do("nothing"), timeout_s=20) == "well"
        await ref.stop(timeout_s=20)

    warm(main)


def test_a_reply_that_its_type_refuses_fails_only_its_ask(warm: Warm):
    """In the system and in another process; it is not the fault of the actor that gave it."""

    async def main(system: ActorSystem) -> None:
        giver = await system.spawn(Giver, where=Process(restart=AT_ONCE))
        between = await system.spawn(Giver, where=Process(restart=AT_ONCE))
        with pytest.raises(InternalError, match="-1 is negative"):
            await giver.ask(Give(-1), timeout_s=20)
        with pytest.raises(InternalError, match="-2 is negative"):
            async for _ in giver.stream(Give(-2)):
                pass
        with pytest.raises(NotFound, match="InternalError: .*-3 is negative"):
            await between.ask(Give(-3, giver), timeout_s=20)
        assert (await between.ask(Give(4, giver), timeout_s=20)).number == 4
        assert [each.restarts for each in system.stats().actors] == [0, 0]

    warm(main)
