# SPDX-License-Identifier: Apache-2.0
"""The supervisor inside another program: loops, threads, streams, several at once."""

from __future__ import annotations

import asyncio
import concurrent.futures
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actorserve import Supervisor, SyncSupervisor
from actorserve.actors.sync_stream import SyncStream
from actorserve.config import Settings
from actorserve.errors import InvalidArgument, NotFound, Unavailable
from tests.conftest import wait_until
from tests.server.calling_models import DECOUPLED
from tests.server.harness import IDENTITY_CONFIG, write_model

EXAMPLES = Path(__file__).parents[2] / "examples" / "repository"
ONLY_ADD_SUB = Settings(model_control_mode="explicit", load_model=("add_sub",))
X = np.arange(4, dtype=np.float32)
INPUTS = {"INPUT0": X, "INPUT1": X}


def test_a_synchronous_app_serves_from_many_threads():
    """Eight threads share one server without asyncio."""
    with SyncSupervisor(EXAMPLES, ONLY_ADD_SUB) as server:
        assert server.is_ready() and server.failures == {}

        def ask(n: int) -> bool:
            x = np.full(4, n, np.float32)
            outputs = server.infer("add_sub", {"INPUT0": x, "INPUT1": x}, timeout_s=20)
            return bool(np.array_equal(outputs["OUTPUT0"], 2 * x))

        with ThreadPoolExecutor(8) as threads:
            assert all(threads.map(ask, range(200)))
        assert server.stats().models[0].versions[0].scheduler.succeeded == 200


def test_a_synchronous_server_is_stopped_twice_and_started_again():
    """stop() is idempotent, also before start(); a stopped server says so, and starts again."""
    server = SyncSupervisor(EXAMPLES, ONLY_ADD_SUB)
    server.stop()
    with pytest.raises(Unavailable, match="not running"):
        server.infer("add_sub", INPUTS)
    for _ in range(2):
        server.start()
        assert np.array_equal(server.infer("add_sub", INPUTS)["OUTPUT0"], 2 * X)
        server.stop()
        server.stop()


def test_errors_cross_the_thread():
    """A synchronous caller sees the same errors."""
    with SyncSupervisor(EXAMPLES, ONLY_ADD_SUB) as server, pytest.raises(NotFound, match="'nope'"):
        server.infer("nope", INPUTS)


def test_a_stream_of_a_plain_model_has_one_response():
    """stream() works for models that have one answer."""

    async def main() -> None:
        async with Supervisor(EXAMPLES, ONLY_ADD_SUB) as server:
            found = [each async for each in server.stream("add_sub", INPUTS)]
            assert len(found) == 1
            assert np.array_equal(found[0]["OUTPUT0"], 2 * X)

    asyncio.run(main())
    with SyncSupervisor(EXAMPLES, ONLY_ADD_SUB) as server:
        assert len(list(server.stream("add_sub", INPUTS))) == 1


def test_models_are_loaded_and_unloaded_by_the_app():
    """load() and unload() work while others serve."""
    with SyncSupervisor(EXAMPLES, ONLY_ADD_SUB) as server:
        server.load("async_double")
        x = np.array([21], np.int64)
        assert server.infer("async_double", {"INPUT": x})["OUTPUT"].tolist() == [42]
        server.unload("async_double")
        assert not server.is_model_ready("async_double")
        with pytest.raises(NotFound):
            server.infer("async_double", {"INPUT": x})
        assert server.is_model_ready("add_sub")


def test_two_servers_live_in_one_process_off_the_main_thread():
    """Each has its own loop, thread and zygote."""
    outcomes: list[object] = []

    def run() -> None:
        async def main() -> None:
            async with Supervisor(EXAMPLES, ONLY_ADD_SUB) as server:
                outputs = await server.infer("add_sub", INPUTS, timeout_s=20)
                outcomes.append(outputs["OUTPUT0"].tolist())

        asyncio.run(main())

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert outcomes == [[0, 2, 4, 6]] * 2


def test_uvloop_runs_it_too():
    """The server does not depend on the standard loop."""
    uvloop = pytest.importorskip("uvloop")

    async def main() -> None:
        async with Supervisor(EXAMPLES, ONLY_ADD_SUB) as server:
            outputs = await server.infer("add_sub", INPUTS)
            assert np.array_equal(outputs["OUTPUT1"], 0 * X)

    uvloop.run(main())


