# SPDX-License-Identifier: Apache-2.0
"""The parts of `actorserve chat` that need no server."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest

from actorserve.errors import InvalidArgument, Unavailable
from actorserve.frontend.chat import Chat, Conversation, harmless
from actorserve.frontend.chat_source import Cancel, Manner, Message, Tell


class Parrot:
    """Answers with how many messages it has seen, then fails where it is asked to."""

    model = "parrot"

    def __init__(self) -> None:
        self.seen: list[list[tuple[str, str]]] = []
        self.closed = 0

    def ask(self, messages: Sequence[Message], manner: Manner, tell: Tell) -> Cancel:
        """Tell two pieces, or one and an error."""
        self.seen.append([(each.role, each.content) for each in messages])
        tell(f"{len(messages)}")
        tell(Unavailable("the parrot is gone") if messages[-1].content == "fail" else "!")
        tell(None)
        return self._cancel

    def _cancel(self) -> None:
        self.closed += 1

    def close(self) -> None:
        """Do nothing."""


def test_a_conversation_is_remembered() -> None:
    """With the system's message in front, answers included; each answer is closed."""
    parrot, answers = Parrot(), io.StringIO()
    chat = Chat(parrot, Conversation("be brief"), Manner())
    chat.through_pipes(io.StringIO("one\n\n  two  \n"), answers)
    assert answers.getvalue() == "2!\n4!\n"
    assert parrot.seen[1] == [
        ("system", "be brief"),
        ("user", "one"),
        ("assistant", "2!"),
        ("user", "two"),
    ]
    assert parrot.closed == 2


def test_an_error_ends_pipes() -> None:
    """What had come of the answer is written, and kept."""
    parrot, answers = Parrot(), io.StringIO()
    conversation = Conversation("")
    with pytest.raises(Unavailable):
        Chat(parrot, conversation, Manner()).through_pipes(io.StringIO("fail\nmore\n"), answers)
    assert answers.getvalue() == "1"
    assert [each.content for each in conversation.messages] == ["fail", "1"]


def test_a_question_without_an_answer_was_not_asked() -> None:
    """The next one is not a second one in a row; a new conversation keeps the system's message."""
    conversation = Conversation("be brief")
    conversation.ask("hello\udcff?")
    assert conversation.messages[-1].content == "hello??"
    conversation.answered("")
    assert len(conversation.messages) == 1
    conversation.ask("hello")
    conversation.answered("hi")
    conversation.clear()
    assert [each.role for each in conversation.messages] == ["system"]


def test_an_answer_orders_no_terminal_about() -> None:
    """Control characters are shown as what they are: nothing to be shown."""
    assert harmless("a\x1b[2J\tb\né\x07\x9b") == "a\ufffd[2J\tb\né\ufffd\ufffd"


def test_a_model_is_tried_out_with_a_word() -> None:
    """What it refuses is raised; the trial is in no conversation, and other errors may pass."""

    class Refusing(Parrot):
        def ask(self, messages: Sequence[Message], manner: Manner, tell: Tell) -> Cancel:
            assert manner.max_tokens == 1
            tell(InvalidArgument("no chat template"))
            return self._cancel

    conversation = Conversation("be brief")
    with pytest.raises(InvalidArgument, match="no chat template"):
        Chat(Refusing(), conversation, Manner(max_tokens=9)).try_out()
    assert len(conversation.messages) == 1
    parrot = Parrot()
    Chat(parrot, conversation, Manner()).try_out()
    assert parrot.closed == 1
