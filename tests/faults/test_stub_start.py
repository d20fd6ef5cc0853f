# SPDX-License-Identifier: Apache-2.0
"""A stub dies, hangs or refuses while it starts: the model fails with a reason, the rest serves."""

from __future__ import annotations

import logging
import sys

import pytest

from actorserve.errors import ActorserveError, Unavailable
from tests.faults.harness import (
    DIE,
    IDENTITY,
    PLACES,
    Harness,
    parameter,
    write_model,
    write_noting_model,
)


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


def test_row_30_an_interpreter_that_is_no_python_is_tried_once(serve, repository, tmp_path, caplog):
    """What ends before it runs a line of ours will do so again."""
    bin_dir = tmp_path / "environment" / "bin"
    bin_dir.mkdir(parents=True)
    (bin_dir / "python").write_text(f"#!/bin/sh\necho again >> {tmp_path}/starts\nexit 3\n")
    (bin_dir / "python").chmod(0o755)
    extra = parameter("EXECUTION_ENV_PATH", bin_dir.parent)
    write_model(repository, "model", extra=extra)

    async def test(harness: Harness) -> None:
        reason = harness.server.failures["model"]
        assert f"interpreter '{bin_dir}/python' exited with code 3 before" in reason
        assert "expected a Python of 3.10 or newer" in reason
        assert (tmp_path / "starts").read_text() == "again\n"

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


def test_row_58_spawn_failures_never_count_as_deaths(serve, repository, monkeypatch):
    """EAGAIN from the system is tried again, however often, and is nobody's death."""
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
        assert await harness.outcome("model", [1.0]) == [1.0]

    serve(test)
