# SPDX-License-Identifier: Apache-2.0
"""Tests of the fence's mechanics; that it orders memory cannot be seen from Python."""

from __future__ import annotations

import subprocess
import sys

from actorserve.shm.fence import new_fence


def test_acquire_succeeds_after_every_release() -> None:
    """A failed acquire would order nothing."""
    release, acquire = new_fence()
    for _ in range(1000):
        release()
        assert acquire(False)


def test_interruption_between_the_halves_leaves_a_usable_fence() -> None:
    """An exception that lands between release and acquire does not break the next fence."""
    release, acquire = new_fence()
    release()
    release()
    assert acquire(False)
    release()
    assert acquire(False)


def test_fences_are_private() -> None:
    """A release of one fence is not there for another to take."""
    release, _ = new_fence()
    _, acquire = new_fence()
    release()
    assert not acquire(False)


_WITHOUT_NAMES = """
import sys

def refuse(event, arguments):
    if event == "open" and "/dev/shm" in str(arguments[0]):
        raise AssertionError(arguments)

sys.addaudithook(refuse)
from actorserve.shm.fence import new_fence
new_fence()
assert "_multiprocessing" not in sys.modules
"""


def test_a_fence_has_no_name_that_a_kill_could_leave() -> None:
    """The semaphores of multiprocessing are in /dev/shm for a moment."""
    subprocess.run([sys.executable, "-c", _WITHOUT_NAMES], check=True, timeout=30)
