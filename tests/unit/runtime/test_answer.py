# SPDX-License-Identifier: Apache-2.0
"""Answers and streams by themselves: one outcome, told to everybody who waits, wherever."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import weakref
from typing import Any

import pytest

from actorserve.errors import ActorDead, Cancelled, DeadlineExceeded
from actorserve.runtime.answer import Answer
from actorserve.runtime.stream import WINDOW, Stream
from actorserve.runtime.waiting import Waiting


class Owner:
    """What an answer belongs to; it blocks like a system's door."""

    def __init__(self) -> None:
        self.given_up_times = 0
        self.credit = 0

    @property
    def door(self) -> Owner:
        return self

    def describe(self) -> str:
        return "this"

    def given_up(self) -> None:
        self.given_up_times += 1

    def dropped(self) -> None:
        self.given_up()

    def granted(self, count: int) -> None:
        self.credit += count

    def block(self, waiting: Waiting, timeout_s: float | None) -> bool:
        return waiting.wait_in_thread(timeout_s)


@pytest.fixture(autouse=True)
def switch_often():
    """Let threads take turns far more often than they do by themselves."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def test_of_many_outcomes_exactly_one_is_given():
    """Eight threads settle, fail and cancel at once; a ninth waits and gets the winner's."""
    for _ in range(200):
        answer: Answer[int] = Answer(Owner())
        start = threading.Barrier(9)
        wins: list[object] = []

        def give(number: int, answer: Any = answer, start: Any = start, wins: Any = wins) -> None:
            start.wait()
            if number % 3 == 0:
                won = answer.settle(number)
            elif number % 3 == 1:
                won = answer.fail(ActorDead(str(number)))
            else:
                won = answer.cancel()
            if won:
                wins.append(number)

        threads = [threading.Thread(target=give, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        start.wait()
        try:
            outcome: object = answer.result(timeout_s=20)
        except ActorDead as error:
            outcome = int(error.message)
        except Cancelled:
            outcome = "cancelled"
        for thread in threads:
            thread.join()
        assert len(wins) == 1
        assert outcome in (wins[0], "cancelled" if wins[0] in (2, 5) else wins[0])


def test_everybody_who_waits_is_told():
    """Threads, tasks of this loop and of another one, for one answer."""
    answer: Answer[int] = Answer(Owner())
    found: list[int] = []
    ready = threading.Barrier(4)

    def in_thread() -> None:
        ready.wait()
        found.append(answer.result(timeout_s=20))

    async def in_loop() -> None:
        async def one() -> None:
            found.append(await answer)

        tasks = [asyncio.ensure_future(one()) for _ in range(3)]
        await asyncio.sleep(0)
        ready.wait()
        await asyncio.gather(*tasks)

    threads = [threading.Thread(target=in_thread), threading.Thread(target=in_thread)]
    threads.append(threading.Thread(target=lambda: asyncio.run(in_loop())))
    for thread in threads:
        thread.start()
    ready.wait()
    answer.settle(7)
    for thread in threads:
        thread.join()
    assert found == [7] * 5


def test_a_deadline_is_kept_by_whoever_waits():
    """In a thread and in a loop; what comes later is dropped, and the owner hears once."""
    from actorserve.clock import monotonic_s

    owner = Owner()
    answer: Answer[int] = Answer(owner, monotonic_s() + 0.01)
    with pytest.raises(DeadlineExceeded, match="this: no answer in time"):
        answer.result()
    assert not answer.settle(3)
    assert owner.given_up_times == 1
    again: Answer[int] = Answer(owner, monotonic_s() + 0.01)

    async def main() -> None:
        with pytest.raises(DeadlineExceeded):
            await again

    asyncio.run(main())
    assert owner.given_up_times == 2


def test_an_answer_that_is_there_is_not_waited_for():
    """Before, and again; an error is raised each time without growing its traceback."""
    answer: Answer[int] = Answer(Owner())
    answer.fail(ActorDead("gone"))
    depths = []
    for _ in range(3):
        with pytest.raises(ActorDead) as seen:
            answer.result()
        depths.append(len(list(seen.traceback)))
    assert depths[0] == depths[2]
    assert answer.has_failed()


def test_nothing_is_kept_alive_by_an_answer_that_is_over():
    """No cycle between an answer and its call: both go without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        owner = Owner()
        answer: Answer[int] = Answer(owner)
        owner.answer = answer  # type: ignore[attr-defined]
        answer.settle(3)
        watch = weakref.ref(owner)
        del owner, answer
        assert watch() is None
    finally:
        gc.enable()


def test_a_stream_grants_half_its_window_at_a_time():
    """Its sender starts with the window; more comes as the reader takes."""
    owner = Owner()
    stream: Stream[int] = Stream(owner)
    for number in range(WINDOW):
        stream.push(number)
    for number in range(WINDOW // 2 - 1):
        assert next(stream) == number
    assert owner.credit == 0
    next(stream)
    assert owner.credit == WINDOW // 2
    stream.finish()
    assert list(stream) == list(range(WINDOW // 2, WINDOW))
    assert list(stream) == []


def test_a_stream_raises_its_error_once_and_behind_its_items():
    """Then it is at its end."""
    stream: Stream[int] = Stream(Owner())
    stream.push(1)
    stream.fail(ActorDead("gone"))
    stream.push(2)
    assert next(stream) == 1
    with pytest.raises(ActorDead):
        next(stream)
    assert list(stream) == []


def test_a_stream_that_is_dropped_or_waits_too_long_is_given_up():
    """Its owner hears, once."""
    owner = Owner()
    stream: Stream[int] = Stream(owner, 0.01)
    with pytest.raises(DeadlineExceeded, match=r"this: no item in 0.01 s"):
        next(stream)
    del stream
    assert owner.given_up_times == 1
    stream = Stream(owner)
    del stream
    gc.collect()
    assert owner.given_up_times == 2

    async def main() -> None:
        stream: Stream[int] = Stream(owner)
        task = asyncio.ensure_future(read(stream))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert stream.is_over()

    async def read(stream: Stream[int]) -> None:
        async for _ in stream:
            pass

    asyncio.run(main())
    assert owner.given_up_times == 3


def test_a_stream_between_threads_loses_nothing():
    """A fast sender and a fast reader, item by item."""
    for _ in range(5):
        stream: Stream[int] = Stream(Owner())

        def send(stream: Stream[int] = stream) -> None:
            for number in range(2000):
                stream.push(number)
            stream.finish()

        thread = threading.Thread(target=send)
        thread.start()
        assert list(stream) == list(range(2000))
        thread.join()
