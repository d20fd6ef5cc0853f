# SPDX-License-Identifier: Apache-2.0
"""How a server ends: drained, in time, with exit code 0, and with nothing left behind."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading

import numpy as np
import psutil
import pytest

from actorserve import Supervisor, __version__
from actorserve.clock import monotonic_s
from actorserve.config import Settings
from actorserve.errors import Unavailable
from tests.conftest import wait_until
from tests.server.harness import IDENTITY, IDENTITY_CONFIG, Server, write_model

GATED = IDENTITY.replace(
    "answers = []",
    """answers = []
        open(os.environ["BEGUN"], "w").close()
        deadline = time.monotonic() + 50
        while not os.path.exists(os.environ["GO"]) and time.monotonic() < deadline:
            time.sleep(0.005)""",
)


class Running:
    """A request in a thread; `outcome` is (status, answer) when it has ended."""

    def __init__(self, server: Server, model: str = "gated") -> None:
        self.outcome: tuple[int, object] | None = None

        def ask() -> None:
            try:
                self.outcome = server.infer(model, {"INPUT0": ("FP32", [1], [7])})
            except (OSError, http.client.HTTPException) as error:
                self.outcome = (0, error)

        self._thread = threading.Thread(target=ask)
        self._thread.start()

    def end(self) -> tuple[int, object]:
        """Wait for the outcome."""
        self._thread.join(30)
        assert self.outcome is not None
        return self.outcome


@pytest.fixture
def gated(start_server, repository, tmp_path):
    """Return a function that starts a server whose model answers only when `server.go` exists."""
    write_model(repository, "gated", GATED)

    def start(*flags: str) -> Server:
        go, begun = tmp_path / "go", tmp_path / "begun"
        env = {"GO": str(go), "BEGUN": str(begun)}
        server = start_server(repository, flags=flags, env=env, own_group=True)
        server.go, server.begun = go, begun
        return server

    return start


def _family(server: Server) -> list[psutil.Process]:
    process = psutil.Process(server.process.pid)
    return [process, *process.children(recursive=True)]


def _has_ended(server: Server) -> bool:
    return server.process.poll() is not None


def test_sigterm_drains(gated):
    """Ready is false at once, new requests are refused, the running one is answered; code 0."""
    server = gated()
    running = Running(server)
    wait_until(server.begun.exists)
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: server.call("GET", "/v2/health/ready")[0] == 503)
    assert server.call("GET", "/v2/health/live")[0] == 200
    assert server.call("GET", "/v2/models/gated/ready")[0] == 400
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": [0]}
    reply = server.request("POST", "/v2/models/gated/infer", {"inputs": [tensor]})
    assert reply.status == 503
    assert reply.error == "the server is exiting and takes no new requests"
    assert int(reply.headers["retry-after"]) >= 1
    assert not _has_ended(server)
    server.go.touch()
    assert running.end() == (200, {"OUTPUT0": [7]})
    assert server.wait() == 0
    log = server.log()
    assert '"SIGTERM: stopping when accepted work has ended"' in log
    assert log.rstrip().endswith('"stopped"')


def test_requests_that_wait_are_drained_too(repository, tmp_path, monkeypatch):
    """Also those that no stub has begun; embedded, where it can be seen that all are accepted."""
    write_model(repository, "gated", GATED)
    go = tmp_path / "go"
    monkeypatch.setenv("GO", str(go))
    monkeypatch.setenv("BEGUN", str(tmp_path / "begun"))

    async def main() -> None:
        server = Supervisor(repository, Settings(crash_dir=str(tmp_path)))
        await server.start()
        x = np.ones(1, np.float32)
        asked = [asyncio.ensure_future(server.infer("gated", {"INPUT0": x})) for _ in range(30)]
        await asyncio.wait(asked, timeout=0)
        scheduler = server.stats().models[0].versions[0].scheduler
        assert (scheduler.accepted, scheduler.succeeded) == (30, 0)
        assert scheduler.queued > 0
        stopping = asyncio.ensure_future(server.stop())
        await asyncio.wait([stopping], timeout=0.05)
        assert not server.is_ready()
        with pytest.raises(Unavailable, match="the server is exiting"):
            await server.infer("gated", {"INPUT0": x})
        go.touch()
        for each in await asyncio.gather(*asked):
            assert each["OUTPUT0"].tolist() == [1]
        await stopping

    asyncio.run(main())


def test_a_second_signal_is_quick(gated):
    """It does not wait for the grace time of half a minute."""
    server = gated()
    running = Running(server)
    wait_until(server.begun.exists)
    server.process.send_signal(signal.SIGTERM)
    server.wait_log("SIGTERM: stopping when accepted work has ended")
    assert not _has_ended(server)
    began_s = monotonic_s()
    server.process.send_signal(signal.SIGTERM)
    assert running.end()[0] in (0, 503)
    assert server.wait(25) == 0
    assert monotonic_s() - began_s < 20
    assert '"SIGTERM again: stopping at once"' in server.log()


def test_ctrl_c_reaches_the_whole_group(gated):
    """The terminal signals every process; only the supervisor acts on it, and drains."""
    server = gated()
    running = Running(server)
    wait_until(server.begun.exists)
    family = _family(server)
    os.killpg(server.process.pid, signal.SIGINT)
    for process in family[1:]:
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
    wait_until(lambda: server.call("GET", "/v2/health/ready")[0] == 503)
    server.go.touch()
    assert running.end() == (200, {"OUTPUT0": [7]})
    assert server.wait() == 0
    assert '"SIGINT: stopping when accepted work has ended"' in server.log()
    assert "Traceback" not in server.log()
    assert "KeyboardInterrupt" not in server.log()


def test_a_life_from_start_to_stop(start_server, repository, tmp_path):
    """What people read, a request that works, what systemd hears, and clients that only wait."""
    write_model(repository, "model", IDENTITY, IDENTITY_CONFIG)
    address = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(address))
        manager.settimeout(30)
        env = {"NOTIFY_SOCKET": str(address), "WATCHDOG_USEC": "200000"}
        server = start_server(repository, env=env)
        heard = [manager.recv(100).decode() for _ in range(3)]
        assert heard == ["READY=1", "WATCHDOG=1", "WATCHDOG=1"]
        url = f"http://{server.address}"
        tried = next(line for line in server.log().splitlines() if line.startswith("Try:   "))
        _, _, _, where, _, body = shlex.split(tried)
        assert server.request("POST", where.removeprefix(url), body.encode()).status == 200
        idle = [http.client.HTTPConnection(server.host, server.port) for _ in range(5)]
        for connection in idle:
            connection.request("GET", "/v2/health/live")
            connection.getresponse().read()
        began_s = monotonic_s()
        assert server.stop() == 0
        assert monotonic_s() - began_s < 4, "idle connections delay the end"
        for connection in idle:
            connection.close()
        while heard[-1] != "STOPPING=1":
            heard.append(manager.recv(100).decode())
    log = re.sub(r"^[IWE]\d{4} \S+ \d+ \S+\] ", "", server.log(), flags=re.MULTILINE)
    assert log.splitlines() == [
        json.dumps(f"actorserve {__version__}: HTTP on {url}"),
        json.dumps(f"metrics on http://127.0.0.1:{server.metrics_port}/metrics"),
        '"model_0: ready"',
        "\"successfully loaded 'model' version 1\"",
        "MODEL  VERSION  STATE  INSTANCES",
        "model  1        READY  1/1",
        "",
        f"Ready: {url}   (health: {url}/v2/health/ready; stop with Ctrl-C)",
        tried,
        '"SIGTERM: stopping when accepted work has ended"',
        '"stopped"',
    ]


def test_an_unread_pipe_does_not_stop_the_server(repository, tmp_path):
    """Nobody reads stderr, and the model is chatty: requests and SIGTERM are served still."""
    chatty = "answers = []\n        [print('y' * 200) for _ in range(400)]"
    body = IDENTITY.replace("answers = []", chatty)
    write_model(repository, "model", body)
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": [7]}
    body_of_one = {"inputs": [tensor]}
    ready = tmp_path / "ready.json"
    command = [sys.executable, "-m", "actorserve", "start", str(repository)]
    command += ["--http-port", "0", "--metrics-port", "0", "--ready-file", str(ready)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        wait_until(ready.exists, 20)
        port = json.loads(ready.read_text())["http"]["port"]
        for _ in range(6):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("POST", "/v2/models/model/infer", json.dumps(body_of_one))
            assert connection.getresponse().status == 200
            connection.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
