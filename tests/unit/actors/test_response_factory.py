# SPDX-License-Identifier: Apache-2.0
"""One request: whatever happens to it in whatever order, it ends exactly once."""

from __future__ import annotations

import itertools

import pytest

from actorserve.errors import (
    Cancelled,
    Code,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    ProtocolError,
    Unavailable,
)
from actorserve.wire.messages import Handle, WireError, WireResponse, WireTensor
from tests.unit.actors.conftest import FakeDesk, FakeExchange, FakePeer, Made

PEER = FakePeer()


def output(block: int = 0, **fields: int) -> WireTensor:
    """Return an output by handle, or an inline one for block 0."""
    if not block:
        return WireTensor("OUT", 11, (1,), b"\0\0\x80?")
    return WireTensor("OUT", 11, (1,), Handle(2, block, 0, fields.get("offset", 0), 4))


def answer(made: Made, *, final: bool = True, block: int = 0) -> WireResponse:
    """Return a response of the stub."""
    return WireResponse(made.key, [output(block)], None, "{}", final)


# --- one way -------------------------------------------------------------------------------------


def test_a_request_travels_with_all_that_the_model_may_ask(exchange, desk):
    """Id, parameters, sequence, timeout, wanted outputs, cancel slot."""
    made = Made(
        exchange,
        desk,
        parameters={"a": 1, "b": "x", "c": True, "d": 0.5},
        correlation_id="seq",
        sequence_start=True,
        sequence_end=True,
        timeout_us=77,
    )
    wire = made.dispatch(5)
    assert wire is not None
    assert wire.id == made.key
    assert wire.request_id == f"r{made.key}"
    assert wire.parameters == '{"a":1,"b":"x","c":true,"d":0.5}'
    assert (wire.correlation_id, wire.flags, wire.timeout_us) == ("seq", 3, 77)
    assert (wire.requested_outputs, wire.cancel_slot) == (["OUT"], 5)
    assert [tensor.name for tensor in wire.inputs] == ["A", "B"]


def test_a_request_without_extras_travels_light(exchange, desk):
    """No parameters are an empty object."""
    wire = Made(exchange, desk).dispatch()
    assert wire is not None
    assert (wire.parameters, wire.flags) == ("{}", 0)


def test_an_answer_becomes_a_response(exchange, desk):
    """Names, types, shapes, parameters, the version that answered; inputs are let go."""
    made = Made(exchange, desk)
    made.dispatch(0)
    wire = WireResponse(made.key, [output(), output(9)], None, '{"p":1}', True)
    assert made.factory.respond(wire, PEER) is True
    (response,) = made.responses
    assert (response.model_name, response.model_version) == ("model", "3")
    assert (response.id, response.parameters) == (f"r{made.key}", {"p": 1})
    assert [(t.name, t.datatype, t.shape) for t in response.outputs] == [("OUT", "FP32", (1,))] * 2
    assert bytes(response.outputs[0].data) == b"\0\0\x80?"
    assert exchange.received == [9]
    assert exchange.dropped == [made.key]
    assert desk.finished == [made.key]
    assert not made.factory.has_failed


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (Code.NOT_FOUND, NotFound),
        (Code.INVALID_ARG, InvalidArgument),
        (Code.UNAVAILABLE, Unavailable),
        (Code.CANCELLED, Cancelled),
    ],
)
def test_a_model_s_error_keeps_its_code(exchange, desk, code, kind):
    """Outputs that came with it are dropped."""
    made = Made(exchange, desk)
    made.dispatch(0)
    error = WireError(int(code), "no")
    made.factory.respond(WireResponse(made.key, [output(4)], error), PEER)
    assert isinstance(made.responses[0].error, kind)
    assert made.outcome == "no"
    assert made.responses[0].outputs == []
    assert exchange.discarded == [4]
    assert made.factory.has_failed


def test_inputs_are_kept_until_the_end(exchange, desk):
    """A stub may die before it has begun them."""
    made = Made(exchange, desk)
    made.dispatch(0)
    made.factory.respond(answer(made, final=False), PEER)
    assert exchange.dropped == []
    made.factory.respond(answer(made), PEER)
    assert exchange.dropped == [made.key]


def test_an_abandoned_request_tells_nobody(exchange, desk):
    """It was refused before it was accepted."""
    made = Made(exchange, desk)
    made.factory.abandon()
    assert (made.responses, desk.finished, exchange.dropped) == ([], [], [made.key])
    assert made.dispatch(0) is None


