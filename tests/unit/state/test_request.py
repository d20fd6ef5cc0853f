# SPDX-License-Identifier: Apache-2.0
"""The life of a request, over the whole product of states and events."""

from __future__ import annotations

import itertools
import random

import pytest

from actorserve.state import request as r
from actorserve.state.request import TRANSITIONS, Life, poison_message

STATES = range(len(r.STATE_NAMES))
EVENTS = range(len(r.EVENT_NAMES))
FLAGS = {
    name: getattr(r, name)
    for name in ("DELIVER", "END", "FREE", "DROP", "FAIL", "TELL", "REQUEUE", "UNQUEUE")
}

# One line a state; one column an event, in this order; "-" is: stay, and do nothing.
ORDER = "DISPATCH RESPONSE FINAL ERROR CANCEL DEADLINE STUB_DIED STUB_DIED_RETRY DISCONNECT"
REFUSED = "ENDED+FAIL+END+UNQUEUE"
ANSWERED = "ENDED+DELIVER+END+FREE"
FAILED = "ENDED+FAIL+END+FREE"
EXPECTED = f"""
QUEUED      DISPATCHED      QUEUED+DROP        QUEUED+DROP     {REFUSED}       {REFUSED}       {REFUSED}          -           -                   ENDED+END+UNQUEUE
DISPATCHED  DISPATCHED+DROP STREAMING+DELIVER  {ANSWERED}      {FAILED}        CANCELLING+TELL GONE+FAIL+END+TELL {FAILED}    QUEUED+REQUEUE+FREE GONE+END+TELL
STREAMING   STREAMING+DROP  STREAMING+DELIVER  {ANSWERED}      {FAILED}        CANCELLING+TELL GONE+FAIL+END+TELL {FAILED}    {FAILED}            GONE+END+TELL
CANCELLING  CANCELLING+DROP CANCELLING+DELIVER {ANSWERED}      {FAILED}        -               GONE+FAIL+END      {FAILED}    {FAILED}            GONE+END
GONE        GONE+DROP       GONE+DROP          ENDED+FREE+DROP ENDED+FREE+DROP -               -                  ENDED+FREE  ENDED+FREE          -
ENDED       ENDED+DROP      ENDED+DROP         ENDED+DROP      ENDED+DROP      -               -                  -           -                   -
"""  # noqa: E501


def _expected() -> dict[tuple[int, int], set[str]]:
    table: dict[tuple[int, int], set[str]] = {}
    for line in EXPECTED.strip().splitlines():
        state, *cells = line.split()
        assert len(cells) == len(EVENTS)
        for event, cell in zip(ORDER.split(), cells, strict=True):
            words = {state} if cell == "-" else set(cell.split("+"))
            table[r.STATE_NAMES.index(state), r.EVENT_NAMES.index(event)] = words
    return table


def _words(todo: int) -> set[str]:
    words = {r.STATE_NAMES[todo & r.STATE_MASK]}
    return words | {name for name, flag in FLAGS.items() if todo & flag}


@pytest.mark.parametrize(
    ("state", "event"),
    [
        pytest.param(s, e, id=f"{r.STATE_NAMES[s]}-{r.EVENT_NAMES[e]}")
        for s, e in itertools.product(STATES, EVENTS)
    ],
)
def test_each_state_takes_each_event(state: int, event: int) -> None:
    """Every pair of state and event does what the table in this file says, and no more."""
    life = Life()
    life.state = state
    todo = life.step(event)
    assert _words(todo) == _expected()[state, event]
    assert todo == TRANSITIONS[state][event]
    assert life.state == todo & r.STATE_MASK


def test_flags_and_states_share_no_bit() -> None:
    """A step's integer can be taken apart again."""
    bits = [r.STATE_MASK, *FLAGS.values()]
    assert sum(bits) == (r.STATE_MASK | sum(FLAGS.values()))
    assert all(a & b == 0 for a, b in itertools.combinations(bits, 2))
    assert max(STATES) <= r.STATE_MASK


def test_event_constants_stand_in_the_order_of_their_names() -> None:
    """The names that people read belong to the numbers that the table is indexed with."""
    assert [getattr(r, name) for name in r.EVENT_NAMES] == list(EVENTS)
    assert [getattr(r, name) for name in r.STATE_NAMES] == list(STATES)


