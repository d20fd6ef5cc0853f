# SPDX-License-Identifier: Apache-2.0
"""A message that came to an actor in its own process; its outcome goes up the channel."""

from __future__ import annotations

from typing import Any

from actorserve.clock import monotonic_ns
from actorserve.errors import ActorserveError, TooLarge
from actorserve.runtime.call import ASK, STREAM, TELL, Runner
from actorserve.runtime.child_end import ChildEnd
from actorserve.runtime.failure import failure_of
from actorserve.runtime.message import Message
from actorserve.runtime.payload import pack, packed_of, unpack_message
from actorserve.runtime.ref import Door
from actorserve.wire.actors import Answered, Deliver, Done, Failed, ItemSent
from actorserve.wire.codec import encode


class ChildCall:
    """See call.Work."""

    __slots__ = ("_deliver", "_door", "_end", "_is_over", "kind", "runner")

    def __init__(self, end: ChildEnd, door: Door, deliver: Deliver) -> None:
        self.kind = deliver.kind
        self.runner: Runner | None = None
        self._end = end
        self._door = door
        self._deliver = deliver
        self._is_over = False

    @property
    def number(self) -> int:
        """Its number on the channel."""
        return self._deliver.number

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for it any more."""
        return self._is_over

    @property
    def is_late(self) -> bool:
        """Whether its deadline has passed."""
        deadline_ns = self._deliver.deadline_ns
        return bool(deadline_ns) and monotonic_ns() >= deadline_ns

    @property
    def has_handles(self) -> bool:
        """Whether something of it lies in shared memory."""
        return bool(self._deliver.parcel.handles())

    @property
    def what(self) -> str:
        """The name of the message's class."""
        return self._deliver.parcel.kind.rpartition(":")[2]

    def message(self) -> Message[Any]:
        """Return the message; its arrays are views. Raises ProtocolError, BootError."""
        return unpack_message(packed_of(self._deliver.parcel, self._end.look), self._door)

    def skip(self) -> None:
        """Give back what lies in shared memory, without a look at the message."""
        for handle in self._deliver.parcel.handles():
            self._end.look(handle)

    def revoke(self) -> None:
        """Hear that nobody waits for it any more."""
        self._is_over = True

    # --- outcomes --------------------------------------------------------------------------------

    def reply(self, value: object) -> None:
        """Answer an ask."""
        if self.kind == ASK and self._send(Answered, value):
            self._is_over = True

    def item(self, value: object) -> None:
        """Send one item of a stream."""
        if not self._is_over:
            self._send(ItemSent, value)

    def end(self) -> None:
        """End a stream."""
        if self.kind == STREAM and not self._is_over:
            self._is_over = True
            self._end.send(Done(self.number))

    def fail(self, error: ActorserveError) -> None:
        """End it with an error."""
        if self.kind != TELL and not self._is_over:
            self._is_over = True
            self._end.send(Failed(self.number, failure_of(error)))

    def _send(self, kind: Any, value: object) -> bool:
        """Send a value; where that cannot be, fail instead and return False."""
        if self._is_over:
            return False
        try:
            parcel = self._end.parcel(pack(value, self._door))
            data = encode(kind(self.number, parcel))
            if len(data) > self._end.max_frame_bytes:
                raise TooLarge(f"the answer to {self.what} takes {len(data)} bytes beside arrays")
        except ActorserveError as error:
            self.fail(error)
            return False
        self._end.send_encoded(data)
        return True
