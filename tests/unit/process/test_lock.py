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


@pytest.fixture
def hold(kit):
    """Start processes that take a mutex, each with a fork that does not; (holder, its fork)."""
    victims: list[int] = []

    def start(lock: HealthLock) -> tuple[int, int]:
        told_r, told_w = os.pipe()

        def body() -> None:
            lock.take()
            fork = kit.forked(kit.sleep_for_ever)
            os.write(told_w, str(fork).encode())
            kit.sleep_for_ever()

        pid = kit.forked(body)
        fork = int(os.read(told_r, 20))
        os.close(told_r)
        os.close(told_w)
        victims.append(fork)
        return pid, fork

    yield start
    for victim in victims:
        os.kill(victim, signal.SIGKILL)


def test_holder_is_named_until_it_dies(lock, hold, kit):
    """Row 9: the kernel frees the mutex of a killed holder although the holder's fork lives."""
    assert lock.holder() is None
    pid, fork = hold(lock)
    assert lock.holder() == pid
    with pytest.raises(Unavailable, match=str(pid)):
        lock.take()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert not kit.is_gone(fork)
    assert lock.holder() is None


def test_threads_of_the_holder_do_not_lose_it(lock, kit):
    """The mutex belongs to the process, whichever thread took it."""
    thread = threading.Thread(target=lock.take)
    thread.start()
    thread.join()
    pid = kit.forked(lambda: os._exit(0 if lock.holder() == os.getppid() else 1))
    assert os.waitpid(pid, 0)[1] == 0


def test_attached_end_works_alike(lock, hold):
    """A received descriptor is one end like the created one."""
    other = HealthLock.attach(os.dup(lock.fd))
    pid, _ = hold(other)
    assert lock.holder() == pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    other.close()


def test_memory_files_are_not_needed(monkeypatch):
    """An interpreter without memfd_create uses an unlinked file."""
    monkeypatch.delattr(os, "memfd_create")
    lock = HealthLock.create()
    lock.take()
    assert lock.holder() is None
    lock.close()
