# SPDX-License-Identifier: Apache-2.0
"""Kills at random while models call each other: each request has one end, and nothing is left.

The seed is printed, and ACTORSERVE_CHAOS_SEED sets it. `-m chaos` runs the long version.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from actorserve.clock import monotonic_s
from actorserve.errors import ActorserveError, Unavailable
from actorserve.triton.inference import InferRequest, InferResponse, InferTensor
from tests.faults.harness import Harness, write_model

DECOUPLED = "model_transaction_policy { decoupled: true }"
SIZES = (1, 20_000)

CALLS = """
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

def call(model, array):
    return pb_utils.InferenceRequest(
        model_name=model, inputs=[pb_utils.Tensor("INPUT0", array)],
        requested_output_names=["OUTPUT0"])

def passed_on(responses):
    for response in responses:
        if response.has_error():
            return pb_utils.InferenceResponse(error=response.error())
    return pb_utils.InferenceResponse(
        [pb_utils.Tensor("OUTPUT0", responses[0].output_tensors()[0].as_numpy())])

class TritonPythonModel:
"""

LEAF = """
    def execute(self, requests):
        time.sleep(0.001)
        return answers(tensors(requests))
"""
COUNT = """
    def execute(self, requests):
        for request, x in zip(requests, tensors(requests)):
            threading.Thread(target=self.run, args=(request.get_response_sender(), x)).start()

    def run(self, sender, x):
        for _ in range(30):
            sender.send(answers([x])[0])
        sender.send(flags=FINAL)
"""
SYNC = """
    def execute(self, requests):
        out = []
        for x in tensors(requests):
            stream = call("count", x).exec(decoupled=True)
            first = next(stream)
            out.append(passed_on([call("leaf", x).exec(), first]))
        return out
"""
ASYNC = """
    async def execute(self, requests):
        out = []
        for x in tensors(requests):
            made = [call("leaf", x).async_exec() for _ in range(3)]
            made.append(call("sync", x).async_exec())
            out.append(passed_on(await asyncio.gather(*made)))
        return out
"""
STREAMS = """
    async def execute(self, requests):
        for request, x in zip(requests, tensors(requests)):
            sender = request.get_response_sender()
            answer = passed_on([await call("leaf", x).async_exec()])
            for _ in range(100):
                sender.send(answer)
            sender.send(flags=FINAL)
