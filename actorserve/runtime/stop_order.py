# SPDX-License-Identifier: Apache-2.0
"""The order to stop one actor for good: whoever gives it again may make it sooner, never later."""

from __future__ import annotations

from actorserve.clock import monotonic_s
from actorserve.runtime.answer import Answer


class StopOrder:
    """All orders to stop one actor, as one. Belongs to the system's loop.

    `is_given` says that there is one, `is_hurried` that what waits is not to be worked off, and
    `due_s` is the soonest of the deadlines; None where nobody has set one.
    """

    def __init__(self) -> None:
        self.is_given = False
        self.is_hurried = False
        self.due_s: float | None = None
        self._answers: list[Answer[None]] = []

    def add(self, answer: Answer[None], *, is_drained: bool, timeout_s: float | None) -> bool:
        """Take another order; True if it is the first."""
        is_first, self.is_given = not self.is_given, True
        self._answers.append(answer)
        self.is_hurried = self.is_hurried or not is_drained
        if timeout_s is not None:
            due_s = monotonic_s() + timeout_s
            self.due_s = due_s if self.due_s is None else min(self.due_s, due_s)
        return is_first

    def due(self) -> float | None:
        """Return the deadline as it is now."""
        return self.due_s

    def settle(self) -> None:
        """Tell everybody that the actor has stopped."""
        answers, self._answers = self._answers, []
        for answer in answers:
            answer.settle(None)
