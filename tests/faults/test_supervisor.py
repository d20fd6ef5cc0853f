# SPDX-License-Identifier: Apache-2.0
"""What the host does to a server: no descriptors, no log, no processes, PID 1, a twin."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
from collections.abc import Iterator

import psutil
import pytest

from tests.conftest import wait_until
from tests.faults.harness import Harness, stub_pids, write_model
from tests.faults.host import launched, namespace
from tests.server.harness import Server

INPUT = {"INPUT0": ("FP32", [2], [1.0, 2.0])}
TENSOR = {"name": "INPUT0", "datatype": "FP32", "shape": [2], "data": [1.0, 2.0]}
ANSWER = (200, {"OUTPUT0": [1.0, 2.0]})


def test_row_50_two_servers_of_one_repository_do_not_meet(start_server, repository):
    """Both serve; the end of one, orderly or not, is nothing to the other."""
    first, second, third = (start_server(repository) for _ in range(3))
    assert len(stub_pids()) == 3
    for server in (first, second, third):
        assert server.infer("bystander", INPUT) == ANSWER
    first.process.kill()
    first.process.wait()
    assert second.stop() == 0
    assert third.infer("bystander", INPUT) == ANSWER
    assert len(stub_pids()) == 1


@contextlib.contextmanager
def descriptors_below(process: psutil.Process, limit: int) -> Iterator[None]:
    """Let a process open no descriptor from this number on, for a while."""
    before = process.rlimit(psutil.RLIMIT_NOFILE)
    process.rlimit(psutil.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        process.rlimit(psutil.RLIMIT_NOFILE, before)


def test_row_56_connections_beyond_the_descriptors_wait_or_are_refused(start_server, repository):
    """A server whose descriptors are used up does not crash, and serves when they are free."""
    server = start_server(repository)
    process = psutil.Process(server.process.pid)
    highest = max(int(name) for name in os.listdir(f"/proc/{process.pid}/fd"))  # noqa: PTH208
    with descriptors_below(process, highest + 5):
        sockets = []
        for _ in range(40):
            sock = socket.create_connection((server.host, server.port), timeout=5)
            sockets.append(sock)
        assert server.process.poll() is None
        for sock in sockets:
            sock.close()
    wait_until(lambda: answers(server), 20)
    assert server.stop() == 0


def status_of(client: http.client.HTTPConnection, method: str, path: str, body: str = "") -> int:
    """Send a request on a connection that stays, and return its status."""
    client.request(method, path, body)
    response = client.getresponse()
    response.read()
    return response.status


def answers(server: Server) -> bool:
    """Whether an inference succeeds now."""
    try:
        return bool(server.infer("bystander", INPUT) == ANSWER)
    except (OSError, http.client.HTTPException):
        return False


def test_row_56_a_stub_that_dies_when_no_descriptor_is_left_comes_back(start_server, repository):
    """The restart waits for descriptors; nobody is given up."""
    write_model(repository, "model")
    server = start_server(repository, "--restart-backoff-s", "0:0.2")
    client = http.client.HTTPConnection(server.host, server.port, timeout=10)
    assert status_of(client, "GET", "/v2/health/ready") == 200
    with descriptors_below(psutil.Process(server.process.pid), 3):
        os.kill(server.stubs()["model_0_0"], signal.SIGKILL)
        log = server.wait_log("no process could be made")
        assert "ulimit -n" in log
        assert status_of(client, "GET", "/v2/health/ready") == 503
        body = json.dumps({"inputs": [TENSOR]})
        assert status_of(client, "POST", "/v2/models/bystander/infer", body) == 200
    client.close()
    wait_until(lambda: server.call("GET", "/v2/health/ready")[0] == 200, 20)
    assert server.infer("model", INPUT) == ANSWER
    assert server.stop() == 0


def test_row_56_a_server_starts_and_serves_with_64_descriptors(repository, tmp_path):
    """`ulimit -n 64` is enough for one stub and some clients."""
    limited = ["sh", "-c", 'ulimit -n 64; exec "$@"', "sh"]
    with launched(tmp_path, repository, prefix=limited) as server:
        sockets = [socket.create_connection((server.host, server.port)) for _ in range(80)]
        assert server.process.poll() is None
        for sock in sockets:
            sock.close()
        wait_until(lambda: answers(server), 20)
        os.kill(server.stubs()["bystander_0_0"], signal.SIGKILL)
        wait_until(lambda: answers(server), 20)
        assert server.stop() == 0


@pytest.mark.parametrize(
    "where", ["closed pipe", "closed later", "nobody reads", "/dev/full", "no descriptors"]
)
def test_row_57_a_log_that_nobody_takes_does_not_end_serving(repository, tmp_path, where):
    """Reader gone before the start or later, disk full, stdout and stderr closed: it serves."""
    body = """
