# SPDX-License-Identifier: Apache-2.0
"""The calls that a stub's model makes to other models, and the way their answers find the caller.

    exec on the main thread ─► Infer(work) ─► it reads the work lane itself while it waits
    exec on another thread ──► Infer(control) ─► the control thread ─► a queue ─► that thread
    async_exec ──────────────► Infer ─► whoever reads the lane ─► a future in its loop
    exec in a forked child ──► fork_relay.py ─► Infer(control) ─► the control thread ─► the child

A call's number is never used again, so nothing that comes late can meet another call. A call that
nobody waits for any more is dropped: finalizers only note it, the control thread does the rest.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from actorserve.actors.bodies import Bodies, Room
from actorserve.actors.caller import AwaitedCall, RelayedCall, WaitedCall
from actorserve.actors.device_calls import Call, DeviceCalls, answer_placement
from actorserve.actors.fork_relay import ForkRelay, Respond
from actorserve.actors.lineage import started_for
from actorserve.actors.replies import error_response
from actorserve.errors import ActorserveError, Code, InvalidArgument
from actorserve.runtime.stub_end import StubEnd
from actorserve.triton.calling import calling_for
from actorserve.triton.error import TritonError, TritonErrorCode, TritonModelException
from actorserve.triton.failure import plain_text
from actorserve.triton.request import InferenceRequest
from actorserve.triton.response import InferenceResponse
from actorserve.triton.response_iterator import ResponseIterator
from actorserve.triton.tensor import Tensor
from actorserve.wire.codec import encode
from actorserve.wire.device_ref import Placement
from actorserve.wire.messages import (
    INLINE_BYTES,
    CallTaken,
    CancelCall,
    Handle,
    Infer,
    MoveCall,
    WireResponse,
    WireTensor,
)

_CODES = {
    Code.DEADLINE_EXCEEDED: TritonErrorCode.UNAVAILABLE,
    Code.RESOURCE_EXHAUSTED: TritonErrorCode.UNAVAILABLE,
    Code.TOO_LARGE: TritonErrorCode.INVALID_ARG,
}
"""The server's own codes in the model API's terms; those that are not here are INTERNAL."""


class Calls:
    """The calls of one stub; see triton.calling.Caller. Any thread."""

    def __init__(self, end: StubEnd, bodies: Bodies) -> None:
        """Belongs to the main thread's stub: construct it there."""
        self.end = end
        self.after_main_wait: Callable[[], None] = lambda: None
        self.main_loop: asyncio.AbstractEventLoop | None = None
        self._bodies = bodies
        self._main = threading.get_ident()
        self._numbers = itertools.count(1)
        self._open: dict[int, Call] = {}
        self._dropped: deque[int] = deque()
        self._relay = ForkRelay(self._serve_child)
        self._by_device = DeviceCalls()

    # --- triton.calling.Caller -------------------------------------------------------------------

    def call(self, request: InferenceRequest) -> InferenceResponse:
        """Make a call and wait for its one response."""
        if self.end.is_severed:
            return self._call_from_child(request)
        waiting = WaitedCall(self, on_control=not self.is_on_main())
        self._send(waiting, request, waits=not waiting.on_control)
        try:
            response = waiting.next()
        except BaseException:
            waiting.drop()
            raise
        return _unexpected() if response is None else response

    def call_stream(self, request: InferenceRequest) -> ResponseIterator:
        """Make a call with any number of responses."""
        self._refuse_child()
        waiting = WaitedCall(self, on_control=not self.is_on_main())
        self._send(waiting, request, decoupled=True)
        return ResponseIterator._over(waiting)

    def call_async(self, request: InferenceRequest) -> asyncio.Future[Any]:
        """Make a call from a coroutine."""
        self._refuse_child()
        awaited = AwaitedCall(self, asyncio.get_running_loop())
        self._send(awaited, request)
        return awaited.future

    # --- making calls ----------------------------------------------------------------------------

    def is_on_main(self) -> bool:
        """Whether this is the main thread."""
        return threading.get_ident() == self._main

    def next_number(self) -> int:
        """Return a number that no other call of this stub has."""
        return next(self._numbers)

    def _send(
        self,
        call: Call,
        request: InferenceRequest,
        *,
        decoupled: bool = False,
        waits: bool = False,
    ) -> None:
        """Send a call; one that cannot be sent is answered here."""
        placement = wanted = None
        devices = self.end.devices
        if devices is not None:
            wanted = answer_placement(devices, request._preferred_memory)
            placement = self._by_device.placement(devices, request)
        message = _infer(
            call.number,
            request,
            [],
            decoupled=decoupled,
            on_control=call.on_control,
            waits=waits,
            placement=wanted,
        )
        self._send_with(call, message, request._inputs, placement)

    def _send_with(
        self, call: Call, message: Infer, inputs: list[Tensor], placement: Placement | None
    ) -> None:
        """Send a call with these inputs; `placement` says which of them may go by reference."""
        tensors = message.inputs
        room = Room()
        try:
            for tensor in inputs:
                tensors.append(self._bodies.wire_tensor(tensor, room, placement))
            data = encode(message)
            if len(data) > self.end.max_frame_bytes:
                raise InvalidArgument("its names and parameters do not fit into one message")
        except (ActorserveError, TritonModelException, UnicodeEncodeError) as error:
            self.end.withdraw(tensors)
            if self.end.devices is not None:
                self.end.devices.note(error)
            call.put(_refused(message.model_name, call.number, error))
            return
        if placement is not None and any(tensor.device is not None for tensor in tensors):
            self._by_device.keep(call, message, inputs)
        self._open[call.number] = call
        if self.end.devices is not None:
            self.end.devices.settle(rings=False)  # so that it comes back before the answer does
        self.end.send_encoded(data)
        if tensors:
            self.end.forwarded(tensors)

    def _send_again(self, number: int) -> bool:
        """Send a call by host memory whose receiver cannot use its device; False for no such."""
        kept = self._by_device.take_refused(number)
        if kept is None:
            return False
        call, message, inputs = kept
        again = msgspec.structs.replace(message, inputs=[], on_control=call.on_control)
        self._send_with(call, again, inputs, None)
        return True

    # --- forked children -------------------------------------------------------------------------

    def _refuse_child(self) -> None:
        if self.end.is_severed:
            raise TritonModelException(
                "In a process that the model has forked, only exec(decoupled=False) is possible."
            )

    def _call_from_child(self, request: InferenceRequest) -> InferenceResponse:
        """Make a call through the stub that this process was forked from."""
        tensors = []
        for tensor in request._inputs:
            number, shape, body = tensor._body()
            tensors.append(WireTensor(tensor._name, number, shape, body.tobytes()))
        (wire,) = self._relay.call(_infer(0, request, tensors)).responses
        return self.response(wire)

    def _serve_child(self, message: Infer, respond: Respond) -> None:
        """Make a call for a forked child."""
        relayed = RelayedCall(self, respond)
        tensors: list[WireTensor] = []
        try:
            for tensor in message.inputs:
                if isinstance(tensor.data, bytes) and len(tensor.data) > INLINE_BYTES:
                    handle = self.end.place(np.frombuffer(tensor.data, np.uint8))
                    tensor = msgspec.structs.replace(tensor, data=handle)
                tensors.append(tensor)
            call = msgspec.structs.replace(
                message, call=relayed.number, inputs=tensors, on_control=True
            )
            data = encode(call)
            if len(data) > self.end.max_frame_bytes:
                raise InvalidArgument("its tensors do not fit into one message")
        except ActorserveError as error:
            self.end.withdraw(tensors)
            relayed.put(_refused(message.model_name, relayed.number, error))
            return
        self._open[relayed.number] = relayed
        self.end.send_encoded(data)
        self.end.forwarded(tensors)

    def with_bodies(self, wire: WireResponse) -> WireResponse:
        """Return a response whose bodies are in the message, for another process."""
        outputs = [
            msgspec.structs.replace(
                tensor, data=self.end.view(tensor.data, writable=False).tobytes()
            )
            if isinstance(tensor.data, Handle)
            else tensor
            for tensor in wire.outputs
        ]
        return msgspec.structs.replace(wire, outputs=outputs)

    # --- answers ---------------------------------------------------------------------------------

    def take(self, responses: list[WireResponse]) -> None:
        """Hand responses to their callers; whichever thread reads the lane."""
        for wire in responses:
            call = self._open.get(wire.id)
            if call is None:
                self._give_back(wire)
                continue
            if wire.final:
                self._open.pop(wire.id, None)
            if self._by_device.has_calls:
                if _is_unreachable(wire) and self._send_again(wire.id):
                    continue
                self._by_device.forget(wire.id)
            call.put(wire)

    def response(self, wire: WireResponse) -> InferenceResponse:
        """Turn what came into a response; large outputs are views of shared memory."""
        error = wire.error
        if error is not None:
            return InferenceResponse(error=TritonError(error.message, _api_code(error.code)))
        outputs: list[Tensor] = []
        try:
            for tensor in wire.outputs:
                outputs.append(self._bodies.tensor(tensor))
            response = InferenceResponse(outputs)
        except ActorserveError as problem:
            # Whichever thread reads the lane is not the one to hear that.
            if self.end.devices is not None:
                self.end.devices.note(problem)
                rest = wire.outputs[len(outputs) :]
                self.end.devices.give_back([t.device for t in rest if t.device is not None])
            return InferenceResponse(error=TritonError(f"Unexpected response: {problem.message}"))
        if wire.parameters != "{}":
            response._parameters = wire.parameters
        return response

    def taken(self, number: int, count: int) -> None:
        """Say that so many more responses of a stream were looked at; nothing after its end."""
        if number in self._open:
            self.end.send(CallTaken(number, count))

    def cancel(self, number: int) -> None:
        """Ask for the end of a call; nothing where it has ended."""
        if number in self._open:
            self.end.send(CancelCall(number))

    def move(self, number: int) -> None:
        """Have the control thread read a call's answers: the main thread may be busy."""
        self.end.send(MoveCall(number))

    def moved(self) -> None:
        """Read what was sent before the move. Control thread."""
        self.end.take_in()
        self.end.wake_main()

    # --- what nobody waits for -------------------------------------------------------------------

    def drop(self, number: int) -> None:
        """Want nothing more of a call; may be called by a finalizer, in any thread."""
        self._dropped.append(number)
        self.end.wake_control()

    def reap(self) -> None:
        """Cancel what was dropped. Control thread."""
        while self._dropped:
            number = self._dropped.popleft()
            if self._open.pop(number, None) is not None:
                self._by_device.forget(number)
                self.end.send(CancelCall(number, is_dropped=True))

    def _give_back(self, wire: WireResponse) -> None:
        """Return the tensors of a response that nobody looks at."""
        self.end.give_back([t.data for t in wire.outputs if isinstance(t.data, Handle)])
        if self.end.devices is not None:
            self.end.devices.give_back([t.device for t in wire.outputs if t.device is not None])


