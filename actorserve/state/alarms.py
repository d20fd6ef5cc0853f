# SPDX-License-Identifier: Apache-2.0
"""The timers of one supervised child: which are armed, until when, and whether one counts.

Pure: to arm and to cancel are actions for whoever has a clock (supervision.py). A timer that fires
was perhaps cancelled on its way, or comes a little early. One that ends a phase may come late by
more than `LATE_S`: that says that our own process was stopped, not that the child is slow, so the
phase gets its budget once more. While a debugger has the child, it gets it always.
"""

from __future__ import annotations

from actorserve.state.lifecycle import Action, ArmTimer, CancelTimer, Timer, TimerFired

LATE_S = 2.0
"""A timer that fires later than this was held up by us."""
_EARLY_S = 0.01  # loops may fire a timer early by the resolution of their clock


class Alarms:
    """See the module's head. `actions` is the list that belongs to the event in hand."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.phase_budget_s = 0.0
        self._is_excused = False  # this phase got its second budget
        self._due_s: dict[Timer, float] = {}

    def due_s(self, kind: Timer) -> float | None:
        """Return when a timer fires; None where it is not armed."""
        return self._due_s.get(kind)

    def arm(self, kind: Timer, now_s: float, delay_s: float, incarnation: int) -> None:
        """Have a timer fire."""
        self._due_s[kind] = now_s + delay_s
        self.actions.append(ArmTimer(kind, delay_s, incarnation))

    def disarm(self, kind: Timer) -> None:
        """Have it not fire; nothing where it is not armed."""
        if self._due_s.pop(kind, None) is not None:
            self.actions.append(CancelTimer(kind))

    def disarm_all(self) -> None:
        """Have none fire."""
        for kind in list(self._due_s):
            self.disarm(kind)

    def begin_phase(self, now_s: float, budget_s: float, incarnation: int) -> None:
        """Give a phase its budget."""
        self._is_excused = False
        self.phase_budget_s = budget_s
        self.arm(Timer.PHASE, now_s, budget_s, incarnation)

    def is_due(self, event: TimerFired) -> bool | None:
        """Whether a timer that fires counts, and is then armed no more; None where it never was.

        Where it does not count, it is armed again.
        """
        due_s = self._due_s.get(event.kind)
        if due_s is None:
            return None
        now_s = event.now_s
        if now_s < due_s - _EARLY_S:
            self.arm(event.kind, now_s, due_s - now_s, event.incarnation)
            return False
        del self._due_s[event.kind]
        if event.kind is Timer.PHASE:
            is_late = now_s - due_s > LATE_S and not self._is_excused
            if is_late or event.is_traced:
                self._is_excused = self._is_excused or is_late
                self.arm(Timer.PHASE, now_s, self.phase_budget_s, event.incarnation)
                return False
        return True
