# SPDX-License-Identifier: Apache-2.0
"""Memory ordering between processes, in Python.

A fence is `release()` and then `acquire(False)` of a lock that nobody else has. On Linux that lock
is a semaphore without a name, or one byte: its release is a read-modify-write with release order at
least, its acquire one with acquire order. On x86-64 each is a full barrier by itself; on ARMv8
everything before the pair is ordered before everything after it, a store before a load included,
because of this order of the two: `with lock: pass`, acquire first, is weaker than even a
store-store barrier there. A lock has no name that a killed process could leave in /dev/shm, as
those of multiprocessing have for a moment.

Two kinds of places need one:

- A message is published by one 8-byte store after its bytes, and taken by one load before them.
  x86-64 keeps both orders by itself, so there the fence is left out (`WEAKLY_ORDERED`).
- Parking: each side stores its own word and then loads the other's ("I sleep" against "there is
  something"). Without a fence between the two, both may miss the other's store and the sleeper
  is never rung. x86-64 needs it too.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable

WEAKLY_ORDERED = platform.machine().lower() not in ("x86_64", "amd64", "i386", "i686")
"""Whether this machine lets loads pass loads, or stores pass stores."""


def new_fence() -> tuple[Callable[[], object], Callable[[bool], object]]:
    """Return the two halves of a fence, to be called as `release()` and then `acquire(False)`.

    About 100 ns for the pair. Each end of a lane needs one of its own: in a shared one `acquire`
    may find the lock taken by another thread, and a failed acquire orders nothing.
    """
    lock = threading.Lock()
    lock.acquire()

    def release() -> None:
        try:
            lock.release()
        except RuntimeError:
            pass  # an exception came between the halves of the last fence: it is free already

    return release, lock.acquire
