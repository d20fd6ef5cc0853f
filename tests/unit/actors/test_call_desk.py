# SPDX-License-Identifier: Apache-2.0
"""The calls of one stub, seen from the supervisor: credit, parents, drops; without processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from actorserve.actors.call_desk import MOST_AHEAD, CallDesk
from actorserve.actors.response_factory import ResponseFactory
from actorserve.errors import ActorserveError, InternalError, NotFound, ProtocolError
from actorserve.state.request import CANCELLING, ENDED, GONE
from actorserve.triton.inference import ModelInfo
from actorserve.wire.messages import (
    CallMoved,
    CallResponded,
    CallTaken,
    CancelCall,
    Infer,
    MoveCall,
    WireResponse,
)
from tests.unit.actors.conftest import FakeDesk, FakeExchange, FakePeer, Made

decode = msgspec.msgpack.Decoder(CallResponded | CallMoved).decode


class Loop:
    """A loop whose turns the test takes."""

    def __init__(self) -> None:
        self.due: list[Callable[[], None]] = []

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.due.append(callback)

    def turn(self) -> None:
        """Run what is due."""
        due, self.due = self.due, []
        for each in due:
            each()


class End:
    """The caller's channel."""

    max_frame_bytes = 10_000

    def __init__(self) -> None:
        self.sent: list[tuple[str, Any]] = []

    def send_tensors(self, data: bytes, tensors: Any, *, on_control: bool) -> None:
        self.sent.append(("control" if on_control else "work", decode(data)))

    def send_control(self, message: Any) -> None:
        self.sent.append(("control", message))


class Requests:
    """The caller's own requests."""

    def __init__(self) -> None:
        self.known: dict[int, ResponseFactory] = {}

    def request(self, key: int) -> ResponseFactory | None:
        return self.known.get(key)


class World:
    """A desk, the model that is called, and what comes of it."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.exchange = FakeExchange()
        self.end = End()
        self.requests = Requests()
        self.made: list[Made] = []
        self.error: ActorserveError | None = None
        self.watched: list[Any] = []
        self.info = ModelInfo("callee", "1", ("1",), "python", 0, True, (), ())
        self.desk = CallDesk(self, "caller_0", self.end, self.requests)  # type: ignore[arg-type]

    # What a node has.
    def route(self, model: str, version: str) -> World:
        return self

    def watch_call(self, call: Any) -> None:
        self.watched.append(call)

    # What a version has.
    def submit(self, request: Any, on_response: Any) -> ResponseFactory:
        if self.error is not None:
            raise self.error
        made = Made(self.exchange, FakeDesk(), on_response=on_response)
        self.made.append(made)
        return made.factory

    def call(self, number: int = 1, **more: Any) -> Made:
        """Make a call that is dispatched at once; returns the callee's request."""
        self.desk.infer(Infer(number, "callee", -1, "", [], [], decoupled=True, **more))
        self.made[-1].dispatch()
        return self.made[-1]

    def parent(self) -> Made:
        """Return a request of the caller."""
        parent = Made(self.exchange, FakeDesk())
        parent.dispatch()
        self.requests.known[parent.key] = parent.factory
        return parent

    @property
    def responses(self) -> list[tuple[str, int, bool]]:
        """What was sent to the caller: lane, call, and whether it is the last."""
        return [
            (lane, each.id, each.final)
            for lane, message in self.end.sent
            if isinstance(message, CallResponded)
            for each in message.responses
        ]


def respond(made: Made, count: int = 1, *, final: bool = False) -> None:
    """Have the callee send responses."""
    for _ in range(count):
        made.factory.respond(WireResponse(made.key, [], None, "{}", final), FakePeer())


@pytest.fixture
def world() -> World:
    """Return a desk."""
    return World()


def test_responses_of_a_turn_go_in_one_frame_for_each_lane(world):
    """In order, and the call is forgotten with its last one."""
    first, second = world.call(1), world.call(2, on_control=True)
    respond(first)
    respond(second)
    respond(first, final=True)
    assert world.responses == []
    world.loop.turn()
    assert len(world.end.sent) == 2
    assert world.responses == [("work", 1, False), ("work", 1, True), ("control", 2, False)]
    assert [call.number for call in world.desk.calls()] == [2]


