# SPDX-License-Identifier: Apache-2.0
"""How many lines a model may have in the log."""

from __future__ import annotations

from actorserve.state.line_quota import LineQuota


def test_a_burst_then_so_many_a_second():
    """What is beyond is refused, and counted."""
    quota = LineQuota(burst=5, per_s=10.0)
    assert [quota.admit(1, 100.0) for _ in range(7)] == [1] * 5 + [0] * 2
    assert quota.refused == 2
    assert [quota.admit(1, 100.25) for _ in range(3)] == [1, 1, 0]
    assert [quota.admit(1, 1e6) for _ in range(6)] == [1] * 5 + [0]


def test_a_flood_is_told_of_once_a_second():
    """With all that was refused since the last time."""
    quota = LineQuota(burst=1, per_s=1.0)
    assert quota.take_refused(10.0) == 0
    assert quota.admit(1, 10.0)
    assert not quota.admit(1, 10.0)
    assert quota.take_refused(10.0) == 1
    assert not quota.admit(1, 10.1)
    assert not quota.admit(1, 10.2)
    assert quota.take_refused(10.5) == 0
    assert quota.take_refused(11.0) == 2
    assert quota.take_refused(20.0) == 0


def test_a_clock_that_stands_still_admits_nothing_more():
    """Nor does one that is a little late in another thread."""
    quota = LineQuota(burst=1, per_s=1000.0)
    assert quota.admit(1, 50.0)
    assert not quota.admit(1, 50.0)
    assert not quota.admit(1, 49.9)
    assert quota.admit(1, 50.1)


def test_some_of_many_may_be_admitted():
    """As many as there is room for."""
    quota = LineQuota(burst=10, per_s=1.0)
    assert quota.admit(0, 5.0) == 0
    assert quota.admit(7, 5.0) == 7
    assert quota.admit(7, 5.0) == 3
    assert quota.refused == 4
    assert quota.admit(7, 7.5) == 2
