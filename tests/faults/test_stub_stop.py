# SPDX-License-Identifier: Apache-2.0
"""A model or a server is stopped while a stub starts, dies or waits for its restart."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from actorserve import Supervisor
from actorserve.config import Settings
from actorserve.errors import Unavailable
from tests.conftest import wait_until
from tests.faults.harness import (
    PLACES,
    Harness,
    parameter,
    stub_pids,
    write_model,
    write_noting_model,
)


def test_row_33_a_stub_that_dies_while_it_is_restarted_counts_once(serve, repository):
    """Each new stub is killed as soon as it has a pid; then it is left alone and serves."""
    write_model(repository, "model")

    async def test(harness: Harness) -> None:
        killed: set[int] = set()
        for _ in range(4):
            await harness.until(lambda: harness.instance("model").pid not in {0, *killed})
            killed.add(harness.kill("model"))
        await harness.until(
            lambda: (
                harness.instance("model").state == "RUNNING"
                and harness.instance("model").pid not in killed
            )
        )
        assert len(killed) == 4
        assert harness.instance("model").restarts == 4
        assert await harness.outcome("model", [1.0]) == [1.0]

    serve(test)


def test_row_33_a_stub_that_dies_while_it_is_unloaded_stays_gone(serve, repository, notes):
    """SIGKILL in finalize ends the unload, and nothing is started again."""
    body = """
class TritonPythonModel:
    def initialize(self, args):
        note()
    def execute(self, requests):
        return answers(tensors(requests))
    def finalize(self):
        note()
        threading.Event().wait()
"""
    write_noting_model(repository, body)

    async def test(harness: Harness) -> None:
        unloading = asyncio.ensure_future(harness.server.unload("model"))
        await harness.until(lambda: notes.stat().st_size == 2)
        harness.kill("model")
        await asyncio.wait_for(unloading, 10)
        assert harness.instance("model").state == "STOPPED"
        assert harness.instance("model").restarts == 0
        assert stub_pids() == [harness.instance("bystander").pid]
        await harness.server.load("model")
        assert await harness.outcome("model", [1.0]) == [1.0]
        unloading = asyncio.ensure_future(harness.server.unload("model"))
        await harness.until(lambda: notes.stat().st_size == 4)
        harness.kill("model")
        await unloading

    serve(test, auto_complete_config=False)


def test_row_34_a_model_that_is_stopped_in_backoff_stays_stopped(serve, repository):
    """Unload during the pause before a restart: no restart comes."""
    write_model(repository, "model")

    async def test(harness: Harness) -> None:
        harness.kill("model")
        await harness.until(lambda: harness.instance("model").state == "BACKOFF")
        error = await harness.outcome("model", [1.0])
        assert error == [1.0] or isinstance(error, Unavailable)
        if isinstance(error, Unavailable):
            assert "SIGKILL" in error.message
            assert error.retry_after_s is not None
        await asyncio.wait_for(harness.server.unload("model"), 5)
        assert harness.instance("model").state == "STOPPED"
        assert await harness.holds(lambda: harness.instance("model").state == "STOPPED", 0.5)
        assert stub_pids() == [harness.instance("bystander").pid]

    serve(test, restart_backoff_s=(1.5, 1.5))


@pytest.mark.parametrize("moment", ["spawning", "starting", "hung"])
def test_row_34_an_instance_that_is_stopped_while_it_starts_stays_stopped(
    serve, repository, notes, moment
):
    """Unload while a spawn is pending, during initialize, or while a hung stub is aborted."""
    body = """
class TritonPythonModel:
    def initialize(self, args):
        note()
        if os.path.getsize(os.environ["NOTES"]) > 1:
            ctypes.PyDLL(None).sleep(100)
    def execute(self, requests):
        return answers(tensors(requests))
"""
    # C code that holds the interpreter keeps SIGABRT's dump waiting for as long as it can.
    write_noting_model(repository, body, extra=parameter("INITIALIZE_TIMEOUT_S", 0.3))

    async def test(harness: Harness) -> None:
        zygote = harness.zygote_pid
        if moment == "spawning":
            os.kill(zygote, signal.SIGSTOP)
        pid = harness.kill("model")
        await harness.until(lambda: harness.instance("model").state == "STARTING")
        if moment == "starting":
            await harness.until(lambda: notes.stat().st_size == 2)
        elif moment == "hung":
            await harness.until(lambda: "timed out" in harness.instance("model").reason)
        await asyncio.wait_for(harness.server.unload("model"), 10)
        assert harness.instance("model").state == "STOPPED"
        assert await harness.holds(lambda: harness.instance("model").state == "STOPPED", 0.3)
        assert pid not in stub_pids()
        assert stub_pids() == [harness.instance("bystander").pid]

    serve(test, auto_complete_config=False)


@pytest.mark.parametrize("place", ["importing", "initializing", "completing the configuration"])
def test_row_46_a_server_that_is_stopped_while_it_starts_stops(repository, tmp_path, notes, place):
    """`stop` during `start` ends both soon, and no stub is left."""
    write_noting_model(repository, PLACES[place].format(code="threading.Event().wait()"))
    is_asked = place.startswith("completing")
    settings = Settings(auto_complete_config=is_asked, crash_dir=str(tmp_path))

    async def main() -> None:
        server = Supervisor(repository, settings)
        starting = asyncio.ensure_future(server.start())
        await Harness(server).until(lambda: notes.stat().st_size)
        await asyncio.wait_for(server.stop(grace_s=5), 10)
        assert not server.is_ready()
        with pytest.raises(Unavailable):
            await asyncio.wait_for(starting, 5)

    asyncio.run(main())


def test_row_46_a_load_that_is_unloaded_ends(serve, repository, notes):
    """Unload during a load: the load ends with an error, and can be tried again."""
    body = """
class TritonPythonModel:
    def initialize(self, args):
        note()
        if os.path.getsize(os.environ["NOTES"]) == 1:
            threading.Event().wait()
    def execute(self, requests):
        return answers(tensors(requests))
"""
    write_noting_model(repository, body)

    async def test(harness: Harness) -> None:
        loading = asyncio.ensure_future(harness.server.load("model"))
        await harness.until(lambda: notes.stat().st_size == 1)
        await asyncio.wait_for(harness.server.unload("model"), 10)
        with pytest.raises(Unavailable):
            await asyncio.wait_for(loading, 5)
        await harness.server.load("model")
        assert await harness.outcome("model", [1.0]) == [1.0]

    serve(
        test,
        auto_complete_config=False,
        model_control_mode="explicit",
        load_model=("bystander",),
    )


def test_row_46_sigterm_while_models_load(start_server, repository, notes):
    """The server stops with code 0, says nothing of being ready, and leaves no stub."""
    write_noting_model(repository, PLACES["initializing"].format(code="threading.Event().wait()"))
    server = start_server(repository, "--disable-auto-complete-config", wait=False)
    wait_until(lambda: notes.stat().st_size, 20)
    assert server.stop(10) == 0
    assert "Ready:" not in server.log()
