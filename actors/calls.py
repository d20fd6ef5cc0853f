# SPDX-License-Identifier: Apache-2.0
"""The calls that a stub's model makes to other models, and the way their answers find the caller.

    exec on the main thread ─► Infer(work) ─► it reads the work lane itself while it waits
    exec on another thread ──► Infer(control) ─► the control thread ─► a queue ─► that thread
    async_exec ──────────────► Infer ─► whoever reads the lane ─► a future in its loop

A call's number is never used again, so nothing that comes late can meet another call. A call that
nobody waits for any more is dropped: finalizers only note it, the control thread does the rest.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import threading
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from actorserve.actors.bodies import Bodies, Room
from actorserve.actors.replies import error_response
from actorserve.errors import ActorserveError, Code, InvalidArgument
from actorserve.runtime.stub_end import StubEnd
from actorserve.triton.error import TritonError, TritonErrorCode, TritonModelException
from actorserve.triton.failure import plain_text
from actorserve.triton.request import InferenceRequest
from actorserve.triton.response import InferenceResponse
from actorserve.triton.response_iterator import ResponseIterator
from actorserve.wire.codec import encode
from actorserve.wire.messages import (
    CancelCall,
    Handle,
    Infer,
    MoveCall,
    WireResponse,
    WireTensor,
)

current_requests: contextvars.ContextVar[tuple[int, ...]] = contextvars.ContextVar(
    "actorserve_requests", default=()
)
"""The requests that the running code works for, as far as context variables tell."""

_CODES = {
    Code.DEADLINE_EXCEEDED: TritonErrorCode.UNAVAILABLE,
    Code.RESOURCE_EXHAUSTED: TritonErrorCode.UNAVAILABLE,
    Code.TOO_LARGE: TritonErrorCode.INVALID_ARG,
}
"""The server's own codes in the model API's terms; those that are not here are INTERNAL."""


class Call(Protocol):
    """A call that has no end yet."""

    def put(self, wire: WireResponse) -> None:
        """Take a response; any thread."""

    def leave(self) -> list[WireResponse]:
        """Want nothing more; returns the responses that nobody has taken."""


class Calls:
    """The calls of one stub; see triton.calling.Caller. Any thread."""

    def __init__(self, end: StubEnd, bodies: Bodies) -> None:
        """Belongs to the main thread's stub: construct it there."""
        self.end = end
        self.after_main_wait: Callable[[], None] = lambda: None
        self._bodies = bodies
        self._main = threading.get_ident()
        self._numbers = itertools.count(1)
        self._open: dict[int, Call] = {}
        self._dropped: deque[int] = deque()

    # --- triton.calling.Caller -------------------------------------------------------------------

    def call(self, request: InferenceRequest) -> InferenceResponse:
        """Make a call and wait for its one response."""
        waiting = WaitedCall(self, on_control=not self.is_on_main())
        self._send(waiting.number, waiting, request, waits=not waiting.on_control)
        try:
            response = waiting.next()
        except BaseException:
            waiting.drop()
            raise
        return _unexpected() if response is None else response

    def call_stream(self, request: InferenceRequest) -> ResponseIterator:
        """Make a call with any number of responses."""
        waiting = WaitedCall(self, on_control=not self.is_on_main())
        self._send(waiting.number, waiting, request, decoupled=True)
        return ResponseIterator._over(waiting)

    def call_async(self, request: InferenceRequest) -> asyncio.Future[Any]:
        """Make a call from a coroutine."""
        awaited = AwaitedCall(self, asyncio.get_running_loop())
        self._send(awaited.number, awaited, request, on_control=not self.is_on_main())
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
        number: int,
        call: WaitedCall | AwaitedCall,
        request: InferenceRequest,
        *,
        decoupled: bool = False,
        waits: bool = False,
        on_control: bool | None = None,
    ) -> None:
        """Send a call; one that cannot be sent is answered here."""
        tensors: list[WireTensor] = []
        room = Room()
        try:
            for tensor in request._inputs:
                tensors.append(self._bodies.wire_tensor(tensor, room))
            data = encode(
                Infer(
                    number,
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
                    call.on_control if on_control is None else on_control,
                    waits,
                    list(current_requests.get()),
                )
            )
            if len(data) > self.end.max_frame_bytes:
                raise InvalidArgument("its names and parameters do not fit into one message")
        except (ActorserveError, TritonModelException, UnicodeEncodeError) as error:
            self.end.withdraw(tensors)
            call.put(_refused(request, number, error))
            return
        self._open[number] = call
        self.end.send_encoded(data)
        if tensors:
            self.end.forwarded(tensors)

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
            call.put(wire)

    def response(self, wire: WireResponse) -> InferenceResponse:
        """Turn what came into a response; large outputs are views of shared memory."""
        error = wire.error
        if error is not None:
            return InferenceResponse(error=TritonError(error.message, _api_code(error.code)))
        response = InferenceResponse([self._bodies.tensor(tensor) for tensor in wire.outputs])
        if wire.parameters != "{}":
            response._parameters = wire.parameters
        return response

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
        """Cancel what was dropped, and give its tensors back. Control thread."""
        while self._dropped:
            number = self._dropped.popleft()
            call = self._open.pop(number, None)
            if call is not None:
                for wire in call.leave():
                    self._give_back(wire)
                self.end.send(CancelCall(number, is_dropped=True))

    def give_back(self, wire: WireResponse) -> None:
        """Return the tensors of a response that nobody looks at."""
        self._give_back(wire)

    def _give_back(self, wire: WireResponse) -> None:
        self.end.give_back([t.data for t in wire.outputs if isinstance(t.data, Handle)])


