# SPDX-License-Identifier: Apache-2.0
"""Fault points: off by default, exact when on."""

from __future__ import annotations

import os
import signal

import pytest

from actorserve import fault
from actorserve.fault import fault_point


@pytest.fixture(autouse=True)
def disarmed():
    """Leave no fault behind."""
    yield
    fault.arm(None)


def status_of(kit, text: str, *points: str) -> int:
    """The wait status of a fork that passes the points with these faults."""

    def body() -> None:
        fault.arm(text)
        for point in points:
            fault_point(point)
        os._exit(42)

    pid = kit.forked(body)
    if "stop" in text:
        assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
        os.kill(pid, signal.SIGCONT)
    if "hang" in text:
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
        os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("", 42 << 8),
        ("a:kill", signal.SIGKILL),
        ("b:segv", signal.SIGSEGV),
        ("a:exit0", 0),
        ("a:stop", 42 << 8),
        ("a:hang", signal.SIGKILL),
        ("c:kill", 42 << 8),
        ("x:kill, b:exit0", 0),
        ("b:kill:2", signal.SIGKILL),
        ("a:kill:2", 42 << 8),
    ],
)
def test_fault_strikes_where_it_was_set(kit, text, status):
    """Only the named point strikes, at the passage named."""
    assert status_of(kit, text, "a", "b", "b") & ~0x80 == status


@pytest.mark.parametrize("text", ["a", "a:explode", "a:kill:soon", ":"])
def test_misspelt_fault_is_refused(text):
    """A fault that could never strike is an error, not silence."""
    with pytest.raises(ValueError, match="ACTORSERVE_FAULT"):
        fault.arm(text)
