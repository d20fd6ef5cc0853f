# SPDX-License-Identifier: Apache-2.0
"""Bounded mailboxes, order, many senders at once: exactly one outcome for each message."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actorserve import ActorStopped, ActorSystem, Full, Loop, Process, Thread
from actorserve.errors import ActorserveError, DeadlineExceeded
from actorserve.runtime.placement import Placement
from tests.unit.runtime.patience import until
from tests.unit.runtime.sample_actors import Add, Append, AsyncWorker, Block, Read, Worker

Warm = Callable[[Callable[[ActorSystem], Any]], Any]

place = pytest.mark.parametrize(
    "where", [Loop(), Thread(), Process()], ids=["loop", "thread", "process"]
)


@place
def test_a_full_mailbox_makes_senders_wait_or_refuses_them(
    warm: Warm, where: Placement, tmp_path: Path
):
    """The caller chooses: in line, in line until a deadline, or Full at once."""

    async def main(system: ActorSystem) -> None:
        gate = tmp_path / "gate"
        ref = await system.spawn(AsyncWorker, where=where, mailbox=2, name="small")
        blocked = ref.ask(Block(str(gate)))
        await until(Path(f"{gate}.begun").exists)
        await ref.tell(Append("1"))
        await ref.tell(Append("2"))
        with pytest.raises(Full, match=r"the mailbox of 'small' is full \(2\)"):
            ref.tell_nowait(Append("refused"))
        with pytest.raises(Full):
            await ref.ask_nowait(Add(1, 2))
        in_line = ref.tell(Append("3"))
        asked = ref.ask(Read())
        with pytest.raises(DeadlineExceeded, match="Append for 'small'"):
            await ref.tell(Append("too late"), timeout_s=0.05)
        assert not in_line.is_over()
        stats = system.stats().actors[0].mailbox
        assert stats.queued + stats.ahead == 2
        assert stats.in_line == 2
        gate.touch()
        assert await blocked == "done"
        await in_line
        assert await asked == ["started", "1", "2", "3"]

    warm(main)


@place
def test_whoever_waits_is_told_when_the_actor_stops(warm: Warm, where: Placement, tmp_path: Path):
    """Queued and in line: everybody gets the reason."""

    async def main(system: ActorSystem) -> None:
        gate = tmp_path / "gate"
        ref = await system.spawn(AsyncWorker, where=where, mailbox=3)
        blocked = ref.ask(Block(str(gate)))
        await until(Path(f"{gate}.begun").exists)
        asks = [ref.ask(Add(1, number)) for number in range(10)]
        tells = [ref.tell(Append("never")) for _ in range(3)]
        end = ref.stop(drain=False)
        for waiting in (*asks, *tells):
            with pytest.raises(ActorStopped):
                await waiting
        gate.touch()
        assert await blocked == "done"
        await end

    warm(main)


@place
def test_each_sender_is_heard_in_its_order(warm: Warm, where: Placement):
    """Four senders through a mailbox of two: nobody overtakes itself."""

    async def send(ref: Any, sender: int) -> None:
        for number in range(100):
            await ref.tell(Append(f"{sender}:{number}"))

    async def main(system: ActorSystem) -> None:
        ref = await system.spawn(Worker, where=where, mailbox=2)
        await asyncio.gather(*[send(ref, sender) for sender in range(4)])
        texts = await ref.ask(Read())
        for sender in range(4):
            own = [text for text in texts if text.startswith(f"{sender}:")]
            assert own == [f"{sender}:{number}" for number in range(100)]

    warm(main)


@pytest.mark.parametrize(
    ("where", "mailbox", "each"),
    [(Loop(), 20_000, 1000), (Thread(), 16, 1000), (Process(), 16, 1000), (Process(), 20_000, 200)],
    ids=["loop-20000", "thread-16", "process-16", "process-20000"],
)
def test_ten_thousand_asks_from_eight_threads_and_two_loops(
    where: Placement, mailbox: int, each: int
):
    """Each is answered, once and with its own answer, whoever asks from wherever."""
    outcomes: Counter[int] = Counter()
    wrong: list[object] = []

    def expect(number: int, answer: int) -> None:
        if answer != number + 1:
            wrong.append((number, answer))
        outcomes[number] += 1

    def ask_in_thread(ref: Any, numbers: range) -> None:
        try:
            window = []
            for number in numbers:
                window.append((number, ref.ask(Add(number, 1), timeout_s=50)))
                if len(window) == 32:
                    for sent, answer in window:
                        expect(sent, answer.result())
                    window = []
            for sent, answer in window:
                expect(sent, answer.result())
        except BaseException as error:
            wrong.append(error)

    async def ask_in_loop(ref: Any, numbers: range) -> None:
        async def one(number: int) -> None:
            expect(number, await ref.ask(Add(number, 1), timeout_s=50))

        for start in range(numbers.start, numbers.stop, 50):
            await asyncio.gather(*[one(number) for number in range(start, start + 50)])

    def loop_thread(ref: Any, numbers: range) -> None:
        try:
            asyncio.run(ask_in_loop(ref, numbers))
        except BaseException as error:
            wrong.append(error)

    with ActorSystem.start() as system:
        ref = system.spawn(Worker, where=where, mailbox=mailbox).result(timeout_s=30)
        threads = [
            threading.Thread(
                target=loop_thread if at >= 8 else ask_in_thread,
                args=(ref, range(at * each, at * each + each)),
            )
            for at in range(10)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert outcomes == Counter(range(10 * each))
        assert system.stats().actors[0].handled == 10 * each


@place
def test_the_system_ends_in_the_middle_and_answers_everybody(where: Placement):
    """Threads that go on asking while the system stops get an answer or the reason, each time."""
    outcomes: Counter[str] = Counter()
    begun = threading.Event()

    def ask(ref: Any) -> None:
        while not outcomes["refused"]:
            answers = [ref.ask(Add(1, 1), timeout_s=50) for _ in range(20)]
            for answer in answers:
                try:
                    assert answer.result() == 2
                    outcomes["answered"] += 1
                    begun.set()
                except ActorStopped:
                    outcomes["refused"] += 1
                except ActorserveError as error:
                    outcomes[repr(error)] += 1

    with ActorSystem.start() as system:
        ref = system.spawn(Worker, where=where).result(timeout_s=30)
        threads = [threading.Thread(target=ask, args=(ref,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        assert begun.wait(30)
        system.stop(drain=False).result(timeout_s=30)
    for thread in threads:
        thread.join()
    assert set(outcomes) == {"answered", "refused"}