def _is_unreachable(wire: WireResponse) -> bool:
    return wire.error is not None and wire.error.code == Code.DEVICE_UNREACHABLE


def _api_code(code: int) -> TritonErrorCode:
    try:
        return TritonErrorCode(code)
    except ValueError:
        return _CODES.get(Code(code), TritonErrorCode.INTERNAL)


def _infer(
    call: int,
    request: InferenceRequest,
    tensors: list[WireTensor],
    *,
    decoupled: bool = False,
    on_control: bool = False,
    waits: bool = False,
    placement: Placement | None = None,
) -> Infer:
    return Infer(
        call,
        request._model_name,
        request._model_version,
        request._request_id,
        tensors,
        request._requested_outputs,
        request._parameters,
        request._correlation_id,
        request._flags,
        request._timeout_us,
        decoupled,
        on_control,
        waits,
        list(calling_for.get() or getattr(request, "_parents", ()) or started_for()),
        placement,
    )


def _refused(model: str, number: int, error: Exception) -> WireResponse:
    code = error.code if isinstance(error, ActorserveError) else Code.INVALID_ARG
    text = f"Model {model} - Error when running inference: {plain_text(str(error))}"
    return error_response(number, text, int(code))


def _unexpected() -> InferenceResponse:
    return InferenceResponse(error=TritonError("Unexpected empty response."))
