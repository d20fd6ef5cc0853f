# SPDX-License-Identifier: Apache-2.0
"""Wakes a loop from any thread, without lending the interpreter lock to anybody.

`call_soon_threadsafe` writes to a socket, as Python writes: without the lock. The loop's thread
takes it at once and keeps it for whatever it has to do then, up to the switch interval of 5 ms,
while the caller waits to come back from a write of a microsecond. Here the write itself happens
with the lock held; it cannot block, since the descriptor does not.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
from collections.abc import Callable

from actorserve.shm.doorbell import Doorbell

_ONE = (1).to_bytes(8, sys.byteorder)
_write = ctypes.PyDLL(None).write  # PyDLL is what keeps the lock
_write.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t]


class LoopBell:
    """Made and closed in its loop's thread; `on_ring` is called there, once for several rings.

    The descriptor lives as long as this object, so that no ring can meet another of its number.
    No lock is needed then, which an interrupted ring could leave behind.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_ring: Callable[[], object]) -> None:
        """Begin to listen; ResourceExhausted if no descriptor is left."""
        self._bell = Doorbell.create()
        self._is_closed = False
        self._loop = loop
        self._on_ring = on_ring
        loop.add_reader(self._bell.fileno(), self._hear)

    def ring(self) -> None:
        """Have `on_ring` called soon; nothing happens after `close`. Any thread."""
        if not self._is_closed:
            _write(self._bell.fds[-1], _ONE, 8)

    def close(self) -> None:
        """Listen no more; idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._bell.fileno())

    def _hear(self) -> None:
        self._bell.clear()
        self._on_ring()