"""


def write_models(repository: Path) -> None:
    """Write models that call each other in every way."""
    head = "import asyncio\n" + CALLS
    write_model(repository, "leaf", head + LEAF, count=2)
    write_model(repository, "count", head + COUNT, extra=DECOUPLED)
    write_model(repository, "sync", head + SYNC, count=2)
    overlapping = 'parameters { key: "CONCURRENT_EXECUTES" value: { string_value: "16" } }'
    write_model(repository, "async", head + ASYNC, extra=overlapping)
    write_model(repository, "streams", head + STREAMS, extra=DECOUPLED)


class Load:
    """Clients that ask every model, leave some requests early, and hold each answer against it."""

    def __init__(self, harness: Harness, chance: random.Random) -> None:
        self._harness = harness
        self._chance = chance
        self._is_over = False
        self._numbers = iter(range(1, 1 << 24))
        self.outcomes: Counter[str] = Counter()
        self._clients = [
            asyncio.ensure_future(self._client(model, size))
            for size in SIZES
            for model in ("leaf", "sync", "async", "streams", "streams")
        ]

    async def end(self) -> None:
        """Let every client finish its last request."""
        self._is_over = True
        await asyncio.wait_for(asyncio.gather(*self._clients), 30)

    def check(self) -> None:
        """Raise what a client has found wrong so far."""
        for client in self._clients:
            if client.done():
                client.result()

    async def _client(self, model: str, size: int) -> None:
        while not self._is_over:
            x = np.full(size, next(self._numbers), np.float32)
            responses: list[InferResponse] = []
            ended = asyncio.Event()

            def take(response: InferResponse, responses=responses, ended=ended) -> None:
                responses.append(response)
                if response.final:
                    ended.set()

            tensor = InferTensor("INPUT0", "FP32", (size,), x.tobytes())
            try:
                sent = self._harness.server.submit(
                    InferRequest(model, [tensor], takes_stream=True), take
                )
            except Unavailable:
                self.outcomes["refused"] += 1
                await asyncio.sleep(0)
                continue
            if self._chance.random() < 0.1:
                await asyncio.sleep(self._chance.random() * 0.01)
                sent.disconnect()
                self.outcomes["left"] += 1
                continue
            sent.consumed(1 << 20)
            await asyncio.wait_for(ended.wait(), 20)
            self._judge(model, x, responses)
            responses.clear()
            await asyncio.sleep(0)

    def _judge(self, model: str, x: np.ndarray, responses: list[InferResponse]) -> None:
        assert [each.final for each in responses].count(True) == 1
        assert responses[-1].final
        for each in responses:
            if each.error is not None:
                # A callee's death, or a call that the death of its caller's request has ended.
                assert isinstance(each.error, ActorserveError)
                assert "died" in str(each.error) or isinstance(each.error, Unavailable), each.error
            elif not each.is_empty:
                assert bytes(each.outputs[0].data) == x.tobytes(), "another's data"  # type: ignore[arg-type]
        is_good = all(each.error is None for each in responses)
        assert not is_good or len(responses) == (101 if model == "streams" else 1)
        self.outcomes["answered" if is_good else "failed"] += 1


async def _kill(harness: Harness, chance: random.Random) -> None:
    """Kill somebody at a random moment; returns when everybody is back."""
    await harness.holds(lambda: True, chance.random() * 0.3)
    zygote = harness.zygote_pid
    stubs = [
        each.pid
        for model in harness.server.stats().models
        for version in model.versions
        for each in version.instances
        if each.pid
    ]
    victims = chance.choice([[zygote], [chance.choice(stubs)], chance.sample(stubs, 3)])
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    gone = set(victims)

    def is_back() -> bool:
        models = harness.server.stats().models
        pids = {each.pid for m in models for v in m.versions for each in v.instances}
        pids.add(harness.zygote_pid)
        return 0 not in pids and not pids & gone and harness.server.is_ready()

    await harness.until(is_back, 30)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [6, pytest.param(120, marks=pytest.mark.chaos)])
def test_callers_callees_and_the_zygote_are_killed_at_random(serve, repository, seconds):
    """Streams, nested and asynchronous calls go on; at the end no call and no block is left."""
    seed = int(os.environ.get("ACTORSERVE_CHAOS_SEED", random.randrange(1 << 32)))
    print(f"ACTORSERVE_CHAOS_SEED={seed}")
    chance = random.Random(seed)
    write_models(repository)

    async def test(harness: Harness) -> None:
        load = Load(harness, chance)
        kills = 0
        end_s = monotonic_s() + seconds
        while monotonic_s() < end_s:
            await _kill(harness, chance)
            kills += 1
            load.check()
        await load.end()
        print(f"{kills} kills, {dict(load.outcomes)}")
        assert load.outcomes["answered"] > 10 * kills
        await harness.until(lambda: not _in_flight(harness), 20)
        for _, _, instances in harness.server._all_instances():
            for each in instances:
                await harness.until(lambda each=each: each.calls is not None, 20)
                assert len(each.calls) == 0
                assert len(each._current.in_flight._requests) == 0
        await harness.until(lambda: harness.server.stats().exchange.held_blocks == 0, 20)
        descriptors = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(5):
            await _kill(harness, chance)
        await harness.until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= descriptors, 20)

    serve(test)


def _in_flight(harness: Harness) -> int:
    counts = [v.scheduler for m in harness.server.stats().models for v in m.versions]
    return sum(each.queued + each.in_flight for each in counts)
