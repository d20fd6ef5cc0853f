# SPDX-License-Identifier: Apache-2.0
"""Clients that leave, overload, deadlines, reloads: one outcome each, and nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
from collections.abc import AsyncIterator

import numpy as np
import pytest

from actorserve.clock import monotonic_s
from actorserve.errors import (
    DeadlineExceeded,
    Unavailable,
)
from actorserve.frontend.http_server import HttpServer
from tests.faults.harness import Harness, write_model

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


# --- rows 65 and 66: clients that leave ----------------------------------------------------------


def test_row_65_a_cancelled_task_that_waits_is_never_executed(serve, repository, gate):
    """The queued request of a cancelled task is dropped; its memory is free at once."""
    write_model(repository, "model", WATCHFUL)

    async def test(harness: Harness) -> None:
        first = harness.submit("model", [-1.0])
        await harness.until(lambda: gate.executed() == [-1])
        waiting = [harness.submit("model", [float(n)] * 5000) for n in range(1, 4)]
        await harness.until(lambda: harness.scheduler("model").accepted == 4)
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
            await harness.until(lambda: harness.scheduler("model").accepted == 3)
            await leaver.hang_up() if way == "close" else leaver.reset()
            await harness.until(lambda: harness.scheduler("model").failed == 1)
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
            await harness.until(lambda: harness.scheduler("model").queued == 5)
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
        await harness.until(lambda: harness.scheduler("model").in_flight == 0)
        stats = harness.scheduler("model")
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
            await harness.until(lambda: harness.scheduler("model").in_flight == 0)
            assert front.stats().in_flight == 0
            assert [each.pid for each in harness.instances("model")] == pids
            assert (await (await send(address, post([1.0]))).reply())[0] == 200

    serve(test)
