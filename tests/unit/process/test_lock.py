# SPDX-License-Identifier: Apache-2.0
"""The health mutex: asked for, never waited for, free when its holder is dead."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from actorserve.errors import Unavailable
from actorserve.process.lock import HealthLock


@pytest.fixture
def lock():
    """A mutex that nobody holds."""
    lock = HealthLock.create()
    yield lock
    lock.close()
    lock.close()


def hold(lock: HealthLock) -> int:
    """Fork a process that takes the mutex, and its own fork that does not; the holder's pid."""
    told_r, told_w = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(told_r)
        lock.take()
        if os.fork() == 0:
            os.setsid()
        os.write(told_w, b"1")
        signal.pause()
        os._exit(0)
    os.close(told_w)
    assert os.read(told_r, 1) == b"1"
    os.close(told_r)
    return pid


def test_holder_is_named_until_it_dies(lock):
    """row 9: the kernel frees the mutex of a killed holder although the holder's fork lives."""
    assert lock.holder() is None
    pid = hold(lock)
    try:
        assert lock.holder() == pid
        with pytest.raises(Unavailable, match=str(pid)):
            lock.take()
    finally:
        os.kill(pid, signal.SIGKILL)
        children = _children(pid)
        os.waitpid(pid, 0)
        for child in children:
            os.kill(child, 0)
        assert lock.holder() is None
        for child in children:
            os.kill(child, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process(pid).children()]


def test_threads_of_the_holder_do_not_lose_it(lock):
    """The mutex belongs to the process, whichever thread took it."""
    thread = threading.Thread(target=lock.take)
    thread.start()
    thread.join()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if lock.holder() == os.getppid() else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_attached_end_works_alike():
    """A received descriptor is one end like the created one."""
    lock = HealthLock.create()
    other = HealthLock.attach(os.dup(lock.fd))
    pid = hold(other)
    assert lock.holder() == pid
    os.killpg(os.getpgrp(), 0)
    for victim in (*_children(pid), pid):
        os.kill(victim, signal.SIGKILL)
    os.waitpid(pid, 0)
    other.close()
    lock.close()


def test_memory_files_are_not_needed(monkeypatch):
    """An interpreter without memfd_create uses an unlinked file."""
    monkeypatch.delattr(os, "memfd_create")
    lock = HealthLock.create()
    lock.take()
    assert lock.holder() is None
    lock.close()
