# SPDX-License-Identifier: Apache-2.0
"""Clients that leave, overload, deadlines, reloads: one outcome each, and nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from actorserve.actors.model import ModelStats
from actorserve.actors.scheduler import SchedulerStats
from actorserve.clock import monotonic_s
from actorserve.errors import (
    ActorserveError,
    DeadlineExceeded,
    InternalError,
    NotFound,
    Unavailable,
)
from actorserve.frontend.http_server import HttpServer
from tests.faults.harness import Harness, marked_processes, write_model

WATCHFUL = """
class TritonPythonModel:
    def execute(self, requests):
        arrays = tensors(requests)
        with open(os.environ["BEGUN"], "a") as file:
            file.write(f"{int(arrays[0].flat[0])} ")
        if arrays[0].flat[0] < 0:
            while not (requests[0].is_cancelled() or os.path.exists(os.environ["GO"])):
                time.sleep(0.002)
            if requests[0].is_cancelled():
                open(os.environ["TOLD"], "w").close()
            arrays = [np.zeros(300_000, np.float32)]
        return answers(arrays)
"""
"""A negative request waits until it is cancelled or the file GO is there, and answers 1.2 MB."""


class Gate:
    """The files of WATCHFUL models."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go, self.told = (folder / name for name in ("BEGUN", "GO", "TOLD"))
        self.begun.touch()
        for path in (self.begun, self.go, self.told):
            monkeypatch.setenv(path.name, str(path))

    def executed(self) -> list[int]:
        """Return the first elements of what was executed, in order."""
        return [int(word) for word in self.begun.read_text().split()]


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Return the gate of this test's WATCHFUL models."""
    return Gate(tmp_path, monkeypatch)


@contextlib.asynccontextmanager
async def http(harness: Harness) -> AsyncIterator[tuple[HttpServer, tuple[str, int]]]:
    """Put an HTTP front end before the embedded server; yields it and its address."""
    sock = socket.create_server(("127.0.0.1", 0))
    sock.setblocking(False)
    front = HttpServer(harness.server, sockets=[sock])
    await front.start()
    try:
        yield front, sock.getsockname()
    finally:
        await front.stop()


def post(values: list[float], is_batched: bool = False) -> bytes:
    """Return an inference as bytes for a socket."""
    shape = [1, len(values)] if is_batched else [len(values)]
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": shape, "data": values}
    body = json.dumps({"inputs": [tensor]}).encode()
    head = f"POST /v2/models/model/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


async def send(address: tuple[str, int], data: bytes) -> Client:
    """Open a connection and send a request on it."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(data)
    await writer.drain()
    return Client(reader, writer)


class Client:
    """One HTTP connection with a request under way."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def reply(self) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body, and hang up."""
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        body = await self._reader.readexactly(int(headers.get("content-length", "0")))
        await self.hang_up()
        return int(first.split()[1]), headers, body

    async def hang_up(self) -> None:
        """Close the connection, whatever is under way."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    def reset(self) -> None:
        """Cut the connection with RST."""
        self._writer.transport.abort()


def model(harness: Harness) -> ModelStats:
    """Return how the model stands."""
    return next(each for each in harness.server.stats().models if each.name == "model")


def scheduler(harness: Harness) -> SchedulerStats:
    """Return the counts of the model's scheduler."""
    return model(harness).versions[0].scheduler


# --- rows 65 and 66: clients that leave ----------------------------------------------------------


def test_row_65_a_cancelled_task_that_waits_is_never_executed(serve, repository, gate):
    """The queued request of a cancelled task is dropped; its memory is free at once."""
    write_model(repository, "model", WATCHFUL)

    async def test(harness: Harness) -> None:
        first = harness.submit("model", [-1.0])
        await harness.until(lambda: gate.executed() == [-1])
        waiting = [harness.submit("model", [float(n)] * 5000) for n in range(1, 4)]
        await harness.until(lambda: scheduler(harness).accepted == 4)
        waiting[1].cancel()
        await asyncio.wait([waiting[1]])
        assert waiting[1].cancelled()
        gate.go.touch()
        assert (await first)[:1] == [0.0]
        assert await waiting[0] == [1.0] * 5000
        assert await waiting[2] == [3.0] * 5000
        assert 2 not in gate.executed()

    serve(test)


