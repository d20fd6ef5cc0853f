# SPDX-License-Identifier: Apache-2.0
"""The calls that one stub's model has made to other models, seen from the supervisor.

    stub ─ Infer ─► StubCall ─► the other model's scheduler ─► … ─► its responses
      ▲                                                                │
      └── CallResponded, one frame for all of a loop's turn ◄──────────┘

Tensors go by handle both ways: the supervisor counts who holds them and copies nothing. A call is
a request like any other; it knows for which requests it was made, and is cancelled when all of
them are. A wait holds nothing here but an entry in a table.

A stream may be MOST_AHEAD responses ahead of a caller that does not look at them; then its sender
has to wait, as for any slow client.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from actorserve.actors.in_flight import InFlight
from actorserve.actors.node import Node
from actorserve.actors.response_factory import OnResponse, ResponseFactory
from actorserve.errors import (
    ActorserveError,
    DecoupledModel,
    DeviceUnreachable,
    InvalidArgument,
    ProtocolError,
)
from actorserve.runtime.exchange import ArenaSlab, HeldRef
from actorserve.runtime.host_end import HostEnd
from actorserve.state.request import DISPATCHED, QUEUED
from actorserve.triton.inference import InferRequest, InferResponse, InferTensor, ModelInfo
from actorserve.wire.codec import encode
from actorserve.wire.messages import (
    CallMoved,
    CallResponded,
    CallTaken,
    CancelCall,
    Handle,
    Infer,
    MoveCall,
    WireError,
    WireResponse,
    WireTensor,
)
from actorserve.wire.tensors import BY_NUMBER, DataType

_WIRE_NAMES = tuple(datatype.wire_name for datatype in BY_NUMBER)
_decode_parameters = msgspec.json.Decoder(dict[str, bool | int | float | str]).decode


MOST_AHEAD = 1024
"""Responses of one stream that were sent to the caller and that it has not looked at."""


class Callee(Protocol):
    """A version of a model, as a call needs it."""

    info: ModelInfo

    @property
    def devices(self) -> frozenset[tuple[str, str]]:
        """The devices on which its instances can take tensors: driver and UUID."""

    def submit(self, request: InferRequest, on_response: OnResponse) -> ResponseFactory:
        """Check and enqueue. Raises ActorserveError; slabs are then still the caller's."""


Route = Callable[[str, str], Callee]
"""From a model's name and version to what serves it. Raises NotFound or Unavailable."""


class StubCall:
    """One call from its Infer to its last response."""

    __slots__ = (
        "ahead",
        "desk",
        "factory",
        "is_dropped",
        "number",
        "on_control",
        "parents",
        "target",
        "waits",
        "withheld",
    )

    def __init__(self, desk: CallDesk, message: Infer, parents: list[ResponseFactory]) -> None:
        self.desk = desk
        self.number = message.call
        self.on_control = message.on_control
        self.waits = message.waits
        self.parents = parents
        self.target: tuple[str, str] = ("", "")  # the model and version that it reached
        self.factory: ResponseFactory | None = None
        self.is_dropped = False
        self.ahead = 0  # responses that the caller has not looked at, as far as it has said
        self.withheld = 0  # of them, those for which the callee has had no credit

    def on_response(self, response: InferResponse) -> None:
        """Send a response of the callee on to the caller."""
        if response.final:
            self.desk.ended(self)
        if not self.is_dropped:
            self.desk.post(self, response)

    def sent(self) -> None:
        """Hear that a response which is not the last is on its way to the caller."""
        self.ahead += 1
        if self.ahead > MOST_AHEAD:
            self.withheld += 1
            self.desk.held_up(self)
        elif self.factory is not None:
            self.factory.consumed()

    def taken(self, count: int) -> None:
        """Hear that the caller has looked at some, or may be unable to before others go on."""
        self.ahead -= count
        released = min(count, self.withheld)
        if released and self.factory is not None:
            self.withheld -= released
            self.factory.consumed(released)

    @property
    def has_begun(self) -> bool:
        """Whether a response has come, so that its model surely works on it."""
        return self.factory is None or self.factory.state not in (QUEUED, DISPATCHED)

    def parent_cancelled(self) -> None:
        """Cancel, unless one of the requests that it was made for still wants its answer."""
        if self.factory is not None and all(each.is_cancelled for each in self.parents):
            self.factory.cancel()


