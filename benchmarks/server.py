# SPDX-License-Identifier: Apache-2.0
"""Servers as their users start them: a command in a process, a port, an end."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib import util
from pathlib import Path

import msgspec

from benchmarks import usage
from benchmarks.sampling import CannotRun

START_S = 60.0
STOP_S = 15.0
LOOK_S = 0.002


class Server(msgspec.Struct, frozen=True):
    """A server that is ready; `ready_s` is the time from its command to there."""

    pid: int
    port: int
    ready_s: float

    def cpu_s(self) -> float:
        """Return the CPU time of all its processes so far."""
        return usage.cpu_of_all_s(usage.tree_of(self.pid))


@contextlib.contextmanager
def actorserve(repository: Path, *flags: str) -> Iterator[Server]:
    """Serve a repository by `actorserve start`."""
    ready = Path(tempfile.mkdtemp(prefix="ready-")) / "ready.json"
    command = [sys.executable, "-m", "actorserve", "start", str(repository)]
    command += ["--http-port", "0", "--metrics-port", "0", "--ready-file", str(ready), *flags]
    start_s = time.monotonic()
    with _running(command) as process:
        while not ready.exists():
            _pause(process, start_s)
        ready_s = time.monotonic() - start_s
        port = json.loads(ready.read_text())["http"]["port"]
        yield Server(process.pid, port, ready_s)


@contextlib.contextmanager
def mosec() -> Iterator[Server]:
    """Serve the same model by mosec. Raises CannotRun where it is not installed."""
    if util.find_spec("mosec") is None:
        raise CannotRun("mosec is not installed")
    port = _free_port()
    command = [sys.executable, "-m", "benchmarks.mosec_peer", "--address", "127.0.0.1"]
    command += ["--port", str(port), "--log-level", "error"]
    command += ["--path", f"{tempfile.mkdtemp(prefix='mosec-')}/sockets"]
    start_s = time.monotonic()
    with _running(command) as process:
        while not _answers(port):
            _pause(process, start_s)
        yield Server(process.pid, port, time.monotonic() - start_s)


@contextlib.contextmanager
def _running(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server's command; at the end stop it, and kill it if it does not stop."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            yield process
        except CannotRun as error:
            log.seek(0)
            lines = log.read().decode(errors="replace").strip().splitlines()
            raise CannotRun(f"{error}: {lines[-1] if lines else 'it said nothing'}") from None
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _pause(process: subprocess.Popen[bytes], start_s: float) -> None:
    """Wait a moment for a server that starts. Raises CannotRun for one that never will."""
    if process.poll() is not None:
        raise CannotRun(f"the server ended with {process.returncode}")
    if time.monotonic() - start_s > START_S:
        raise CannotRun(f"the server was not ready within {START_S:g} s")
    select.select([], [], [], LOOK_S)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(port: int) -> bool:
    """Whether an inference is answered: mosec listens before its worker is there."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/inference", bytes(4))
    try:
        with urllib.request.urlopen(request, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
