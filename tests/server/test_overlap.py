# SPDX-License-Identifier: Apache-2.0
"""Many executes and streams at one stub: how many at a time, and what becomes of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import Any

import numpy as np
import pytest

from actorserve import Supervisor
from actorserve.clock import monotonic_s
from actorserve.config import Settings
from actorserve.errors import DeadlineExceeded, Unavailable
from actorserve.triton.inference import InferRequest, InferTensor
from tests.server.calling_models import COUNT, ask, listen, serve, until, write
from tests.server.harness import parameter
from tests.server.script_models import Heard

NO_BACKOFF = {"restart_backoff_s": (0.0, 0.0)}

GATHER = """
def initialize(self, args):
    self.running = self.most = 0
    self.order = []

async def execute(self, requests):
    self.running += 1
    self.most = max(self.most, self.running)
    x = read(requests[0])
    await asyncio.sleep(float(x[0]))
    self.order.append(float(x[1]))
    self.running -= 1
    END
"""
PLAIN = GATHER.replace("END", "return [answer([self.most, *self.order])]")
STREAM = GATHER.replace(
    "END", "requests[0].get_response_sender().send(answer([self.most, *self.order]), FINAL)"
)

OPEN = """
def execute(self, requests):
    for request in requests:
        sender = request.get_response_sender()
        sender.send(answer([os.getpid()]))
        kept.append((request, sender))
# module level
kept = []
"""
"""Streams with one response and no end."""

ATTEMPTS = """
def execute(self, requests):
    for request in requests:
        sender = request.get_response_sender()
        x = read(request)
        if x[0] == 1:
            sender.send(answer([1]))
        with open(PATH, "a") as file:
            file.write("x")
        if os.path.getsize(PATH) < 2:
            os.kill(os.getpid(), signal.SIGKILL)
        sender.send(answer([2]), FINAL)
"""


def submit(server: Supervisor, model: str, *values: float) -> Heard:
    """Begin a stream that reads whatever comes."""
    heard = Heard(reads=True)
    data = np.array(values, np.float32)
    tensor = InferTensor("INPUT0", "FP32", data.shape, data.tobytes())
    heard.sent = server.submit(InferRequest(model, [tensor], takes_stream=True), heard.take)
    return heard


def pid_of(server: Supervisor, model: str) -> int:
    """Return the pid of a model's stub."""
    return {m.name: m.versions[0].instances[0].pid for m in server.stats().models}[model]


@pytest.mark.parametrize(
    ("body", "config", "most"),
    [
        (PLAIN, "", 1),
        (PLAIN, parameter("CONCURRENT_EXECUTES", 1), 1),
        (PLAIN, parameter("CONCURRENT_EXECUTES", 3), 3),
        (STREAM, "", 20),
        (STREAM, parameter("CONCURRENT_EXECUTES", 3), 3),
        (STREAM, parameter("CONCURRENT_EXECUTES", 1), 1),
    ],
)
def test_how_many_executes_run_at_a_time(repository, body, config, most):
    """A decoupled asynchronous model runs many, a plain one only if it says so."""
    write(repository, "model", body, decoupled=body is STREAM, config=config)

    async def test(server: Supervisor) -> None:
        heard = [submit(server, "model", 0.1, n) for n in range(20)]
        for each in heard:
            await asyncio.wait_for(each.ended.wait(), 30)
        values = [each.values[0] for each in heard]
        assert max(each[0] for each in values) == most
        assert {each[-1] for each in values} == set(range(20))

    serve(repository, test)


@pytest.mark.parametrize("body", [PLAIN, STREAM], ids=["plain", "decoupled"])
def test_one_at_a_time_keeps_the_order(repository, body):
    """However long each takes."""
    config = parameter("CONCURRENT_EXECUTES", 1)
    write(repository, "model", body, decoupled=body is STREAM, config=config)

    async def test(server: Supervisor) -> None:
        delays = [0.03, 0.0, 0.02, 0.0, 0.01, 0.0]
        heard = [submit(server, "model", delay, n) for n, delay in enumerate(delays)]
        for each in heard:
            await asyncio.wait_for(each.ended.wait(), 20)
        assert heard[-1].values[0][1:] == [0, 1, 2, 3, 4, 5]

    serve(repository, test)


