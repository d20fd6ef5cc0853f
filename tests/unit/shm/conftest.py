# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the shared memory room: both backends, and children that never outlive a test."""

from __future__ import annotations

import os
import select
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator

import pytest

from actorserve.shm import segment

PATIENCE_S = 60.0


class Child:
    """A forked child; `wait` returns its wait status, or fails the test when it takes too long."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._status: int | None = None

    def wait(self) -> int:
        if self._status is None:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            if not poll.poll(PATIENCE_S * 1000):
                pytest.fail(f"child {self.pid} did not end within {PATIENCE_S} s")
            self._status = os.waitpid(self.pid, 0)[1]
        return self._status

    def kill(self) -> None:
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def close(self) -> None:
        self.kill()
        os.close(self._pidfd)


def _run_child(function: Callable[[], object]) -> None:
    status = 1
    try:
        function()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


@pytest.fixture
def fork() -> Iterator[Callable[[Callable[[], object]], Child]]:
    """Return a function that runs another one in a forked child: exit code 0 unless it raised."""
    children: list[Child] = []

    def start(function: Callable[[], object]) -> Child:
        with warnings.catch_warnings():
            # From 3.12 fork warns of other threads; numpy's are idle and the child calls none.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            _run_child(function)
        children.append(Child(pid))
        return children[-1]

    yield start
    for child in children:
        child.close()


@pytest.fixture(params=["shm", "memfd"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test once with segments from /dev/shm and once with memfds."""
    monkeypatch.setattr(segment, "_chosen", request.param)
    return str(request.param)
