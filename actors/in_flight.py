# SPDX-License-Identifier: Apache-2.0
"""What one incarnation of a stub has: batches and requests, sent, answered, or lost with it.

A batch's number counts up within the incarnation; the stub writes the number that it begins on
the health page. So when it dies, the batches beyond that number are known to be untouched: they
are queued again, and "at most once" holds for the others, which fail.

A request may outlive its batch: the model has kept its sender. What such a sender may send is its
credit, on the health page: what the client has taken, and a window more, which is smaller where
many requests share the stub's lane.
"""

from __future__ import annotations

import msgspec

from actorserve.actors.response_factory import ResponseFactory
from actorserve.clock import monotonic_s
from actorserve.errors import (
    ActorserveError,
    DeviceUnreachable,
    InternalError,
    InvalidArgument,
    ProtocolError,
)
from actorserve.runtime.exchange import Exchange
from actorserve.runtime.host_end import HostEnd
from actorserve.state.statistics import Reason, Timing
from actorserve.wire.codec import encode
from actorserve.wire.messages import Disowned, Execute, Executed, WireRequest, WireResponse

NO_SLOT = -1
"""The cancel slot of a request beyond the page's slots: it cannot be told, only its end dropped."""


WINDOW = 256
LARGE_WINDOW = 64
LEAST_WINDOW = 8
WINDOWS_TOTAL = 1024
"""Responses on their way: of one request at most and at least, and of a stub altogether.

The large window is for requests whose responses hold shared memory, and for the first ones of all.
"""

UNLIMITED = 1 << 62

MOST_GONE = 64
"""Requests without a client whose senders a stub may keep; beyond, the stub has to end them."""


class Lost(msgspec.Struct):
    """What a dead stub had and somebody else is to have, in order.

    `untouched` it had not begun; `retried` it had, and their model allows another try.
    """

    untouched: list[ResponseFactory]
    retried: list[ResponseFactory]


