# SPDX-License-Identifier: Apache-2.0
"""The guard: SIGKILL from the kernel when the last write end closes."""

from __future__ import annotations

import ctypes
import os
import signal

import pytest

from actorserve.process import guard


@pytest.fixture
def pipe():
    """A guard pipe; the test closes the write end."""
    read_fd, write_fd = os.pipe()
    yield read_fd, write_fd
    os.close(read_fd)


def guarded(pipe: tuple[int, int], body: str) -> int:
    """Fork a guarded group leader that runs `body` once it is armed; its pid."""
    read_fd, write_fd = pipe
    told_r, told_w = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write_fd)
        os.setsid()
        guard.arm(read_fd, whole_group=True)
        os.write(told_w, b"1")
        if body == "gil":
            ctypes.PyDLL(None).usleep(30_000_000)
        signal.pause()
        os._exit(0)
    assert os.read(told_r, 1) == b"1"
    os.close(told_r)
    os.close(told_w)
    return pid


@pytest.mark.parametrize("body", ["idle", "gil"])
def test_guard_kills_whatever_holds_the_interpreter(pipe, body, kit):
    """row 41: also a process whose C code never lets Python run."""
    pid = guarded(pipe, body)
    os.close(pipe[1])
    kit.wait_gone(pid)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL


def test_guard_waits_for_the_last_writer(pipe, kit):
    """As long as anybody holds the write end, nothing happens."""
    pid = guarded(pipe, "idle")
    kept = os.dup(pipe[1])
    os.close(pipe[1])
    assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    os.close(kept)
    kit.wait_gone(pid)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL


def test_guard_that_is_too_late_kills_at_once(pipe):
    """row 42: a supervisor that died before the arming is noticed by the arming."""
    read_fd, write_fd = pipe
    os.close(write_fd)
    pid = os.fork()
    if pid == 0:
        os.setsid()
        guard.arm(read_fd, whole_group=True)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL


def test_group_of_a_dead_leader_is_guarded(pipe, kit):
    """rows 37, 41: what a dead stub forked dies with the supervisor too."""
    read_fd, write_fd = pipe
    told_r, told_w = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write_fd)
        os.setsid()
        guard.arm(read_fd, whole_group=True)
        member = os.fork()
        if member:
            os.write(told_w, str(member).encode())
            os._exit(0)
        signal.pause()
        os._exit(0)
    os.waitpid(pid, 0)
    member = int(os.read(told_r, 20))
    assert not kit.is_gone(member)
    os.close(write_fd)
    kit.wait_gone(member)
    os.close(told_r)
    os.close(told_w)
