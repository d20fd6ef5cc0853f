# SPDX-License-Identifier: Apache-2.0
"""Tests of the fence's mechanics; that it orders memory cannot be seen from Python."""

from __future__ import annotations

import multiprocessing

import pytest

from actorserve.shm.fence import new_fence


def _no_semaphores(method: str) -> object:
    raise OSError(f"no semaphores for {method}")


@pytest.fixture(params=["semaphore", "lock"])
def fence(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Return a fence of each kind; the lock is what is left without semaphores."""
    if request.param == "lock":
        monkeypatch.setattr(multiprocessing, "get_context", _no_semaphores)
    return new_fence()


def test_acquire_succeeds_after_every_release(fence) -> None:
    """A failed acquire would order nothing."""
    release, acquire = fence
    for _ in range(1000):
        release()
        assert acquire(False)


def test_interruption_between_the_halves_leaves_a_usable_fence(fence) -> None:
    """An exception that lands between release and acquire does not break the next fence."""
    release, acquire = fence
    release()
    release()
    assert acquire(False)
    release()
    assert acquire(False)


def test_fences_are_private(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release of one fence is not there for another to take."""
    release, _ = new_fence()
    _, acquire = new_fence()
    release()
    assert not acquire(False)