class CallDesk:
    """See the module's head. Belongs to the supervisor's loop, and to one incarnation."""

    def __init__(self, node: Node, caller: str, end: HostEnd, in_flight: InFlight) -> None:
        self.caller = caller
        self.in_flight = in_flight
        self.has_called = False
        self.late_responses = 0
        self._node = node
        self._end = end
        self._calls: dict[int, StubCall] = {}
        self._posted: list[tuple[StubCall, InferResponse]] = []
        self._is_closed = False

    def __len__(self) -> int:
        """Return how many calls have no end yet."""
        return len(self._calls)

    def calls(self) -> list[StubCall]:
        """Return the calls that have no end yet."""
        return list(self._calls.values())

    # --- what the stub asks for ------------------------------------------------------------------

    def infer(self, message: Infer) -> None:
        """Make a call. What is wrong with it is the answer; ProtocolError for a broken wire."""
        self.has_called = True
        if message.call in self._calls:
            raise ProtocolError(f"'{self.caller}' used the number of call {message.call} twice")
        in_flight = self.in_flight
        parents = [each for key in message.parents if (each := in_flight.request(key)) is not None]
        call = StubCall(self, message, parents)
        inputs = [self._input(tensor) for tensor in message.inputs]
        try:
            version = self._route(message)
            call.target = (version.info.name, version.info.version)
            self._check_devices(version, message.inputs)
            self._calls[message.call] = call
            factory = version.submit(_request(message, inputs), call.on_response)
        except ActorserveError as error:
            self._calls.pop(message.call, None)
            for tensor in inputs:
                if isinstance(tensor.data, (ArenaSlab, HeldRef)):
                    tensor.data.release()
            self.post(call, _refusal(message, error))
            return
        if message.call not in self._calls:
            return  # it has ended within submit
        call.factory = factory
        for parent in parents:
            if parent.children is None:
                parent.children = set()
            parent.children.add(call)
        if parents:
            call.parent_cancelled()
        self._node.watch_call(call)

    def _route(self, message: Infer) -> Callee:
        version = "" if message.model_version < 0 else str(message.model_version)
        callee: Callee = self._node.route(message.model_name, version)
        return callee

    def _check_devices(self, version: Callee, inputs: list[WireTensor]) -> None:
        """Raise DeviceUnreachable where no instance of the other model can use an input."""
        for tensor in inputs:
            devices = self._node.exchange.devices
            if tensor.device is None or devices is None:
                continue
            if devices.device_of(tensor.device) not in version.devices:
                raise DeviceUnreachable(f"input '{tensor.name}' lies on a device it has not")

    def _input(self, tensor: WireTensor) -> InferTensor:
        if not 0 < tensor.datatype < len(_WIRE_NAMES):
            raise ProtocolError(f"an input has the data type number {tensor.datatype}")
        body = tensor.data
        exchange = self._node.exchange
        data: ArenaSlab | HeldRef | bytes
        if isinstance(body, Handle):
            data = exchange.borrow(self._end, body)
        elif tensor.device is None:
            data = body
        elif tensor.datatype == DataType.BYTES:
            raise ProtocolError("an input of type BYTES lies on a device")
        else:
            data = exchange.receive_ref(self._end, tensor.device)
        return InferTensor(tensor.name, _WIRE_NAMES[tensor.datatype], tensor.shape, data)

    def cancel(self, message: CancelCall) -> None:
        """Cancel a call, or drop it; nothing where it has ended."""
        call = self._calls.get(message.call)
        if call is None or call.factory is None:
            return
        if message.is_dropped:
            self._drop(call)
        else:
            call.factory.cancel()

    def _drop(self, call: StubCall) -> None:
        call.is_dropped = True
        factory = call.factory
        self.ended(call)
        if factory is not None:
            factory.disconnect()

    def taken(self, message: CallTaken) -> None:
        """Hear that the caller has looked at responses; nothing where the call has ended."""
        call = self._calls.get(message.call)
        if call is not None:
            call.taken(message.count)

    def held_up(self, call: StubCall) -> None:
        """Hear that a sender waits for this caller."""
        self._node.watch_call(call)

    def move(self, message: MoveCall) -> None:
        """Send what comes for a call on the control lane from now on."""
        self._flush()
        call = self._calls.get(message.call)
        if call is not None:
            call.on_control = True
        self._end.send_control(CallMoved(message.call))

    def ended(self, call: StubCall) -> None:
        """Forget a call that has its last response, or needs none."""
        self._calls.pop(call.number, None)
        call.factory = None  # each has the other: nothing waits for a GC
        for parent in call.parents:
            if parent.children is not None:
                parent.children.discard(call)
        call.parents = []

    def close(self) -> None:
        """Drop every call: the stub is dead."""
        self._is_closed = True
        for call in self.calls():
            self._drop(call)
        self._posted.clear()

    # --- responses -------------------------------------------------------------------------------

    def post(self, call: StubCall, response: InferResponse) -> None:
        """Send a response with all others of this turn of the loop."""
        if self._is_closed:
            return
        if not self._posted:
            self._node.loop.call_soon(self._flush)
        self._posted.append((call, response))

    def _flush(self) -> None:
        posted, self._posted = self._posted, []
        if not posted:
            return
        for on_control in (False, True):
            lane = [item for item in posted if item[0].on_control is on_control]
            if lane and not self._is_closed:
                self._send(lane, on_control=on_control)
        for call, response in posted:
            if not response.final:
                call.sent()
        devices = self._node.exchange.devices
        if devices is not None:
            posted.clear()  # with it go our holds
            devices.settle()

    def _send(self, posted: list[tuple[StubCall, InferResponse]], *, on_control: bool) -> None:
        """Send responses in one frame, or in several where they do not fit."""
        wires = [self._wire(call, response) for call, response in posted]
        data = encode(CallResponded(wires))
        if len(data) > self._end.max_frame_bytes:
            if len(posted) > 1:
                middle = len(posted) // 2
                self._send(posted[:middle], on_control=on_control)
                self._send(posted[middle:], on_control=on_control)
                return
            error = InvalidArgument("the response's names and parameters do not fit into a message")
            wires = [WireResponse(posted[0][0].number, [], _wire_error(error))]
            data = encode(CallResponded(wires))
        tensors = [tensor for wire in wires for tensor in wire.outputs]
        self._end.send_tensors(data, tensors, on_control=on_control)

    def _wire(self, call: StubCall, response: InferResponse) -> WireResponse:
        error = response.error
        if error is not None or response.source is None:
            wire_error = _wire_error(error) if error is not None else None
            return WireResponse(call.number, [], wire_error, "{}", response.final)
        source, sender = response.source
        outputs = [self._output(tensor, sender) for tensor in source.outputs]
        return WireResponse(
            call.number, outputs, None, source.parameters, source.final, source.is_empty
        )

    def _output(self, tensor: WireTensor, sender: int) -> WireTensor:
        """Say of a body whether others use it too; the response's own view of it is alive."""
        handle = tensor.data
        if not isinstance(handle, Handle):
            return tensor
        shared = self._node.exchange.is_shared(handle, sender)
        if shared is handle.shared:
            return tensor
        return msgspec.structs.replace(tensor, data=msgspec.structs.replace(handle, shared=shared))


def _request(message: Infer, inputs: list[InferTensor]) -> InferRequest:
    return InferRequest(
        message.model_name,
        inputs,
        "" if message.model_version < 0 else str(message.model_version),
        message.request_id,
        message.requested_outputs,
        {} if message.parameters == "{}" else _decode_parameters(message.parameters),
        message.correlation_id,
        bool(message.flags & 1),
        bool(message.flags & 2),
        timeout_us=message.timeout_us,
        takes_stream=message.decoupled,
        is_call=True,
        placement=message.placement,
    )


def _refusal(message: Infer, error: ActorserveError) -> InferResponse:
    """Return the answer to a call that was not accepted, in the documented words."""
    name = message.model_name
    text = f"Model {name} - Error when running inference: {error.message}"
    if isinstance(error, DecoupledModel):
        text = (
            f"Model {name} is using the decoupled. The current BLS request call doesn't support "
            "models using the decoupled transaction policy. Please use 'decoupled=True' argument "
            "to the 'exec' or 'async_exec' calls for decoupled models.'"
        )
    refused = type(error)(text)
    return InferResponse(message.model_name, "", message.request_id, [], error=refused)


def _wire_error(error: ActorserveError) -> WireError:
    return WireError(int(error.code), error.message)
