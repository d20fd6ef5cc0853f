# SPDX-License-Identifier: Apache-2.0
"""How many lines a model may have in the log."""

from __future__ import annotations

from actorserve.actors.log_gate import LogGate


def test_a_burst_then_so_many_a_second():
    """What is beyond is refused, and counted."""
    gate = LogGate(burst=5, per_s=10.0)
    assert [gate.admits(100.0) for _ in range(7)] == [True] * 5 + [False] * 2
    assert gate.refused == 2
    assert [gate.admits(100.25) for _ in range(3)] == [True, True, False]
    assert [gate.admits(1e6) for _ in range(6)] == [True] * 5 + [False]


def test_a_flood_is_told_of_once_a_second():
    """With all that was refused since the last time."""
    gate = LogGate(burst=1, per_s=1.0)
    assert gate.take_refused(10.0) == 0
    assert gate.admits(10.0)
    assert not gate.admits(10.0)
    assert gate.take_refused(10.0) == 1
    assert not gate.admits(10.1)
    assert not gate.admits(10.2)
    assert gate.take_refused(10.5) == 0
    assert gate.take_refused(11.0) == 2
    assert gate.take_refused(20.0) == 0


def test_a_clock_that_stands_still_admits_nothing_more():
    """Nor does one that is a little late in another thread."""
    gate = LogGate(burst=1, per_s=1000.0)
    assert gate.admits(50.0)
    assert not gate.admits(50.0)
    assert not gate.admits(49.9)
    assert gate.admits(50.1)