def test_a_batch_that_takes_too_long_ends_alone_with_that_error(repository):
    """Those that began later lose their stub and say so; each has one end, the next works."""
    write(
        repository,
        "model",
        """
async def execute(self, requests):
    x = read(requests[0])
    await asyncio.sleep(float(x[0]))
    return [answer(x)]
""",
        config=parameter("CONCURRENT_EXECUTES", 8) + parameter("EXECUTE_TIMEOUT_S", 0.5),
    )

    async def test(server: Supervisor) -> None:
        first = submit(server, "model", 60)
        others = []
        while not first.ended.is_set():
            with contextlib.suppress(Unavailable):  # it was just ended
                others.append(submit(server, "model", 0.2))
            await asyncio.wait([asyncio.ensure_future(first.ended.wait())], timeout=0.05)
        for each in others:
            await asyncio.wait_for(each.ended.wait(), 20)
        (error,) = first.values
        assert isinstance(error, DeadlineExceeded)
        ends = [each.values for each in others]
        assert all(len(each) == 1 for each in ends)
        assert any(isinstance(each[0], float) for each in ends)
        assert all(isinstance(each[0], (float, Unavailable)) for each in ends), ends
        await until(server.is_ready)
        assert await ask(server, "model", 0) == [0]

    serve(repository, test, **NO_BACKOFF)


@pytest.mark.parametrize("is_async", [False, True])
def test_the_death_of_a_stub_ends_all_of_its_streams(repository, is_async):
    """A hundred that are open, each with one clear error; the next stub serves on."""
    body = OPEN.replace("def execute", "async def execute") if is_async else OPEN
    write(repository, "model", body, decoupled=True)

    async def test(server: Supervisor) -> None:
        heard = [submit(server, "model", n) for n in range(100)]
        for each in heard:
            await asyncio.wait_for(each.came.wait(), 20)
        os.kill(pid_of(server, "model"), signal.SIGKILL)
        for each in heard:
            await asyncio.wait_for(each.ended.wait(), 20)
            pid, error = each.values
            assert isinstance(error, Unavailable)
            assert "stub 'model_0' died while it had the request: killed by SIGKILL" in str(error)
        again = submit(server, "model", 1)
        await asyncio.wait_for(again.came.wait(), 20)
        assert again.values[0] != pid
        again.sent.disconnect()
        os.kill(pid_of(server, "model"), signal.SIGKILL)

    serve(repository, test, **NO_BACKOFF)


@pytest.mark.parametrize("has_delivered", [False, True])
def test_a_stream_is_tried_again_only_if_nothing_was_delivered(repository, tmp_path, has_delivered):
    """RETRY_ON_STUB_DEATH: else its client would get the first responses twice."""
    path = tmp_path / "attempts"
    body = ATTEMPTS.replace("PATH", repr(str(path)))
    write(repository, "model", body, decoupled=True, config=parameter("RETRY_ON_STUB_DEATH", 3))

    async def test(server: Supervisor) -> None:
        if has_delivered:
            heard = submit(server, "model", 1)
            await asyncio.wait_for(heard.ended.wait(), 20)
            one, error = heard.values
            assert one == 1
            assert isinstance(error, Unavailable)
            assert len(path.read_text()) == 1
        else:
            assert await listen(server, "model", 0) == [2]
            assert len(path.read_text()) == 2

    serve(repository, test, **NO_BACKOFF)


def test_what_a_dead_stub_had_not_begun_goes_to_the_next(repository):
    """Streams that were sent ahead, behind one whose execute kills the stub."""
    body = """
def execute(self, requests):
    for request in requests:
        x = read(request)
        if x[0] < 0:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        sender = request.get_response_sender()
        sender.send(answer(x))
        sender.send(flags=FINAL)
"""
    write(repository, "model", body, decoupled=True)

    async def test(server: Supervisor) -> None:
        for n in range(50):  # it learns that they are short
            assert await listen(server, "model", n) == [n]
        deadly = submit(server, "model", -1)
        heard = [submit(server, "model", n) for n in range(50)]
        for each in (deadly, *heard):
            await asyncio.wait_for(each.ended.wait(), 20)
        assert isinstance(deadly.values[0], Unavailable)
        assert [each.values for each in heard] == [[n, ""] for n in range(50)]

    serve(repository, test, **NO_BACKOFF)


@pytest.mark.parametrize("how", ["unload", "stop"])
def test_senders_that_are_kept_for_ever_hold_nothing_up(repository, how, tmp_path):
    """A model never ends its streams: unloading and stopping take their grace time, and no more."""
    write(repository, "model", OPEN, decoupled=True)
    write(repository, "count", COUNT, decoupled=True)
    settings = Settings(crash_dir=str(tmp_path / "crashes"), exit_timeout_s=0.5)

    async def main() -> None:
        async with Supervisor(repository, settings) as server:
            heard = [submit(server, "model", n) for n in range(10)]
            for each in heard:
                await asyncio.wait_for(each.came.wait(), 20)
            started_s = monotonic_s()
            if how == "unload":
                unloading = asyncio.ensure_future(server.unload("model"))
                assert await listen(server, "count", 3) == [0, 1, 2]
                for each in heard:
                    each.sent.disconnect()
                await asyncio.wait_for(unloading, 15)
            else:
                await server.stop(grace_s=0.5)
                ends: list[Any] = [each.values[-1] for each in heard]
                assert all(isinstance(each, Unavailable) for each in ends)
            assert monotonic_s() - started_s < 15

    asyncio.run(main())
