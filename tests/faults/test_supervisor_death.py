# SPDX-License-Identifier: Apache-2.0
"""The supervisor is SIGKILLed: whatever it had started is gone, and the next one serves."""

from __future__ import annotations

import fcntl
import os
import secrets
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.conftest import wait_until
from tests.faults.harness import marked_processes, parameter, write_model

INPUT = {"INPUT0": ("FP32", [2], [1.0, 2.0])}
GONE_S = 5.0

BUSY = """
class TritonPythonModel:
    def initialize(self, args):
        {initialize}
    def execute(self, requests):
        arrays = tensors(requests)
        if arrays[0][0] < 0:
            open(os.environ["BEGUN"], "w").close()
            {execute}
        return answers(arrays)
"""


@pytest.fixture
def serves(start_server, repository) -> Callable[[], None]:
    """Return a check: another server starts, answers and stops, and then /dev/shm is clean."""
    before = segments()

    def check() -> None:
        server = start_server(repository)
        assert server.infer("bystander", INPUT) == (200, {"OUTPUT0": [1.0, 2.0]})
        assert server.stop() == 0
        wait_until(lambda: not segments() - before)  # others' names live for microseconds

    return check


def segments() -> set[str]:
    """Return the names that servers have in /dev/shm."""
    return {path.name for path in Path("/dev/shm").glob("actorserve-*")}


@pytest.mark.parametrize(
    ("initialize", "execute"),
    [
        ("pass", None),
        ("pass", "threading.Event().wait()"),
        ("pass", "ctypes.PyDLL(None).sleep(1000)"),
        ("signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))", "threading.Event().wait()"),
        ("pass", "os.kill(os.getpid(), signal.SIGSTOP)"),
        ("subprocess.Popen(['sleep', '1000'])", None),
        ("import multiprocessing as m; self.pool = m.get_context('fork').Pool(2)", None),
    ],
)
def test_row_41_a_killed_supervisor_leaves_nobody(
    start_server, serves, repository, tmp_path, monkeypatch, initialize, execute
):
    """Idle or busy, blocked in C, deaf to signals, stopped, with children: gone within 5 s."""
    begun = tmp_path / "begun"
    monkeypatch.setenv("BEGUN", str(begun))
    body = BUSY.format(initialize=initialize, execute=execute or "pass")
    write_model(repository, "model", body, count=2)
    server = start_server(repository)
    with ThreadPoolExecutor(1) as clients:
        if execute:
            asked = clients.submit(server.infer, "model", {"INPUT0": ("FP32", [1], [-1.0])})
            wait_until(begun.exists)
        assert len(marked_processes()) >= 5
        server.process.kill()
        server.process.wait()
        wait_until(lambda: not marked_processes(), GONE_S)
        if execute:
            assert isinstance(asked.exception(10), (ConnectionError, OSError))
    serves()


@pytest.mark.parametrize("state", ["killed", "stopped"])
def test_row_41_a_killed_supervisor_whose_zygote_was_hurt_leaves_nobody(
    start_server, repository, state
):
    """Orphans of a dead zygote and the children of a stopped one end too."""
    server = start_server(repository)
    zygote = next(pid for pid, name in marked_processes().items() if name == "actor-zygote")
    os.kill(zygote, signal.SIGKILL if state == "killed" else signal.SIGSTOP)
    server.process.kill()
    server.process.wait()
    wait_until(lambda: not marked_processes(), GONE_S)


def test_row_41_stubs_of_another_interpreter_end_too(start_server, repository):
    """A stub that was exec'ed is as sure to be gone as one that was forked."""
    extra = parameter("EXECUTION_ENV_PATH", sys.prefix)
    write_model(repository, "model", extra=extra)
    server = start_server(repository)
    assert "model_0_0" in marked_processes().values()
    server.process.kill()
    server.process.wait()
    wait_until(lambda: not marked_processes(), GONE_S)


@pytest.mark.parametrize(
    "code", ["threading.Event().wait()", "ctypes.PyDLL(None).sleep(1000)", "\nwhile True: pass"]
)
def test_row_42_a_supervisor_that_is_killed_while_stubs_import_leaves_nobody(
    start_server, repository, code
):
    """SIGKILL while model.py is being imported."""
    write_model(repository, "model", f"print('importing'); {code}")
    server = start_server(repository, "--disable-auto-complete-config", wait=False)
    server.wait_log('"importing"')
    server.process.kill()
    server.process.wait()
    wait_until(lambda: not marked_processes(), GONE_S)


def test_row_42_a_supervisor_that_is_killed_while_it_starts_leaves_nobody(
    start_server, serves, repository
):
    """SIGKILL at some moments of the start: zygote or stubs half made, or made."""
    for delay_s in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8):
        server = start_server(repository, wait=False)
        select.select([], [], [], delay_s)
        server.process.kill()
        server.process.wait()
        wait_until(lambda: not marked_processes(), GONE_S)
    serves()


def test_row_51_a_start_removes_the_names_that_dead_servers_left_and_no_others(
    start_server, repository
):
    """A name that nobody holds goes; one that a living process holds stays."""
    names = [f"actorserve-{secrets.token_hex(12)}" for _ in range(2)]
    dead, held = (Path("/dev/shm") / name for name in names)
    dead.write_bytes(b"x")
    try:
        with held.open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            assert start_server(repository).stop() == 0
            assert not dead.exists()
            assert held.exists()
    finally:
        held.unlink(missing_ok=True)
        dead.unlink(missing_ok=True)


def test_row_51_a_start_while_another_server_dies(start_server, repository):
    """The next server starts in the very moment in which the old one is killed."""
    server = start_server(repository)
    for _ in range(3):
        server.process.kill()
        successor = start_server(repository, wait=False)
        server.process.wait()
        successor.wait_ready()
        assert successor.infer("bystander", INPUT)[0] == 200
        server = successor
    assert server.stop() == 0


FORKING_HOST = """
async def main():
    server = new_server()
    await server.start()
    pid = {fork}
    if pid == 0:
        ctypes.CDLL(None).pause()
        os._exit(0)
    await ask(server)
    say(child=pid, zygote=server._node.spawner.stats().zygote_pid)
    await pause(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("fork", ["os.fork()", "ctypes.CDLL(None).fork()"])
def test_row_40c_a_fork_of_the_host_keeps_no_stub_alive(embed, fork):
    """The host is SIGKILLed while its forked child lives: stubs and zygote are gone all the same.

    A fork by C code runs no hook of Python's, so that the child holds every descriptor.
    """
    host = embed(FORKING_HOST.format(fork=fork))
    child = host.hear()["child"]
    try:
        assert {"bystander_0_0", "actor-zygote"} <= set(marked_processes().values())
        host.kill()
        wait_until(lambda: set(marked_processes()) == {child}, GONE_S)
        assert psutil.pid_exists(child)
    finally:
        os.kill(child, signal.SIGKILL)
        wait_until(lambda: not marked_processes())


def test_row_40c_a_program_that_the_host_started_keeps_no_stub_alive(embed):
    """A subprocess of the host inherits nothing that would."""
    host = embed("""
async def main():
    server = new_server()
    await server.start()
    child = subprocess.Popen(["sleep", "60"], close_fds=False)
    say(child=child.pid)
    await pause(60)

asyncio.run(main())
""")
    child = host.hear()["child"]
    try:
        host.kill()
        wait_until(lambda: set(marked_processes()) == {child}, GONE_S)
    finally:
        subprocess.run(["kill", "-9", str(child)], check=True)
