# SPDX-License-Identifier: Apache-2.0
"""What one process has, when callers and the process itself leave at the worst moment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from actorserve import Message
from actorserve.errors import ActorserveError, ActorStopped, TooLarge
from actorserve.runtime.call import ASK, STREAM, TELL, LocalCall
from actorserve.runtime.in_flight import InFlight
from actorserve.runtime.mailbox import Mailbox
from actorserve.wire.actors import Revoke


class Nothing(Message[int]):
    """Carries nothing."""


class Road:
    """An outbox, the runner behind it, and the door in front of it."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.failed: list[Callable[[ActorserveError], None]] = []
        self.in_flight = InFlight(self, self)  # type: ignore[arg-type]
        self.mailbox = Mailbox("a", 10, lambda: None)

    def send(self, _packed: Any, _build: Any, on_error: Callable[[ActorserveError], None]) -> None:
        self.sent.append("Deliver")
        self.failed.append(on_error)

    def send_plain(self, message: Revoke) -> None:
        self.sent.append(type(message).__name__)

    def revoke(self, call: Any) -> None:
        self.in_flight.revoke(call)

    def later(self, function: Callable[[], None]) -> None:
        function()

    def call(self, kind: int) -> tuple[LocalCall, Any]:
        """Return a call that has been taken from the mailbox, and what its caller has."""
        call = LocalCall(self, "a", kind, Nothing())  # type: ignore[arg-type]
        wanted = call.expect_stream(None) if kind == STREAM else call.expect_answer()
        self.mailbox.put(call)
        assert self.mailbox.take(1) is call
        return call, wanted


@pytest.mark.parametrize("kind", [ASK, STREAM], ids=["ask", "stream"])
def test_a_call_given_up_on_its_way_from_the_mailbox_is_revoked(kind: int):
    """The mailbox has it no more and the process not yet: else it would be open for ever."""
    road = Road()
    call, wanted = road.call(kind)
    wanted.close() if kind == STREAM else wanted.cancel()
    road.in_flight.send(call)
    assert road.sent == ["Deliver", "Revoke"]
    road.in_flight.came_to(1)
    assert road.in_flight.is_empty()


@pytest.mark.parametrize("kind", [ASK, STREAM, TELL], ids=["ask", "stream", "tell"])
def test_a_message_that_cannot_be_sent_is_forgotten(kind: int):
    """It fails, and the process has nothing to do."""
    road = Road()
    call, _ = road.call(kind)
    road.in_flight.send(call)
    road.failed[0](TooLarge("too large"))
    assert road.in_flight.is_empty() and len(road.in_flight) == 0
    assert call.is_over == (kind != TELL)


@pytest.mark.parametrize("kind", [ASK, STREAM, TELL], ids=["ask", "stream", "tell"])
def test_a_message_whose_placing_fails_after_its_process_died_is_the_next_one_s(kind: int):
    """It has gone back to the mailbox by then, and the next life may well place it."""
    road = Road()
    call, _ = road.call(kind)
    road.in_flight.send(call)
    assert road.in_flight.lose(0)[1] == [call]
    road.failed[0](TooLarge("too large"))
    assert not call.is_over


def test_a_mailbox_that_is_opened_while_it_refuses_gives_the_reason_that_it_had():
    """The reason is read once: in between, another thread may let the actor be asked again."""

    class Opening(Mailbox):
        @property
        def _refusal(self) -> ActorserveError | None:
            refusal, self._reason = self._reason, None
            return refusal

        @_refusal.setter
        def _refusal(self, reason: ActorserveError | None) -> None:
            self._reason = reason

    mailbox = Opening("a", 10, lambda: None)
    mailbox.refuse(ActorStopped("not now"))
    call = LocalCall(Road(), "a", ASK, Nothing())  # type: ignore[arg-type]
    answer = call.expect_answer()
    mailbox.put(call)
    with pytest.raises(ActorStopped, match="not now"):
        answer.outcome()
