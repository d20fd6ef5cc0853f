# SPDX-License-Identifier: Apache-2.0
"""The FastAPI example as a real process: it serves, and goes on serving while its stubs are killed.

Clients keep their connections, so that an answer too many would be taken for the next one's.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from actorserve.clock import monotonic_s
from tests.conftest import wait_until
from tests.faults.harness import TAG, marked_processes

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "embedding.md"
UVICORN = [sys.executable, "-m", "uvicorn", "examples.fastapi_app:app", "--port", "0"]
SCRIPT = [sys.executable, str(ROOT / "examples" / "fastapi_app.py")]
KILLS_OF_A_STUB = 4
"""Few enough for the back-off to stay below a second: nobody is turned away for want of a stub."""


class App:
    """The example in a process of its own."""

    def __init__(self, command: list[str], log: Path) -> None:
        self._log = log
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "PORT": "0"},
                stdout=stream,
                stderr=stream,
            )
        self.port = 0

    def log(self) -> str:
        """Everything that it wrote."""
        return self._log.read_text(errors="replace")

    def wait_listening(self) -> None:
        """Wait until it takes connections, which is when its models are loaded."""
        wait_until(lambda: self.process.poll() is not None or self._address(), 40, "listening")
        address = self._address()
        assert address is not None, self.log()
        self.port = int(address[1])

    def _address(self) -> re.Match[str] | None:
        return re.search(r"running on http://127\.0\.0\.1:(\d+)", self.log())

    def connect(self) -> http.client.HTTPConnection:
        """Return a new connection."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)

    def ask(self, path: str, body: Any = None) -> tuple[int, Any]:
        """Send one request on a connection of its own; returns status and document."""
        connection = self.connect()
        try:
            return exchange(connection, path, body)[:2]
        finally:
            connection.close()

    def stop(self) -> None:
        """Send SIGTERM and wait: uvicorn ends in order, and then by that signal."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            pytest.fail(f"the app did not stop:\n{self.log()}")


def exchange(
    connection: http.client.HTTPConnection, path: str, body: Any = None
) -> tuple[int, Any, http.client.HTTPResponse]:
    """Send one request and read its answer."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    connection.request("GET" if data is None else "POST", path, data, headers)
    response = connection.getresponse()
    return response.status, json.loads(response.read()), response


@pytest.fixture
def start(no_leaks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable]:
    """Return a function that starts the app; afterwards nothing that it started may live."""
    monkeypatch.setenv(TAG, secrets.token_hex(8))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    apps: list[App] = []

    def start_app(command: list[str]) -> App:
        apps.append(App(command, tmp_path / f"app-{len(apps)}.log"))
        apps[-1].wait_listening()
        return apps[-1]

    yield start_app
    for app in apps:
        app.stop()
    wait_until(lambda: not marked_processes(), what="its processes are gone")


DOUBLE, ADD_SUB = "async_double_0", "add_sub_0_0"
"""The instances, which are also the names that ps shows."""


def stub(name: str) -> int:
    """Return the pid of an instance's stub, 0 while there is none."""
    return next((pid for pid, shown in marked_processes().items() if shown == name), 0)


def kill_stub(name: str) -> int:
    """Kill an instance's stub; returns the pid that it had."""
    pid = stub(name)
    assert pid > 0, f"there is no {name}"
    os.kill(pid, signal.SIGKILL)
    return pid


def wait_back(name: str, gone: int) -> None:
    """Wait until the instance has another process than the one that is gone."""
    wait_until(lambda: stub(name) not in (0, gone), 20, f"{name} is back")


@pytest.mark.parametrize(
    "command",
    [
        [*UVICORN, "--loop", "asyncio"],
        [*UVICORN, "--loop", "uvloop"],
        SCRIPT,
    ],
    ids=["asyncio", "uvloop", "script"],
)
def test_the_app_answers_and_ends_in_order(start, command):
    """Answers, the models' own errors with their statuses, readiness; nothing is left behind."""
    app = start(command)
    assert app.ask("/ready") == (200, {"failures": {}})
    status, answer = app.ask("/add_sub", {"a": [1, 2, 3, 4], "b": [10, 20, 30, 40]})
    assert (status, answer["sum"]) == (200, [11, 22, 33, 44])
    assert app.ask("/double", [1, -21]) == (200, [2, -42])
    shown = re.search(r"-d '(\{.*?\})'\n(\{.*?\})\n```", PAGE.read_text(), re.DOTALL)
    assert shown is not None
    assert app.ask("/add_sub", json.loads(shown[1])) == (200, json.loads(shown[2]))
    status, answer = app.ask("/add_sub", {"a": [1], "b": [1, 2, 3, 4]})
    assert status == 400
    assert "unexpected shape for input 'INPUT0' for model 'add_sub'" in answer["error"]
    assert app.ask("/add_sub", {"a": "text"})[0] == 422
    app.stop()
    assert app.process.returncode in (0, -signal.SIGTERM)
    assert "Application shutdown complete" in app.log()
    assert "Traceback" not in app.log()


