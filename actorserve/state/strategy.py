# SPDX-License-Identifier: Apache-2.0
"""Which siblings share the fate of a child that died: OTP's strategies as a table, no clock.

The failed child itself is restarted by its own machine (supervision.py); this says what happens
to the others, and when the whole group is to be given up.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from actorserve.state.restart import note_restart


class Strategy(enum.Enum):
    """Who is restarted together with a failed child."""

    ONE_FOR_ONE = "one_for_one"
    """Nobody."""
    ONE_FOR_ALL = "one_for_all"
    """All siblings."""
    REST_FOR_ONE = "rest_for_one"
    """The siblings that were started after it, because they may depend on it."""


class Plan(msgspec.Struct, frozen=True):
    """What to do with the group, by names.

    Send Stop to those in `stop`, one after the other (the latest started first), then bring
    those in `start` to RUNNING, one after the other; the failed child is among them, at its
    place, and comes back by itself. With `is_escalated`, `stop` names all siblings, the failed
    child gets Escalate, and the group's owner is told as if the group itself had died.
    """

    stop: tuple[str, ...] = ()
    start: tuple[str, ...] = ()
    is_escalated: bool = False


_SIBLINGS: dict[Strategy, Callable[[Sequence[str], int], Sequence[str]]] = {
    Strategy.ONE_FOR_ONE: lambda order, failed: (),
    Strategy.ONE_FOR_ALL: lambda order, failed: (*order[:failed], *order[failed + 1 :]),
    Strategy.REST_FOR_ONE: lambda order, failed: order[failed + 1 :],
}


def plan_restart(strategy: Strategy, order: Sequence[str], failed: str) -> Plan:
    """Return the plan for a child that died and is restarted; `order` is the order of start."""
    siblings = _SIBLINGS[strategy](order, order.index(failed))
    affected = {failed, *siblings}
    return Plan(
        stop=tuple(reversed(siblings)), start=tuple(name for name in order if name in affected)
    )


def plan_stop(order: Sequence[str]) -> tuple[str, ...]:
    """Return the order in which a group is stopped: the reverse of its start."""
    return tuple(reversed(order))


class GroupStats(msgspec.Struct, frozen=True):
    """What a group has been through; `recent` counts the restarts within its period."""

    children: int
    restarts: int
    recent: int
    is_escalated: bool


class Group:
    """Children under one strategy, with a common limit of restarts.

    `order` is the order of start. `intensity=(n, period_s)`: more than n restarts within the
    period end in escalation, which is final; None never escalates.
    """

    def __init__(
        self,
        strategy: Strategy,
        order: Sequence[str],
        intensity: tuple[int, float] | None = None,
    ) -> None:
        self.strategy = strategy
        self.order = tuple(order)
        self.intensity = intensity
        self._restarts = 0
        self._recent: deque[float] = deque()
        self._is_escalated = False

    def child_died(self, name: str, now_s: float, will_restart: bool) -> Plan:
        """Take a child's death. `will_restart` is its own policy's word on this kind of end.

        A child that is not to be restarted (temporary, or transient and ended normally) takes
        nobody with it.
        """
        if not will_restart or self._is_escalated:
            return Plan()
        if self._is_too_often(now_s):
            return self.escalate(name)
        self._restarts += 1
        return plan_restart(self.strategy, self.order, name)

    def escalate(self, name: str) -> Plan:
        """Give the group up because of this child: stop all its siblings, the latest first."""
        self._is_escalated = True
        return Plan(
            stop=tuple(sibling for sibling in plan_stop(self.order) if sibling != name),
            is_escalated=True,
        )

    def _is_too_often(self, now_s: float) -> bool:
        """Count a restart at `now_s` against the intensity."""
        if self.intensity is None:
            return False
        limit, period_s = self.intensity
        return note_restart(self._recent, now_s, period_s) > limit

    def stats(self) -> GroupStats:
        """Return the counts."""
        return GroupStats(len(self.order), self._restarts, len(self._recent), self._is_escalated)
