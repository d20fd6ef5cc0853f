# SPDX-License-Identifier: Apache-2.0
"""The batches that one incarnation of a stub has: sent, answered, or lost with it.

A batch's number counts up within the incarnation; the stub writes the number that it begins on
the health page. So when it dies, the batches beyond that number are known to be untouched: they
are queued again, and "at most once" holds for the others, which fail.
"""

from __future__ import annotations

import msgspec

from actorserve.actors.response_factory import ResponseFactory
from actorserve.errors import (
    ActorserveError,
    InternalError,
    InvalidArgument,
    ProtocolError,
)
from actorserve.runtime.exchange import Exchange
from actorserve.runtime.host_end import HostEnd
from actorserve.wire.codec import encode
from actorserve.wire.messages import Execute, Executed, WireRequest, WireResponse

NO_SLOT = -1
"""The cancel slot of a request beyond the page's slots: it cannot be told, only its end dropped."""


class Lost(msgspec.Struct):
    """What a dead stub had and somebody else is to have, in order.

    `untouched` it had not begun; `retried` it had, and their model allows another try.
    """

    untouched: list[ResponseFactory]
    retried: list[ResponseFactory]


class InFlight:
    """What is at one stub. Belongs to the supervisor's loop."""

    def __init__(self, instance: str, end: HostEnd, exchange: Exchange) -> None:
        self._instance = instance
        self._end = end
        self._exchange = exchange
        self._number = 0
        self._batches: dict[int, list[ResponseFactory]] = {}
        self._requests: dict[int, ResponseFactory] = {}
        self._slots = list(range(end.page.cancel_slots))
        self.executed = 0
        self.late_responses = 0

    def __len__(self) -> int:
        """Return the number of batches that are not answered yet."""
        return len(self._batches)

    # --- sending ---------------------------------------------------------------------------------

    def send(self, factories: list[ResponseFactory]) -> None:
        """Send requests as one batch; those that ended meanwhile are left out.

        A batch that no frame can hold goes in halves; a single request of that kind is refused.
        """
        wires: list[WireRequest] = []
        sent: list[ResponseFactory] = []
        for factory in factories:
            slot = self._slots.pop() if self._slots else NO_SLOT
            wire = factory.dispatch(slot)
            if wire is None:
                self._give_slot(slot)
                continue
            wires.append(wire)
            sent.append(factory)
        if not wires:
            return
        data = encode(Execute(self._number + 1, wires))
        if len(data) <= self._end.max_frame_bytes:
            self._send_encoded(data, wires, sent)
        elif len(sent) == 1:
            self._refuse(
                sent,
                InvalidArgument("the request's names and parameters do not fit into one message"),
            )
        else:
            self._send_halves(sent)

    def _send_encoded(
        self, data: bytes, wires: list[WireRequest], sent: list[ResponseFactory]
    ) -> None:
        tensors = [tensor for wire in wires for tensor in wire.inputs]
        try:
            self._end.send_encoded(data, tensors)
        except ActorserveError as error:
            self._refuse(sent, error)
            return
        self._number += 1
        self._batches[self._number] = sent
        for factory in sent:
            self._requests[factory.key] = factory

    def _send_halves(self, sent: list[ResponseFactory]) -> None:
        for factory in sent:
            self._give_slot(factory.cancel_slot)
            factory.take_back()
        middle = len(sent) // 2
        self.send(sent[:middle])
        self.send(sent[middle:])

    def _refuse(self, sent: list[ResponseFactory], error: ActorserveError) -> None:
        for factory in sent:
            self._give_slot(factory.cancel_slot)
            factory.fail(error)

    def tell_cancelled(self, factory: ResponseFactory) -> bool:
        """Set the cancel word of a request that is here; False where it is not."""
        if factory.key not in self._requests:
            return False
        if factory.cancel_slot != NO_SLOT:
            self._end.page.cancel(factory.cancel_slot, factory.key)
        return True

    # --- answers ---------------------------------------------------------------------------------

    def respond(self, response: WireResponse) -> None:
        """Pass one response on. Raises ProtocolError for a handle that the stub may not send."""
        factory = self._requests.get(response.id)
        if factory is None:
            self.late_responses += 1
            self._exchange.discard(self._end, response.outputs)
        elif factory.respond(response, self._end):
            self._forget(factory)

    def finish(self, executed: Executed) -> None:
        """Take the end of a batch. Raises ProtocolError for one that the stub has not."""
        factories = self._batches.get(executed.batch)
        if factories is None:
            raise ProtocolError(
                f"'{self._instance}' answered batch {executed.batch}, which it has not"
            )
        for response in executed.responses:
            self.respond(response)
        # Not before: where a response is broken, the stub's death settles the whole batch.
        del self._batches[executed.batch]
        self.executed += 1
        for factory in factories:
            if factory.key in self._requests:
                self._forget(factory)
                factory.fail(InternalError(f"'{self._instance}' gave no answer to the request"))

    def lose(self, error: ActorserveError) -> Lost:
        """Settle everything after the stub's death; returns what is to be queued again."""
        begun = self._end.page.last_begun()
        batches, self._batches = self._batches, {}
        self._requests.clear()
        lost = Lost([], [])
        for number, factories in batches.items():
            if number > begun:
                lost.untouched.extend([each for each in factories if each.take_back()])
            else:
                lost.retried.extend([each for each in factories if each.lose_stub(error)])
        return lost

    def expire_begun(self, error: ActorserveError) -> None:
        """End the requests of the batch in execution now, though the stub still has them."""
        begun = self._end.page.last_begun()
        for factory in self._batches.get(begun, ()):
            factory.expire(error)

    def _forget(self, factory: ResponseFactory) -> None:
        del self._requests[factory.key]
        self._give_slot(factory.cancel_slot)

    def _give_slot(self, slot: int) -> None:
        if slot != NO_SLOT:
            self._slots.append(slot)
