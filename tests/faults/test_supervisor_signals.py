# SPDX-License-Identifier: Apache-2.0
"""Signals and stand-stills of the supervisor: it drains, hurries, goes on, or ends cleanly."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from actorserve.clock import monotonic_s
from tests.conftest import wait_until
from tests.faults.harness import marked_processes, parameter, stub_pids, write_model

WAITS = """
class TritonPythonModel:
    def execute(self, requests):
        arrays = tensors(requests)
        with open(os.environ["BEGUN"], "a") as file:
            file.write("x")
        wait_for_file(os.environ["GO"])
        return answers(arrays)
"""


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return two files for WAITS models: one that grows with each execute, one that ends it."""
    begun, go = tmp_path / "begun", tmp_path / "go"
    begun.touch()
    monkeypatch.setenv("BEGUN", str(begun))
    monkeypatch.setenv("GO", str(go))
    return begun, go


def ask(server: Any, value: float, model: str = "model") -> Any:
    """Return status and answer of one inference."""
    return server.infer(model, {"INPUT0": ("FP32", [1], [value])})


def test_row_44_sigterm_lets_accepted_work_end(start_server, repository, gate):
    """Ready is false at once and live stays true; what was accepted is answered; exit code 0."""
    begun, go = gate
    write_model(repository, "model", WAITS, count=2)
    server = start_server(repository)
    with ThreadPoolExecutor(20) as clients:
        asked = [clients.submit(ask, server, float(n)) for n in range(20)]
        wait_until(lambda: begun.stat().st_size >= 2)
        wait_until_accepted(server, 20)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.call("GET", "/v2/health/ready")[0] == 503)
        assert server.call("GET", "/v2/health/live")[0] == 200
        status, text = ask(server, 1.0, "bystander")
        assert status == 503
        assert "exiting" in text
        go.touch()
        for n, each in enumerate(asked):
            assert each.result(20) == (200, {"OUTPUT0": [float(n)]})
    assert server.wait(10) == 0


def wait_until_accepted(server: Any, count: int) -> None:
    """Wait until the server has so many requests in its queues and in flight."""

    def has_all() -> bool:
        _, status = server.call("GET", "/v2/actorserve/status")
        schedulers = [
            version["scheduler"] for model in status["models"] for version in model["versions"]
        ]
        return sum(each["queued"] + each["in_flight"] for each in schedulers) >= count

    wait_until(has_all)


def test_row_44_work_that_outlasts_the_grace_time_gets_an_error(start_server, repository, gate):
    """Everyone who waits is told at the end of the grace time; exit code 0."""
    begun, _ = gate
    write_model(repository, "model", WAITS)
    server = start_server(repository, "--exit-timeout-secs", "0.5")
    with ThreadPoolExecutor(8) as clients:
        asked = [clients.submit(ask, server, float(n)) for n in range(8)]
        wait_until(lambda: begun.stat().st_size)
        wait_until_accepted(server, 8)
        server.process.send_signal(signal.SIGTERM)
        for each in asked:
            status, text = each.result(10)
            assert status == 503
            assert "exiting" in text
    assert server.wait(10) == 0


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_row_45_a_second_signal_is_quick(start_server, repository, gate, first, second):
    """A stop that would wait for half a minute ends at once, with exit code 0."""
    begun, _ = gate
    write_model(repository, "model", WAITS)
    server = start_server(repository)
    with ThreadPoolExecutor(1) as clients:
        asked = clients.submit(ask, server, 1.0)
        wait_until(lambda: begun.stat().st_size)
        server.process.send_signal(first)
        server.wait_log("stopping when accepted work has ended")
        server.process.send_signal(second)
        assert server.wait(10) == 0
        assert answered_or_cut(asked)


def answered_or_cut(asked: Future[Any]) -> bool:
    """Whether a client got an error of ours, or saw its connection end."""
    try:
        return bool(asked.result(10)[0] == 503)
    except (ConnectionError, OSError):
        return True


def test_row_45_ctrl_c_in_a_terminal_stops_without_tracebacks(start_server, repository):
    """SIGINT to the whole process group: the supervisor alone acts, and nobody prints a stack."""
    server = start_server(repository, own_group=True)
    os.killpg(server.process.pid, signal.SIGINT)
    assert server.wait(10) == 0
    assert "Traceback" not in server.log()


