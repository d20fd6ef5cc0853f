# SPDX-License-Identifier: Apache-2.0
"""Inference from within the process: `await server.infer(…)` on asyncio and on uvloop.

Each turn starts a server of its own, so that a lucky or unlucky placement of the processes on the
cores does not last for a whole row.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from actorserve import Supervisor
from benchmarks import floor, lanes, usage
from benchmarks.rows import LOOPS
from benchmarks.sampling import (
    OURS,
    CannotRun,
    Contender,
    Effort,
    Figures,
    Findings,
    take_turns,
)

MODELS = Path(__file__).with_name("models")
MODEL = "identity"
LARGE_BYTES = 16 << 20
LARGE_WARM_UP_S = 1.0
Array = npt.NDArray[np.float32]


def small(effort: Effort) -> Findings:
    """Measure inferences of 4 bytes, and beside them the round trip that each of them contains."""
    findings = Findings()
    contenders = [_contender(loop, _small_turn, effort) for loop in LOOPS]
    rows = tuple(f"infer-4b-1-{loop}" for loop in LOOPS)

    def round_trip() -> Figures:
        trip_us = lanes.lane_round_trip_us(effort.seconds)
        return dict.fromkeys(rows, trip_us)

    contenders.append(Contender("lane round trip", rows, round_trip))
    take_turns(findings, contenders, effort)
    return findings


def large(effort: Effort) -> Findings:
    """Measure inferences of 16 MiB, and beside them the one copy that each of them contains."""
    findings = Findings()
    contenders = [_contender(loop, _large_turn, effort) for loop in LOOPS]
    rows = tuple(row for contender in contenders for row in contender.rows)

    def copies() -> Figures:
        source, target = np.ones(LARGE_BYTES, np.uint8), np.ones(LARGE_BYTES, np.uint8)
        speed = floor.memcpy_gb_per_s(
            source.ctypes.data, [target.ctypes.data], LARGE_BYTES, effort.seconds
        )
        return dict.fromkeys(rows, speed * 1e9 / LARGE_BYTES)

    contenders.append(Contender("memcpy", rows, copies))
    take_turns(findings, contenders, effort)
    return findings


# --- one turn ------------------------------------------------------------------------------------

Measure = Callable[[Supervisor, str, Effort], Coroutine[Any, Any, Figures]]
ROWS = {
    "_small_turn": ("infer-4b-1", "infer-4b-8", "infer-4b-32", "infer-4b-cpu"),
    "_large_turn": ("infer-16m-1", "infer-16m-8"),
}


def _contender(loop: str, measure: Measure, effort: Effort) -> Contender:
    rows = tuple(f"{row}-{loop}" for row in ROWS[measure.__name__])
    return Contender(OURS, rows, partial(_turn, loop, measure, effort))


def _turn(loop: str, measure: Measure, effort: Effort) -> Figures:
    """Serve the model on a new loop of this kind, and measure."""

    async def serve() -> Figures:
        async with Supervisor(MODELS) as server:
            if server.failures:
                raise CannotRun(f"the model did not load: {server.failures}")
            return await measure(server, loop, effort)

    if loop == "asyncio":
        return asyncio.run(serve())
    try:
        import uvloop
    except ModuleNotFoundError:
        raise CannotRun("uvloop is not installed") from None
    figures: Figures = uvloop.run(serve())
    return figures


async def _small_turn(server: Supervisor, loop: str, effort: Effort) -> Figures:
    array = np.ones(1, np.float32)
    await _load(server, array, 8, 0.2)
    alone_us, _ = await _load(server, array, 1, effort.seconds)
    _, at_8 = await _load(server, array, 8, effort.seconds)
    stub = _stub_pid(server)
    before_s = (time.process_time(), usage.cpu_s(stub))
    start_s = time.monotonic()
    _, at_32 = await _load(server, array, 32, effort.seconds)
    requests = at_32 * (time.monotonic() - start_s)
    ours_us = (time.process_time() - before_s[0]) / requests * 1e6
    stubs_us = (usage.cpu_s(stub) - before_s[1]) / requests * 1e6
    return {
        f"infer-4b-1-{loop}": alone_us,
        f"infer-4b-8-{loop}": at_8,
        f"infer-4b-32-{loop}": at_32,
        f"infer-4b-cpu-{loop}": ours_us + stubs_us,
        (f"infer-4b-cpu-{loop}", "of it supervisor"): ours_us,
        (f"infer-4b-cpu-{loop}", "of it stub"): stubs_us,
    }


async def _large_turn(server: Supervisor, loop: str, effort: Effort) -> Figures:
    array = np.ones(LARGE_BYTES // 4, np.float32)
    await _load(server, array, 8, LARGE_WARM_UP_S)  # the arena grows and its pages get warm
    _, at_1 = await _load(server, array, 1, effort.seconds)
    _, at_8 = await _load(server, array, 8, effort.seconds)
    return {f"infer-16m-1-{loop}": at_1, f"infer-16m-8-{loop}": at_8}


async def _load(
    server: Supervisor, array: Array, outstanding: int, seconds: float
) -> tuple[float, float]:
    """Keep so many requests outstanding; return the median latency in µs and requests per s."""
    times_us: list[float] = []
    end_s = time.monotonic() + seconds

    async def client() -> None:
        while (start_s := time.monotonic()) < end_s:
            outputs = await server.infer(MODEL, {"INPUT0": array})
            times_us.append((time.monotonic() - start_s) * 1e6)
            if outputs["OUTPUT0"].size != array.size:
                raise ValueError("the answer is not the input")

    start_s = time.monotonic()
    await asyncio.gather(*[client() for _ in range(outstanding)])
    return statistics.median(times_us), len(times_us) / (time.monotonic() - start_s)


def _stub_pid(server: Supervisor) -> int:
    return server.stats().models[0].versions[0].instances[0].pid
