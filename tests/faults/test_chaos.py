# SPDX-License-Identifier: Apache-2.0
"""Kills at random moments under load: each request has one outcome, and everything comes back.

The seed is printed, and ACTORSERVE_CHAOS_SEED sets it. `-m chaos` runs the long versions.
"""

from __future__ import annotations

import asyncio
import http.client
import os
import random
import signal
import statistics
import threading
from collections import Counter

import numpy as np
import pytest

from actorserve.clock import monotonic_s
from actorserve.errors import ActorserveError, Unavailable
from actorserve.triton.inference import InferRequest, InferResponse, InferTensor
from tests.conftest import wait_until
from tests.faults.harness import Harness, marked_processes, write_model
from tests.server.harness import Server, binary_body

SIZES = (1, 5_000, 262_144)
"""Elements of 4 bytes: 4 B travel in the frame, 20 KB and 1 MB by handle."""

TARGETS_S = {"stub": 0.05, "zygote": 0.5, "all": 0.5}
"""What the median should be on a quiet machine; ten times that is allowed."""

BUSY = """
class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.003)
        return answers(tensors(requests))
"""
"""Slow enough for most of its stubs to have a request when they die."""

LONG = [pytest.mark.chaos, pytest.mark.slow]


@pytest.fixture
def chance() -> random.Random:
    """Return the dice of this test."""
    seed = int(os.environ.get("ACTORSERVE_CHAOS_SEED", random.randrange(1 << 32)))
    print(f"ACTORSERVE_CHAOS_SEED={seed}")
    return random.Random(seed)


