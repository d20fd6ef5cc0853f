# SPDX-License-Identifier: Apache-2.0
"""Models that call models, streams, and many streams at once, from within the process.

    calls:    requests ─► caller ─► identity, 1 or 8 times
    streams:  requests ─► count ─► responses
    fan_out:  requests ─► fan ─► count, 32 or 512 times at once

Every answer is checked: a call, a response or a stream that is missing is an error, not a rate.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from actorserve import Supervisor
from benchmarks import usage
from benchmarks.sampling import OURS, CannotRun, Contender, Effort, Figures, Findings, take_turns

MODELS = [Path(__file__).with_name("models"), Path(__file__).with_name("call_models")]
OUTSTANDING = 32
CALLS = (1, 8)
STREAMS = (1, 64)
STREAM_LENGTH = 1000
FANS = (32, 512)
FAN_LENGTH = 2
CALLERS = {"sync": "caller", "async": "caller_async"}

Measure = Callable[[Supervisor, Effort], Coroutine[Any, Any, Figures]]


def calls(effort: Effort) -> Findings:
    """Measure requests that make calls, one after the other and at once."""
    rows = [f"bls-{form}-{count}" for form in CALLERS for count in CALLS]
    return _section(effort, rows, _calls_turn)


def streams(effort: Effort) -> Findings:
    """Measure streamed responses, of one stream and of many at once."""
    return _section(effort, [f"stream-{count}" for count in STREAMS], _streams_turn)


def fan_out(effort: Effort) -> Findings:
    """Measure requests that open many streams at once."""
    return _section(effort, [f"fan-out-{count}" for count in FANS], _fans_turn)


def _section(effort: Effort, rows: list[str], measure: Measure) -> Findings:
    findings = Findings()
    turn = partial(_turn, measure, effort)
    with_cpu = (*rows, *[f"{row}-cpu" for row in rows])
    take_turns(findings, [Contender(OURS, with_cpu, turn)], effort)
    return findings


def _turn(measure: Measure, effort: Effort) -> Figures:
    """Serve the models on a new loop, and measure."""

    async def serve() -> Figures:
        async with Supervisor(MODELS) as server:
            if server.failures:
                raise CannotRun(f"a model did not load: {server.failures}")
            return await measure(server, effort)

    return asyncio.run(serve())


# --- one turn ------------------------------------------------------------------------------------


async def _calls_turn(server: Supervisor, effort: Effort) -> Figures:
    figures: dict[str | tuple[str, str], float] = {}
    for form, model in CALLERS.items():
        for count in CALLS:
            ask = partial(_ask, server, model, count, float(sum(range(count))))
            await _rate(ask, OUTSTANDING, 0.2)
            rate, cpu_us = await _rate(ask, OUTSTANDING, effort.seconds)
            row = f"bls-{form}-{count}"
            figures[row] = rate * count
            figures[f"{row}-cpu"] = cpu_us / count
    return figures


async def _streams_turn(server: Supervisor, effort: Effort) -> Figures:
    figures: dict[str | tuple[str, str], float] = {}
    for count in STREAMS:
        listen = partial(_listen, server)
        await _rate(listen, count, 0.2)
        rate, cpu_us = await _rate(listen, count, effort.seconds)
        figures[f"stream-{count}"] = rate * STREAM_LENGTH
        figures[f"stream-{count}-cpu"] = cpu_us / STREAM_LENGTH
    return figures


async def _fans_turn(server: Supervisor, effort: Effort) -> Figures:
    figures: dict[str | tuple[str, str], float] = {}
    for count in FANS:
        ask = partial(_ask, server, "fan", count, float(FAN_LENGTH * count))
        await _rate(ask, OUTSTANDING, 0.2)
        rate, cpu_us = await _rate(ask, OUTSTANDING, effort.seconds)
        figures[f"fan-out-{count}"] = rate
        figures[f"fan-out-{count}-cpu"] = cpu_us / count
    return figures


async def _ask(server: Supervisor, model: str, count: int, expected: float) -> None:
    outputs = await server.infer(model, {"N": np.array([count], np.int32)})
    if outputs["OUT"][0] != expected:
        raise ValueError(f"{model} answered {outputs['OUT'][0]}, not {expected}")


async def _listen(server: Supervisor) -> None:
    due = 0
    inputs = {"N": np.array([STREAM_LENGTH], np.int32)}
    async for outputs in server.stream("count", inputs):
        if outputs["OUT"][0] != due:
            raise ValueError(f"response {outputs['OUT'][0]} came, not {due}")
        due += 1
    if due != STREAM_LENGTH:
        raise ValueError(f"a stream ended after {due} responses")


async def _rate(
    ask: Callable[[], Awaitable[None]], outstanding: int, seconds: float
) -> tuple[float, float]:
    """Keep so many requests outstanding; return requests per s, and all CPU for one in µs."""
    done = 0
    start_s = time.monotonic()
    end_s = start_s + seconds
    pids = usage.tree_of(os.getpid())
    before_s = usage.cpu_of_all_s(pids)

    async def client() -> None:
        nonlocal done
        while True:
            await ask()
            done += 1
            if time.monotonic() >= end_s:
                return

    await asyncio.gather(*[client() for _ in range(outstanding)])
    rate = done / (time.monotonic() - start_s)
    return rate, (usage.cpu_of_all_s(pids) - before_s) / done * 1e6
