# SPDX-License-Identifier: Apache-2.0
"""A stub dies: each request in flight gets one clear answer, and the stub comes back."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from actorserve.errors import Code, DeadlineExceeded, Unavailable
from tests.faults.harness import IDENTITY, Harness, parameter, write_model

SLOW = """
class TritonPythonModel:
    def execute(self, requests):
        arrays = tensors(requests)
        if arrays[0].flat[0] < 0:
            open(os.environ["MARK"], "w").close()
            threading.Event().wait()
        return answers(arrays)
"""


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file that a SLOW model makes when it has begun to wait for ever."""
    path = tmp_path / "mark"
    monkeypatch.setenv("MARK", str(path))
    return path


def test_row_1_an_idle_stub_is_replaced(serve, repository):
    """SIGKILL while idle: not ready until it is back, and no request is lost."""
    write_model(repository, "model")

    async def test(harness: Harness) -> None:
        pid = harness.kill("model")
        await harness.until(lambda: harness.instance("model").pid != pid)
        assert await harness.outcome("model", [1.0]) == [1.0]
        await harness.until_restarted("model", pid)
        assert harness.instance("model").restarts == 1
        assert harness.server.is_model_ready("model")

    serve(test)


@pytest.mark.parametrize(
    ("row", "code", "text"),
    [
        (4, "os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL (perhaps out of memory)"),
        (14, "ctypes.string_at(0)", "SIGSEGV"),
        (14, "os.kill(os.getpid(), signal.SIGBUS)", "SIGBUS"),
        (14, "os.abort()", "SIGABRT"),
        (15, "os._exit(0)", "exited with code 0"),
        (15, "os._exit(7)", "exited with code 7"),
        (39, "os.closerange(0, 256)\n            threading.Event().wait(30)", ""),
    ],
)
def test_death_in_execute_is_one_error_and_a_restart(serve, repository, row, code, text):
    """The dispatched request ends with UNAVAILABLE that names the end; the next one is served."""
    write_model(
        repository,
        "model",
        f"""
class TritonPythonModel:
    def execute(self, requests):
        arrays = tensors(requests)
        if arrays[0][0] < 0:
            {code}
        return answers(arrays)
""",
    )

    async def test(harness: Harness) -> None:
        pid = harness.instance("model").pid
        error = await harness.outcome("model", [-1.0])
        assert isinstance(error, Unavailable), error
        assert "model_0_0" in error.message
        assert text in error.message
        await harness.until_restarted("model", pid)
        assert await harness.outcome("model", [2.0]) == [2.0]

    serve(test)


def test_row_4_a_batch_of_eight_fails_once_each(serve, repository, mark):
    """All requests of the batch end with one error, none is run again, their blocks are free."""
    write_model(
        repository,
        "model",
        SLOW,
        max_batch=8,
        extra="dynamic_batching { preferred_batch_size: [ 8 ] "
        "max_queue_delay_microseconds: 5000000 }",
    )

    async def test(harness: Harness) -> None:
        values = [[[-1.0] * 2000] for _ in range(8)]
        tasks = [harness.submit("model", each) for each in values]
        await harness.until(mark.exists)
        pid = harness.kill("model")
        outcomes = await asyncio.gather(*tasks)
        assert all(isinstance(each, Unavailable) for each in outcomes), outcomes
        await harness.until_restarted("model", pid)
        stats = next(m for m in harness.server.stats().models if m.name == "model")
        assert stats.versions[0].scheduler.failed == 8

    serve(test)


def test_rows_3_and_6_waiting_requests_go_to_the_next_stub(serve, repository, mark):
    """Of five requests at a stub that dies only the one in execution fails."""
    write_model(repository, "model", SLOW)

    async def test(harness: Harness) -> None:
        first = harness.submit("model", [-1.0])
        rest = [harness.submit("model", [float(n)]) for n in range(1, 5)]
        await harness.until(mark.exists)
        harness.kill("model")
        assert isinstance(await first, Unavailable)
        assert await asyncio.gather(*rest) == [[1.0], [2.0], [3.0], [4.0]]

    serve(test)


def test_row_12_the_other_instance_serves_on(serve, repository, mark):
    """One of two instances dies: requests go to the other one meanwhile."""
    write_model(repository, "model", count=2)

    async def test(harness: Harness) -> None:
        pid = harness.kill("model")
        for n in range(20):
            assert await harness.outcome("model", [float(n)]) == [float(n)]
        await harness.until_restarted("model", pid)

    serve(test)


@pytest.mark.parametrize(
    "raising",
    [
        "sys.exit(1)",
        "raise KeyboardInterrupt",
        "raise MemoryError",
        "raise BaseException('x')",
        "(lambda f: f(f))(lambda f: f(f))",
        "raise GeneratorExit",
    ],
)
def test_rows_16_and_17_what_execute_raises_ends_only_its_batch(serve, repository, raising):
    """The request fails with INTERNAL, the stub is the same afterwards."""
    write_model(
        repository,
        "model",
        f"""
class TritonPythonModel:
    def execute(self, requests):
        arrays = tensors(requests)
        if arrays[0][0] < 0:
            {raising}
        return answers(arrays)
""",
    )

    async def test(harness: Harness) -> None:
        pid = harness.instance("model").pid
        error = await harness.outcome("model", [-1.0])
        assert error.code is Code.INTERNAL
        assert "Failed to process the request(s) for model 'model_0_0'" in error.message
        assert await harness.outcome("model", [3.0]) == [3.0]
        assert harness.instance("model").pid == pid

    serve(test)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_row_20_signals_to_everybody_end_no_stub(serve, repository, number):
    """SIGTERM and SIGINT from outside are survived by stubs."""
    write_model(repository, "model")

    async def test(harness: Harness) -> None:
        pid = harness.kill("model", number)
        assert await harness.outcome("model", [1.0]) == [1.0]
        assert harness.instance("model").pid == pid

    serve(test)


