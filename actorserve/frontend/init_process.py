# SPDX-License-Identifier: Apache-2.0
"""What PID 1 of a container owes: to reap the orphans that it inherits.

Models start processes that start others; whoever of them loses its parent becomes a child of
PID 1, and stays a zombie until somebody asks for its status. Our own child, the zygote, is left
to whoever started it. Does nothing in any other process: there the orphans are init's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path


def reap_orphans(loop: asyncio.AbstractEventLoop, own_child: Callable[[], int | None]) -> None:
    """From now on reap every dead child but `own_child()`, if this process is PID 1."""
    if os.getpid() != 1:
        return
    # Not the loop's own way: uvloop keeps SIGCHLD for the subprocesses that it starts itself.
    signal.signal(signal.SIGCHLD, lambda number, frame: loop.call_soon_threadsafe(_reap, own_child))
    _reap(own_child)


def _reap(own_child: Callable[[], int | None]) -> None:
    kept = own_child()
    for pid in _dead_children():
        if pid != kept:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _dead_children() -> list[int]:
    """Return the children that wait to be reaped."""
    found = []
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for pid in path.read_text().split():
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                if state == "Z":
                    found.append(int(pid))
    return found
