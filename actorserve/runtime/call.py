# SPDX-License-Identifier: Apache-2.0
"""A message on its way, with whoever wants to hear what became of it.

    LocalCall ─── by a reference in this process: ends in an Answer or a Stream
    PeerCall ──── by an actor in another process (peer.py): ends in messages to it

A call passes from its caller through one mailbox to the runner that works at it, which may be in
any thread. What always holds: an ask or a stream ends exactly once, whoever comes first.
"""

from __future__ import annotations

import logging
import sys
import weakref
from types import FrameType
from typing import Any, Protocol

from actorserve.clock import monotonic_s
from actorserve.errors import ActorserveError, InternalError, ProtocolError
from actorserve.runtime.answer import Answer
from actorserve.runtime.message import Message
from actorserve.runtime.payload import Packed, pack_message, unpack_reply
from actorserve.runtime.ref import Door
from actorserve.runtime.stream import Stream
from actorserve.wire.actors import ASK, STREAM, TELL

__all__ = ["ASK", "STREAM", "TELL", "Call", "LocalCall", "Runner", "Work"]

_log = logging.getLogger("actorserve")
_OWN = "actorserve.runtime."


class Runner(Protocol):
    """Whoever works at a call, or holds it."""

    def grant(self, call: Any, count: int) -> None:
        """Let a stream go on. From any thread."""

    def revoke(self, call: Any) -> None:
        """Hear that nobody waits for the call any more. From any thread."""


class Work(Protocol):
    """A call, as the code that runs an actor sees it."""

    kind: int
    runner: Runner | None

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for it any more."""

    @property
    def what(self) -> str:
        """The name of the message's class."""

    def message(self) -> Message[Any]:
        """Return the message. Raises ActorserveError where it cannot be read."""

    def reply(self, value: object) -> None:
        """Answer an ask."""

    def item(self, value: object) -> None:
        """Send one item of a stream."""

    def end(self) -> None:
        """End a stream."""

    def fail(self, error: ActorserveError) -> None:
        """End it with an error; that of a tell goes nowhere."""


class Call:
    """Base of the calls in the system's process."""

    __slots__ = ("deadline_s", "door", "kind", "runner", "target")

    def __init__(self, door: Door, target: str, kind: int, deadline_s: float | None) -> None:
        self.door = door
        self.target = target
        self.kind = kind
        self.deadline_s = deadline_s
        self.runner: Runner | None = None

    # --- for the mailbox and the hosts ---

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for it any more."""
        raise NotImplementedError

    @property
    def is_late(self) -> bool:
        """Whether its deadline has passed."""
        return self.deadline_s is not None and monotonic_s() >= self.deadline_s

    @property
    def what(self) -> str:
        """The name of the message's class."""
        raise NotImplementedError

    def describe(self) -> str:
        """Say what was wanted, for people."""
        return f"{self.what} for {self.target!r}"

    def message(self) -> Message[Any]:
        """Return the message. Raises ActorserveError where it cannot be read."""
        raise NotImplementedError

    def packed(self) -> Packed:
        """Return it ready to travel. Raises InvalidArgument where it cannot."""
        raise NotImplementedError

    # --- what becomes of it ---

    def taken(self) -> None:
        """Say that the mailbox has it."""
        raise NotImplementedError

    def reply(self, value: object) -> None:
        """Answer an ask."""
        raise NotImplementedError

    def reply_packed(self, packed: Packed) -> None:
        """Answer an ask with what came from another process."""
        raise NotImplementedError

    def item(self, value: object) -> None:
        """Send one item of a stream."""
        raise NotImplementedError

    def item_packed(self, packed: Packed) -> None:
        """Send an item that came from another process."""
        raise NotImplementedError

    def end(self) -> None:
        """End a stream."""
        raise NotImplementedError

    def fail(self, error: ActorserveError) -> None:
        """End it with an error."""
        raise NotImplementedError

    # --- from the caller ---

    def granted(self, count: int) -> None:
        """Let the stream go on."""
        if self.runner is not None:
            self.runner.grant(self, count)

    def dropped(self) -> None:
        """See StreamOwner."""
        self.door.later(self.given_up)

    def given_up(self) -> None:
        """Take it back, as far as it has not been begun."""
        if self.runner is not None:
            self.runner.revoke(self)


