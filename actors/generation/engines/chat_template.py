# SPDX-License-Identifier: Apache-2.0
"""A conversation as the text that a chat model was trained on, in the ChatML form:

    <|im_start|>user ⏎ What is it? <|im_end|> ⏎ … <|im_start|>assistant ⏎

Files carry their template as a program in Jinja. What comes out of a file is data here and never
run: the ChatML form is recognised, with the system message it puts first when there is none, and
any other template is refused. Marks and text stay apart, so that nobody ends his own message or
begins another's by writing a mark into it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from actorserve.actors.generation.engine import RequestError
from actorserve.errors import InvalidArgument

__all__ = ["ChatTemplate", "Piece"]

BEGIN = "<|im_start|>"
END = "<|im_end|>"
ROLES = ("system", "user", "assistant", "tool")

_SPACES = re.compile(r"\s+")
_LOOP_BODY = "'<|im_start|>'+message['role']+'"
_DEFAULT_SYSTEM = re.compile(
    r"messages\[0\]\['role'\] != 'system' %\}\s*\{\{-?\s*'<\|im_start\|>system\n(.*?)<\|im_end\|>",
    re.DOTALL,
)


class Piece(NamedTuple):
    """A piece of a prompt: a mark of the template (one special token), or text as it is."""

    text: str
    is_mark: bool


class ChatTemplate:
    """How a model wants its conversations."""

    def __init__(self, default_system: str = "") -> None:
        self.default_system = default_system

    @classmethod
    def parse(cls, source: str | None) -> ChatTemplate:
        """Recognise a template. Raises RequestError for none and for one of another form."""
        if not source:
            raise RequestError("the model has no chat template: send it a prompt, not messages")
        source = source.replace("\\n", "\n")
        if _LOOP_BODY not in _SPACES.sub("", source):
            raise RequestError("the model's chat template is not of the ChatML form; send a prompt")
        found = _DEFAULT_SYSTEM.search(source)
        return cls(found[1] if found else "")

    def pieces(self, messages: Sequence[dict[str, str]]) -> list[Piece]:
        """Return the prompt that asks for the next message of the assistant.

        Raises InvalidArgument for no messages, an unknown role or a content that is no text.
        """
        if not messages:
            raise InvalidArgument("a conversation needs at least one message")
        out: list[Piece] = []
        if messages[0].get("role") != "system" and self.default_system:
            out += self._message("system", self.default_system)
        for number, message in enumerate(messages):
            role, content = message.get("role"), message.get("content")
            if role not in ROLES:
                raise InvalidArgument(
                    f"message {number} has the role {role!r}; expected one of {', '.join(ROLES)}"
                )
            if not isinstance(content, str):
                raise InvalidArgument(
                    f"the content of message {number} must be text, got {type(content).__name__}"
                )
            out += self._message(role, content)
        return [*out, Piece(BEGIN, True), Piece("assistant\n", False)]

    def _message(self, role: str, content: str) -> list[Piece]:
        return [
            Piece(BEGIN, True),
            Piece(f"{role}\n{content}", False),
            Piece(END, True),
            Piece("\n", False),
        ]
