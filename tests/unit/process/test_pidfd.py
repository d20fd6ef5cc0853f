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


@pytest.fixture
def start(kit):
    """Fork a group leader that sleeps; its pid, its pidfd, and the pid of a group member."""
    members: list[int] = []

    def start_leader() -> tuple[int, int, int]:
        told_r, told_w = os.pipe()

        def leader() -> None:
            os.setsid()
            os.write(told_w, str(kit.forked(signal.pause)).encode())
            signal.pause()

        pid = kit.forked(leader)
        member = int(os.read(told_r, 20))
        os.close(told_r)
        os.close(told_w)
        members.append(member)
        return pid, pidfd.open_pidfd(pid), member

    yield start_leader
    for member in members:
        if not kit.is_gone(member):
            os.kill(member, signal.SIGKILL)


def test_signal_reaches_the_living_only(python, start, kit):
    """A signal hits, the death is seen, and signals after it are harmless."""
    pid, fd, member = start()
    assert not os.get_inheritable(fd)
    assert not pidfd.is_dead(fd)
    assert pidfd.send_signal(fd, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert pidfd.is_dead(fd)
    assert not pidfd.send_signal(fd, signal.SIGKILL)
    pidfd.kill_group(fd, pid)
    assert kit.wait_gone(member) < 5
    os.close(fd)


@pytest.mark.parametrize("kernel", ["new", "old"])
@pytest.mark.parametrize("leader", ["alive", "zombie", "reaped"])
def test_group_dies_whatever_became_of_its_leader(python, start, kernel, leader, kit, monkeypatch):
    """Row 37: the group is killed through the leader's pidfd, alive or not, on any kernel."""
    if kernel == "old":
        monkeypatch.setattr(pidfd, "_TO_GROUP", 1 << 30)
    pid, fd, member = start()
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
def test_own_child_is_reaped_by_pidfd(code, kit):
    """The status of a child of this process is taken once, as waitpid gives it."""
    ends = {signal.SIGKILL, signal.SIGSEGV}
    pid = kit.forked(lambda: os.kill(os.getpid(), code) if code in ends else os._exit(code))
    fd = pidfd.open_pidfd(pid)
    kit.wait_gone(pid)
    assert pidfd.is_dead(fd)
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


def test_living_process_has_no_status(start):
    """Nothing is known before the death."""
    pid, fd, _ = start()
    assert pidfd.reap(fd) is None
    assert pidfd.exit_status(fd) is None
    pidfd.kill_group(fd, pid)
    os.waitpid(pid, 0)
    os.close(fd)


def test_nobody_has_no_pidfd(python, kit):
    """A pid without a process is ESRCH."""
    pid = kit.forked(lambda: None)
    os.waitpid(pid, 0)
    with pytest.raises(OSError) as raised:
        pidfd.open_pidfd(pid)
    assert raised.value.errno == errno.ESRCH
