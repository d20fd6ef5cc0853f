# SPDX-License-Identifier: Apache-2.0
"""Tokens through the generation executor, beside the engine's bare loop and other roads.

    bare loop:   add ─► poll, in this process, nobody else
    executor:    loop ─► executor ─► rank's process ─► engine, and back to `async for`
    others:      the same engine and the same reader on the roads of generation_peers.py

The scripted engine costs next to nothing, so that its rows show the road alone; TinyGPT's show
what is left of a real model's speed. Every stream's tokens are counted.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from actorserve.actors.generation import ExecutorConfig, GenerationExecutor, SamplingParams
from actorserve.actors.generation.engine import GenRequest, Sampling
from actorserve.actors.generation.spec import EngineSpec
from benchmarks import generation_peers as peers
from benchmarks import usage
from benchmarks.generation_peers import EngineChoice, Tokens
from benchmarks.sampling import OURS, Contender, Effort, Figures, Findings, take_turns

STREAMS = (1, 32, 256)
MODEL_STREAMS = (1, 8, 32)
BARE = "bare loop"
SCRIPTED = EngineChoice("scripted", {})
TINYGPT = EngineChoice("tinygpt", {"slots": 32})
PROMPT = [1, 2, 3]
IDLE_S = 2.0
TURN_LIMIT_S = 60.0

Listen = Callable[[], Coroutine[Any, Any, int]]


def scripted(effort: Effort) -> Findings:
    """Measure the road: an engine that costs nothing."""
    findings = Findings()
    for streams in STREAMS:
        row = f"generation-{streams}"
        length = effort.pick(50, 200) if streams > 1 else effort.pick(500, 2000)
        rows = (row, f"{row}-cpu")
        turns: dict[str, Callable[[], Figures]] = {
            OURS: partial(_through_executor, SCRIPTED, streams, length, row),
            BARE: partial(_bare, SCRIPTED, streams, length, row),
        }
        for label, road in _roads(SCRIPTED).items():
            turns[label] = partial(_through_peer, road, streams, length, row)
        take_turns(findings, [Contender(who, rows, turn) for who, turn in turns.items()], effort)
    return findings


def tinygpt(effort: Effort) -> Findings:
    """Measure a real model, its matrix work included."""
    findings = Findings()
    length = effort.pick(20, 60)
    for streams in MODEL_STREAMS:
        row = f"generation-tinygpt-{streams}"
        rounds = max(1, MODEL_STREAMS[-1] // streams)  # a few tokens alone would measure nothing
        turns = {
            OURS: partial(_through_executor, TINYGPT, streams, length, row, rounds),
            BARE: partial(_bare, TINYGPT, streams, length, row, rounds),
        }
        take_turns(findings, [Contender(who, (row,), turn) for who, turn in turns.items()], effort)
    return findings


def submit(effort: Effort) -> Findings:
    """Measure how long a submit keeps its loop, and what an idle executor costs."""
    findings = Findings()
    rows = ("generation-submit-p50", "generation-submit-most", "generation-idle")
    take_turns(findings, [Contender(OURS, rows, partial(_submit_turn, effort))], effort)
    return findings


def _roads(choice: EngineChoice) -> dict[str, Callable[[], AbstractContextManager[Tokens]]]:
    return {
        peers.CONNECTION: partial(peers.connection, choice),
        peers.ZMQ: partial(peers.zmq_sockets, choice, is_batched=False),
        peers.ZMQ_BATCHED: partial(peers.zmq_sockets, choice, is_batched=True),
    }


# --- one turn ------------------------------------------------------------------------------------


def _bare(choice: EngineChoice, streams: int, length: int, row: str, rounds: int = 1) -> Figures:
    """Add and poll in this process."""
    engine = EngineSpec(choice.name, choice.options).make()
    engine.start(0, None)
    start_s = 0.0
    for turn in range(1 + rounds):
        if turn == 1:  # the first one warms up
            start_s = time.perf_counter()
        tokens = 0
        for number in range(streams):
            # Ids go on, as everywhere: those of earlier rounds are over.
            request_id = 1 + number + streams * turn
            engine.add(GenRequest(request_id, PROMPT, Sampling(max_tokens=length)))
        running = streams
        while running:
            for output in engine.poll(0.0):
                tokens += len(output.tokens)
                running -= output.final
        _check(tokens, streams, length)
    elapsed_s = time.perf_counter() - start_s
    engine.close()
    return {row: rounds * streams * length / elapsed_s}


def _through_executor(
    choice: EngineChoice, streams: int, length: int, row: str, rounds: int = 1
) -> Figures:
    """Stream through an executor with its engine in another process."""
    with _executor(choice) as executor:
        params = SamplingParams(max_tokens=length)

        async def listen() -> int:
            result = executor.generate_async(PROMPT, params, streaming=True)
            async for _ in result:
                pass
            return len(result.outputs[0].token_ids)

        return asyncio.run(_timed(listen, streams, length, row, rounds))


def _through_peer(
    road: Callable[[], AbstractContextManager[Tokens]], streams: int, length: int, row: str
) -> Figures:
    with road() as tokens:

        async def listen() -> int:
            counts: AsyncIterator[int] = tokens.stream(length)
            return sum([count async for count in counts])

        return asyncio.run(_timed(listen, streams, length, row))


async def _timed(listen: Listen, streams: int, length: int, row: str, rounds: int = 1) -> Figures:
    """Run so many streams at once, again and again; all but the first time counts."""
    pids = usage.tree_of(os.getpid())
    before_s = start_s = 0.0
    for turn in range(1 + rounds):
        if turn == 1:
            before_s = usage.cpu_of_all_s(pids)
            start_s = time.perf_counter()
        counts = await asyncio.wait_for(
            asyncio.gather(*[listen() for _ in range(streams)]), TURN_LIMIT_S
        )
        _check(sum(counts), streams, length)
    elapsed_s = time.perf_counter() - start_s
    tokens = rounds * streams * length
    cpu_us = (usage.cpu_of_all_s(pids) - before_s) / tokens * 1e6
    return {row: tokens / elapsed_s, f"{row}-cpu": cpu_us}


def _check(tokens: int, streams: int, length: int) -> None:
    if tokens != streams * length:
        raise ValueError(f"{tokens} tokens came, not {streams * length}")


def _submit_turn(effort: Effort) -> Figures:
    """Submit from a loop, under load, and then do nothing."""

    async def main(executor: GenerationExecutor) -> Figures:
        params = SamplingParams(max_tokens=20)
        took_s, results = [], []
        # A collection of all that the bench has imported takes 30 ms, and is no submit.
        gc.collect()
        gc.freeze()
        for _ in range(effort.pick(300, 2000)):
            start_s = time.perf_counter()
            results.append(executor.generate_async(PROMPT, params, streaming=True))
            took_s.append(time.perf_counter() - start_s)
            await asyncio.sleep(0)
        await asyncio.gather(*[result.aresult() for result in results])
        pids = usage.tree_of(os.getpid())
        before_s = usage.cpu_of_all_s(pids)
        await asyncio.sleep(IDLE_S)
        idle = (usage.cpu_of_all_s(pids) - before_s) / IDLE_S
        took_s.sort()
        return {
            "generation-submit-p50": took_s[len(took_s) // 2],
            "generation-submit-most": took_s[-1],
            "generation-idle": idle * 100,
        }

    with _executor(SCRIPTED) as executor:
        return asyncio.run(main(executor))


@contextmanager
def _executor(choice: EngineChoice) -> Any:
    spec = EngineSpec(choice.name, choice.options)
    # One thread of BLAS, as the bare loop has: see run.py's sections.
    config = ExecutorConfig(env={"OPENBLAS_NUM_THREADS": "1"})
    with GenerationExecutor.create(spec, config) as executor:
        yield executor
