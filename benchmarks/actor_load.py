# SPDX-License-Identifier: Apache-2.0
"""Drive whoever answers questions: one at a time, several outstanding, many senders.

The same loops drive our actors and the peers, from within an event loop and from plain threads.
Every answer is compared with what it should be.
"""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

OUTSTANDING = 32
TASKS = 32
THREADS = 8


class LoopAsk(msgspec.Struct, frozen=True):
    """A question of an event loop.

    `ask` is awaited at once. `post` returns something to await later, with the question under way:
    a coroutine that nobody awaits does nothing, so there it has to make a task.
    """

    ask: Callable[[], Awaitable[object]]
    post: Callable[[], Awaitable[object]]
    expected: object


class ThreadAsk(msgspec.Struct, frozen=True):
    """A question of a thread: `post` it, then `wait` for what that returned."""

    post: Callable[[], Any]
    wait: Callable[[Any], object]
    expected: object


class AskLoad(msgspec.Struct, frozen=True):
    """How the questions were answered, `alone` with one outstanding at a time."""

    alone_p50_us: float
    alone_p99_us: float
    pipelined_per_s: float
    senders_per_s: float


async def load_from_loop(question: LoopAsk, seconds: float) -> AskLoad:
    """Ask for so many seconds in each way, after a warm-up."""
    await _trips_us(question, seconds / 3)
    trips_us = await _trips_us(question, seconds)
    return AskLoad(
        alone_p50_us=statistics.median(trips_us),
        alone_p99_us=_p99(trips_us),
        pipelined_per_s=await pipeline_from_loop(question, OUTSTANDING, seconds),
        senders_per_s=await _tasks_per_s(question, seconds),
    )


def load_from_thread(question: ThreadAsk, seconds: float) -> AskLoad:
    """Ask for so many seconds in each way, after a warm-up."""
    _thread_trips_us(question, seconds / 3)
    trips_us = _thread_trips_us(question, seconds)
    return AskLoad(
        alone_p50_us=statistics.median(trips_us),
        alone_p99_us=_p99(trips_us),
        pipelined_per_s=pipeline_from_thread(question, OUTSTANDING, seconds),
        senders_per_s=_threads_per_s(question, seconds),
    )


async def pipeline_from_loop(question: LoopAsk, outstanding: int, seconds: float) -> float:
    """Let one task keep so many questions outstanding; return answers per second."""
    under_way: deque[Awaitable[object]] = deque()
    count = 0
    start_s = time.monotonic()
    end_s = start_s + seconds
    while time.monotonic() < end_s:
        under_way.append(question.post())
        if len(under_way) == outstanding:
            _check(question.expected, await under_way.popleft())
        count += 1
    while under_way:
        _check(question.expected, await under_way.popleft())
    return count / (time.monotonic() - start_s)


def pipeline_from_thread(question: ThreadAsk, outstanding: int, seconds: float) -> float:
    """Let one thread keep so many questions outstanding; return answers per second."""
    under_way: deque[Any] = deque()
    count = 0
    start_s = time.monotonic()
    end_s = start_s + seconds
    while time.monotonic() < end_s:
        under_way.append(question.post())
        if len(under_way) == outstanding:
            _check(question.expected, question.wait(under_way.popleft()))
        count += 1
    while under_way:
        _check(question.expected, question.wait(under_way.popleft()))
    return count / (time.monotonic() - start_s)


async def _trips_us(question: LoopAsk, seconds: float) -> list[float]:
    trips_us: list[float] = []
    end_s = time.monotonic() + seconds
    while (start_s := time.monotonic()) < end_s:
        _check(question.expected, await question.ask())
        trips_us.append((time.monotonic() - start_s) * 1e6)
    return trips_us


def _thread_trips_us(question: ThreadAsk, seconds: float) -> list[float]:
    trips_us: list[float] = []
    end_s = time.monotonic() + seconds
    while (start_s := time.monotonic()) < end_s:
        _check(question.expected, question.wait(question.post()))
        trips_us.append((time.monotonic() - start_s) * 1e6)
    return trips_us


async def _tasks_per_s(question: LoopAsk, seconds: float) -> float:
    """Let many tasks ask, each one question at a time; return answers per second."""
    start_s = time.monotonic()
    trips = await asyncio.gather(*[_trips_us(question, seconds) for _ in range(TASKS)])
    return sum(map(len, trips)) / (time.monotonic() - start_s)


def _threads_per_s(question: ThreadAsk, seconds: float) -> float:
    """Let many threads ask, each one question at a time; return answers per second."""
    counts: list[int] = []

    def send() -> None:
        counts.append(len(_thread_trips_us(question, seconds)))

    threads = [threading.Thread(target=send) for _ in range(THREADS)]
    start_s = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(counts) != THREADS:
        raise ValueError("a sender failed")
    return sum(counts) / (time.monotonic() - start_s)


def _p99(trips_us: list[float]) -> float:
    return sorted(trips_us)[len(trips_us) * 99 // 100]


def _check(expected: object, answer: object) -> None:
    if answer != expected:
        raise ValueError(f"an answer is {answer!r}, expected {expected!r}")