class TritonPythonModel:
    def execute(self, requests):
        for n in range(200):
            print("a line that nobody reads", n)
            pb_utils.Logger.log_info("another")
        return answers(tensors(requests))
"""
    write_model(repository, "model", body)
    flags = ["--log-file", "/dev/full"] if where == "/dev/full" else []
    prefix = ["sh", "-c", 'exec "$@" 1>&- 2>&-', "sh"] if where == "no descriptors" else []
    read_fd, write_fd = os.pipe()
    if where == "closed pipe":
        os.close(read_fd)
    with launched(tmp_path, repository, *flags, prefix=prefix, output=write_fd) as server:
        os.close(write_fd)
        if where == "closed later":
            os.close(read_fd)
        for _ in range(3):
            assert server.infer("model", INPUT) == ANSWER
        os.kill(server.stubs()["model_0_0"], signal.SIGKILL)
        wait_until(lambda: server.infer("model", INPUT) == ANSWER)
        assert server.stop() == 0
    if where not in ("closed pipe", "closed later"):
        os.close(read_fd)


def test_row_58_a_zygote_that_cannot_fork_is_asked_again(serve, repository):
    """No room for descriptors in the zygote: the restart is tried until it works."""
    write_model(repository, "model")

    async def test(harness: Harness) -> None:
        zygote = psutil.Process(harness.zygote_pid)
        with descriptors_below(zygote, 3):
            pid = harness.kill("model")
            await harness.until(
                lambda: "no process could be made" in harness.instance("model").reason
            )
            assert not harness.server.is_ready()
            assert await harness.outcome("bystander", [1.0]) == [1.0]
        await harness.until_restarted("model", pid)
        assert await harness.outcome("model", [1.0]) == [1.0]
        assert zygote.is_running()

    serve(test)


def test_row_61_pid_1_reaps_what_its_models_leave(repository, tmp_path):
    """As PID 1: orphans do not stay as zombies, strangers are not counted, SIGTERM works."""
    body = """
class TritonPythonModel:
    def execute(self, requests):
        # Daemons that lose their parent at once, and end by themselves a little later.
        subprocess.run(["sh", "-c", "setsid sleep 0.1 & setsid sleep 0.2 & exit 0"])
        return answers(tensors(requests))
"""
    write_model(repository, "model", body)
    prefix = namespace("--pid", "--fork", "--mount-proc", "--kill-child=SIGKILL")
    with launched(tmp_path, repository, prefix=prefix) as outer:
        (inner,) = psutil.Process(outer.process.pid).children()

        def zombies() -> list[psutil.Process]:
            children = inner.children(recursive=True)
            return [each for each in children if each.status() == psutil.STATUS_ZOMBIE]

        for _ in range(3):
            assert outer.infer("model", INPUT) == ANSWER
        pid = named(inner, "model_0_0")
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: named(inner, "model_0_0") not in (0, pid))
        zygote = named(inner, "actor-zygote")
        os.kill(zygote, signal.SIGKILL)
        wait_until(lambda: named(inner, "actor-zygote") not in (0, zygote))
        # A stub whose zygote is dead is a child of PID 1 now.
        pid = named(inner, "model_0_0")
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: named(inner, "model_0_0") not in (0, pid))
        wait_until(lambda: outer.infer("model", INPUT) == ANSWER)
        wait_until(lambda: not zombies(), 10, "zombies stay")
        inner.send_signal(signal.SIGTERM)
        assert outer.wait(15) == 0


def named(process: psutil.Process, name: str) -> int:
    """Return the pid of the living descendant with this name, 0 for none."""
    for each in process.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if each.name() == name and each.status() != psutil.STATUS_ZOMBIE:
                return each.pid
    return 0