def test_a_copy_that_was_given_up_keeps_its_block_to_itself(monkeypatch):
    """The thread still writes; the next request must not get that memory before it is done."""
    is_begun, may_end = threading.Event(), threading.Event()
    copy = np.copyto

    def slow(target: np.ndarray, source: np.ndarray) -> None:
        is_begun.set()
        assert may_end.wait(20)
        copy(target, source)

    async def main() -> None:
        async with Supervisor(EXAMPLES, ONLY_ADD_SUB) as server:
            large = np.full(1 << 20, 7, np.float32)
            monkeypatch.setattr("actorserve.actors.embedding.np.copyto", slow)
            task = asyncio.ensure_future(server.infer("add_sub", {"INPUT0": large}))
            await asyncio.to_thread(is_begun.wait, 20)
            task.cancel()
            await asyncio.wait([task])
            other = server.allocate(large.nbytes)
            if other is None:
                await server.grow(large.nbytes)
                other = server.allocate(large.nbytes)
            other.buffer[:] = bytes(large.nbytes)
            may_end.set()
            while server.stats().exchange.held_blocks > 1:
                await asyncio.to_thread(lambda: None)
            assert not np.frombuffer(other.buffer, np.uint8).any()
            other.release()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_stream_that_the_collector_ends_in_the_loop_s_thread_blocks_nothing():
    """A generator in a cycle is closed wherever the collector happens to run."""
    with SyncSupervisor(EXAMPLES, ONLY_ADD_SUB) as server:
        stream = server.stream("add_sub", INPUTS)
        next(stream)
        asyncio.run_coroutine_threadsafe(_closed(stream), server._loop).result(20)
        assert np.array_equal(server.infer("add_sub", INPUTS)["OUTPUT0"], 2 * X)


async def _closed(stream: Any) -> None:
    stream.close()


def test_a_server_that_is_stopped_while_it_opens_does_not_serve():
    """Nobody would stop it afterwards."""

    async def main() -> None:
        server = Supervisor(EXAMPLES, ONLY_ADD_SUB)
        starting = asyncio.ensure_future(server.start())
        await asyncio.sleep(0)
        await server.stop()
        with pytest.raises(Unavailable, match="stopped before it had started"):
            await starting
        assert not server.is_live()
        async with server:
            assert server.is_ready()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("timeout_s", 0),
        ("timeout_s", -1.5),
        ("timeout_s", float("nan")),
        ("timeout_s", "3"),
        ("timeout_s", True),
        ("priority", -1),
        ("priority", 1 << 64),
        ("priority", 0.5),
    ],
)
def test_limits_that_cannot_be_meant_are_refused(argument, value):
    """By name, before anything is sent; infer and stream alike."""
    with SyncSupervisor(EXAMPLES, ONLY_ADD_SUB) as server:
        wanted = {argument: value}
        for attempt in (
            lambda: server.infer("add_sub", INPUTS, **wanted),
            lambda: list(server.stream("add_sub", INPUTS, **wanted)),
        ):
            with pytest.raises(InvalidArgument, match=f"^{argument}: expected .* got {value!r}"):
                attempt()
        limits = {"timeout_s": np.float32(20), "priority": 0}
        assert len(server.infer("add_sub", INPUTS, **limits)) == 2
        assert server.infer("add_sub", INPUTS, timeout_s=float("inf"))


ENDLESS = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            threading.Thread(target=self.run, args=(request, sender)).start()

    def run(self, request, sender):
        output = pb_utils.Tensor("OUTPUT0", np.ones(1, np.float32))
        sender.send(pb_utils.InferenceResponse([output]))
        while not request.is_cancelled():
            time.sleep(0.001)
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def test_an_interrupt_ends_a_stream_wherever_it_comes(tmp_path):
    """Ctrl-C while the next response is awaited, or while that begins: nothing else is raised."""
    write_model(tmp_path / "repository", "endless", ENDLESS, IDENTITY_CONFIG + DECOUPLED)
    settings = Settings(crash_dir=str(tmp_path / "crashes"))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with SyncSupervisor(tmp_path / "repository", settings) as server:
            for turn in range(30):
                stream = server.stream("endless", {"INPUT0": np.ones(1, np.float32)})
                assert next(stream)["OUTPUT0"].tolist() == [1]
                with pytest.raises(KeyboardInterrupt):
                    signal.setitimer(signal.ITIMER_REAL, 1e-6 + turn * 2e-5)
                    next(stream)
                    signal.pause()
                signal.setitimer(signal.ITIMER_REAL, 0)
            assert server.is_ready()

            def pending() -> int:
                scheduler = server.stats().models[0].versions[0].scheduler
                return scheduler.queued + scheduler.in_flight

            wait_until(lambda: pending() == 0)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_step_that_comes_after_the_loop_s_last_turn_does_not_wait_for_ever():
    """Nobody runs it any more: whoever closes the loop cancels it, and the reader hears of that."""
    loop = asyncio.new_event_loop()
    waits: set[Any] = set()
    server = SyncSupervisor(EXAMPLES, ONLY_ADD_SUB)
    stream = SyncStream(loop, server._server.stream("add_sub", INPUTS), waits)
    reader = ThreadPoolExecutor(1)
    step = reader.submit(stream.next)
    wait_until(lambda: waits)
    for each in list(waits):
        each.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        step.result(20)
    reader.shutdown()
    loop.close()
    assert not waits