def test_row_22_a_stopped_stub_is_replaced(serve, repository):
    """SIGSTOP beyond its budget: the request fails, the stub is replaced."""
    extra = parameter("STOPPED_TIMEOUT_S", 0.5)
    write_model(repository, "model", extra=extra)

    async def test(harness: Harness) -> None:
        pid = harness.kill("model", signal.SIGSTOP)
        error = await harness.outcome("model", [1.0])
        await harness.until_restarted("model", pid, 20)
        assert await harness.outcome("model", [2.0]) == [2.0]
        # The stub never began the request, so its successor may have answered it.
        assert error == [1.0] or isinstance(error, Unavailable)

    serve(test)


def test_row_23_a_short_stop_changes_nothing(serve, repository):
    """SIGSTOP and SIGCONT within the budget: the same stub answers."""
    write_model(repository, "model")

    async def test(harness: Harness) -> None:
        pid = harness.kill("model", signal.SIGSTOP)
        task = harness.submit("model", [1.0])
        harness.kill("model", signal.SIGCONT)
        assert await task == [1.0]
        assert harness.instance("model").pid == pid

    serve(test)


def test_row_24_c_code_that_holds_the_interpreter_is_busy_not_hung(serve, repository):
    """A stub without beats or CPU time in execute is left alone."""
    write_model(
        repository,
        "model",
        """
class TritonPythonModel:
    def execute(self, requests):
        ctypes.PyDLL(None).usleep(3_000_000)
        return answers(tensors(requests))
""",
    )

    async def test(harness: Harness) -> None:
        pid = harness.instance("model").pid
        assert await harness.outcome("model", [1.0]) == [1.0]
        assert harness.instance("model").pid == pid

    serve(test)


def test_row_25_an_endless_execute_is_ended_at_its_deadline(serve, repository, mark):
    """EXECUTE_TIMEOUT_S: the request gets DEADLINE_EXCEEDED, the stub is replaced."""
    write_model(repository, "model", SLOW, extra=parameter("EXECUTE_TIMEOUT_S", 0.5))

    async def test(harness: Harness) -> None:
        pid = harness.instance("model").pid
        error = await harness.outcome("model", [-1.0])
        assert isinstance(error, DeadlineExceeded), error
        assert "model_0_0" in error.message
        await harness.until_restarted("model", pid)
        assert await harness.outcome("model", [2.0]) == [2.0]

    serve(test)


@pytest.mark.parametrize(("retries", "stubs"), [(0, 1), (1, 2)])
def test_row_36_a_poison_request_kills_no_more_stubs_than_it_may(serve, repository, retries, stubs):
    """RETRY_ON_STUB_DEATH n: n + 1 stubs at most, then the request is refused."""
    write_model(
        repository,
        "model",
        """
class TritonPythonModel:
    def execute(self, requests):
        if tensors(requests)[0][0] < 0:
            os._exit(3)
        return answers(tensors(requests))
""",
        extra=parameter("RETRY_ON_STUB_DEATH", retries) if retries else "",
    )

    async def test(harness: Harness) -> None:
        pid = harness.instance("model").pid
        error = await harness.outcome("model", [-1.0] * 3000)
        assert isinstance(error, Unavailable)
        if retries:
            assert f"killed {stubs} stubs" in error.message
        await harness.until_restarted("model", pid)
        await harness.until(lambda: harness.instance("model").state == "RUNNING")
        assert harness.instance("model").restarts == stubs
        assert await harness.outcome("model", [1.0]) == [1.0]

    serve(test)


def test_row_37_what_a_stub_started_goes_with_it(serve, repository, tmp_path):
    """A dead stub's children are ended too."""
    write_model(
        repository,
        "model",
        f"""
class TritonPythonModel:
    def initialize(self, args):
        self.child = subprocess.Popen(["sleep", "600"])
        open({str(tmp_path / "pid")!r}, "w").write(str(self.child.pid))
    def execute(self, requests):
        return answers(tensors(requests))
""",
    )

    async def test(harness: Harness) -> None:
        grandchild = Path(f"/proc/{(tmp_path / 'pid').read_text()}")
        assert grandchild.exists()
        pid = harness.kill("model")
        await harness.until(lambda: not grandchild.exists() or "Z" in _state(grandchild))
        await harness.until_restarted("model", pid)

    serve(test)


def _state(process: Path) -> str:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_row_32_eight_stubs_die_at_once(serve, repository):
    """All come back, each counted once."""
    write_model(repository, "model", IDENTITY, count=8)

    async def test(harness: Harness) -> None:
        import os

        for each in harness.instances("model"):
            os.kill(each.pid, signal.SIGKILL)
        await harness.until(
            lambda: all(
                each.state == "RUNNING" and each.restarts == 1
                for each in harness.instances("model")
            )
        )
        assert await harness.outcome("model", [1.0]) == [1.0]

    serve(test)