@pytest.mark.parametrize("way", ["close", "reset"])
def test_row_65_a_socket_that_closes_while_its_request_waits(serve, repository, gate, way):
    """The front end notices, and the request is dropped before it is executed."""
    write_model(repository, "model", WATCHFUL)

    async def test(harness: Harness) -> None:
        async with http(harness) as (front, address):
            first = harness.submit("model", [-1.0])
            await harness.until(lambda: gate.executed() == [-1])
            leaver = await send(address, post([2.0] * 2000))
            stayer = await send(address, post([3.0]))
            await harness.until(lambda: scheduler(harness).accepted == 3)
            await leaver.hang_up() if way == "close" else leaver.reset()
            await harness.until(lambda: scheduler(harness).failed == 1)
            gate.go.touch()
            assert (await stayer.reply())[0] == 200
            await first
            assert 2 not in gate.executed()
            assert front.stats().in_flight == 0
            assert front.stats().disconnects == 1

    serve(test)


def test_row_66_a_cancelled_task_that_is_executed_is_told(serve, repository, gate):
    """`is_cancelled()` turns true; what the model answers then is dropped and its memory free."""
    write_model(repository, "model", WATCHFUL)

    async def test(harness: Harness) -> None:
        task = harness.submit("model", [-1.0] * 100_000)
        await harness.until(lambda: gate.executed() == [-1])
        task.cancel()
        await harness.until(gate.told.exists)
        assert await harness.outcome("model", [1.0]) == [1.0]
        assert harness.instance("model").restarts == 0

    serve(test)


@pytest.mark.parametrize("way", ["close", "reset"])
def test_row_66_a_socket_that_closes_while_its_request_is_executed(serve, repository, gate, way):
    """The model is told within a second (ten are allowed), and the connection is forgotten."""
    write_model(repository, "model", WATCHFUL)

    async def test(harness: Harness) -> None:
        async with http(harness) as (front, address):
            leaver = await send(address, post([-1.0] * 2000))
            await harness.until(lambda: gate.executed() == [-1])
            await leaver.hang_up() if way == "close" else leaver.reset()
            await harness.until(gate.told.exists)
            await harness.until(lambda: front.stats().in_flight == 0)
            assert (await (await send(address, post([1.0]))).reply())[0] == 200
            await harness.until(lambda: front.stats().connections == 0)

    serve(test)


def test_row_66_a_deadline_of_the_client_ends_a_request_that_is_executed(serve, repository, gate):
    """`timeout_s` is kept whatever the model does; it is told, and its late answer is dropped."""
    write_model(repository, "model", WATCHFUL)

    async def test(harness: Harness) -> None:
        error = await harness.outcome("model", [-1.0], timeout_s=0.1)
        assert isinstance(error, DeadlineExceeded)
        await harness.until(gate.told.exists)
        assert await harness.outcome("model", [1.0]) == [1.0]

    serve(test)


# --- rows 70 and 71: too many, too late ----------------------------------------------------------

LIMITED = "dynamic_batching { default_queue_policy { max_queue_size: 5 } }"


