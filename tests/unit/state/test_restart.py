# SPDX-License-Identifier: Apache-2.0
"""When a child is started again."""

from __future__ import annotations

from typing import Any

import pytest

from actorserve.errors import ConfigError
from actorserve.state.restart import History, Restart, parse_backoff


def test_first_restart_is_at_once_then_doubles_to_the_longest() -> None:
    """The default policy: 0, 0.1, 0.2 … 30 s, and never more."""
    delays = [Restart().delay_s(n, 0.0) for n in range(12)]
    assert delays == pytest.approx([0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30, 30])
    assert Restart().delay_s(10**9, 0.0) == 30


def test_jitter_only_shortens() -> None:
    """Children of one disaster come back apart, none later than the longest delay."""
    assert Restart().delay_s(20, 0.999) == pytest.approx(24, rel=0.01)
    assert Restart(jitter=0).delay_s(20, 0.999) == 30
    assert Restart(first_s=2).delay_s(0, 0.5) == pytest.approx(1.8)


@pytest.mark.parametrize("text", ["0:0", "0.5:10", " 1 : 2 "])
def test_backoff_flag_sets_first_and_longest(text: str) -> None:
    """FIRST:MAX is read as seconds; the rest of the policy stays."""
    first, longest = map(float, text.split(":"))
    restart = parse_backoff(text, Restart(kind="transient"))
    assert (restart.first_s, restart.max_s, restart.kind) == (first, longest, "transient")


def test_zero_backoff_never_waits() -> None:
    """Kill tests and benches restart at once, always."""
    restart = parse_backoff("0:0")
    assert {restart.delay_s(n, 0.5) for n in range(50)} == {0.0}


@pytest.mark.parametrize(
    "text", ["", "1", "1:", ":1", "a:b", "1:2:3", "-1:2", "2:1", "nan:1", "0:inf", "1,2"]
)
def test_bad_backoff_flag_says_what_was_expected(text: str) -> None:
    """Anything but two sensible numbers is refused."""
    with pytest.raises(ConfigError, match=r"expected FIRST:MAX|expected seconds|longer than"):
        parse_backoff(text)


@pytest.mark.parametrize(
    "values",
    [
        {"jitter": 1.5},
        {"deaths_before_ready": 0},
        {"intensity": (-1, 5.0)},
        {"intensity": (1, 0.0)},
        {"kind": "eternal"},
        {"healthy_after_s": -1.0},
    ],
    ids=lambda values: next(iter(values)),
)
def test_senseless_policy_is_refused(values: dict[str, Any]) -> None:
    """A policy that cannot be meant is an error where it is made."""
    with pytest.raises(ConfigError, match=f"restart policy: .*{next(iter(values))}"):
        Restart(**values)


def test_history_forgets_after_good_health() -> None:
    """A child that was ready for 60 s starts its row of delays again."""
    history = History(Restart())
    for now_s in range(5):
        history.died(float(now_s), ready_since_s=float(now_s) - 1)
        history.next_delay_s(0.0)
    assert history.next_delay_s(0.0) == pytest.approx(1.6)
    history.died(100.0, ready_since_s=40.0)
    assert history.next_delay_s(0.0) == 0


def test_intensity_counts_within_its_period_only() -> None:
    """More than n restarts within the period are final; spread out they never are."""
    slow, quick = (History(Restart(intensity=(2, 10.0))) for _ in range(2))
    assert not any(slow.died(now_s * 5.0, now_s * 5.0) for now_s in range(100))
    deaths = [quick.died(float(now_s), float(now_s)) for now_s in range(3)]
    assert deaths == ["", "", "restarted more than 2 times in 10 s"]