@pytest.mark.parametrize("seed", range(20))
def test_any_sequence_ends_exactly_once(seed: int) -> None:
    """Whatever happens in whatever order: one END, nothing delivered after it, freed once a try."""
    dice = random.Random(seed)
    for _ in range(300):
        life, ends, at_stub = Life(), 0, False
        for event in dice.choices(EVENTS, k=dice.randint(1, 30)):
            before = life.state
            todo = life.step(event)
            if todo & (r.DELIVER | r.FAIL):
                assert ends == 0
            assert not todo & r.FAIL or todo & r.END
            ends += bool(todo & r.END)
            if before == r.QUEUED and life.state == r.DISPATCHED:
                at_stub = True
            if todo & (r.FREE | r.TELL):
                assert at_stub
            if todo & r.FREE:
                at_stub = False
            if todo & (r.DROP | r.REQUEUE):
                assert not todo & (r.DELIVER | r.END)
            assert ends == (life.state in (r.GONE, r.ENDED))
            assert at_stub == (life.state not in (r.QUEUED, r.ENDED))
        for event in (r.DEADLINE, r.STUB_DIED):
            ends += bool(life.step(event) & r.END)
        assert (life.state, ends) == (r.ENDED, 1)


def test_65_request_of_a_gone_client_is_dropped_from_the_queue() -> None:
    """A disconnect in the queue leaves nothing to execute and nobody to answer."""
    life = Life()
    todo = life.step(r.DISCONNECT)
    assert todo & r.UNQUEUE and todo & r.END and not todo & r.FAIL
    assert life.step(r.DISPATCH) & r.DROP


def test_66_result_for_a_gone_client_is_dropped_and_frees_the_stub() -> None:
    """A disconnect during execution is told to the stub, whose answer then goes nowhere."""
    life = Life()
    life.step(r.DISPATCH)
    assert life.step(r.DISCONNECT) & r.TELL
    todo = life.step(r.FINAL)
    assert todo & r.DROP and todo & r.FREE and not todo & r.DELIVER


def test_73_second_final_is_dropped() -> None:
    """What comes after the end is dropped, so that a caller can count it."""
    life = Life()
    life.step(r.DISPATCH)
    assert life.step(r.FINAL) & r.DELIVER
    for event in (r.FINAL, r.RESPONSE, r.ERROR):
        assert life.step(event) == r.ENDED | r.DROP


def test_4_dead_stub_fails_its_request_once() -> None:
    """Without a policy of retries, a dispatched request is never run again."""
    life = Life()
    life.step(r.DISPATCH)
    assert life.stub_died(0) & r.FAIL
    assert life.death_message(0, "stub 'm_0_0' was killed") == "stub 'm_0_0' was killed"
    assert life.stub_died(0) == r.ENDED
    assert life.kills == 1


def test_5_stream_that_has_begun_is_never_run_again() -> None:
    """After the first response a retry would deliver it twice."""
    life = Life()
    life.step(r.DISPATCH)
    life.step(r.RESPONSE)
    todo = life.stub_died(5)
    assert todo & r.FAIL and todo & r.END and not todo & r.REQUEUE


@pytest.mark.parametrize("retries", [1, 2, 5])
def test_36_poison_is_refused_after_its_retries(retries: int) -> None:
    """A request that has killed n + 1 stubs is refused, with their number."""
    life = Life()
    for _ in range(retries):
        life.step(r.DISPATCH)
        assert life.stub_died(retries) & r.REQUEUE
        assert life.state == r.QUEUED
    life.step(r.DISPATCH)
    assert life.stub_died(retries) & r.FAIL
    message = f"request rejected: killed {retries + 1} stubs"
    assert life.death_message(retries, "it died") == message
    assert life.stats() == r.LifeStats("ENDED", retries + 1)


def test_78_queued_request_is_not_blamed_for_a_death() -> None:
    """A stub's death does not touch a request that was never sent to it."""
    life = Life()
    assert life.stub_died(0) == r.QUEUED
    assert life.kills == 0


def test_cancelled_request_is_not_retried() -> None:
    """Nobody wants the answer any more: its end is told instead."""
    life = Life()
    life.step(r.DISPATCH)
    assert life.step(r.CANCEL) & r.TELL
    assert life.step(r.CANCEL) == r.CANCELLING
    assert not life.stub_died(3) & r.REQUEUE
    assert life.state == r.ENDED


def test_poison_message_counts_in_words() -> None:
    """One stub is not "1 stubs"."""
    assert poison_message(1) == "request rejected: killed 1 stub"
    assert poison_message(2) == "request rejected: killed 2 stubs"


def test_life_costs_a_subclass_nothing() -> None:
    """The server's own request class adds slots and gets no __dict__."""

    class Flight(Life):
        __slots__ = ("id",)

    assert not hasattr(Flight(), "__dict__")
