# SPDX-License-Identifier: Apache-2.0
"""Who gets in, who is late, and which outputs count."""

from __future__ import annotations

import random

import msgspec
import pytest

from actorserve.state.admission import Admission


class Request(msgspec.Struct):
    id: int
    priority: int = 0
    deadline_s: float = 0.0
    rows: int = 1
    tokens: int = 1


class Came(msgspec.Struct):
    id: int
    finish: str | None = None
    final: bool = False


@pytest.fixture
def admission() -> Admission[Request]:
    """Return an empty one."""
    return Admission(lambda request: request.rows, lambda request: request.tokens)


def ids(requests: list[Request]) -> list[int]:
    """Return their numbers."""
    return [each.id for each in requests]


def test_the_higher_priority_goes_first_then_the_older(admission: Admission[Request]):
    """Order is priority, then arrival."""
    for number, priority in enumerate([0, 1, 0, 2, 1]):
        assert admission.submit(Request(number, priority))
    assert ids(admission.admit((3, 100))) == [3, 1, 4]
    assert ids(admission.admit(None)) == [0, 2]


def test_what_does_not_fit_is_not_overtaken(admission: Admission[Request]):
    """A small request behind a large one waits with it."""
    for number, tokens in enumerate([4, 10, 1]):
        admission.submit(Request(number, tokens=tokens))
    assert ids(admission.admit((9, 8))) == [0]
    assert admission.waiting == 2
    assert ids(admission.admit((9, 4))) == []


def test_when_nothing_runs_the_first_one_goes(admission: Admission[Request]):
    """One that is too large for all is the engine's to refuse."""
    admission.submit(Request(1, rows=100))
    admission.submit(Request(2))
    assert ids(admission.admit((4, 4))) == [1]


def test_an_id_in_use_is_refused(admission: Admission[Request]):
    """Waiting or running, there is one request of a number."""
    assert admission.submit(Request(1))
    assert not admission.submit(Request(1))
    admission.admit(None)
    assert not admission.submit(Request(1))
    admission.sift([Came(1, "stop", True)])
    assert admission.submit(Request(1))


def test_aborting_takes_out_what_waits_and_tells_of_what_runs(admission: Admission[Request]):
    """Each is named once; unknown ones and ended ones are no mistake."""
    for number in range(3):
        admission.submit(Request(number))
    admission.admit((1, 9))
    assert ids(admission.abort([0, 2, 77, 2])) == [2]
    assert admission.abort([0]) == []
    assert admission.take_aborts(1.0) == [0]
    assert admission.take_aborts(1.0) == []
    passed = admission.sift([Came(0, "cancelled", True), Came(0, "stop", True), Came(2)])
    assert len(passed) == 1
    assert admission.stats().late_outputs == 2
    assert ids(admission.admit(None)) == [1]


def test_deadlines_end_what_waits_and_what_runs(admission: Admission[Request]):
    """A running one's "cancelled" becomes "timeout"; another end of it stays."""
    for number in range(3):
        admission.submit(Request(number, deadline_s=1.0 + number))
    admission.admit((2, 9))
    assert admission.next_deadline_s() == 1.0
    assert admission.expire(0.5) == []
    assert ids(admission.expire(9.0)) == [2]
    assert admission.take_aborts(9.0) == [0, 1]
    outputs = admission.sift([Came(0, "cancelled", True), Came(1, "stop", True)])
    assert [each.finish for each in outputs] == ["timeout", "stop"]
    assert not admission.has_aborts
    assert admission.next_deadline_s() is None


def test_a_final_that_does_not_come_is_overdue(admission: Admission[Request]):
    """After its grace an aborted request is given back, with the reason."""
    admission.submit(Request(1))
    admission.admit(None)
    admission.abort([1])
    admission.take_aborts(10.0)
    assert admission.overdue(14.0, 5.0) == []
    assert [(each.id, why) for each, why in admission.overdue(15.0, 5.0)] == [(1, "cancelled")]
    assert admission.stats().missing_finals == 1
    assert admission.sift([Came(1, "cancelled", True)]) == []


def test_stale_deadlines_are_swept(admission: Admission[Request]):
    """Requests that have gone leave no deadlines behind."""
    for number in range(1000):
        admission.submit(Request(number, deadline_s=1e6))
        admission.admit(None)
        admission.sift([Came(number, "stop", True)])
        admission.expire(0.0)
    assert len(admission._deadlines) < 100


def test_clear_gives_everything_back(admission: Admission[Request]):
    """Waiting and running ones alike."""
    for number in range(4):
        admission.submit(Request(number))
    admission.admit((2, 9))
    assert sorted(ids(admission.clear())) == [0, 1, 2, 3]
    assert admission.admit(None) == []


@pytest.mark.parametrize("seed", range(20))
def test_every_request_leaves_once(admission: Admission[Request], seed: int):
    """Whatever happens in whatever order, each has one end."""
    dice = random.Random(seed)
    ended: list[int] = []
    now_s = 0.0
    count = 0
    for _ in range(500):
        now_s += dice.random()
        running = list(admission._running)
        match dice.randrange(6):
            case 0 | 1:
                count += 1
                deadline_s = dice.choice([0.0, now_s + 3 * dice.random()])
                admission.submit(Request(count, dice.randrange(3), deadline_s, 1, 1))
            case 2:
                ended += ids(admission.abort([dice.randrange(count + 2)]))
            case 3:
                ended += ids(admission.expire(now_s))
                admission.take_aborts(now_s)
                ended += [each.id for each, _ in admission.overdue(now_s, 2.0)]
            case 4:
                admission.admit((dice.randrange(3), 99))
            case 5 if running:
                came = [Came(dice.choice(running), "stop", dice.random() < 0.7) for _ in range(3)]
                ended += [each.id for each in admission.sift(came) if each.final]
    ended += ids(admission.clear())
    assert sorted(ended) == list(range(1, count + 1))