def test_row_70_overload_is_refused_and_health_answers(serve, repository, gate):
    """Beyond the queue's limit: 503 with Retry-After; the accepted ones are all served."""
    write_model(repository, "model", WATCHFUL, max_batch=1, extra=LIMITED)

    async def test(harness: Harness) -> None:
        async with http(harness) as (_, address):
            data = post([-1.0], is_batched=True)
            first = await send(address, data)
            await harness.until(lambda: gate.executed() == [-1])
            clients = [await send(address, data) for _ in range(60)]
            await harness.until(lambda: scheduler(harness).queued == 5)
            started_s = monotonic_s()
            health = await send(address, b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await health.reply())[0] == 200
            assert monotonic_s() - started_s < 1.0
            replies = asyncio.gather(*[client.reply() for client in (first, *clients)])
            gate.go.touch()
            statuses = [status for status, _, _ in await replies]
            refused = [each for each in replies.result() if each[0] == 503]
            assert statuses.count(200) + len(refused) == 61
            assert 6 <= statuses.count(200) <= 12
            assert all(int(headers["retry-after"]) >= 1 for _, headers, _ in refused)
            assert all(b"maximum queue size" in body for _, _, body in refused)

    serve(test)


def test_row_71_a_queue_timeout_is_kept_while_a_long_batch_runs(serve, repository, gate):
    """Rejected when it is due, not when the instance is free."""
    policy = "dynamic_batching { default_queue_policy { default_timeout_microseconds: 200000 } }"
    write_model(repository, "model", WATCHFUL, max_batch=1, extra=policy)

    async def test(harness: Harness) -> None:
        first = harness.submit("model", [[-1.0]])
        await harness.until(lambda: gate.executed() == [-1])
        started_s = monotonic_s()
        waiting = [harness.submit("model", [[float(n)]]) for n in range(1, 6)]
        outcomes = await asyncio.wait_for(asyncio.gather(*waiting[1:]), 10)
        assert monotonic_s() - started_s < 2.0
        assert all(isinstance(each, Unavailable) for each in outcomes), outcomes
        assert all("timeout expired" in each.message for each in outcomes)
        assert not first.done()
        gate.go.touch()
        await first
        await waiting[0]
        assert set(gate.executed()) <= {-1, 1}

    serve(test)


def test_row_71_a_clients_timeout_is_kept_in_the_queue(serve, repository, gate):
    """The same for the deadline that a request brings along."""
    write_model(repository, "model", WATCHFUL)

    async def test(harness: Harness) -> None:
        first = harness.submit("model", [-1.0])
        await harness.until(lambda: gate.executed() == [-1])
        started_s = monotonic_s()
        error = await harness.outcome("model", [1.0], timeout_s=0.1)
        assert isinstance(error, DeadlineExceeded)
        assert monotonic_s() - started_s < 2.0
        gate.go.touch()
        await first
        assert await harness.outcome("model", [2.0]) == [2.0]
        assert gate.executed() == [-1, 2]

    serve(test)


# --- row 75: random timeouts ---------------------------------------------------------------------


def test_row_75_thousands_of_requests_with_random_timeouts(serve, repository):
    """Every gauge is zero afterwards, the stubs are the same, the next request is served."""
    write_model(repository, "model", count=2)
    chance = random.Random(75)

    async def test(harness: Harness) -> None:
        pids = [each.pid for each in harness.instances("model")]
        left = [2000]

        async def client(number: int) -> None:
            while left[0] > 0:
                left[0] -= 1
                x = np.full(chance.choice([1, 700, 3000, 40_000]), left[0], np.float32)
                got = await harness.outcome("model", x, timeout_s=chance.random() * 0.01)
                assert isinstance(got, DeadlineExceeded) or got == x.tolist()

        await asyncio.gather(*[client(number) for number in range(24)])
        await harness.until(lambda: scheduler(harness).in_flight == 0)
        stats = scheduler(harness)
        assert stats.queued == 0
        assert stats.succeeded + stats.failed == stats.accepted
        assert [each.pid for each in harness.instances("model")] == pids
        assert await harness.outcome("model", [1.0]) == [1.0]

    serve(test)


