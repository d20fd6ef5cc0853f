# SPDX-License-Identifier: Apache-2.0
"""A real server for tests: `actorserve start` as a process, addressed through its ready file."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from actorserve.clock import monotonic_s

START_TIMEOUT_S = 40.0


class Server:
    """A running `actorserve start`."""

    def __init__(self, process: subprocess.Popen[bytes], ready_file: Path, log: Path) -> None:
        self.process = process
        self.log_path = log
        self._ready_file = ready_file
        self.host = "127.0.0.1"
        self.port = 0

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait for the ready file; fail with the log where the server ends before."""
        deadline_s = monotonic_s() + timeout_s
        while not self._ready_file.exists():
            if self.process.poll() is not None:
                pytest.fail(f"the server ended with {self.process.returncode}:\n{self.log()}")
            if monotonic_s() > deadline_s:
                pytest.fail(f"the server is not ready after {timeout_s:g} s:\n{self.log()}")
            try:
                self.process.wait(0.02)
            except subprocess.TimeoutExpired:
                continue
        where = json.loads(self._ready_file.read_text())["http"]
        self.host, self.port = where["host"], where["port"]

    @property
    def address(self) -> str:
        """host:port of the HTTP front end."""
        return f"{self.host}:{self.port}"

    def log(self) -> str:
        """Everything that the server wrote to stderr."""
        return self.log_path.read_text(errors="replace")

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        timeout_s: float = 30.0,
    ) -> tuple[int, Any]:
        """Send one request; returns the status and the body, parsed where it is JSON."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        try:
            data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
            connection.request(method, path, data, headers or {})
            response = connection.getresponse()
            raw = response.read()
        finally:
            connection.close()
        try:
            return response.status, json.loads(raw)
        except ValueError:
            return response.status, raw

    def infer(self, model: str, inputs: dict[str, tuple[str, list[int], list[Any]]]) -> Any:
        """Infer with JSON; returns (status, outputs by name or the error's text)."""
        tensors = [
            {"name": name, "datatype": datatype, "shape": shape, "data": data}
            for name, (datatype, shape, data) in inputs.items()
        ]
        status, answer = self.call("POST", f"/v2/models/{model}/infer", {"inputs": tensors})
        if status != 200:
            return status, answer["error"]
        return status, {output["name"]: output["data"] for output in answer["outputs"]}

    def stubs(self) -> dict[str, int]:
        """Return the pids of the stubs by the name that ps shows."""
        found = {}
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                found[process.name()] = process.pid
            except psutil.Error:
                continue
        return {name: pid for name, pid in found.items() if name[-1:].isdigit()}

    def stop(self, timeout_s: float = 20.0) -> int:
        """Send SIGTERM and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            pytest.fail(f"the server did not stop within {timeout_s:g} s:\n{self.log()}")


Start = Callable[..., Server]


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a server: `start_server(repository, *flags, wait=True)`."""
    servers: list[Server] = []

    def start(
        repository: Path | str,
        *flags: str,
        wait: bool = True,
        env: dict[str, str] | None = None,
    ) -> Server:
        number = len(servers)
        ready_file = tmp_path / f"ready-{number}.json"
        log = tmp_path / f"server-{number}.log"
        command = [sys.executable, "-m", "actorserve", "start", str(repository)]
        command += ["--http-port", "0", "--ready-file", str(ready_file)]
        command += ["--crash-dir", str(tmp_path / "crashes"), *flags]
        with log.open("wb") as stream:
            process = subprocess.Popen(
                command, stderr=stream, stdout=stream, env={**os.environ, **(env or {})}
            )
        server = Server(process, ready_file, log)
        servers.append(server)
        if wait:
            server.wait_ready()
        return server

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.stop()


MODEL_HEAD = """\
import os, signal, sys, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils
"""

IDENTITY_CONFIG = """\
backend: "python"
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""


def write_model(repository: Path, name: str, body: str, config: str = IDENTITY_CONFIG) -> Path:
    """Write a model with this source (after the usual imports); returns its folder."""
    folder = repository / name
    (folder / "1").mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_text(config)
    (folder / "1" / "model.py").write_text(MODEL_HEAD + body)
    return folder


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return an empty repository."""
    path = tmp_path / "repository"
    path.mkdir()
    return path
