# SPDX-License-Identifier: Apache-2.0
"""Questions of a stub: each has one answer, on the lane that was named, whatever happens."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from actorserve.actors.answers import MOST_OPEN, AnswerDesk, Asker
from actorserve.errors import Code, NotFound, ProtocolError
from actorserve.wire.codec import decode_to_stub
from actorserve.wire.messages import Answered, Asked, CheckModelReady, LoadModel, UnloadModel


class End:
    """A channel that keeps what is sent."""

    max_frame_bytes = 1000

    def __init__(self) -> None:
        self.sent: list[tuple[Any, bool]] = []

    def send_with_handles(self, data, handles, *, on_control, is_bounded) -> None:
        """Keep a message."""
        self.sent.append((decode_to_stub(data), on_control))


def make(answerer: Any) -> tuple[AnswerDesk, End]:
    """Return a desk with one answerer."""
    end = End()
    loop = asyncio.get_running_loop()
    node = SimpleNamespace(answerers={LoadModel: answerer}, run=loop.create_task)
    asker = Asker("m_0", "m", "1", True, end)  # type: ignore[arg-type]
    return AnswerDesk(node, end, lambda: asker), end  # type: ignore[arg-type]


def run(test: Any) -> None:
    """Run a test in a loop."""
    asyncio.run(test())


def test_answers_take_the_lane_that_was_named():
    """Those that are there at once, and errors."""

    async def test() -> None:
        desk, end = make(lambda question, asker: (question.name, asker.model) == ("x", "m"))
        desk.asked(Asked(1, LoadModel("x"), False))
        desk.asked(Asked(2, LoadModel("y"), True))
        assert end.sent == [(Answered(1, True), False), (Answered(2, False), True)]

        def refuse(question: Any, asker: Any) -> None:
            raise NotFound("nowhere")

        desk, end = make(refuse)
        desk.asked(Asked(3, LoadModel("x")))
        answered = end.sent[0][0]
        assert (answered.error.code, answered.error.message) == (Code.NOT_FOUND, "nowhere")

    run(test)


@pytest.mark.parametrize(("error", "code"), [(NotFound("x"), 2), (ValueError("x"), 1)])
def test_a_late_error_is_an_answer_too(error, code):
    """Also one that nobody has thought of."""

    async def test() -> None:
        async def late(question: Any, asker: Any) -> None:
            await asyncio.sleep(0)
            raise error

        desk, end = make(late)
        desk.asked(Asked(1, LoadModel("x"), True))
        assert end.sent == []
        while not end.sent:
            await asyncio.sleep(0)
        assert (end.sent[0][0].error.code, end.sent[0][1]) == (code, True)

    run(test)


def test_what_nobody_answers_and_what_is_too_much_is_refused():
    """A kind without an answerer, more open questions than allowed, an answer that is too long."""

    async def test() -> None:
        go = asyncio.Event()
        desk, end = make(lambda question, asker: go.wait())
        desk.asked(Asked(1, UnloadModel("x")))
        assert "nobody answers a UnloadModel" in end.sent.pop()[0].error.message
        for number in range(MOST_OPEN + 1):
            desk.asked(Asked(number, LoadModel("x")))
        assert [each.number for each, _ in end.sent] == [MOST_OPEN]
        go.set()
        while len(end.sent) <= MOST_OPEN:
            await asyncio.sleep(0)
        desk.answerers[CheckModelReady] = lambda question, asker: "x" * 2000
        desk.asked(Asked(-1, CheckModelReady("x")))
        assert "does not fit into one message" in end.sent[-1][0].error.message

    run(test)


def test_a_question_that_breaks_the_wire_is_no_question():
    """It is the stub's end, as any other broken message."""

    async def test() -> None:
        def broken(question: Any, asker: Any) -> None:
            raise ProtocolError("a handle of somebody else")

        desk, end = make(broken)
        with pytest.raises(ProtocolError):
            desk.asked(Asked(1, LoadModel("x")))
        assert end.sent == []

    run(test)