class LocalCall(Call):
    """A call by a reference in the system's process."""

    __slots__ = ("_message", "_packed", "_sent_at", "_stream", "answer")

    def __init__(
        self,
        door: Door,
        target: str,
        kind: int,
        message: Message[Any],
        deadline_s: float | None = None,
    ) -> None:
        super().__init__(door, target, kind, deadline_s)
        self._message = message
        self._packed: Packed | None = None
        self._sent_at = ""
        self.answer: Answer[Any] | None = None
        self._stream: weakref.ref[Stream[Any]] | None = None

    def expect_answer(self) -> Answer[Any]:
        """Return the Answer that this call will end in; once."""
        self.answer = Answer(self, self.deadline_s)
        return self.answer

    def expect_stream(self, item_timeout_s: float | None) -> Stream[Any]:
        """Return the Stream that this call will end in; once.

        It is not kept alive from here: a reader that drops it wants no more items.
        """
        stream: Stream[Any] = Stream(self, item_timeout_s)
        self._stream = weakref.ref(stream)
        return stream

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for it any more."""
        if self.kind == STREAM:
            stream = self._stream() if self._stream is not None else None
            return stream is None or stream.is_over()
        answer = self.answer
        if answer is None:
            return False
        # The Answer of a tell is over when the mailbox has taken it, its delivery is not.
        return answer.is_over() if self.kind == ASK else answer.has_failed()

    @property
    def what(self) -> str:
        """The name of the message's class."""
        return type(self._message).__name__

    def message(self) -> Message[Any]:
        """Return the message as the caller gave it."""
        return self._message

    def packed(self) -> Packed:
        """Return it ready to travel. Raises InvalidArgument where it cannot."""
        if self._packed is None:
            self._packed = pack_message(self._message, self.door)
        return self._packed

    def leaves(self) -> None:
        """Be packed for another process, in the caller's own stack; it may not be read there.

        Raises InvalidArgument where it cannot travel.
        """
        self.packed()
        self._sent_at = _line_of_caller()

    def taken(self) -> None:
        """Say that the mailbox has it: that is all that a tell waits for."""
        if self.kind == TELL and self.answer is not None:
            self.answer.settle(None)

    def reply(self, value: object) -> None:
        """Answer an ask."""
        if self.answer is not None:
            self.answer.settle(value)

    def reply_packed(self, packed: Packed) -> None:
        """Read what came from another process, and answer with it."""
        if not self.is_over:
            try:
                value = unpack_reply(packed, type(self._message), self.door)
            except ProtocolError as error:
                self.fail(self._misfit(error))
                return
            self.reply(value)

    def item(self, value: object) -> None:
        """Send one item of a stream."""
        stream = self._stream() if self._stream is not None else None
        if stream is not None:
            stream.push(value)

    def item_packed(self, packed: Packed) -> None:
        """Read an item that came from another process, and send it."""
        if not self.is_over:
            try:
                value = unpack_reply(packed, type(self._message), self.door)
            except ProtocolError as error:
                self.fail(self._misfit(error))
                self.given_up()
                return
            self.item(value)

    def end(self) -> None:
        """End a stream."""
        stream = self._stream() if self._stream is not None else None
        if stream is not None:
            stream.finish()

    def fail(self, error: ActorserveError) -> None:
        """End it with an error; that of a tell that was taken has no reader any more."""
        if isinstance(error, ProtocolError) and self._sent_at:
            error = ProtocolError(f"{self.describe()}, sent at {self._sent_at}: {error.message}")
        if self.kind == STREAM:
            stream = self._stream() if self._stream is not None else None
            if stream is not None:
                stream.fail(error)
        elif self.answer is None or not self.answer.fail(error):
            _log.debug("%s failed with nobody to tell: %s", self.describe(), error)

    def _misfit(self, error: ProtocolError) -> InternalError:
        return InternalError(f"{self.describe()} was answered with something else: {error}")


def _line_of_caller() -> str:
    """Return where the code stands that has called this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_OWN):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
