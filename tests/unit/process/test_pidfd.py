# SPDX-License-Identifier: Apache-2.0
"""Signals and statuses by pidfd, with and without the newest kernel and Python."""

from __future__ import annotations

import errno
import os
import signal

import pytest

from actorserve.process import pidfd


@pytest.fixture(params=["this Python", "a Python without pidfd"])
def python(request, monkeypatch):
    """Run with os.pidfd_open and as conda's interpreters do."""
    if request.param != "this Python":
        monkeypatch.delattr(os, "pidfd_open")
        monkeypatch.delattr(signal, "pidfd_send_signal")


def start(with_member: bool = False) -> tuple[int, int, int]:
    """Fork a group leader that sleeps; its pid, pidfd, and the pid of another group member."""
    told_r, told_w = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        member = os.fork() if with_member else 1
        if member:
            os.write(told_w, str(member).encode())
        signal.pause()
        os._exit(0)
    member = int(os.read(told_r, 20))
    os.close(told_r)
    os.close(told_w)
    return pid, pidfd.open_pidfd(pid), member


def test_signal_reaches_the_living_only(python):
    """A signal hits, the death is seen, and signals after it are harmless."""
    pid, fd, _ = start()
    assert not os.get_inheritable(fd)
    assert not pidfd.is_dead(fd)
    assert pidfd.send_signal(fd, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert pidfd.is_dead(fd)
    assert not pidfd.send_signal(fd, signal.SIGKILL)
    pidfd.kill_group(fd, pid)
    os.close(fd)


@pytest.mark.parametrize("kernel", ["new", "old"])
@pytest.mark.parametrize("leader", ["alive", "zombie", "reaped"])
def test_group_dies_whatever_became_of_its_leader(python, kernel, leader, kit, monkeypatch):
    """row 37: the group is killed through the leader's pidfd, alive or not, on any kernel."""
    if kernel == "old":
        monkeypatch.setattr(pidfd, "_TO_GROUP", 1 << 31)
    pid, fd, member = start(with_member=True)
    if leader != "alive":
        os.kill(pid, signal.SIGKILL)
        kit.wait_gone(pid)
    if leader == "reaped":
        os.waitpid(pid, 0)
    pidfd.kill_group(fd, pid)
    if kernel == "old" and leader == "zombie":  # the number might be a stranger's: left alone
        os.kill(member, signal.SIGKILL)
    kit.wait_gone(pid, member)
    if leader != "reaped":
        os.waitpid(pid, 0)
    os.close(fd)


@pytest.mark.parametrize("code", [0, 3, signal.SIGKILL, signal.SIGSEGV])
def test_own_child_is_reaped_by_pidfd(code):
    """The status of a child of this process is taken once, as waitpid gives it."""
    pid = os.fork()
    if pid == 0:
        if code > 3:
            os.kill(os.getpid(), code)
        os._exit(code)
    fd = pidfd.open_pidfd(pid)
    while not pidfd.is_dead(fd):
        pass
    expected = code if code > 3 else code << 8
    status = pidfd.reap(fd)
    assert status is not None
    assert status & ~0x80 == expected
    assert pidfd.reap(fd) is None
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, 0)
    known = pidfd.exit_status(fd)
    assert known is None or known & ~0x80 == expected
    os.close(fd)


def test_living_process_has_no_status():
    """Nothing is known before the death."""
    pid, fd, _ = start()
    assert pidfd.reap(fd) is None
    assert pidfd.exit_status(fd) is None
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(fd)


def test_nobody_has_no_pidfd(python):
    """A pid without a process is ESRCH."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    with pytest.raises(OSError) as raised:
        pidfd.open_pidfd(pid)
    assert raised.value.errno == errno.ESRCH
