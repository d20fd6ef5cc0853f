# SPDX-License-Identifier: Apache-2.0
"""Health: does a child hang? No clock, no I/O.

It is judged from samples, which the supervisor takes at a steady interval:

    phase                      what kills (HUNG)                       what only shows (SUSPECT)
    spawning … initializing    the phase's budget is over;             silence
                               stopped ('T') for `stopped_s`
    idle                       silence for `silent_s`; 'T' as above    silence
    executing                  'T' as above; `execute_s`, if set       silence
    finalizing                 the phase's budget; 'T' as above        silence

Silence means neither a beat nor CPU time. It proves nothing while user code runs (a C call that
holds the GIL shows neither), so it never kills there; while a child waits for work, nothing of
the kind should go on, and a child that stays silent would not take any. CPU time, on the other
hand, is no excuse in a phase with a budget: an endless loop has plenty.

Time is only counted while somebody could have used it. State 't' (a debugger has the process)
starts every budget again, and so does a gap between two samples that is much longer than their
interval: then the supervisor itself stood still (SIGSTOP, a frozen container), its clock went
on, and everybody would look hung at once.
"""

from __future__ import annotations

import enum

import msgspec

from actorserve.state.lifecycle import Budgets, Phase

SUSPECT_AFTER_S = 5.0
"""Silence that is worth showing; a beat is due every fraction of a second."""
_GAP_INTERVALS = 3.0  # a sample this many intervals late says that the judge stood still
_GAP_SLACK_S = 1.0  # and at least this: a busy machine is late by fractions of a second


class Level(enum.Enum):
    """How a child looks."""

    OK = "ok"
    SUSPECT = "suspect"
    """Worth a look; nothing is done about it."""
    HUNG = "hung"
    """To be ended (supervision.Hung)."""


class Verdict(msgspec.Struct, frozen=True):
    """A level and, unless it is OK, the reason in words for people."""

    level: Level
    reason: str = ""


OK = Verdict(Level.OK)


class Evidence(msgspec.Struct, frozen=True):
    """One sample of a child, taken at `now_s`.

    `phase_s` is how long it has been in the phase (executing: with this batch) and `label` what
    that is in words; `beat_age_s` the age of its last beat, None before there is a health page;
    `process_state` the letter in /proc/PID/stat; `cpu_s` the CPU time that it has used.
    """

    now_s: float
    phase: Phase
    phase_s: float
    beat_age_s: float | None
    process_state: str
    cpu_s: float
    label: str = ""


class JudgeStats(msgspec.Struct, frozen=True):
    """What a judge has seen; `resets` counts the samples that started the budgets again."""

    samples: int
    resets: int
    silent_s: float
    stopped_s: float


class HangJudge:
    """Judge one incarnation of a child; a new incarnation gets a new judge.

    `interval_s` is the time between two samples, `now_s` when the incarnation began: a gap
    before the first sample is one like any other.
    """

    def __init__(
        self,
        budgets: Budgets | None = None,
        interval_s: float = 1.0,
        now_s: float | None = None,
    ) -> None:
        self.budgets = budgets or Budgets()
        self._max_gap_s = max(_GAP_INTERVALS * interval_s, interval_s + _GAP_SLACK_S)
        self._counted_from_s: float | None = None  # no budget counts time before this
        self._last_s = now_s
        self._stopped_from_s: float | None = None  # the first of the samples in state T
        self._alive_s = 0.0  # the last proof of life: a beat, or CPU time
        self._cpu_s = -1.0
        self._now_s = 0.0
        self._samples = 0
        self._resets = 0

    def judge(self, evidence: Evidence) -> Verdict:
        """Take a sample and judge. HUNG is repeated as long as the evidence is the same."""
        counted_s = self._take(evidence)
        stopped_s, silent_s = self._stopped_s(), self._silent_s()
        if stopped_s >= self.budgets.stopped_s:
            return Verdict(Level.HUNG, f"stopped (state T) for {stopped_s:.0f} s")
        budget_s = self.budgets.of(evidence.phase)
        if budget_s is not None and counted_s >= budget_s:
            doing = evidence.label or evidence.phase.value
            return Verdict(Level.HUNG, f"timed out: still {doing} after {budget_s:g} s")
        if evidence.phase is Phase.IDLE and min(silent_s, counted_s) >= self.budgets.silent_s:
            return Verdict(
                Level.HUNG, f"no beat and no CPU time for {silent_s:.0f} s while waiting for work"
            )
        if self._stopped_from_s is not None:
            return Verdict(Level.SUSPECT, f"stopped (state T) for {stopped_s:.0f} s")
        if silent_s >= SUSPECT_AFTER_S:
            return Verdict(Level.SUSPECT, f"no beat and no CPU time for {silent_s:.0f} s")
        return OK

    def stats(self) -> JudgeStats:
        """Return the counts and the latest measures."""
        return JudgeStats(self._samples, self._resets, self._silent_s(), self._stopped_s())

    def _take(self, evidence: Evidence) -> float:
        """Note a sample; return how much of the phase's time counts."""
        now_s = self._now_s = evidence.now_s
        self._samples += 1
        has_gap = self._last_s is not None and now_s - self._last_s > self._max_gap_s
        self._last_s = now_s
        if has_gap or evidence.process_state == "t":
            self._resets += 1
            self._counted_from_s = self._alive_s = now_s
            self._stopped_from_s = None
        if evidence.process_state != "T":
            self._stopped_from_s = None
        elif self._stopped_from_s is None:
            self._stopped_from_s = now_s
        if evidence.cpu_s > self._cpu_s:
            self._cpu_s = evidence.cpu_s
            self._alive_s = now_s
        if evidence.beat_age_s is not None:
            self._alive_s = max(self._alive_s, now_s - evidence.beat_age_s)
        if self._counted_from_s is None:
            return evidence.phase_s
        return min(evidence.phase_s, now_s - self._counted_from_s)

    def _stopped_s(self) -> float:
        return 0.0 if self._stopped_from_s is None else self._now_s - self._stopped_from_s

    def _silent_s(self) -> float:
        return max(0.0, self._now_s - self._alive_s)
