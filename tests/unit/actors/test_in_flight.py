# SPDX-License-Identifier: Apache-2.0
"""The batches at one stub: sent, answered, split, or lost with it; the channel is a stand-in."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from actorserve.actors.in_flight import LARGE_WINDOW, NO_SLOT, WINDOW, InFlight
from actorserve.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    ProtocolError,
    ResourceExhausted,
    Unavailable,
)
from actorserve.wire.messages import Disowned, Execute, Executed, Handle, WireResponse, WireTensor
from tests.unit.actors.conftest import FakeDesk, Made

decode = msgspec.msgpack.Decoder(Execute).decode
DEATH = Unavailable("the stub died")


class FakePage:
    """A health page."""

    def __init__(self, slots: int) -> None:
        self.cancel_slots = slots
        self.cancelled: list[tuple[int, int]] = []
        self.begun = 0
        self.granted: list[int] = []
        self.does_sender_wait = False

    def cancel(self, slot: int, request_id: int) -> None:
        self.cancelled.append((slot, request_id))

    def last_begun(self) -> int:
        return self.begun

    def grant(self, slot: int, request_id: int, total: int) -> bool:
        self.granted.append(total)
        return self.does_sender_wait


class FakeEnd:
    """A channel that keeps what is sent."""

    arena = 2

    def __init__(self, slots: int = 4, max_frame_bytes: int = 100_000) -> None:
        self.page = FakePage(slots)
        self.max_frame_bytes = max_frame_bytes
        self.sent: list[Execute] = []
        self.error: Exception | None = None
        self.rung: list[bool] = []
        self.woken = 0
        self.told: list[int] = []
        self.disowned: list[list[int]] = []

    def send_control(self, message: Disowned) -> None:
        self.disowned.append(message.requests)

    def tell_of_credit(self, request: int) -> None:
        self.told.append(request)

    def wake(self) -> None:
        self.woken += 1

    def send_encoded(self, data: bytes, tensors: list[WireTensor], *, wakes: bool = True) -> None:
        if self.error is not None:
            raise self.error
        self.rung.append(wakes)
        self.sent.append(decode(data))
        assert len(tensors) == 2 * len(self.sent[-1].requests)

    def batches(self) -> list[list[int]]:
        """Return the requests of each batch."""
        return [[wire.id for wire in message.requests] for message in self.sent]

    def all_sent(self) -> list[int]:
        """Return all requests in the order in which they were sent."""
        return [key for batch in self.batches() for key in batch]


@pytest.fixture
def end() -> FakeEnd:
    """Return a channel."""
    return FakeEnd()


@pytest.fixture
def in_flight(end: FakeEnd, exchange: Any) -> InFlight:
    """Return what is at the stub 'i'."""
    return InFlight("i", end, exchange)  # type: ignore[arg-type]


@pytest.fixture
def make(exchange: Any, desk: FakeDesk) -> Any:
    """Return `make(n, **fields)`: that many requests."""

    def make(count: int, **fields: Any) -> list[Made]:
        return [Made(exchange, desk, **fields) for _ in range(count)]

    return make


def factories(made: list[Made]) -> list[Any]:
    """Return their factories."""
    return [each.factory for each in made]


def answers(made: list[Made]) -> list[WireResponse]:
    """Return an answer for each."""
    return [WireResponse(each.key, [WireTensor("OUT", 11, (0,), b"")]) for each in made]


# --- sending and answers -------------------------------------------------------------------------


def test_batches_are_numbered_and_answered_one_by_one(in_flight, end, make):
    """Numbers count up; each answer goes to its own request."""
    first, second = make(2), make(1)
    in_flight.send(factories(first))
    in_flight.send(factories(second))
    assert [message.batch for message in end.sent] == [1, 2]
    assert len(in_flight) == 2
    in_flight.finish(Executed(2, answers(second)))
    assert [each.outcome for each in first + second] == ["", "", "ok"]
    in_flight.finish(Executed(1, answers(first[::-1])))
    assert [each.outcome for each in first] == ["ok", "ok"]
    assert (len(in_flight), in_flight.executed) == (0, 2)


def test_answers_may_come_before_the_end_of_the_batch(in_flight, make):
    """Where one frame cannot hold them all."""
    made = make(2)
    in_flight.send(factories(made))
    for response in answers(made):
        in_flight.respond(response)
    assert [each.outcome for each in made] == ["ok", "ok"]
    in_flight.finish(Executed(1, []))
    assert all(len(each.responses) == 1 for each in made)


def test_requests_that_ended_meanwhile_are_left_out(in_flight, end, make):
    """A batch of none is not sent at all."""
    made = make(3)
    made[1].factory.cancel()
    in_flight.send(factories(made))
    assert end.batches() == [[made[0].key, made[2].key]]
    made[0].factory.expire(DEATH)
    dead = make(1)
    dead[0].factory.cancel()
    in_flight.send(factories(dead))
    assert len(end.sent) == 1


def test_a_request_without_an_answer_is_one_error(in_flight, make):
    """The batch ended and the stub said nothing of it."""
    made = make(2)
    in_flight.send(factories(made))
    in_flight.finish(Executed(1, answers(made[:1])))
    assert [each.outcome for each in made] == ["ok", "'i' gave no answer to the request"]
    assert isinstance(made[1].responses[0].error, InternalError)


def test_answers_that_nobody_waits_for_are_counted_and_their_blocks_go_home(
    in_flight, exchange, make
):
    """Of a request that has ended, and of one that never was."""
    made = make(1)
    in_flight.send(factories(made))
    made[0].factory.disconnect()
    late = WireTensor("OUT", 11, (1,), Handle(2, 8, 0, 0, 4))
    in_flight.respond(WireResponse(made[0].key, [late]))
    in_flight.respond(WireResponse(12345, [late]))
    assert in_flight.late_responses == 1
    assert exchange.discarded == [8, 8]
    in_flight.finish(Executed(1, []))
    assert made[0].responses == []


def test_the_end_of_an_unknown_batch_breaks_the_wire(in_flight, make):
    """Also a second end of the same."""
    in_flight.send(factories(make(1)))
    with pytest.raises(ProtocolError, match="answered batch 2, which it has not"):
        in_flight.finish(Executed(2, []))
    in_flight.finish(Executed(1, []))
    with pytest.raises(ProtocolError, match="answered batch 1, which it has not"):
        in_flight.finish(Executed(1, []))


def test_a_broken_answer_leaves_its_batch_to_the_stub_s_end(in_flight, end, make):
    """The neighbours behind it are not forgotten: all end, each once."""
    made = make(3)
    in_flight.send(factories(made))
    end.page.begun = 1
    responses = answers(made)
    false = WireTensor("OUT", 11, (1,), Handle(2, 1, 0, 666, 4))
    responses[1] = WireResponse(made[1].key, [false])
    with pytest.raises(ProtocolError):
        in_flight.finish(Executed(1, responses))
    lost = in_flight.lose(DEATH)
    assert (lost.untouched, lost.retried) == ([], [])
    assert [each.outcome for each in made] == ["ok", "the stub died", "the stub died"]
    assert all(len(each.responses) == 1 for each in made)


# --- slots ---------------------------------------------------------------------------------------


def test_cancel_slots_are_used_again(in_flight, end, make):
    """Each request has its own; when they run out, the next has none and goes all the same."""
    made = make(6)
    in_flight.send(factories(made))
    slots = [wire.cancel_slot for wire in end.sent[0].requests]
    assert sorted(slots) == [NO_SLOT, NO_SLOT, 0, 1, 2, 3]
    in_flight.tell_cancelled(made[0].factory)
    assert end.page.cancelled == [(slots[0], made[0].key)]
    in_flight.tell_cancelled(made[5].factory)
    assert len(end.page.cancelled) == 1
    in_flight.finish(Executed(1, answers(made)))
    in_flight.tell_cancelled(made[0].factory)
    assert len(end.page.cancelled) == 1
    again = make(4)
    in_flight.send(factories(again))
    assert sorted(wire.cancel_slot for wire in end.sent[1].requests) == [0, 1, 2, 3]


def test_requests_without_a_client_do_not_take_all_slots(end, exchange, make, monkeypatch):
    """Senders that the model keeps for ever: beyond a limit, the stub is told to end them."""
    monkeypatch.setattr("actorserve.actors.in_flight.MOST_GONE", 1)
    in_flight = InFlight("i", end, exchange)
    kept = make(3)
    for number, each in enumerate(kept, 1):
        in_flight.send([each.factory])
        in_flight.finish(Executed(number, [], 0, [each.key]))
        each.factory.disconnect()
    assert end.disowned == [[kept[0].key, kept[1].key]]
    assert in_flight.requests == 3
    for each in kept[:2]:
        in_flight.respond(WireResponse(each.key, []))
    assert in_flight.requests == 1
    working = make(3)
    in_flight.send(factories(working))
    for each in working:
        each.factory.disconnect()
    assert end.disowned[1:] == [[kept[2].key]]  # not those that execute has in hand


def test_a_batch_that_needs_all_slots_gets_them_back_at_once(end, exchange, make):
    """One request that is kept and gone would hold all others up."""
    in_flight = InFlight("i", end, exchange, most_in_batch=4)
    (kept,) = make(1)
    in_flight.send([kept.factory])
    in_flight.finish(Executed(1, [], 0, [kept.key]))
    assert not in_flight.has_slots
    kept.factory.disconnect()
    assert end.disowned == [[kept.key]]
    in_flight.respond(WireResponse(kept.key, []))
    assert in_flight.has_slots


# --- frames --------------------------------------------------------------------------------------


def test_a_batch_that_no_frame_holds_goes_in_halves(exchange, make):
    """As often as it takes, in order, and each request once."""
    end = FakeEnd(slots=32, max_frame_bytes=6000)
    in_flight = InFlight("i", end, exchange)  # type: ignore[arg-type]
    made = make(16, parameters={"p": "x" * 1000})
    in_flight.send(factories(made))
    assert [len(keys) for keys in end.batches()] == [4, 4, 4, 4]
    assert end.all_sent() == [each.key for each in made]
    assert [message.batch for message in end.sent] == [1, 2, 3, 4]
    for number in range(4):
        in_flight.finish(Executed(number + 1, answers(made[4 * number : 4 * number + 4])))
    assert all(each.outcome == "ok" for each in made)
    assert all(each.factory.kills == 0 for each in made)
    in_flight.send(factories(make(32)))
    assert len({wire.cancel_slot for message in end.sent[4:] for wire in message.requests}) == 32


def test_one_request_that_no_frame_holds_is_refused(exchange, make):
    """Its neighbours are sent."""
    end = FakeEnd(max_frame_bytes=6000)
    in_flight = InFlight("i", end, exchange)  # type: ignore[arg-type]
    made = make(1) + make(1, parameters={"p": "x" * 10_000}) + make(1)
    in_flight.send(factories(made))
    assert isinstance(made[1].responses[0].error, InvalidArgument)
    assert "do not fit into one message" in made[1].outcome
    assert end.all_sent() == [made[0].key, made[2].key]


def test_a_channel_that_takes_nothing_refuses(in_flight, end, make):
    """The requests end with its error, and their slots are free again."""
    end.error = ResourceExhausted("no room")
    made = make(2)
    in_flight.send(factories(made))
    assert [each.outcome for each in made] == ["no room", "no room"]
    assert len(in_flight) == 0
    end.error = None
    in_flight.send(factories(make(4)))
    assert sorted(wire.cancel_slot for wire in end.sent[0].requests) == [0, 1, 2, 3]


# --- death ---------------------------------------------------------------------------------------


def test_death_tells_begun_from_untouched(in_flight, end, make):
    """Batches beyond the number on the page go to the next stub, in order; the others fail."""
    batches = [make(2), make(1), make(2)]
    for each in batches:
        in_flight.send(factories(each))
    end.page.begun = 1
    lost = in_flight.lose(DEATH)
    assert [each.outcome for each in batches[0]] == ["the stub died"] * 2
    assert lost.untouched == factories(batches[1] + batches[2])
    assert lost.retried == []
    assert len(in_flight) == 0
    assert all(each.factory.kills == 0 for each in batches[1])


def test_begun_requests_are_tried_again_where_that_is_allowed(exchange, end):
    """Apart from the untouched, because one of them may be the killer."""
    desk = FakeDesk(retries=1)
    in_flight = InFlight("i", end, exchange)  # type: ignore[arg-type]
    made = [Made(exchange, desk) for _ in range(3)]
    in_flight.send(factories(made[:2]))
    in_flight.send(factories(made[2:]))
    end.page.begun = 1
    lost = in_flight.lose(DEATH)
    assert lost.retried == factories(made[:2])
    assert lost.untouched == factories(made[2:])
    assert all(not each.responses for each in made)


def test_what_ended_before_the_death_is_not_touched(in_flight, end, make):
    """Answered, cancelled or abandoned: one end each."""
    made = make(3)
    in_flight.send(factories(made))
    end.page.begun = 1
    in_flight.respond(answers(made)[0])
    made[1].factory.disconnect()
    made[2].factory.cancel()
    lost = in_flight.lose(DEATH)
    assert (lost.untouched, lost.retried) == ([], [])
    assert [len(each.responses) for each in made] == [1, 0, 1]
    assert made[2].outcome == "the stub died"


def test_a_cancelled_request_that_no_stub_began_is_not_queued_again(in_flight, make):
    """It ends as what it is."""
    made = make(2)
    in_flight.send(factories(made))
    made[0].factory.cancel()
    lost = in_flight.lose(DEATH)
    assert lost.untouched == [made[1].factory]
    assert made[0].outcome == "the request was cancelled"


def test_a_hanging_batch_expires_alone(in_flight, end, make):
    """The one in execution ends now; those behind it wait for the next stub."""
    batches = [make(2), make(1)]
    for each in batches:
        in_flight.send(factories(each))
    in_flight.expire_batch(1, DeadlineExceeded("too long"))
    assert [each.outcome for each in batches[0]] == ["too long"] * 2
    lost = in_flight.lose(DEATH)
    assert lost.untouched == factories(batches[1])
    assert all(len(each.responses) == 1 for each in batches[0])


# --- bells and credit ----------------------------------------------------------------------------


def executed(number: int, *made: Made) -> Executed:
    """Return the end of a batch with an answer for each of its requests."""
    return Executed(number, [WireResponse(each.key) for each in made])


def test_work_that_is_sent_ahead_rings_for_nobody(in_flight, end, make):
    """A stub that looks between two batches finds it; one with a loop of its own is rung."""
    first, second, third = make(3)
    in_flight.send([first.factory])
    in_flight.send([second.factory])
    in_flight.looks_between = True
    in_flight.send([third.factory])
    assert end.rung == [True, True, False]


def test_a_stub_that_slept_before_its_work_came_is_woken_when_its_last_batch_ends(
    in_flight, end, make
):
    """The next batch is there and not begun; where it is begun already, nobody sleeps."""
    in_flight.looks_between = True
    made = make(3)
    for each in made:
        in_flight.send([each.factory])
    end.page.begun = 1
    in_flight.finish(executed(1, made[0]))
    assert end.woken == 1
    end.page.begun = 3
    in_flight.finish(executed(2, made[1]))
    in_flight.finish(executed(3, made[2]))
    assert end.woken == 1
    assert len(in_flight) == 0


def test_credit_is_a_window_more_than_was_taken(end, exchange, make):
    """Small responses get a large window once the first has come, those of shared memory do not."""
    in_flight = InFlight("i", end, exchange, decoupled=True)
    (made,) = make(1)
    in_flight.send([made.factory])
    assert end.page.granted == [LARGE_WINDOW]
    in_flight.respond(WireResponse(made.key, final=False))
    end.page.does_sender_wait = True
    made.factory.consumed()
    assert end.page.granted == [LARGE_WINDOW, 1 + WINDOW]
    handle = Handle(2, 1, 0, 0, 8000)
    in_flight.respond(WireResponse(made.key, [WireTensor("OUT", 11, (2000,), handle)], final=False))
    made.factory.consumed()
    assert end.told == [made.key]
    for _ in range(WINDOW):
        made.factory.consumed()
    steps = [later - earlier for earlier, later in zip(end.page.granted[1:], end.page.granted[2:])]
    assert steps == [LARGE_WINDOW // 2] * len(steps)
    assert steps
    assert set(end.told) == {made.key}