class WaitedCall:
    """A call whose responses a thread waits for; see triton.response_iterator.Source."""

    __slots__ = ("_calls", "_is_over", "_queue", "number", "on_control")

    def __init__(self, calls: Calls, *, on_control: bool) -> None:
        self.number = calls.next_number()
        self.on_control = on_control
        self._calls = calls
        self._queue: SimpleQueue[WireResponse] = SimpleQueue()
        self._is_over = False

    def put(self, wire: WireResponse) -> None:
        """Take a response."""
        self._queue.put(wire)

    def next(self) -> InferenceResponse | None:
        """Return the next response, waiting for it; None after the last."""
        if self._is_over:
            return None
        wire = self._take()
        if wire.final:
            self._is_over = True
        return self._calls.response(wire)

    def _take(self) -> WireResponse:
        if self.on_control or not self._queue.empty():
            return self._queue.get()
        if self._calls.is_on_main():
            return self._read()
        self.on_control = True
        self._calls.move(self.number)
        return self._queue.get()

    def _read(self) -> WireResponse:
        """Read the work lane until a response is there. Main thread only."""
        end, queue = self._calls.end, self._queue
        try:
            while True:
                end.take_in()
                try:
                    return queue.get_nowait()
                except Empty:
                    end.wait(lambda: not queue.empty())
        finally:
            self._calls.after_main_wait()

    def cancel(self) -> None:
        """Ask for the end."""
        self._calls.cancel(self.number)

    def drop(self) -> None:
        """Want nothing more."""
        if not self._is_over:
            self._calls.drop(self.number)

    def leave(self) -> list[WireResponse]:
        """Return what nobody has taken."""
        left = []
        while not self._queue.empty():
            left.append(self._queue.get())
        return left


class AwaitedCall:
    """A call whose one response a coroutine awaits."""

    __slots__ = ("_calls", "_loop", "_thread", "future", "number", "on_control")

    def __init__(self, calls: Calls, loop: asyncio.AbstractEventLoop) -> None:
        self.number = calls.next_number()
        self.on_control = not calls.is_on_main()
        self.future: asyncio.Future[InferenceResponse] = loop.create_future()
        self.future.add_done_callback(self._on_done)
        self._calls = calls
        self._loop = loop
        self._thread = threading.get_ident()

    def put(self, wire: WireResponse) -> None:
        """Take the response, in the future's own loop."""
        if threading.get_ident() == self._thread:
            self._resolve(wire)
            return
        try:
            self._loop.call_soon_threadsafe(self._resolve, wire)
        except RuntimeError:  # the loop is closed: nobody waits
            self._calls.give_back(wire)

    def _resolve(self, wire: WireResponse) -> None:
        if self.future.done():
            self._calls.give_back(wire)
            return
        try:
            self.future.set_result(self._calls.response(wire))
        except Exception as error:
            self.future.set_exception(error)

    def _on_done(self, future: asyncio.Future[InferenceResponse]) -> None:
        if future.cancelled():
            self._calls.drop(self.number)

    def leave(self) -> list[WireResponse]:
        """Nothing is kept here."""
        return []


def _api_code(code: int) -> TritonErrorCode:
    try:
        return TritonErrorCode(code)
    except ValueError:
        return _CODES.get(Code(code), TritonErrorCode.INTERNAL)


def _refused(request: InferenceRequest, number: int, error: Exception) -> WireResponse:
    code = error.code if isinstance(error, ActorserveError) else Code.INVALID_ARG
    text = f"Model {request._model_name} - Error when running inference: {plain_text(str(error))}"
    return error_response(number, text, int(code))


def _unexpected() -> InferenceResponse:
    return InferenceResponse(error=TritonError("Unexpected empty response."))
