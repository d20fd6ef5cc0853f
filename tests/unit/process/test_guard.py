# SPDX-License-Identifier: Apache-2.0
"""The guard: SIGKILL from the kernel when the last write end closes."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

import pytest

from actorserve.process import guard


@pytest.fixture
def pipe():
    """A guard pipe; the test closes the write end."""
    read_fd, write_fd = os.pipe()
    yield read_fd, write_fd
    os.close(read_fd)


@pytest.fixture
def guarded(pipe, kit):
    """Start guarded group leaders that run a body once they are armed; the pid."""
    read_fd, write_fd = pipe

    def start(body: Callable[[], object]) -> int:
        told_r, told_w = os.pipe()

        def leader() -> None:
            os.close(write_fd)
            os.setsid()
            guard.arm(read_fd, whole_group=True)
            os.write(told_w, b"1")
            body()

        pid = kit.forked(leader)
        assert os.read(told_r, 1) == b"1"
        os.close(told_r)
        os.close(told_w)
        return pid

    return start


@pytest.mark.parametrize("body", [signal.pause, lambda: ctypes.PyDLL(None).usleep(30_000_000)])
def test_guard_kills_whatever_holds_the_interpreter(pipe, guarded, body, kit):
    """Row 41: also a process whose C code never lets Python run."""
    pid = guarded(body)
    os.close(pipe[1])
    kit.wait_gone(pid)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL


def test_guard_waits_for_the_last_writer(pipe, guarded, kit):
    """As long as anybody holds the write end, nothing happens."""
    pid = guarded(signal.pause)
    kept = os.dup(pipe[1])
    os.close(pipe[1])
    assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    os.close(kept)
    kit.wait_gone(pid)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL


def test_guard_that_is_too_late_kills_at_once(pipe, kit):
    """Row 42: a supervisor that died before the arming is noticed by the arming."""
    os.close(pipe[1])
    pid = kit.forked(lambda: (os.setsid(), guard.arm(pipe[0], whole_group=True)))
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL


def test_group_of_a_dead_leader_is_guarded(pipe, guarded, kit):
    """Rows 37, 41: what a dead stub forked dies with the supervisor too."""
    told_r, told_w = os.pipe()
    pid = guarded(lambda: os.write(told_w, str(kit.forked(signal.pause)).encode()))
    os.waitpid(pid, 0)
    member = int(os.read(told_r, 20))
    assert not kit.is_gone(member)
    os.close(pipe[1])
    kit.wait_gone(member)
    os.close(told_r)
    os.close(told_w)


def test_softened_guard_continues_a_stopped_process(pipe, kit):
    """A guard that only wakes sends SIGCONT when the supervisor is gone."""
    read_fd, write_fd = pipe

    def body() -> None:
        os.close(write_fd)
        guard.only_wake(guard.arm(read_fd, whole_group=False))
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(5)

    pid = kit.forked(body)
    assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
    os.close(write_fd)
    assert os.WEXITSTATUS(os.waitpid(pid, 0)[1]) == 5