def test_row_75_hundreds_of_sockets_that_close_at_random(serve, repository):
    """The same from outside: connections that end before, while and after they are served."""
    write_model(repository, "model", count=2)
    chance = random.Random(75)

    async def test(harness: Harness) -> None:
        pids = [each.pid for each in harness.instances("model")]
        async with http(harness) as (front, address):

            async def client() -> None:
                data = post([1.0] * chance.choice([1, 2000]))
                cut = chance.choice([len(data), len(data), len(data) // 2, 20])
                one = await send(address, data[:cut])
                await asyncio.wait(
                    [asyncio.get_running_loop().create_future()], timeout=chance.random() * 0.01
                )
                await one.hang_up() if chance.random() < 0.5 else one.reset()

            for _ in range(20):
                await asyncio.gather(*[client() for _ in range(20)])
            await harness.until(lambda: front.stats().connections == 0)
            await harness.until(lambda: scheduler(harness).in_flight == 0)
            assert front.stats().in_flight == 0
            assert [each.pid for each in harness.instances("model")] == pids
            assert (await (await send(address, post([1.0]))).reply())[0] == 200

    serve(test)


# --- row 77: reloads -----------------------------------------------------------------------------

NUMBERED = """
NUMBER = float(open(os.environ["NUMBER"]).read())
class TritonPythonModel:
    def execute(self, requests):
        arrays = tensors(requests)
        if arrays[0][0] < 0:
            with open(os.environ["BEGUN"], "a") as file:
                file.write("-1 ")
            wait_for_file(os.environ["GO"])
        return answers([np.full_like(array, NUMBER) for array in arrays])
"""


@pytest.fixture
def number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file with the number that a NUMBERED model reads when it is loaded."""
    path = tmp_path / "NUMBER"
    path.write_text("1")
    monkeypatch.setenv("NUMBER", str(path))
    return path


def test_row_77_a_reload_fails_no_request(serve, repository, gate, number):
    """Requests go to the old version until the new one serves; none is lost in between."""
    write_model(repository, "model", NUMBERED, count=2)

    async def test(harness: Harness) -> None:
        is_over = False
        seen: list[float] = []

        async def client() -> None:
            while not is_over:
                seen.append((await harness.infer("model", [0.0] * 2000))[0])

        clients = [asyncio.ensure_future(client()) for _ in range(4)]
        for n in range(2, 5):
            number.write_text(str(n))
            await harness.server.load("model")
            count = len(seen)
            await harness.until(lambda count=count: len(seen) > count + 20)
            assert set(seen[count + 8 :]) == {float(n)}
        is_over = True
        await asyncio.gather(*clients)
        assert harness.server.is_ready()
        assert set(seen) == {1.0, 2.0, 3.0, 4.0}

    serve(test)


def test_row_77_requests_that_a_reload_finds_end_on_the_old_version(
    serve, repository, gate, number
):
    """Running and queued ones alike; then the old stub is gone."""
    write_model(repository, "model", NUMBERED)

    async def test(harness: Harness) -> None:
        old_pid = harness.instance("model").pid
        tasks = [harness.submit("model", [float(first)]) for first in (-1, 1, 2, 3, 4, 5)]
        await harness.until(lambda: gate.executed() == [-1])
        number.write_text("2")
        loading = asyncio.ensure_future(harness.server.load("model"))
        await harness.until(
            lambda: model(harness).state == "READY" and harness.instance("model").pid != old_pid
        )
        assert await harness.outcome("model", [3.0]) == [2.0]
        assert not tasks[0].done()
        gate.go.touch()
        assert await asyncio.gather(*tasks) == [[1.0]] * 6
        await loading
        assert not Path(f"/proc/{old_pid}").exists()

    serve(test)


def test_row_77_an_unload_lets_accepted_requests_end(serve, repository, gate, number):
    """What was accepted is answered, new ones are refused, and the index says so."""
    write_model(repository, "model", NUMBERED)

    async def test(harness: Harness) -> None:
        tasks = [harness.submit("model", [float(first)]) for first in (-1, 1, 2, 3)]
        await harness.until(lambda: gate.executed() == [-1])
        unloading = asyncio.ensure_future(harness.server.unload("model"))
        await harness.until(lambda: not harness.server.is_model_ready("model"))
        refused = await harness.outcome("model", [4.0])
        assert isinstance(refused, (Unavailable, NotFound))
        assert not unloading.done()
        gate.go.touch()
        assert await asyncio.gather(*tasks) == [[1.0]] * 4
        await unloading
        assert model(harness).state == "UNAVAILABLE"
        assert harness.server.is_ready(), "an unloaded model is not missing"

    serve(test)


def test_row_77_loads_and_unloads_at_the_same_time_end_in_one_of_both(
    serve, repository, gate, number
):
    """Ten of each at once: no hang, no second stub, and a last load serves."""
    write_model(repository, "model", NUMBERED)

    async def test(harness: Harness) -> None:
        work = []
        for _ in range(5):
            work += [harness.server.load("model"), harness.server.unload("model")]
        results = await asyncio.wait_for(asyncio.gather(*work, return_exceptions=True), 40)
        assert all(each is None or isinstance(each, ActorserveError) for each in results), results
        await harness.server.load("model")
        assert await harness.outcome("model", [1.0]) == [1.0]
        names = list(marked_processes().values())
        assert names.count("model_0_0") == 1, names

    serve(test)


# --- row 78: the race with a death ---------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 5000, 400_000])
def test_row_78_requests_that_race_with_a_death_have_one_outcome(serve, repository, size):
    """Sent in the very tick of the kill, before anybody knows: answered or failed, never lost."""
    write_model(repository, "model", count=2)

    async def test(harness: Harness) -> None:
        for turn in range(6):
            x = np.full(size, turn, np.float32)
            for each in harness.instances("model"):
                if each.pid:
                    os.kill(each.pid, signal.SIGKILL)
            got = await asyncio.gather(*[harness.outcome("model", x) for _ in range(6)])
            for each in got:
                assert isinstance(each, Unavailable) or each == x.tolist(), each
                assert not isinstance(each, InternalError)
            await harness.until(
                lambda: all(each.state == "RUNNING" for each in harness.instances("model"))
            )
        assert scheduler(harness).in_flight == 0

    serve(test)


@pytest.mark.parametrize("end", [signal.SIGCONT, signal.SIGKILL])
def test_row_8_requests_behind_a_full_ring_are_not_lost(serve, repository, end):
    """A stub that reads nothing, and more than its ring holds: it goes on, or its heir does it."""
    write_model(repository, "model")

    async def test(harness: Harness) -> None:
        for _ in range(100):  # quick work, so that much is sent ahead
            await harness.infer("model", [0.0])
        pid = harness.kill("model", signal.SIGSTOP)

        async def ask(number: int) -> float:
            outputs = await harness.server.infer(
                "model",
                {"INPUT0": np.full(1, number, np.float32)},
                parameters={"padding": "x" * 200_000},
                timeout_s=20,
            )
            return float(outputs["OUTPUT0"][0])

        tasks = [asyncio.ensure_future(ask(number)) for number in range(40)]
        await harness.until(lambda: harness.instance("model").outstanding_batches > 5)
        os.kill(pid, end)
        assert await asyncio.gather(*tasks) == list(range(40))
        assert (harness.instance("model").pid == pid) == (end == signal.SIGCONT)

    serve(test)


def test_row_8_a_stub_that_writes_more_than_its_ring_holds_waits(serve, repository, caplog):
    """Megabytes of log lines while the supervisor's loop stands still: all of them come."""
    body = """
class TritonPythonModel:
    def execute(self, requests):
        for number in range(3000):
            pb_utils.Logger.log_info(f"line {number} " + "x" * 1000)
        return answers(tensors(requests))
"""
    write_model(repository, "model", body)

    async def test(harness: Harness) -> None:
        task = harness.submit("model", [1.0])
        await asyncio.sleep(0)
        signal.sigtimedwait([], 0.3)  # the loop does not turn
        assert await task == [1.0]

    with caplog.at_level("INFO", "actorserve"):
        serve(test)
    lines = [each.getMessage().split()[1] for each in caplog.records if "xxx" in each.getMessage()]
    assert lines == [str(number) for number in range(3000)]