# --- answers that cannot be ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "wire",
    [
        WireResponse(0, [output(1, offset=666)]),
        WireResponse(0, [output(), WireTensor("X", 15, (1,), b"x")]),
        WireResponse(0, [WireTensor("X", 0, (1,), b"x")]),
        WireResponse(0, [WireTensor("X", -1, (1,), b"x")]),
        WireResponse(0, [], None, "{"),
        WireResponse(0, [], None, '{"a": [1]}'),
        WireResponse(0, [], None, '"text"'),
    ],
    ids=["handle", "type 15", "type 0", "type -1", "no JSON", "a list", "no object"],
)
def test_a_broken_answer_leaves_the_request_waiting(exchange, desk, wire):
    """The stub has to go, and its end is the request's answer: once."""
    made = Made(exchange, desk)
    made.dispatch(0)
    with pytest.raises(ProtocolError):
        made.factory.respond(wire, PEER)
    assert (made.responses, desk.finished) == ([], [])
    assert made.factory.lose_stub(Unavailable("the stub died")) is False
    assert made.outcome == "the stub died"
    assert desk.finished == [made.key]


def test_a_fault_of_whoever_takes_the_response_changes_nothing(exchange, desk, caplog):
    """It is logged; the request has ended all the same."""

    def fail(response: object) -> None:
        raise RuntimeError("not my day")

    made = Made(exchange, desk, on_response=fail)
    made.dispatch(0)
    assert made.factory.respond(answer(made), PEER) is True
    assert desk.finished == [made.key]
    assert "not my day" in caplog.text


# --- death ---------------------------------------------------------------------------------------


def test_a_request_is_tried_as_often_as_its_model_allows(exchange):
    """Then it is refused as what it is."""
    desk = FakeDesk(retries=2)
    made = Made(exchange, desk)
    for _ in range(2):
        assert made.dispatch(0) is not None
        assert made.factory.lose_stub(Unavailable("death")) is True
    made.dispatch(0)
    assert made.factory.lose_stub(Unavailable("death")) is False
    assert made.outcome == "request rejected: killed 3 stubs"
    assert isinstance(made.responses[0].error, Unavailable)


def test_what_was_delivered_in_part_is_not_tried_again(exchange):
    """The client would get it twice."""
    desk = FakeDesk(retries=5)
    made = Made(exchange, desk)
    made.dispatch(0)
    made.factory.respond(answer(made, final=False), PEER)
    assert made.factory.lose_stub(Unavailable("death")) is False
    assert made.outcome == "death"


def test_a_request_that_no_stub_began_is_taken_back(exchange, desk):
    """It does not count as a death; a cancelled one ends."""
    made = Made(exchange, desk)
    made.dispatch(0)
    assert made.factory.take_back() is True
    assert made.factory.kills == 0
    made.dispatch(0)
    made.factory.cancel()
    assert made.factory.take_back() is False
    assert made.outcome == "the request was cancelled"


# --- every order ---------------------------------------------------------------------------------

EVENTS = {
    "dispatch": lambda made: made.dispatch(0),
    "partial": lambda made: made.factory.respond(answer(made, final=False, block=7), PEER),
    "final": lambda made: made.factory.respond(answer(made, block=8), PEER),
    "error": lambda made: made.factory.respond(
        WireResponse(made.key, [], WireError(1, "model")), PEER
    ),
    "fail": lambda made: made.factory.fail(Unavailable("failed")),
    "expire": lambda made: made.factory.expire(DeadlineExceeded("late")),
    "cancel": lambda made: made.factory.cancel(),
    "disconnect": lambda made: made.factory.disconnect(),
    "death": lambda made: made.factory.lose_stub(Unavailable("death")),
    "take back": lambda made: made.factory.take_back(),
}
NEEDS_A_STUB = {"partial", "final", "error", "death", "take back"}


@pytest.mark.parametrize("retries", [0, 1])
@pytest.mark.parametrize("first", [*EVENTS])
def test_every_order_of_events_ends_once(first, retries):
    """Five events of ten kinds in all orders, then a shutdown: one end, and no block twice."""
    for rest in itertools.product(EVENTS, repeat=4):
        order = (first, *rest)
        exchange, desk = FakeExchange(), FakeDesk(retries)
        made = Made(exchange, desk)
        has_stub = False
        left = False
        for name in order:
            if name in NEEDS_A_STUB and not has_stub:
                continue  # what nobody was sent nobody answers
            result = EVENTS[name](made)
            if name == "dispatch":
                has_stub = has_stub or result is not None
            elif name in ("death", "take back") or (name in ("final", "error") and result):
                has_stub = False
            left = left or (name == "disconnect" and not made.finals)
        made.factory.expire(Unavailable("shutdown"))
        if has_stub:
            made.factory.lose_stub(Unavailable("death"))
        assert desk.finished == [made.key], order
        assert len(made.finals) == (0 if left else 1), order
        assert not made.responses or left or made.responses[-1].final, order
        assert exchange.dropped == [made.key], order
        assert made.factory.state == 5, order
