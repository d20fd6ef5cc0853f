# SPDX-License-Identifier: Apache-2.0
"""A stub dies, hangs or refuses while it starts: the model fails with a reason, the rest serves."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

import pytest

from actorserve.actors.instance import Instance
from actorserve.errors import ActorserveError, Unavailable
from tests.faults.harness import IDENTITY, Harness, parameter, stub_pids, write_model

DIE = "os.kill(os.getpid(), signal.SIGKILL)"
PLACES = {
    "importing": "note(); {code}\nclass TritonPythonModel:\n    pass",
    "initializing": """
class TritonPythonModel:
    def initialize(self, args):
        note(); {code}
""",
    "completing the configuration": """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        note(); {code}
""",
}


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file that grows by a byte with each `note()` of a model."""
    path = tmp_path / "notes"
    path.touch()
    monkeypatch.setenv("NOTES", str(path))
    return path


def write_noting_model(repository: Path, body: str, **how: object) -> None:
    """Write a model whose source may call `note()`."""
    head = (
        'def note():\n    with open(os.environ["NOTES"], "a") as file:\n        file.write("x")\n'
    )
    write_model(repository, "model", f"{head}\n{body}", **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("place", PLACES)
def test_row_2_deaths_before_ready_are_final_after_five(serve, repository, notes, place):
    """SIGKILL in import, initialize or auto_complete_config: five tries, and a reason."""
    write_noting_model(repository, PLACES[place].format(code=DIE))

    async def test(harness: Harness) -> None:
        reason = harness.server.failures["model"]
        assert "SIGKILL (perhaps out of memory)" in reason
        assert "5" in reason
        assert notes.stat().st_size == 5
        assert not harness.server.is_ready()
        assert harness.server.is_live()
        with pytest.raises(ActorserveError):
            await harness.infer("model", [1.0])

    serve(test, auto_complete_config=place.startswith("completing"))


def test_row_2_four_deaths_before_ready_are_forgiven(serve, repository, notes):
    """A stub that dies four times in initialize and then starts serves."""
    body = f"""
class TritonPythonModel:
    def initialize(self, args):
        note()
        if os.path.getsize(os.environ["NOTES"]) < 5:
            {DIE}
    def execute(self, requests):
        return answers(tensors(requests))
"""
    write_noting_model(repository, body)

    async def test(harness: Harness) -> None:
        assert harness.instance("model").restarts == 4
        assert await harness.outcome("model", [1.0]) == [1.0]

    serve(test)


def test_row_2_a_server_that_cannot_load_a_model_ends_with_an_error(start_server, repository):
    """`actorserve start` with exit_on_error: exit code 1, and the log names model and signal."""
    write_model(repository, "model", PLACES["initializing"].format(code=DIE).replace("note();", ""))
    server = start_server(repository, "--restart-backoff-s", "0:0", wait=False)
    assert server.process.wait(30) == 1
    assert "killed by SIGKILL" in server.log()
    assert "failed to load 'model'" in server.log()


@pytest.mark.parametrize(
    ("row", "place", "code"),
    [
        (26, "initializing", "\n        while True: pass"),
        (26, "initializing", "threading.Event().wait()"),
        (26, "initializing", "ctypes.PyDLL(None).sleep(100)"),
        (27, "importing", "\nwhile True: pass"),
        (27, "importing", "threading.Event().wait()"),
    ],
)
def test_a_stub_that_hangs_while_it_starts_is_given_up(serve, repository, notes, row, place, code):
    """Beyond its budget it is killed, five times; the reason says in which phase it hung."""
    extra = parameter("INITIALIZE_TIMEOUT_S", 0.2)
    write_noting_model(repository, PLACES[place].format(code=code), extra=extra)

    async def test(harness: Harness) -> None:
        reason = harness.server.failures["model"]
        assert "timed out" in reason
        assert ("importing model.py" if row == 27 else "initializing") in reason
        assert notes.stat().st_size == 5
        assert not harness.server.is_ready()
        assert harness.server.is_model_ready("bystander")

    # A process that C code keeps from dumping its stacks is only gone after the grace of SIGABRT.
    serve(test, auto_complete_config=False)


@pytest.mark.parametrize("code", ["\n        while True: pass", "threading.Event().wait()"])
def test_row_26_a_hanging_auto_complete_config_fails_the_load(serve, repository, notes, code):
    """It is ended at its budget and not tried again."""
    body = PLACES["completing the configuration"].format(code=code)
    write_noting_model(repository, body, extra=parameter("INITIALIZE_TIMEOUT_S", 0.3))

    async def test(harness: Harness) -> None:
        reason = harness.server.failures["model"]
        assert "did not return within 0.3 s" in reason
        assert notes.stat().st_size == 1

    serve(test)


def test_row_26_a_stub_that_is_stopped_while_it_starts_is_replaced(serve, repository, notes):
    """SIGSTOP in initialize beyond STOPPED_TIMEOUT_S: the next one starts."""
    body = """
class TritonPythonModel:
    def initialize(self, args):
        note()
        if os.path.getsize(os.environ["NOTES"]) < 2:
            os.kill(os.getpid(), signal.SIGSTOP)
    def execute(self, requests):
        return answers(tensors(requests))
"""
    write_noting_model(repository, body, extra=parameter("STOPPED_TIMEOUT_S", 0.1))

    async def test(harness: Harness) -> None:
        assert harness.instance("model").restarts == 1
        assert await harness.outcome("model", [1.0]) == [1.0]

    serve(test)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("note(); import no_such_module_at_all", "No module named 'no_such_module_at_all'"),
        ("note()\ndef broken(:\n", "SyntaxError"),
        ("note()\nclass SomethingElse:\n    pass", "TritonPythonModel"),
        (PLACES["initializing"].format(code="raise ValueError('no weights')"), "no weights"),
        (PLACES["initializing"].format(code="sys.exit(3)"), "SystemExit: 3"),
        (PLACES["initializing"].format(code="raise KeyboardInterrupt"), "KeyboardInterrupt"),
        (PLACES["initializing"].format(code="raise MemoryError"), "MemoryError"),
        (PLACES["importing"].format(code="sys.exit(3)"), "SystemExit: 3"),
        (PLACES["completing the configuration"].format(code="raise ValueError('x')"), "ValueError"),
    ],
)
def test_row_30_a_boot_error_is_final_at_once(serve, repository, notes, caplog, body, text):
    """What raises while it loads is tried once; log and index say why."""
    write_noting_model(repository, body)

    async def test(harness: Harness) -> None:
        reason = harness.server.failures["model"]
        assert text in reason
        assert harness.server.stats().models[1].reason == reason
        assert notes.stat().st_size == (0 if "SyntaxError" in text else 1)

    with caplog.at_level(logging.INFO, "actorserve"):
        serve(test, auto_complete_config="completing" in body or "auto_complete" in body)
    assert text in caplog.text