@pytest.mark.parametrize("name", ["SIGHUP", "SIGUSR1", "SIGUSR2", "SIGPIPE", "SIGCHLD", "SIGWINCH"])
def test_row_47_other_signals_do_not_end_the_server(start_server, repository, name):
    """It serves on with the same stubs."""
    server = start_server(repository)
    before = stub_pids()
    server.process.send_signal(signal.Signals[name])
    assert ask(server, 1.0, "bystander")[0] == 200
    server.process.send_signal(signal.Signals[name])
    assert ask(server, 1.0, "bystander")[0] == 200
    assert stub_pids() == before
    assert server.stop() == 0


@pytest.mark.parametrize("who", ["supervisor", "everybody"])
def test_row_48_a_stand_still_costs_no_stub(start_server, repository, who):
    """SIGSTOP for longer than every budget, then SIGCONT: the same stubs serve."""
    slow = """
class TritonPythonModel:
    def execute(self, requests):
        threading.Event().wait(1.0)
        return answers(tensors(requests))
"""
    extra = parameter("STOPPED_TIMEOUT_S", 1.5) + parameter("EXECUTE_TIMEOUT_S", 2)
    write_model(repository, "model", slow, extra=extra)
    server = start_server(repository)
    before = stub_pids()
    pids = [server.process.pid] if who == "supervisor" else list(marked_processes())
    if server.process.pid not in pids:
        pids.append(server.process.pid)
    with ThreadPoolExecutor(1) as clients:
        asked = clients.submit(ask, server, 3.0)
        wait_until_accepted(server, 1)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        select.select([], [], [], 3.5)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        assert asked.result(20) == (200, {"OUTPUT0": [3.0]})
    assert ask(server, 1.0)[0] == 200
    select.select([], [], [], 1.5)  # the watch looks once a second
    assert stub_pids() == before
    assert server.call("GET", "/v2/health/ready")[0] == 200
    assert server.stop() == 0


BROKEN = {
    "loading": "Supervisor.load_models = broken",
    "listening": "HttpServer.start = broken",
    "one model": "Model.load = broken",
    "serving": "Notifier.ready = broken_now",
}


@pytest.mark.parametrize("where", BROKEN)
def test_row_43_a_fault_of_ours_ends_the_server_and_its_stubs(repository, tmp_path, where):
    """An exception in the server's own course: exit code not 0, and nobody is left."""
    program = f"""
import sys
from actorserve.actors.model import Model
from actorserve.actors.supervisor import Supervisor
from actorserve.cli import main
from actorserve.frontend.http_server import HttpServer
from actorserve.frontend.notify import Notifier

async def broken(*_):
    raise RuntimeError("a fault of ours")

def broken_now(*_):
    raise RuntimeError("a fault of ours")

{BROKEN[where]}
sys.exit(main(["start", {str(repository)!r}, "--http-port", "0", "--metrics-port", "0"]))
"""
    path = tmp_path / "broken.py"
    path.write_text(program)
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode not in (0, -signal.SIGKILL)
    assert "a fault of ours" in done.stderr
    wait_until(lambda: not marked_processes(), 5)


def test_row_43_a_fault_in_the_watch_does_not_end_it(serve, repository, monkeypatch, caplog):
    """What raises while it looks after the stubs is logged, and the next look is taken."""
    extra = parameter("STOPPED_TIMEOUT_S", 0.2)
    write_model(repository, "model", extra=extra)
    from actorserve.actors.instance import Instance

    watch: Callable[..., None] = Instance.watch
    faults = [2]

    def faulty(instance: Instance, now_s: float) -> None:
        if faults[0] and instance.name == "bystander_0_0":
            faults[0] -= 1
            raise RuntimeError("a fault of ours")
        watch(instance, now_s)

    monkeypatch.setattr("actorserve.actors.supervisor.WATCH_INTERVAL_S", 0.1)
    monkeypatch.setattr(Instance, "watch", faulty)

    async def test(harness: Any) -> None:
        pid = harness.kill("model", signal.SIGSTOP)
        await harness.until_restarted("model", pid)

    started_s = monotonic_s()
    serve(test)
    assert monotonic_s() - started_s < 30
    assert "a fault of ours" in caplog.text
    assert faults == [0]
