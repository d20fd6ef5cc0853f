# SPDX-License-Identifier: Apache-2.0
"""Around every test: a hard timeout that dumps all stacks, and a look for what it left behind."""

from __future__ import annotations

import faulthandler
import gc
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from actorserve.clock import monotonic_s

TEST_TIMEOUT_S = 60.0
SLOW_TEST_TIMEOUT_S = 300.0
SETTLE_S = 10.0


def wait_until(condition: Callable[[], object], timeout_s: float = 10.0, what: str = "") -> None:
    """Return as soon as the condition holds; fail after `timeout_s` seconds."""
    deadline_s = monotonic_s() + timeout_s
    while not condition():
        if monotonic_s() > deadline_s:
            pytest.fail(f"not within {timeout_s:g} s: {what or condition}")
        select.select([], [], [], 0.005)


def _descendants() -> dict[int, str]:
    """Return what runs below this process, by pid; read from /proc, since psutil walks them all."""
    found: dict[int, str] = {}
    waiting = [os.getpid()]
    while waiting:
        for children in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
            try:
                pids = [int(pid) for pid in children.read_text().split()]
            except OSError:
                continue
            for pid in pids:
                found[pid] = _name(pid)
                waiting.append(pid)
    return found


def _name(pid: int) -> str:
    try:
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
    except OSError:
        return "(gone)"
    return f"{name} (state {rest.split()[0]})"


def _dump_all_stacks() -> None:
    """Write the stacks of this process and, by SIGABRT, of everything below it."""
    print("\n=== test timed out; stacks of all processes ===", file=sys.stderr)
    faulthandler.dump_traceback(all_threads=True)
    for pid, name in _descendants().items():
        print(f"--- process {pid} {name}", file=sys.stderr)
        try:
            os.kill(pid, signal.SIGABRT)
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            continue
    sys.stderr.flush()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, Any]:
    """Keep captured text fit to travel: reports of parallel workers cross a pipe as UTF-8."""
    report = yield
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections
    ]
    return report


@pytest.fixture(autouse=True)
def hard_timeout(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that hangs, with the stacks of every process."""
    is_slow = request.node.get_closest_marker("slow") is not None
    limit_s = SLOW_TEST_TIMEOUT_S if is_slow else TEST_TIMEOUT_S

    def on_alarm(number: int, frame: FrameType | None) -> None:
        _dump_all_stacks()
        raise TimeoutError(f"the test took longer than {limit_s:g} s")

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    faulthandler.dump_traceback_later(limit_s + 30, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _shm_entries() -> set[str]:
    shm = Path("/dev/shm")
    return {path.name for path in shm.glob("actorserve-*")} if shm.is_dir() else set()


def _fds() -> dict[str, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 (a path object would be one more)
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
        except OSError:
            continue
    return found


def _leaks(before: tuple[set[int], set[str], dict[str, str], set[int]]) -> list[str]:
    pids, shm, fds, threads = before
    found = [f"process {pid} {name}" for pid, name in _descendants().items() if pid not in pids]
    found += [f"/dev/shm/{name}" for name in _shm_entries() - shm]
    now = _fds()
    found += [f"descriptor {fd} {where}" for fd, where in now.items() if fd not in fds]
    found += [
        f"thread {each.name}"
        for each in threading.enumerate()
        if each.ident not in threads and not each.name.startswith(("pytest", "asyncio_"))
    ]
    return found


@pytest.fixture(scope="session", autouse=True)
def libuv_is_warm() -> None:
    """Let libuv make the one pipe that it keeps for the life of a process."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return
    uvloop.run(_nothing())


async def _nothing() -> None:
    return None


@pytest.fixture(autouse=True)
def no_leaks(hard_timeout: None) -> Iterator[None]:
    """Fail a test that leaves a process, a /dev/shm entry, a descriptor or a thread."""
    before = (
        set(_descendants()),
        _shm_entries(),
        _fds(),
        {each.ident or 0 for each in threading.enumerate()},
    )
    yield
    deadline_s = monotonic_s() + SETTLE_S
    while leaks := _leaks(before):
        if monotonic_s() > deadline_s:
            pytest.fail("left behind: " + "; ".join(leaks))
        gc.collect()
        select.select([], [], [], 0.01)
