# SPDX-License-Identifier: Apache-2.0
"""The floor: what the machine itself needs, whatever program runs on it.

Waking a process on another core, by eventfd from C and from Python, and copying memory.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks.partner import Partner, pinned, two_cores
from benchmarks.sampling import CannotRun

SOURCE = Path(__file__).with_name("eventfd.c")


def compile_c() -> Path:
    """Compile the C program into a temporary folder. Raises CannotRun without a compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise CannotRun("no C compiler here")
    program = Path(tempfile.mkdtemp(prefix="floor-")) / "eventfd"
    command = [compiler, "-O2", "-o", str(program), str(SOURCE)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise CannotRun(f"{SOURCE.name} does not compile: {done.stderr[:200]}")
    return program


def c_eventfd_us(program: Path, seconds: float) -> float:
    """Return the median round trip of two C processes over two eventfds."""
    cores = map(str, two_cores())
    done = subprocess.run(
        [str(program), str(seconds), *cores], capture_output=True, timeout=seconds + 30, check=True
    )
    return int(done.stdout) / 1000


def python_eventfd_us(seconds: float) -> float:
    """Return the median round trip of two Python processes over two eventfds."""
    if not hasattr(os, "eventfd"):
        raise CannotRun("this Python has no os.eventfd")
    there, back = os.eventfd(0), os.eventfd(0)

    def echo() -> None:
        while True:
            os.eventfd_read(there)
            os.eventfd_write(back, 1)

    trips_ns: list[int] = []
    near_core, far_core = two_cores()
    try:
        with Partner(echo, far_core), pinned(near_core):
            end_ns = time.monotonic_ns() + int(seconds * 1e9)
            while (start_ns := time.monotonic_ns()) < end_ns:
                os.eventfd_write(there, 1)
                os.eventfd_read(back)
                trips_ns.append(time.monotonic_ns() - start_ns)
    finally:
        os.close(there)
        os.close(back)
    return statistics.median(trips_ns) / 1000


def memcpy_gb_per_s(source: int, targets: list[int], nbytes: int, seconds: float) -> float:
    """Return the speed of libc's memcpy from one address to several in turn, all of them warm."""
    copied = 0
    start_s = time.monotonic()
    end_s = start_s + seconds
    while (now_s := time.monotonic()) < end_s:
        for target in targets:
            ctypes.memmove(target, source, nbytes)
        copied += nbytes * len(targets)
    return copied / (now_s - start_s) / 1e9
