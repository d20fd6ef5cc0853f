# SPDX-License-Identifier: Apache-2.0
"""Asks: how long an answer takes and how many there are in a second, beside the peers' answers.

Each turn starts an actor of its own, so that a lucky or unlucky placement of threads and processes
on the cores does not last for a whole row.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import partial
from typing import Any, TypeVar

from actorserve import ActorSystem, Answer, Loop, Process, Thread
from actorserve.runtime.placement import Placement
from benchmarks import actor_peers as peers
from benchmarks.actor_load import AskLoad, LoopAsk, ThreadAsk, load_from_loop, load_from_thread
from benchmarks.actor_rows import ask_rows
from benchmarks.sample_actors import Add, Adder
from benchmarks.sampling import OURS, Contender, Effort, Figures, Findings, take_turns

T = TypeVar("T")
TURN_LIMIT_S = 20.0
InLoop = Callable[[], AbstractAsyncContextManager[LoopAsk]]
InThread = Callable[[], AbstractContextManager[ThreadAsk]]


async def in_time(turn: Coroutine[Any, Any, T]) -> T:
    """Run a turn; one that hangs costs only its own contender."""
    return await asyncio.wait_for(turn, TURN_LIMIT_S)


def seconds_of(effort: Effort) -> float:
    """Return how long one figure takes: many are quick, for they are many."""
    return effort.seconds / 5 if effort.is_quick else effort.seconds / 2


# --- sections ------------------------------------------------------------------------------------


def in_loop(effort: Effort) -> Findings:
    """Ask an actor in the loop that asks."""
    return _from_loop(
        "loop",
        effort,
        {
            OURS: partial(_ours_from_loop, Loop()),
            peers.XOSCAR: partial(peers.xoscar_from_loop, is_process=False),
        },
    )


def in_thread(effort: Effort) -> Findings:
    """Ask an actor in a thread, from another thread."""
    return _from_thread(
        "thread",
        effort,
        {
            OURS: partial(_ours_from_thread, Thread()),
            peers.PYKKA: peers.pykka_from_thread,
            peers.THREAD_POOL: partial(peers.executor_from_thread, peers.THREAD_POOL),
        },
    )


def in_process(effort: Effort) -> Findings:
    """Ask an actor in a process, from a loop."""
    return _from_loop(
        "process",
        effort,
        {
            OURS: partial(_ours_from_loop, Process()),
            peers.XOSCAR: partial(peers.xoscar_from_loop, is_process=True),
            peers.PROCESS_POOL: partial(peers.executor_from_loop, peers.PROCESS_POOL),
        },
    )


def in_process_from_thread(effort: Effort) -> Findings:
    """Ask an actor in a process, from a thread."""
    return _from_thread(
        "process-sync",
        effort,
        {
            OURS: partial(_ours_from_thread, Process()),
            peers.PROCESS_POOL: partial(peers.executor_from_thread, peers.PROCESS_POOL),
        },
    )


# --- turns ---------------------------------------------------------------------------------------


def _from_loop(case: str, effort: Effort, who: dict[str, InLoop]) -> Findings:
    async def load(start: InLoop) -> AskLoad:
        async with start() as question:
            return await load_from_loop(question, seconds_of(effort))

    def turn(start: InLoop) -> Figures:
        return _figures(case, asyncio.run(in_time(load(start))))

    return _by_turns(case, effort, {label: partial(turn, start) for label, start in who.items()})


def _from_thread(case: str, effort: Effort, who: dict[str, InThread]) -> Findings:
    def turn(start: InThread) -> Figures:
        with start() as question:
            return _figures(case, load_from_thread(question, seconds_of(effort)))

    return _by_turns(case, effort, {label: partial(turn, start) for label, start in who.items()})


def _by_turns(case: str, effort: Effort, turns: dict[str, Callable[[], Figures]]) -> Findings:
    findings = Findings()
    rows = tuple(row.name for row in ask_rows(case))
    contenders = [Contender(label, rows, turn) for label, turn in turns.items()]
    take_turns(findings, contenders, effort)
    return findings


def _figures(case: str, load: AskLoad) -> Figures:
    values = (load.alone_p50_us, load.alone_p99_us, load.pipelined_per_s, load.senders_per_s)
    return {row.name: value for row, value in zip(ask_rows(case), values)}


# --- ours ----------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _ours_from_loop(where: Placement) -> AsyncIterator[LoopAsk]:
    async with ActorSystem() as system:
        adder = await system.spawn(Adder, where=where)

        def ask() -> Answer[int]:
            return adder.ask(Add(1, 2))

        yield LoopAsk(ask=ask, post=ask, expected=3)


@contextlib.contextmanager
def _ours_from_thread(where: Placement) -> Iterator[ThreadAsk]:
    with ActorSystem.start() as system:
        adder = system.spawn(Adder, where=where).result()
        yield ThreadAsk(post=lambda: adder.ask(Add(1, 2)), wait=Answer.result, expected=3)
