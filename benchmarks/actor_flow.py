# SPDX-License-Identifier: Apache-2.0
"""What flows one way: tells to an actor, streams from it, large arrays to it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from actorserve import ActorSystem, Answer, Loop, Process, Thread
from actorserve.runtime.placement import Placement
from benchmarks import actor_peers as peers
from benchmarks import floor
from benchmarks.actor_load import LoopAsk, pipeline_from_loop
from benchmarks.actor_rows import ARRAY_WINDOWS
from benchmarks.actors import InLoop, in_time, seconds_of
from benchmarks.sample_actors import Add, Count, Counter, Ends, Looker, Source, Tally
from benchmarks.sampling import OURS, Contender, Effort, Figures, Findings, take_turns

STREAM_ITEMS = 500
ARRAY_BYTES = 16 << 20
ARRAY_WARM_UP_S = 0.3
PLACES: dict[str, Placement] = {"loop": Loop(), "thread": Thread(), "process": Process()}

Rate = Callable[[float], Coroutine[Any, Any, float]]
"""Given how long, return how many per second."""


# --- tells ---------------------------------------------------------------------------------------


def tells(effort: Effort) -> Findings:
    """Tell from a loop as fast as it goes; a rate counts what has been received, not only sent."""
    contenders = [
        _contender(OURS, f"actors-tell-{place}", partial(_tells_per_s, where), effort)
        for place, where in PLACES.items()
    ]
    contenders += [
        _contender(peers.XOSCAR, "actors-tell-loop", _xoscar_tells, effort),
        _contender(peers.PYKKA, "actors-tell-thread", _pykka_tells, effort),
        _contender(
            peers.XOSCAR, "actors-tell-process", partial(_xoscar_tells, is_process=True), effort
        ),
    ]
    return _measured(contenders, effort)


async def _tells_per_s(where: Placement, seconds: float) -> float:
    async with ActorSystem() as system:
        counter = await system.spawn(Counter, where=where)
        start_s = time.monotonic()
        while time.monotonic() < start_s + seconds:
            await counter.tell(Add(1, 2))
        seen = await counter.ask(Tally())
        return seen / (time.monotonic() - start_s)


async def _xoscar_tells(seconds: float, *, is_process: bool = False) -> float:
    async with peers.xoscar_actor(is_process=is_process) as actor:
        start_s = time.monotonic()
        while time.monotonic() < start_s + seconds:
            await actor.note.tell(1, 2)
        seen = await actor.tally()
        return float(seen / (time.monotonic() - start_s))


async def _pykka_tells(seconds: float) -> float:
    with peers.pykka_actor() as actor:
        start_s = time.monotonic()
        while time.monotonic() < start_s + seconds:
            actor.tell(Add(1, 2))
        return float(actor.ask(Tally()) / (time.monotonic() - start_s))


# --- streams -------------------------------------------------------------------------------------


def streams(effort: Effort) -> Findings:
    """Read streams of some hundred items each, one after the other, in a loop."""
    contenders = [
        _contender(OURS, f"actors-stream-{place}", partial(_items_per_s, where), effort)
        for place, where in PLACES.items()
    ]
    contenders += [
        _contender(peers.XOSCAR, "actors-stream-loop", _xoscar_items, effort),
        _contender(
            peers.XOSCAR, "actors-stream-process", partial(_xoscar_items, is_process=True), effort
        ),
    ]
    return _measured(contenders, effort)


async def _items_per_s(where: Placement, seconds: float) -> float:
    async with ActorSystem() as system:
        source = await system.spawn(Source, where=where)
        items = 0
        start_s = time.monotonic()
        while time.monotonic() < start_s + seconds:
            async for _ in source.stream(Count(STREAM_ITEMS)):
                items += 1
        return items / (time.monotonic() - start_s)


async def _xoscar_items(seconds: float, *, is_process: bool = False) -> float:
    async with peers.xoscar_actor(is_process=is_process) as actor:
        items = 0
        start_s = time.monotonic()
        while time.monotonic() < start_s + seconds:
            async for _ in await actor.count(STREAM_ITEMS):
                items += 1
        return items / (time.monotonic() - start_s)


# --- arrays --------------------------------------------------------------------------------------


def arrays(effort: Effort) -> Findings:
    """Ask a process about arrays of 16 MiB, beside a bare copy of the same bytes."""
    array = np.ones(ARRAY_BYTES // 4, np.float32)
    rows = tuple(f"actors-array-{window}" for window in ARRAY_WINDOWS)
    who: dict[str, InLoop] = {
        OURS: partial(_looker, array),
        peers.XOSCAR: partial(peers.xoscar_with_arrays, array),
        peers.PROCESS_POOL: partial(peers.executor_with_arrays, array),
    }

    def turn(start: InLoop) -> Figures:
        speeds = asyncio.run(in_time(_gb_per_s(start, seconds_of(effort))))
        return dict(zip(rows, speeds))

    def copies() -> Figures:
        target = np.ones_like(array)
        addresses = [target.ctypes.data]
        speed = floor.memcpy_gb_per_s(array.ctypes.data, addresses, ARRAY_BYTES, seconds_of(effort))
        return dict.fromkeys(rows, speed)

    contenders = [Contender(label, rows, partial(turn, start)) for label, start in who.items()]
    contenders.insert(1, Contender("memcpy", rows, copies))
    return _measured(contenders, effort)


async def _gb_per_s(start: InLoop, seconds: float) -> list[float]:
    """Return the speed for each number of outstanding asks, after a warm-up of the memory."""
    async with start() as question:
        await pipeline_from_loop(question, max(ARRAY_WINDOWS), ARRAY_WARM_UP_S)
        rates = [await pipeline_from_loop(question, window, seconds) for window in ARRAY_WINDOWS]
    return [rate * ARRAY_BYTES / 1e9 for rate in rates]


@contextlib.asynccontextmanager
async def _looker(array: npt.NDArray[np.float32]) -> AsyncIterator[LoopAsk]:
    async with ActorSystem() as system:
        looker = await system.spawn(Looker, where=Process())

        def ask() -> Answer[float]:
            return looker.ask(Ends(array))

        yield LoopAsk(ask=ask, post=ask, expected=peers.ENDS)


# --- turns ---------------------------------------------------------------------------------------


def _contender(label: str, row: str, rate: Rate, effort: Effort) -> Contender:
    def turn() -> Figures:
        return {row: asyncio.run(in_time(rate(seconds_of(effort))))}

    return Contender(label, (row,), turn)


def _measured(contenders: list[Contender], effort: Effort) -> Findings:
    findings = Findings()
    take_turns(findings, contenders, effort)
    return findings