class InFlight:
    """What is at one stub. Belongs to the supervisor's loop."""

    def __init__(
        self,
        instance: str,
        end: HostEnd,
        exchange: Exchange,
        *,
        decoupled: bool = False,
        most_in_batch: int = 1,
    ) -> None:
        self._instance = instance
        self._decoupled = decoupled
        self._end = end
        self._exchange = exchange
        self.owner: object = None  # the instance
        self.looks_between = False  # the stub looks for work after each batch, before it sleeps
        self.tells_of_cancels = False  # its model may wait for them, and not only look
        self._number = 0
        self._batches: dict[int, list[ResponseFactory]] = {}
        self._requests: dict[int, ResponseFactory] = {}
        self._slots = list(range(end.page.cancel_slots))
        self._slots_for_batch = min(most_in_batch, len(self._slots))
        self._gone: dict[int, None] = {}  # requests whose client is gone, the oldest first
        self._most_gone = min(MOST_GONE, len(self._slots) - self._slots_for_batch)
        self.executed = 0
        self.late_responses = 0

    def __len__(self) -> int:
        """Return the number of batches that are not answered yet."""
        return len(self._batches)

    @property
    def requests(self) -> int:
        """How many requests are here, those included that have outlived their batch."""
        return len(self._requests)

    @property
    def has_slots(self) -> bool:
        """Whether the requests of another batch could be told to stop, or to wait."""
        return len(self._slots) >= self._slots_for_batch

    def room(self, most: int) -> int:
        """Return how many batches can come, where there may be `most`; asked at every request."""
        if len(self._slots) < self._slots_for_batch:
            return 0
        return most - len(self._batches)

    def request(self, key: int) -> ResponseFactory | None:
        """Return a request that is here."""
        return self._requests.get(key)

    def kept(self) -> list[ResponseFactory]:
        """Return the requests that have outlived their batch: the model has their senders."""
        in_batches = self._keys_in_batches()
        return [each for key, each in self._requests.items() if key not in in_batches]

    def _keys_in_batches(self) -> set[int]:
        return {factory.key for each in self._batches.values() for factory in each}

    # --- sending ---------------------------------------------------------------------------------

    def send(self, factories: list[ResponseFactory]) -> None:
        """Send requests as one batch; those that ended meanwhile are left out.

        A batch that no frame can hold goes in halves; a single request of that kind is refused.
        """
        wires: list[WireRequest] = []
        sent: list[ResponseFactory] = []
        now_s = monotonic_s()
        for factory in factories:
            slot = self._slots.pop() if self._slots else NO_SLOT
            wire = factory.dispatch(self, slot)
            if wire is None:
                self._give_slot(slot)
                continue
            factory.dispatched_s = now_s
            if self._exchange.devices is not None and not self._end.can_take(wire.inputs):
                self._refuse(
                    [factory], DeviceUnreachable(f"'{self._instance}' cannot use its device")
                )
                continue
            if self._decoupled and slot != NO_SLOT:
                factory.granted = factory.taken + self._window(factory)
                self._end.page.grant(slot, factory.key, factory.granted)
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
            # Work that is sent ahead needs no bell. If the stub sleeps already, the end of its
            # last batch is on its way here: see `finish`.
            wakes = not (self._batches and self.looks_between)
            self._end.send_encoded(data, tensors, wakes=wakes)
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

    # --- what factories ask for (response_factory.Place) -----------------------------------------

    def tell_cancelled(self, factory: ResponseFactory) -> None:
        """Set the cancel word of a request that is here."""
        if factory.key in self._requests and factory.cancel_slot != NO_SLOT:
            self._end.page.cancel(factory.cancel_slot, factory.key)
            if self.tells_of_cancels:
                self._end.tell_of_cancel(factory.key)

    def extend_credit(self, factory: ResponseFactory) -> None:
        """Grant what the client has taken and a window more, in steps of half a window."""
        if not self._decoupled or factory.granted - factory.taken > WINDOW >> 1:
            return  # half of even the largest window is left
        window = self._window(factory)
        total = factory.taken + window
        if total - factory.granted >= window >> 1:
            self._grant(factory, total)

    def lift_credit(self, factory: ResponseFactory) -> None:
        """Let a sender go on that nobody listens to: it must not wait for ever.

        A model may keep such senders for ever, so there is a limit to their number.
        """
        if self._decoupled:
            self._grant(factory, UNLIMITED)
        if factory.key in self._requests:
            self._gone[factory.key] = None
            if len(self._gone) > self._most_gone:
                self.disown()

    def disown(self) -> None:
        """Have the stub end what has no client and has outlived its batch: it frees the slots."""
        in_batches = self._keys_in_batches()
        old = [key for key in self._gone if key not in in_batches]
        if old:
            for key in old:
                del self._gone[key]
            self._end.send_control(Disowned(old))

    def _grant(self, factory: ResponseFactory, total: int) -> None:
        if factory.key not in self._requests or factory.cancel_slot == NO_SLOT:
            return
        factory.granted = total
        if self._end.page.grant(factory.cancel_slot, factory.key, total):
            self._end.tell_of_credit(factory.key)

    def _window(self, factory: ResponseFactory) -> int:
        most = LARGE_WINDOW if factory.is_large else WINDOW
        listening = len(self._requests) - len(self._gone)
        return max(LEAST_WINDOW, min(most, WINDOWS_TOTAL // (listening + 1)))

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
        self._count(factories, executed)
        for response in executed.responses:
            self.respond(response)
        # Not before: where a response is broken, the stub's death settles the whole batch.
        del self._batches[executed.batch]
        self.executed += 1
        if self.looks_between and self._batches and self._end.page.last_begun() < self._number:
            self._end.wake()
        still_open = executed.still_open and set(executed.still_open)
        for factory in factories:
            if factory.key in self._requests and factory.key not in still_open:
                self._forget(factory)
                factory.reason = Reason.BACKEND
                factory.fail(InternalError(f"'{self._instance}' gave no answer to the request"))

    def _count(self, factories: list[ResponseFactory], executed: Executed) -> None:
        """Say how long a batch took: before its answers, which end its requests."""
        timing: Timing = (executed.input_ns, executed.execute_ns, executed.output_ns)
        rows = 0
        for factory in factories:
            rows += factory.rows
            factory.timing = timing
            if factory.lacks_timing:
                factory.counts.add_compute(timing)
        if executed.execute_ns:
            factories[0].counts.executed(rows, timing)

    def lose(self, error: ActorserveError) -> Lost:
        """Settle everything after the stub's death; returns what is to be queued again."""
        begun = self._end.page.last_begun()
        in_batches = self._keys_in_batches()
        batches, self._batches = self._batches, {}
        requests, self._requests = self._requests, {}
        self._gone.clear()
        lost = Lost([], [])
        for key, factory in requests.items():
            if key not in in_batches and factory.lose_stub(error):
                lost.retried.append(factory)
        for number, factories in batches.items():
            if number > begun:
                lost.untouched.extend([each for each in factories if each.take_back()])
            else:
                lost.retried.extend([each for each in factories if each.lose_stub(error)])
        return lost

    def expire_batch(self, batch: int, error: ActorserveError) -> None:
        """End the requests of a batch in execution, though the stub still has them."""
        for factory in self._batches.get(batch, ()):
            factory.reason = Reason.BACKEND
            factory.expire(error)

    def _forget(self, factory: ResponseFactory) -> None:
        del self._requests[factory.key]
        self._gone.pop(factory.key, None)
        factory.place = None
        slot = factory.cancel_slot
        if slot != NO_SLOT:
            self._slots.append(slot)

    def _give_slot(self, slot: int) -> None:
        if slot != NO_SLOT:
            self._slots.append(slot)