class Load:
    """Clients that ask two models until they are told to end, and hold every answer against it."""

    def __init__(self, harness: Harness) -> None:
        self._harness = harness
        self._is_over = False
        self._numbers = iter(range(1, 1 << 24))
        self.outcomes: Counter[str] = Counter()
        self._clients = [
            asyncio.ensure_future(client(model, size))
            for size in SIZES
            for model in ("one", "eight")
            for client in (self._embedded, self._at_the_door)
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

    async def _embedded(self, model: str, size: int) -> None:
        while not self._is_over:
            x = np.full(size, next(self._numbers), np.float32)
            try:
                assert np.array_equal(await self._harness.infer(model, x), x), "another's data"
                self.outcomes["answered"] += 1
            except ActorserveError as error:
                assert isinstance(error, Unavailable), error
                self.outcomes["failed"] += 1

    async def _at_the_door(self, model: str, size: int) -> None:
        """Ask as a front end does, and count what comes back for each request."""
        server = self._harness.server
        while not self._is_over:
            body = np.full(size, next(self._numbers), np.float32).tobytes()
            responses: list[InferResponse] = []
            came = asyncio.Event()

            def take(
                response: InferResponse, responses: list[InferResponse] = responses, came=came
            ) -> None:
                responses.append(response)
                came.set()

            slab = server.allocate(len(body))
            while slab is None:
                await server.grow(len(body))
                slab = server.allocate(len(body))
            slab.buffer[:] = body
            try:
                server.submit(
                    InferRequest(model, [InferTensor("INPUT0", "FP32", (size,), slab)]), take
                )
            except Unavailable:
                self.outcomes["refused"] += 1
                await asyncio.sleep(0)
                continue
            await asyncio.wait_for(came.wait(), 20)
            (response,) = responses
            assert response.final
            if response.error is None:
                assert bytes(response.outputs[0].data) == body, "another's data"  # type: ignore[arg-type]
                self.outcomes["answered"] += 1
            else:
                assert isinstance(response.error, Unavailable), response.error
                self.outcomes["failed"] += 1
            del response
            await asyncio.sleep(0)
            assert len(responses) == 1, "a second outcome"


class Killer:
    """Kills stubs, the zygote, or all of them, and takes the time until they are back."""

    def __init__(self, harness: Harness, chance: random.Random) -> None:
        self._harness = harness
        self._chance = chance
        self.times_s: dict[str, list[float]] = {kind: [] for kind in TARGETS_S}

    def _stubs(self) -> list[int]:
        models = self._harness.server.stats().models
        return [each.pid for m in models for v in m.versions for each in v.instances]

    async def kill(self, kind: str) -> None:
        """Kill after a random moment; returns when everybody is back."""
        harness = self._harness
        await harness.holds(lambda: True, self._chance.random() * 0.05)
        zygote, stubs = harness.zygote_pid, self._stubs()
        victims = {"stub": [self._chance.choice(stubs)], "zygote": [zygote]}
        victims["all"] = [*stubs, zygote]
        self._chance.shuffle(victims["all"])
        for pid in victims[kind]:
            os.kill(pid, signal.SIGKILL)
        started_s = monotonic_s()
        dead = set(victims[kind])

        def is_back() -> bool:
            pids = {harness.zygote_pid, *self._stubs()}
            return 0 not in pids and not pids & dead and harness.server.is_ready()

        await harness.until(is_back, 30)
        self.times_s[kind].append(monotonic_s() - started_s)


@pytest.mark.parametrize("count", [5, pytest.param(50, marks=LONG)])
def test_stubs_and_zygote_are_killed_at_random(serve, repository, chance, count):
    """Single stubs, the zygote, everybody: data is right, restarts are quick, nothing is left."""
    write_model(repository, "one")
    write_model(repository, "eight", BUSY, count=8)
    kinds = list(TARGETS_S) * count
    chance.shuffle(kinds)

    async def test(harness: Harness) -> None:
        load = Load(harness)
        killer = Killer(harness, chance)
        for kind in kinds:
            await killer.kill(kind)
            load.check()
        await load.end()
        print(dict(load.outcomes))
        assert load.outcomes["answered"] > 10 * len(kinds)
        for kind, times_s in killer.times_s.items():
            median_s = statistics.median(times_s)
            print(f"{kind}: median {median_s * 1e3:.0f} ms, most {max(times_s) * 1e3:.0f} ms")
            assert median_s < 10 * TARGETS_S[kind], times_s
        for each in harness.server.stats().models:
            counts = each.versions[0].scheduler
            assert counts.queued == counts.in_flight == 0
            assert counts.succeeded + counts.failed == counts.accepted

    serve(test)


# --- the supervisor itself ------------------------------------------------------------------------


class HttpLoad:
    """Threads that ask one server over HTTP until their connection ends."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.answered = 0
        self.problems: list[str] = []
        self._threads = [
            threading.Thread(target=self._ask, args=(number, size))
            for number, size in enumerate((*SIZES, *SIZES))
        ]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int, size: int) -> None:
        connection = http.client.HTTPConnection(self._server.host, self._server.port, timeout=20)
        turn = 0
        try:
            while True:
                turn += 1
                x = np.full(size, number * 1_000_000 + turn, np.float32)
                body, headers = binary_body({"INPUT0": ("FP32", x)})
                connection.request("POST", "/v2/models/one/infer", body, headers)
                response = connection.getresponse()
                data = response.read()
                if response.status != 200 or not data.endswith(x.tobytes()):
                    self.problems.append(f"{response.status}: {data[:200]!r}")
                    return
                self.answered += 1
        except TimeoutError as error:
            self.problems.append(f"a client was left waiting: {error}")
        except (OSError, http.client.HTTPException):
            return  # the connection ended, as it has to
        finally:
            connection.close()

    def join(self) -> None:
        """Wait until every client has seen the end."""
        for thread in self._threads:
            thread.join(25)
            assert not thread.is_alive()


@pytest.mark.slow
@pytest.mark.parametrize("count", [6, pytest.param(50, marks=pytest.mark.chaos)])
def test_the_supervisor_is_killed_at_random(start_server, repository, chance, count):
    """Every client's connection ends or answers, nobody is left, and a new start serves on."""
    write_model(repository, "one")
    answered = 0
    for _ in range(count):
        server = start_server(repository, "--restart-backoff-s", "0:0")
        load = HttpLoad(server)
        wait_until(lambda load=load: load.answered)
        threading.Event().wait(chance.random() * 0.2)
        server.process.kill()
        server.process.wait()
        load.join()
        assert load.problems == []
        wait_until(lambda: not marked_processes(), 5)
        answered += load.answered
    print(f"{answered} answers, {count} kills")
    server = start_server(repository)
    assert server.infer("one", {"INPUT0": ("FP32", [1], [1.0])}) == (200, {"OUTPUT0": [1.0]})
    assert server.stop() == 0
