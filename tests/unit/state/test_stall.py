# SPDX-License-Identifier: Apache-2.0
"""Which rank stands still."""

from __future__ import annotations

from actorserve.state.stall import Doing, Look, StallJudge

IDLE, BUSY, WAITING, LOADING = Doing.IDLE, Doing.BUSY, Doing.WAITING, Doing.LOADING


def judged(*rows: tuple[float, list[tuple[int, Doing]]], step_s: float = 10, call_s: float = 100):
    """Return the verdicts of a judge over looks at the given times."""
    judge = StallJudge(len(rows[0][1]), step_s=step_s, call_s=call_s, interval_s=1000)
    return [judge.judge(now_s, [Look(*each, each[0]) for each in looks]) for now_s, looks in rows]


def test_idle_ranks_never_stand_still():
    """Nothing to do is no stall, however long."""
    looks = [(7, IDLE), (7, IDLE)]
    assert judged((0, looks), (1e6, looks)) == [None, None]


def test_a_step_that_takes_too_long_is_a_stall():
    """The rank that is in its engine is to blame, and not the one that waits for it."""
    looks = [(7, WAITING), (7, BUSY)]
    verdicts = judged((0, looks), (9, looks), (11, looks))
    assert verdicts[:2] == [None, None]
    assert verdicts[2] == (1, "stands still: in its engine in step 7 for 11.0 s")


def test_a_rank_that_does_not_take_its_next_step_is_to_blame():
    """One that is behind rank 0 and idle has not read the ring: it is stopped, perhaps."""
    verdicts = judged(*[(now_s, [(9, WAITING), (8, IDLE)]) for now_s in (0, 11)])
    assert verdicts[1] is not None
    assert verdicts[1][0] == 1


def test_ranks_that_move_are_well():
    """Steps that go on start the time anew."""
    rows = [(now_s, [(now_s, BUSY), (now_s - 1, BUSY)]) for now_s in range(1, 40, 3)]
    assert judged(*rows) == [None] * len(rows)


def test_work_after_a_long_rest_has_its_own_time():
    """The time in which a rank was idle does not count."""
    rest = [(3, IDLE), (3, IDLE)]
    assert judged((0, rest), (100, rest), (101, [(4, BUSY), (3, IDLE)])) == [None] * 3


def test_a_call_has_more_time():
    """While one rank is in a call, the others wait for it as long."""
    looks = [(7, WAITING), (7, LOADING)]
    verdicts = judged((0, looks), (50, looks), (101, looks))
    assert verdicts[:2] == [None, None]
    assert verdicts[2] is not None
    assert verdicts[2][0] == 1


def test_no_limit_is_no_limit():
    """0 seconds never ends anybody; the stats still say who is slow."""
    judge = StallJudge(2, step_s=0, call_s=0, interval_s=1e6)
    looks = [Look(7, WAITING), Look(6, BUSY)]
    assert judge.judge(0, looks) is None
    assert judge.judge(1e6, looks) is None
    assert judge.stats().slowest_s == 1e6


def test_a_gap_between_looks_is_nobody_s_stall():
    """A parent that was stopped itself, or whose loop was blocked, gives everybody new time."""
    judge = StallJudge(1, step_s=10, call_s=100, interval_s=1)
    looks = [Look(7, BUSY)]
    assert [judge.judge(now_s, looks) for now_s in (100, 103, 150, 153, 156, 159)] == [None] * 6
    assert judge.judge(162, looks) == (0, "stands still: in its engine in step 7 for 12.0 s")
