# SPDX-License-Identifier: Apache-2.0
"""What one stub's model asks the supervisor, seen from the supervisor: a handler for each kind.

    stub ─ Asked ─► AnswerDesk ─► answerers[kind of the question] ─► a result, or a coroutine
      ▲                                                                    │
      └── Answered, on the lane that was named ◄───────────────────────────┘

A handler that takes long is a coroutine: it runs in a task of its own and holds nobody up.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from actorserve.errors import ActorserveError, InternalError, ProtocolError, ResourceExhausted
from actorserve.wire.codec import encode
from actorserve.wire.messages import Answered, Asked, Result, WireError

if TYPE_CHECKING:
    from actorserve.actors.node import Node
    from actorserve.runtime.host_end import HostEnd

MOST_OPEN = 1024
"""How many questions of one stub may be open; more are refused."""

_log = logging.getLogger("actorserve")


class Asker(msgspec.Struct, frozen=True):
    """Who asks: an incarnation of an instance. `is_serving` is false while its model loads."""

    instance: str
    model: str
    version: str
    is_serving: bool
    end: HostEnd


class Answerer(Protocol):
    """Answers one kind of question: at once, or later. ActorserveError is an answer, too."""

    def __call__(self, question: Any, asker: Asker) -> Result | Awaitable[Result]:
        """Return the answer."""


class AnswerDesk:
    """The open questions of one incarnation. Belongs to the supervisor's loop."""

    def __init__(self, node: Node, end: HostEnd, asker: Callable[[], Asker]) -> None:
        self.answerers: dict[type, Answerer] = dict(node.answerers)
        """By kind of question: those of the server, and what is added for this stub alone."""
        self._node = node
        self._end = end
        self._asker = asker
        self._open = 0

    def asked(self, message: Asked) -> None:
        """Have a question answered. Raises ProtocolError for one that breaks the wire."""
        try:
            if self._open >= MOST_OPEN:
                raise ResourceExhausted(f"{MOST_OPEN} questions of this stub are open already")
            answerer: Answerer | None = self.answerers.get(type(message.question))
            if answerer is None:
                raise InternalError(f"nobody answers a {type(message.question).__name__}")
            answer = answerer(message.question, self._asker())
        except ProtocolError:
            raise
        except ActorserveError as error:
            self._refuse(message, error)
        else:
            if isawaitable(answer):
                self._open += 1
                self._node.run(self._answer_later(message, answer))
            else:
                self._answer(message, answer)

    async def _answer_later(self, message: Asked, answer: Awaitable[Result]) -> None:
        try:
            value = await answer
        except ActorserveError as error:
            self._refuse(message, error)
        except Exception as error:
            # Whatever it was: somebody waits for this without a deadline.
            _log.exception("a question of a model could not be answered")
            self._refuse(message, InternalError(str(error)))
        else:
            self._answer(message, value)
        finally:
            self._open -= 1

    def _refuse(self, message: Asked, error: ActorserveError) -> None:
        self._answer(message, None, WireError(int(error.code), error.message))

    def _answer(self, message: Asked, result: Result, error: WireError | None = None) -> None:
        """Send an answer; nothing where the stub is gone."""
        data = encode(Answered(message.number, result, error))
        if len(data) > self._end.max_frame_bytes:
            cut = WireError(int(InternalError.code), "the answer does not fit into one message")
            data = encode(Answered(message.number, None, cut))
        self._end.send_with_handles(data, [], on_control=message.on_control, is_bounded=False)