def test_what_does_not_fit_into_a_frame_goes_in_several(world):
    """A single response that does not fit is an error."""
    made = world.call()
    respond(made, 2000)
    world.loop.turn()
    assert len(world.end.sent) > 1
    assert world.responses == [("work", 1, False)] * 2000


def test_a_call_that_is_refused_is_answered(world):
    """With the error in the documented words."""
    world.error = NotFound("no such model")
    world.desk.infer(Infer(1, "callee", -1, "", [], []))
    world.loop.turn()
    (_, message) = world.end.sent[0]
    assert message.responses[0].error.message == (
        "Model callee - Error when running inference: no such model"
    )
    assert len(world.desk) == 0


def test_a_number_is_used_once(world):
    """Twice breaks the wire."""
    world.call(1)
    with pytest.raises(ProtocolError, match="used the number of call 1 twice"):
        world.call(1)


def test_a_stream_has_credit_until_its_caller_is_far_behind(world):
    """Then only for what the caller has looked at."""
    made = world.call()
    world.watched.clear()
    respond(made, MOST_AHEAD + 50)
    world.loop.turn()
    assert made.factory.taken == MOST_AHEAD
    assert world.watched, "whoever looks after circles has to know"
    world.desk.taken(CallTaken(1, 30))
    assert made.factory.taken == MOST_AHEAD + 30
    world.desk.taken(CallTaken(1, 256))
    assert made.factory.taken == MOST_AHEAD + 50
    respond(made, 200)
    world.loop.turn()
    assert made.factory.taken == MOST_AHEAD + 250
    world.desk.taken(CallTaken(7, 1))  # of a call that has ended


def test_moved_calls_are_flushed_first(world):
    """What was sent before lies on the old lane, then comes the word, then the new lane."""
    made = world.call()
    respond(made)
    world.desk.move(MoveCall(1))
    respond(made, final=True)
    world.loop.turn()
    lanes = [(lane, type(message).__name__) for lane, message in world.end.sent]
    assert lanes == [
        ("work", "CallResponded"),
        ("control", "CallMoved"),
        ("control", "CallResponded"),
    ]


def test_a_cancelled_call_ends_in_its_own_time_and_a_dropped_one_for_good(world):
    """Twice and too late are nothing."""
    made = world.call(1)
    for _ in range(2):
        world.desk.cancel(CancelCall(1))
    assert made.factory.state == CANCELLING
    world.desk.cancel(CancelCall(1, is_dropped=True))
    assert made.factory.state == GONE
    assert len(world.desk) == 0
    world.desk.cancel(CancelCall(1))
    respond(made, final=True)
    world.loop.turn()
    assert world.responses == []


def test_the_caller_s_death_drops_all(world):
    """Nothing is sent any more."""
    made = [world.call(n) for n in (1, 2)]
    respond(made[0])
    world.desk.close()
    world.loop.turn()
    assert [each.factory.state for each in made] == [GONE, GONE]
    assert world.end.sent == []


# --- parents -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cancel", "disconnect", "expire"])
def test_a_call_is_cancelled_with_its_only_parent(world, how):
    """However that came to its end."""
    parent = world.parent()
    made = world.call(parents=[parent.key])
    args = (InternalError("late"),) if how == "expire" else ()
    getattr(parent.factory, how)(*args)
    assert made.factory.state == CANCELLING


def test_a_call_of_several_parents_needs_them_all_cancelled(world):
    """One that has its answer already wants nothing more either."""
    parents = [world.parent() for _ in range(3)]
    made = world.call(parents=[each.key for each in parents])
    parents[0].factory.cancel()
    respond(parents[1], final=True)
    assert parents[1].factory.state == ENDED
    assert made.place.told == []
    parents[2].factory.cancel()
    assert made.factory.state == CANCELLING


def test_a_call_for_a_cancelled_request_is_cancelled_at_once(world):
    """It was made before the model looked; unknown parents do not count."""
    parent = world.parent()
    parent.factory.cancel()
    world.desk.infer(Infer(1, "callee", -1, "", [], [], parents=[parent.key, 12345]))
    assert world.made[-1].factory.state == ENDED  # it was queued
    made = world.call(2, parents=[12345])
    assert made.place.told == []


def test_parents_forget_calls_that_have_ended(world):
    """Nothing is kept for as long as they live."""
    parent = world.parent()
    made = world.call(parents=[parent.key])
    assert len(parent.factory.children) == 1
    respond(made, final=True)
    assert not parent.factory.children
