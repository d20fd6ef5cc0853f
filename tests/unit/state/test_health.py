# SPDX-License-Identifier: Apache-2.0
"""Who hangs."""

from __future__ import annotations

import itertools

import pytest

from actorserve.state.health import (
    OK,
    Evidence,
    HangJudge,
    Level,
    Verdict,
)
from actorserve.state.lifecycle import START_PHASES, Budgets, Phase

BUDGETS = Budgets()
LONG_S = 1500  # longer than any budget


class Child:
    """A child that is looked at every second, from `started_s` on."""

    def __init__(self, phase: Phase, budgets: Budgets = BUDGETS) -> None:
        self.judge = HangJudge(budgets)
        self.phase = phase
        self.now_s = self.began_s = self.beat_s = 1000.0
        self.cpu_s = 0.0

    def look(
        self,
        process_state: str = "S",
        has_beat: bool = False,
        has_cpu: bool = False,
        after_s: float = 1.0,
    ) -> Verdict:
        self.now_s += after_s
        self.cpu_s += 0.5 * has_cpu
        if has_beat:
            self.beat_s = self.now_s
        return self.judge.judge(
            Evidence(
                now_s=self.now_s,
                phase=self.phase,
                phase_s=self.now_s - self.began_s,
                beat_age_s=self.now_s - self.beat_s,
                process_state=process_state,
                cpu_s=self.cpu_s,
            )
        )

    def hung_after_s(self, seconds: int = LONG_S, **looks: object) -> float | None:
        """Return when the child is first called hung, None if it is not within the seconds."""
        for _ in range(seconds):
            if self.look(**looks).level is Level.HUNG:  # type: ignore[arg-type]
                return self.now_s - self.began_s
        return None


# The whole product: phase, process state, beats, CPU time: when is it hung? (None: never)
PRODUCT = list(itertools.product(Phase, "SRDTt", [False, True], [False, True]))


@pytest.mark.parametrize(("phase", "process_state", "has_beat", "has_cpu"), PRODUCT)
def test_product_of_phase_and_evidence(
    phase: Phase, process_state: str, has_beat: bool, has_cpu: bool
) -> None:
    """Each phase has its own causes of a hang, and no other evidence ends it."""
    child = Child(phase)
    hung_s = child.hung_after_s(process_state=process_state, has_beat=has_beat, has_cpu=has_cpu)
    budget_s = BUDGETS.of(phase)
    if process_state == "t":
        expected = None
    elif process_state == "T":
        expected = min(BUDGETS.stopped_s + 1, budget_s or LONG_S)
    elif budget_s is not None:
        expected = budget_s
    elif phase is Phase.IDLE and not has_beat and not has_cpu:
        expected = BUDGETS.silent_s + 1  # the first look counts as a proof of life
    else:
        expected = None
    assert hung_s == expected


def test_22_stopped_child_is_hung_while_it_executes() -> None:
    """SIGSTOP beyond its budget is one of two things that end a child in user code."""
    child = Child(Phase.EXECUTING)
    assert child.look("T").level is Level.SUSPECT
    child.hung_after_s(process_state="T")
    assert child.look("T").reason == "stopped (state T) for 11 s"


def test_23_stop_that_is_continued_in_time_is_nothing() -> None:
    """Only being stopped for long counts, not being stopped often."""
    child = Child(Phase.IDLE)
    for _ in range(50):
        for _ in range(9):
            assert child.look("T", has_beat=False).level is not Level.HUNG
        assert child.look("S", has_beat=True) == OK


def test_24_c_call_that_holds_the_gil_is_busy() -> None:
    """No beat and no CPU time for hours, during execute, is worth a look and nothing more."""
    child = Child(Phase.EXECUTING)
    assert child.hung_after_s(7200) is None
    assert child.look() == Verdict(Level.SUSPECT, "no beat and no CPU time for 7200 s")


def test_25_execute_timeout_ends_a_busy_child_if_someone_set_it() -> None:
    """Beats and CPU time are no excuse for a batch that has outlived its own limit."""
    child = Child(Phase.EXECUTING, Budgets(execute_s=2.0))
    assert child.hung_after_s(has_beat=True, has_cpu=True) == 2.0
    assert child.look().reason == "timed out: still executing after 2 s"


def test_26_endless_loop_in_initialize_is_hung_at_its_budget() -> None:
    """CPU time is no excuse in a phase with a budget; up to there nothing is wrong."""
    child = Child(Phase.INITIALIZING)
    verdicts = {child.look(has_cpu=True) for _ in range(599)}
    assert verdicts == {OK}
    assert child.look(has_cpu=True).level is Level.HUNG


def test_48_gap_between_samples_starts_every_budget_again() -> None:
    """After the supervisor's own SIGSTOP nobody looks hung because of the time in between."""
    for phase in Phase:
        child = Child(phase, Budgets(execute_s=10.0))
        for _ in range(5):
            child.look("T")
        assert child.look("T", after_s=3600.0).level is not Level.HUNG, phase
        assert child.judge.stats().resets == 1
        resumed_s = child.now_s
        while child.look("T").level is not Level.HUNG:
            pass
        assert child.now_s - resumed_s == 10.0


def test_59_late_samples_of_a_busy_machine_are_no_gap() -> None:
    """Samples that come a little late do not put budgets off for ever."""
    child = Child(Phase.INITIALIZING)
    while child.look(after_s=1.9).level is not Level.HUNG:
        assert child.now_s - child.began_s < 600
    assert child.judge.stats().resets == 0


def test_debugger_starts_the_budget_again() -> None:
    """The time in state 't' never counts, and a whole budget is left when it goes away."""
    child = Child(Phase.FINALIZING)
    assert child.hung_after_s(3600, process_state="t") is None
    left_s = child.now_s
    child.hung_after_s()
    assert child.now_s - left_s == BUDGETS.finalize_s


def test_label_says_what_it_was_doing() -> None:
    """A reason names the work in the owner's words."""
    evidence = Evidence(700.0, Phase.IMPORTING, 600.0, None, "R", 1.0, "importing model.py")
    verdict = HangJudge().judge(evidence)
    assert verdict.reason == "timed out: still importing model.py after 600 s"


@pytest.mark.parametrize("phase", START_PHASES)
def test_child_without_a_health_page_is_judged_by_its_budget(phase: Phase) -> None:
    """Before there are beats, their absence means nothing."""
    judge = HangJudge()
    for second in range(int(BUDGETS.of(phase) or 0)):
        assert judge.judge(Evidence(second, phase, second, None, "S", 0.0)).level is not Level.HUNG
    assert judge.stats().samples == BUDGETS.of(phase)


# --- live and ready -----------------------------------------------------------------------------