def test_row_30_an_interpreter_that_cannot_be_a_stub_is_a_boot_error(serve, repository, tmp_path):
    """An environment without msgspec is named at once, and not tried again and again."""
    bin_dir = tmp_path / "environment" / "bin"
    bin_dir.mkdir(parents=True)
    python = bin_dir / "python"
    python.write_text(f'#!/bin/sh\nexec {sys._base_executable} -S "$@"\n')  # type: ignore[attr-defined]
    python.chmod(0o755)
    extra = parameter("EXECUTION_ENV_PATH", bin_dir.parent)
    write_model(repository, "model", extra=extra)

    async def test(harness: Harness) -> None:
        reason = harness.server.failures["model"]
        assert "cannot import" in reason
        assert "msgspec" in reason
        assert "times in a row" not in reason

    serve(test, auto_complete_config=False)


def test_row_31_a_stub_that_dies_after_each_start_is_tried_for_ever(serve, repository, caplog):
    """Ready and dead again and again: at once, then with growing pauses, in few lines of log."""
    body = """
class TritonPythonModel:
    def initialize(self, args):
        threading.Timer(0.05, os._exit, [9]).start()
    def execute(self, requests):
        return answers(tensors(requests))
"""
    write_model(repository, "model", body)

    async def test(harness: Harness) -> None:
        await harness.until(lambda: harness.instance("model").restarts >= 7, 30)
        assert harness.instance("model").state != "FATAL"
        assert harness.server.is_model_ready("bystander")

    with caplog.at_level(logging.INFO, "actorserve"):
        serve(test, restart_backoff_s=(0.0, 0.2))
    restarts = sum("it will be restarted" in each.message for each in caplog.records)
    lines = sum("model_0_0" in each.getMessage() for each in caplog.records)
    assert restarts >= 7
    assert lines <= 3 * (restarts + 1), "the log is flooded"


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
    from actorserve import Supervisor
    from actorserve.config import Settings

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
    harness_deadline(lambda: notes.stat().st_size, server)
    assert server.stop(10) == 0
    assert "Ready:" not in server.log()


def harness_deadline(condition, server) -> None:
    """Wait for a condition while a server process lives."""
    from tests.conftest import wait_until

    wait_until(lambda: condition() or server.process.poll() is not None, 20)
    assert server.process.poll() is None, server.log()


def test_spawn_failures_never_count_as_deaths(serve, repository, monkeypatch):
    """Row 58: EAGAIN from the system is tried again, however often, and is nobody's death."""
    write_model(repository, "model", IDENTITY)

    async def test(harness: Harness) -> None:
        spawner = harness.server._node.spawner
        spawn, left = spawner.spawn, [7]

        async def failing(*arguments):
            if left[0]:
                left[0] -= 1
                raise Unavailable("no process could be made: Resource temporarily unavailable")
            return await spawn(*arguments)

        monkeypatch.setattr(spawner, "spawn", failing)
        pid = harness.kill("model")
        await harness.until(lambda: harness.instance("model").pid != pid)
        reasons = set()

        def is_back() -> bool:
            reasons.add(harness.instance("model").reason)
            return harness.instance("model").state == "RUNNING"

        await harness.until(is_back)
        assert any("Resource temporarily unavailable" in each for each in reasons)
        assert isinstance(harness.server._models["model"].versions()[0]._instances[0], Instance)
        assert await harness.outcome("model", [1.0]) == [1.0]

    serve(test)