def test_readiness_tells_the_truth(start):
    """503 between the death of a stub and its return, 200 before and after."""
    app = start(UVICORN)
    seen: list[int] = []
    for _ in range(3):  # the first restart comes at once, the later ones after a wait
        gone = kill_stub(ADD_SUB)
        deadline_s = monotonic_s() + 20
        while stub(ADD_SUB) in (0, gone):
            seen.append(app.ask("/ready")[0])
            assert monotonic_s() < deadline_s, "no new stub"
        wait_until(lambda: app.ask("/ready") == (200, {"failures": {}}), 20, "ready again")
    assert 503 in seen


HOW = "(killed by SIGKILL|exit status unknown)"
"""On a machine that is too busy to tell the status in time, it is unknown."""


class Client(threading.Thread):
    """Asks on one connection until it is told to end, and holds each answer against its request."""

    def __init__(self, app: App, number: int, over: threading.Event) -> None:
        super().__init__()
        self._connection = app.connect()
        self._numbers = iter(range(number * 100_000, (number + 1) * 100_000))
        self._over = over
        self.instance = DOUBLE if number % 2 else ADD_SUB
        self.statuses: Counter[int] = Counter()
        self.wrong: list[Any] = []

    def run(self) -> None:
        """Ask until it is over; whatever is not as it should be is kept."""
        try:
            while not self._over.is_set():
                self._ask(next(self._numbers))
        except Exception as error:
            self.wrong.append(repr(error))
        finally:
            self._connection.close()

    def _ask(self, n: int) -> None:
        if self.instance == DOUBLE:
            status, answer, response = exchange(self._connection, "/double", [n, -n])
            is_right = answer == [2 * n, -2 * n]
        else:
            body = {"a": [n, 0, 1, 2], "b": [n, 1, 1, 1]}
            status, answer, response = exchange(self._connection, "/add_sub", body)
            is_right = answer == {"sum": [2 * n, 1, 2, 3], "difference": [0, -1, 0, 1]}
        self.statuses[status] += 1
        if status == 503:
            text = f"stub '{self.instance}' died while it had the request: {HOW}"
            is_right = re.match(text, answer["error"]) is not None
            is_right = is_right and int(response.headers["Retry-After"]) >= 1
        if status not in (200, 503) or not is_right:
            self.wrong.append((status, answer))


def test_kills_under_load_cost_a_clear_503_at_most(start):
    """Each request has one answer, right or naming the dead stub; then all are right again."""
    app = start(UVICORN)
    over = threading.Event()
    clients = [Client(app, number, over) for number in range(8)]
    for client in clients:
        client.start()
    try:
        for _ in range(KILLS_OF_A_STUB):
            for name in (DOUBLE, ADD_SUB):
                wait_for_answers([each for each in clients if each.instance == name], 20)
                wait_back(name, kill_stub(name))
        wait_for_answers(clients, 40)
    finally:
        over.set()
        for client in clients:
            client.join(40)
    assert not any(client.is_alive() for client in clients)
    assert [each for client in clients for each in client.wrong] == []
    statuses = sum((client.statuses for client in clients), Counter())
    assert statuses[503] > 0, "a kill in the middle of a request was to be seen"
    assert statuses[200] > statuses[503]
    assert app.process.poll() is None, "the app lives through all of it"
    wait_until(lambda: app.ask("/ready")[0] == 200, 20, "ready again")
    assert app.ask("/double", [5]) == (200, [10])
    assert app.ask("/add_sub", {"a": [1] * 4, "b": [1] * 4})[0] == 200


def wait_for_answers(clients: list[Client], count: int) -> None:
    """Wait until these clients have had so many more right answers."""

    def answered() -> int:
        return sum(client.statuses[200] for client in clients)

    wanted = answered() + count
    wait_until(lambda: answered() >= wanted, 20, f"{count} answers: {[c.wrong for c in clients]}")
