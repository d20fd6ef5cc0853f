# SPDX-License-Identifier: Apache-2.0
"""A call by an actor in another process: its outcome goes back there as messages."""

from __future__ import annotations

from typing import Any, Protocol

from actorserve.errors import ActorserveError
from actorserve.runtime.call import ASK, STREAM, TELL, Call
from actorserve.runtime.failure import failure_of
from actorserve.runtime.message import Message
from actorserve.runtime.payload import Packed, pack, unpack_message
from actorserve.runtime.ref import Door
from actorserve.wire.actors import Done, Failed
from actorserve.wire.messages import Message as WireMessage


class Caller(Protocol):
    """The process that called; its methods may be used from any thread."""

    def send_back(self, call: PeerCall, packed: Packed, *, is_item: bool) -> None:
        """Send an answer or an item."""

    def send_word(self, call: PeerCall, message: WireMessage) -> None:
        """Send a message without a value."""

    def forget(self, call: PeerCall) -> None:
        """Hear that nothing more comes of the call."""


class PeerCall(Call):
    """A call that came over a channel, where it has a `number`."""

    __slots__ = ("_is_gone", "_message", "_packed", "_token", "caller", "number", "on_control")

    def __init__(
        self,
        door: Door,
        target: str,
        kind: int,
        packed: Packed,
        deadline_s: float | None,
        caller: Caller,
        number: int,
        on_control: bool,
    ) -> None:
        super().__init__(door, target, kind, deadline_s)
        self.caller = caller
        self.number = number
        self.on_control = on_control
        self._packed = packed
        self._message: Message[Any] | None = None
        self._token = [True]  # whoever pops it ends the call
        self._is_gone = False  # its caller has died, or waits no more

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for it any more."""
        return self._is_gone or (self.kind != TELL and not self._token)

    @property
    def what(self) -> str:
        """The name of the message's class."""
        return self._packed.kind.rpartition(":")[2]

    def message(self) -> Message[Any]:
        """Read the message; its module is imported here if need be."""
        if self._message is None:
            self._message = unpack_message(self._packed, self.door)
        return self._message

    def packed(self) -> Packed:
        """Return it as it came."""
        return self._packed

    def taken(self) -> None:
        """Tell the sender of a tell that the mailbox has it."""
        if self.kind == TELL and self._end():
            self.caller.send_word(self, Done(self.number))

    def reply(self, value: object) -> None:
        """Answer an ask."""
        if not self.is_over:
            try:
                packed = pack(value, self.door)
            except ActorserveError as error:
                self.fail(error)
                return
            self.reply_packed(packed)

    def reply_packed(self, packed: Packed) -> None:
        """Pass an answer on."""
        if self.kind == ASK and self._end():
            self.caller.send_back(self, packed, is_item=False)

    def item(self, value: object) -> None:
        """Send one item of a stream."""
        if not self.is_over:
            try:
                packed = pack(value, self.door)
            except ActorserveError as error:
                self.fail(error)
                self.given_up()
                return
            self.item_packed(packed)

    def item_packed(self, packed: Packed) -> None:
        """Pass an item on."""
        if not self.is_over:
            self.caller.send_back(self, packed, is_item=True)

    def end(self) -> None:
        """End a stream."""
        if self.kind == STREAM and self._end():
            self.caller.send_word(self, Done(self.number))

    def fail(self, error: ActorserveError) -> None:
        """End it with an error."""
        if self._end():
            self.caller.send_word(self, Failed(self.number, failure_of(error)))

    def leave(self) -> None:
        """Hear that the caller has died, or waits no more; a tell that was taken stays."""
        try:
            self._token.pop()
        except IndexError:
            return
        self._is_gone = True
        self.given_up()

    def _end(self) -> bool:
        try:
            self._token.pop()
        except IndexError:
            return False
        self.caller.forget(self)
        return True
