# SPDX-License-Identifier: Apache-2.0
"""Loads, deaths and full rings under load: each request has one outcome, none is forgotten."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from actorserve.errors import ActorserveError, InternalError, NotFound, Unavailable
from tests.faults.harness import Harness, marked_processes, write_model

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
            lambda: (
                harness.model("model").state == "READY" and harness.instance("model").pid != old_pid
            )
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
        assert harness.model("model").state == "UNAVAILABLE"
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
        assert harness.scheduler("model").in_flight == 0

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


def test_row_8_a_stub_that_writes_more_than_its_ring_holds_goes_on(serve, repository, caplog):
    """Megabytes of log lines while the supervisor's loop stands still: come, or are counted."""
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
    texts = [each.getMessage() for each in caplog.records]
    numbers = [int(text.split()[1]) for text in texts if "xxx" in text]
    left_out = sum(int(text.split()[0]) for text in texts if "lines of level INFO" in text)
    assert numbers == sorted(set(numbers))
    assert len(numbers) >= 1000
    assert len(numbers) + left_out == 3000
