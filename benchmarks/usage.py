# SPDX-License-Identifier: Apache-2.0
"""CPU time and memory of processes that are not ours to instrument."""

from __future__ import annotations

from pathlib import Path

import psutil


def tree_of(pid: int) -> list[int]:
    """Return the process and all below it."""
    process = psutil.Process(pid)
    return [pid, *(child.pid for child in process.children(recursive=True))]


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process so far, to the nanosecond where the kernel tells.

    0 for one that is gone. The usual counters move in ticks of 10 ms, too coarse for idle stubs.
    """
    total_ns = 0
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            total_ns += int((task / "schedstat").read_text().split()[0])
        return total_ns / 1e9
    except (OSError, ValueError, IndexError):
        pass
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def cpu_of_all_s(pids: list[int]) -> float:
    """Return the CPU time of several processes together."""
    return sum(cpu_s(pid) for pid in pids)
