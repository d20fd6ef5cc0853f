# SPDX-License-Identifier: Apache-2.0
"""Which siblings are restarted together."""

from __future__ import annotations

import itertools

import pytest

from actorserve.state.restart import Restart
from actorserve.state.strategy import Group, Plan, Strategy, plan_restart, plan_stop

ORDER = ("a", "b", "c", "d")
PLANS = {
    ("one_for_one", "a"): ("", "a"),
    ("one_for_one", "b"): ("", "b"),
    ("one_for_one", "d"): ("", "d"),
    ("one_for_all", "a"): ("dcb", "abcd"),
    ("one_for_all", "b"): ("dca", "abcd"),
    ("one_for_all", "d"): ("cba", "abcd"),
    ("rest_for_one", "a"): ("dcb", "abcd"),
    ("rest_for_one", "b"): ("dc", "bcd"),
    ("rest_for_one", "d"): ("", "d"),
}


@pytest.mark.parametrize(("strategy", "failed"), PLANS)
def test_strategy_names_the_siblings(strategy: str, failed: str) -> None:
    """Siblings stop in reverse order of their start, and start in order, the failed one too."""
    stop, start = PLANS[strategy, failed]
    plan = plan_restart(Strategy(strategy), ORDER, failed)
    assert plan == Plan(stop=tuple(stop), start=tuple(start))


@pytest.mark.parametrize(
    ("kind", "is_normal", "strategy"),
    list(itertools.product(["permanent", "transient", "temporary"], [False, True], Strategy)),
)
def test_otp_product_of_kind_exit_and_strategy(
    kind: str, is_normal: bool, strategy: Strategy
) -> None:
    """A child that is not restarted takes nobody with it; one that is follows the strategy."""
    will_restart = Restart(kind=kind).is_restarted_after(is_normal)  # type: ignore[arg-type]
    assert will_restart == (kind == "permanent" or (kind == "transient" and not is_normal))
    plan = Group(strategy, ORDER).child_died("b", 0.0, will_restart)
    assert plan == (plan_restart(strategy, ORDER, "b") if will_restart else Plan())


def test_group_escalates_beyond_its_intensity() -> None:
    """Too many restarts of any children give the whole group up, once."""
    group = Group(Strategy.ONE_FOR_ONE, ORDER, intensity=(2, 10.0))
    assert not group.child_died("a", 0.0, True).is_escalated
    assert not group.child_died("b", 1.0, True).is_escalated
    assert group.child_died("c", 2.0, True) == Plan(stop=("d", "b", "a"), is_escalated=True)
    assert group.child_died("d", 3.0, True) == Plan()
    stats = group.stats()
    assert (stats.children, stats.restarts, stats.is_escalated) == (4, 2, True)


def test_group_forgets_old_restarts() -> None:
    """Restarts that are spread out never escalate."""
    group = Group(Strategy.ONE_FOR_ALL, ORDER, intensity=(1, 10.0))
    assert not any(group.child_died("a", t * 11.0, True).is_escalated for t in range(50))


def test_group_stops_in_reverse_order() -> None:
    """What was started last may depend on the rest, so it goes first."""
    assert plan_stop(ORDER) == ("d", "c", "b", "a")
