# SPDX-License-Identifier: Apache-2.0
"""What an actor in a process wants of others: its messages to them, its children, its stops.

All of it goes through the system's process, whose loop this belongs to; outcomes may come from
any thread and are handed over to it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from actorserve.errors import ActorserveError, ProtocolError
from actorserve.runtime.answer import Answer
from actorserve.runtime.door import own_end
from actorserve.runtime.errand import Errand
from actorserve.runtime.failure import failure_of
from actorserve.runtime.outbox import Outbox
from actorserve.runtime.payload import Packed, pack
from actorserve.runtime.peer_call import PeerCall
from actorserve.runtime.placement import decode_placement
from actorserve.runtime.ref import ActorRef
from actorserve.runtime.spec import ActorSpec
from actorserve.state.strategy import Strategy
from actorserve.wire.actors import (
    Answered,
    Done,
    Failed,
    Grant,
    ItemSent,
    Parcel,
    PassOn,
    Revoke,
    SpawnActor,
    StopActor,
)
from actorserve.wire.messages import Message as WireMessage

if TYPE_CHECKING:
    from actorserve.runtime.cell import Cell
    from actorserve.runtime.nursery import Nursery

Unpack = Callable[[Parcel], Packed]


class Guest:
    """One process that calls, through one channel."""

    def __init__(self, nursery: Nursery, cell: Cell, outbox: Outbox) -> None:
        self._nursery = nursery
        self._core = nursery.core
        self._cell = cell
        self._outbox = outbox
        self._calls: dict[int, PeerCall] = {}
        self._is_gone = False

    def take(
        self, message: PassOn | Revoke | Grant | SpawnActor | StopActor, unpack: Unpack
    ) -> None:
        """Do what the actor wants. Raises ProtocolError for what cannot be."""
        if isinstance(message, PassOn):
            self._pass_on(message, unpack(message.parcel))
        elif isinstance(message, Grant):
            call = self._calls.get(message.number)
            if call is not None:
                call.granted(message.count)
        elif isinstance(message, Revoke):
            call = self._calls.pop(message.number, None)
            if call is not None:
                call.leave()
        elif isinstance(message, SpawnActor):
            self._spawn(message, unpack(message.arguments))
        else:
            self._stop(message)

    def leave(self) -> None:
        """Hear that the process has ended: nobody there waits for anything."""
        self._is_gone = True
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.leave()

    # --- messages --------------------------------------------------------------------------------

    def _pass_on(self, message: PassOn, packed: Packed) -> None:
        if message.number in self._calls:
            raise ProtocolError(f"call {message.number} came twice")
        ref = self._nursery.door.ref(message.target, "")
        deadline_s = message.deadline_ns / 1e9 if message.deadline_ns else None
        call = PeerCall(
            self._nursery.door,
            ref.name,
            message.kind,
            packed,
            deadline_s,
            self,
            message.number,
            message.on_control,
        )
        self._calls[message.number] = call
        ref.target.mailbox.put(call, is_nowait=message.is_nowait)

    def send_back(self, call: PeerCall, packed: Packed, *, is_item: bool) -> None:
        """See Caller."""
        self._core.post(self._send_back, call, packed, ItemSent if is_item else Answered)

    def _send_back(self, call: PeerCall, packed: Packed, kind: Any) -> None:
        if not self._is_gone:
            self._outbox.send(
                packed,
                lambda parcel: kind(call.number, parcel),
                lambda error: self._fail(call.number, call.on_control, error),
                on_control=call.on_control,
            )

    def send_word(self, call: PeerCall, message: WireMessage) -> None:
        """See Caller."""
        self._core.post(self._send_word, message, call.on_control)

    def _send_word(self, message: WireMessage, on_control: bool) -> None:
        if not self._is_gone:
            self._outbox.send_plain(message, on_control=on_control)

    def _fail(self, number: int, on_control: bool, error: ActorserveError) -> None:
        self._send_word(Failed(number, failure_of(error)), on_control)

    def forget(self, call: PeerCall) -> None:
        """See Caller."""
        self._core.post(self._calls.pop, call.number, None)

    # --- orders ----------------------------------------------------------------------------------

    def _spawn(self, message: SpawnActor, packed: Packed) -> None:
        answer: Answer[ActorRef] = Answer(Errand(self._nursery.door, "a start"))
        number, on_control = message.number, message.on_control
        answer.listen(partial(self._core.post, self._spawned, answer, number, on_control))
        try:
            spec = ActorSpec(
                message.class_name,
                decode_placement(message.where),
                message.name or None,
                message.mailbox,
                Strategy(message.strategy),
                message.intensity,
            )
        except (msgspec.MsgspecError, ValueError, ActorserveError) as error:
            self._fail(number, on_control, ProtocolError(str(error)))
            return
        spec.packed = packed
        self._nursery.start(self._cell if message.is_child else None, spec, answer)

    def _spawned(self, answer: Answer[ActorRef], number: int, on_control: bool) -> None:
        try:
            packed = pack(answer.outcome(), self._nursery.door)
        except ActorserveError as error:
            self._fail(number, on_control, error)
            return
        self._outbox.send(
            packed,
            lambda parcel: Answered(number, parcel),
            lambda error: self._fail(number, on_control, error),
            on_control=on_control,
        )

    def _stop(self, message: StopActor) -> None:
        ref = self._nursery.door.ref(message.target, "")
        answer: Answer[None] = Answer(Errand(self._nursery.door, "an end"))
        number, on_control = message.number, message.on_control
        if not on_control and self._core.waits_for(self._cell.id, message.target):
            self._fail(number, on_control, own_end(ref.name))
        else:
            answer.listen(partial(self._core.post, self._send_word, Done(number), on_control))
        ref.target.stop(answer, is_drained=message.is_drained, timeout_s=message.timeout_s)
