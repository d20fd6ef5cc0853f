# SPDX-License-Identifier: Apache-2.0
"""Looking at the process of an actor from outside: does it hang?"""

from __future__ import annotations

from typing import Any

from actorserve.clock import monotonic_s
from actorserve.process.watch import Child
from actorserve.runtime.host_channel import HostChannel
from actorserve.state.health import Evidence, HangJudge, Level
from actorserve.state.lifecycle import Budgets, Phase


class Watch:
    """The evidence of one life; state/health.py judges it."""

    def __init__(self, budgets: Budgets) -> None:
        self._judge = HangJudge(budgets)
        self._phase = Phase.SPAWNING
        self._since_s = monotonic_s()

    def enter(self, phase: Phase) -> None:
        """Note that it entered a phase."""
        if phase is not self._phase:
            self._phase = phase
            self._since_s = monotonic_s()

    def look(self, child: Child, end: HostChannel[Any], now_s: float) -> str:
        """Return why it has to be ended, "" if it has not."""
        sample = child.sample()
        if sample.state in "XZ":
            return ""
        phase, since_s = self._phase, self._since_s
        batch, batch_ns = end.page.batch()
        if batch:
            phase, since_s = Phase.EXECUTING, batch_ns / 1e9
        beat_ns = end.page.stats().beat_ns
        verdict = self._judge.judge(
            Evidence(
                now_s=now_s,
                phase=phase,
                phase_s=max(0.0, now_s - since_s),
                beat_age_s=max(0.0, now_s - beat_ns / 1e9) if beat_ns else None,
                process_state=sample.state,
                cpu_s=sample.cpu_s,
            )
        )
        return verdict.reason if verdict.level is Level.HUNG else ""
