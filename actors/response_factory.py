# SPDX-License-Identifier: Apache-2.0
"""One request in flight: holds its inputs, turns answers into responses, ends exactly once.

    submit ─► ResponseFactory ─► Scheduler ─► Instance ─► stub
                    ▲                            │
                    └──── respond / fail ◄───────┘   ─► on_response (the front end's callback)

A plain object over the pure machine of state/request.py, in the supervisor's loop: no task, no
queue, no future. What the machine says is done here; nothing here decides.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from actorserve.actors.place import Child, Desk, Place
from actorserve.actors.request_parameters import parameters_of
from actorserve.clock import monotonic_s
from actorserve.errors import (
    ActorserveError,
    Cancelled,
    ProtocolError,
    error_for,
)
from actorserve.runtime.exchange import Exchange, HeldRef, Peer
from actorserve.state.request import (
    CANCEL,
    CANCELLING,
    DEADLINE,
    DELIVER,
    DISCONNECT,
    DISPATCH,
    DROP,
    END,
    ENDED,
    ERROR,
    FAIL,
    FINAL,
    FREE,
    GONE,
    QUEUED,
    REQUEUE,
    RESPONSE,
    STUB_DIED_RETRY,
    TELL,
    TRANSITIONS,
    UNQUEUE,
    Life,
)
from actorserve.state.statistics import Reason, Timing
from actorserve.triton.inference import InferRequest, InferResponse, InferTensor
from actorserve.wire.device_ref import DeviceRef
from actorserve.wire.messages import Handle, WireRequest, WireResponse, WireTensor
from actorserve.wire.tensors import BY_NUMBER

_log = logging.getLogger("actorserve")
_WIRE_NAMES = tuple(datatype.wire_name for datatype in BY_NUMBER)

OnResponse = Callable[[InferResponse], None]


class ResponseFactory(Life):
    """One request from its acceptance to its end. `key` is its id here, never used twice.

    `rows`, `signature`, `arrival_s` (monotonic), `priority` and `timeout_us` are what the queue
    goes by; see state/backlog.py. `place` is where it is at a stub, None while it is at none.
    `taken` and `granted` count the responses that the client has taken and that may be sent in
    all; `is_large` says that its last response was shared memory, or there was none yet.
    `children` are the calls that were made for it, which are cancelled with it. For those who
    count there are `dispatched_s`, the `timing` of its batch once that is known, and the `reason`
    where it `has_failed`.
    """

    __slots__ = (
        "_desk",
        "_exchange",
        "_inputs",
        "_model_version",
        "_on_response",
        "_outputs",
        "_parameters",
        "_request",
        "arrival_s",
        "cancel_slot",
        "children",
        "counts",
        "dispatched_s",
        "dropped",
        "granted",
        "has_failed",
        "is_call",
        "is_large",
        "key",
        "lacks_timing",
        "place",
        "priority",
        "reason",
        "responded_s",
        "responses",
        "rows",
        "signature",
        "taken",
        "timeout_us",
        "timing",
    )

    def __init__(
        self,
        number: int,
        request: InferRequest,
        model_version: str,
        inputs: list[WireTensor],
        outputs: list[str],
        parameters: str,
        rows: int,
        signature: object,
        arrival_s: float,
        exchange: Exchange,
        desk: Desk,
        on_response: OnResponse,
    ) -> None:
        self.state = QUEUED  # as Life has it, without another call
        self.kills = 0
        self.key = number
        self.rows = rows
        self.signature = signature
        self.priority = request.priority
        self.timeout_us = request.timeout_us
        self.is_call = request.is_call
        self.arrival_s = arrival_s
        self.cancel_slot = 0
        self.children: set[Child] | None = None
        self.place: Place | None = None
        self.taken = self.granted = 0
        self.is_large = True
        self.dropped = 0
        self.has_failed = self.lacks_timing = False
        self.counts = desk.counts
        self.reason: int = Reason.OTHER
        self.dispatched_s = arrival_s
        self.timing: Timing | None = None
        self.responses = 0
        self.responded_s = 0.0
        self._request = request
        self._model_version = model_version
        self._inputs = inputs
        self._outputs = outputs
        self._parameters = parameters
        self._exchange = exchange
        self._desk = desk
        self._on_response = on_response

    # --- on the way to a stub --------------------------------------------------------------------

    def dispatch(self, place: Place, cancel_slot: int) -> WireRequest | None:
        """Return what goes to the stub; None where the request has ended meanwhile."""
        if self.step(DISPATCH) & DROP:
            return None
        self.place = place
        self.cancel_slot = cancel_slot
        request = self._request
        return WireRequest(
            self.key,
            request.id,
            self._inputs,
            self._outputs,
            self._parameters,
            request.correlation_id,
            (1 if request.sequence_start else 0) | (2 if request.sequence_end else 0),
            request.timeout_us,
            cancel_slot,
            request.placement,
        )

    def _drop_inputs(self) -> None:
        """Give up the inputs. Not before the end: a stub may die before it has begun them."""
        for tensor in self._inputs:
            if type(tensor.data) is not bytes or tensor.device is not None:
                self._exchange.drop_tensor(tensor)
        self._inputs = []

    def abandon(self) -> None:
        """Give everything up before the request was accepted: nobody is told anything."""
        self.state = ENDED
        self._drop_inputs()

    # --- answers ---------------------------------------------------------------------------------

    def respond(self, wire: WireResponse, peer: Peer) -> bool:
        """Take a response of the stub; True when the stub is done with the request.

        Raises ProtocolError for a response that cannot be, such as one with a handle that the stub
        may not send. The request then still waits: the end of that stub is its answer.
        """
        event = FINAL if wire.final else RESPONSE
        if TRANSITIONS[self.state][event] & DELIVER:
            response = self._response(wire, peer)
            todo = self.step(event)
            if self.counts.is_streamed:
                self._deliver_counted(response)
            else:
                self._deliver(response)
        else:
            todo = self.step(event)
            self.dropped += 1
            self._exchange.discard(peer, wire.outputs)
        if todo & END:
            self._end()
        return bool(todo & FREE)

    def consumed(self, count: int = 1) -> None:
        """Hear that the client has taken responses; see triton.inference.InFlight."""
        self.taken += count
        if self.place is not None:
            self.place.extend_credit(self)

    def _response(self, wire: WireResponse, peer: Peer) -> InferResponse:
        request = self._request
        error = wire.error
        if error is not None:
            self._exchange.discard(peer, wire.outputs)
            self.reason = self.counts.reason_of(error.code)
            return self._failure(error_for(error.code, error.message), wire.final)
        outputs = []
        self.is_large = False
        for tensor in wire.outputs:
            body = tensor.data
            if isinstance(body, Handle):
                self.is_large = True
                data: memoryview | HeldRef = self._exchange.receive(peer, body)
            elif tensor.device is None:
                data = memoryview(body)
            else:
                data = self._received_ref(tensor.device, peer)
            if not 0 < tensor.datatype < len(_WIRE_NAMES):
                raise ProtocolError(f"an output has the data type number {tensor.datatype}")
            name = _WIRE_NAMES[tensor.datatype]
            outputs.append(InferTensor(tensor.name, name, tensor.shape, data))
        parameters = {} if wire.parameters == "{}" else parameters_of(wire.parameters)
        return InferResponse(
            request.model_name,
            self._model_version,
            request.id,
            outputs,
            parameters,
            None,
            wire.final,
            wire.is_empty,
            (wire, peer.arena),
        )

    def _received_ref(self, ref: DeviceRef, peer: Peer) -> HeldRef:
        """Take an output on a device, which only a caller that said so can have."""
        held = self._exchange.receive_ref(peer, ref)
        if self._request.placement is None:
            raise ProtocolError("a stub sent device memory to a client")
        self.is_large = True
        return held

    def _failure(self, error: ActorserveError, final: bool = True) -> InferResponse:
        self.has_failed = True
        request = self._request
        return InferResponse(
            request.model_name, self._model_version, request.id, [], {}, error, final
        )

    def _deliver(self, response: InferResponse) -> None:
        """Hand a response on; a fault of whoever takes it changes nothing here."""
        try:
            self._on_response(response)
        except Exception:
            _log.exception("a response could not be handed on")

    def _deliver_counted(self, response: InferResponse) -> None:
        """Hand a response of a stream on, and count it by its place there."""
        begun_s = monotonic_s()
        self._deliver(response)
        now_s = monotonic_s()
        since_s = self.responded_s or self.dispatched_s
        index, counts = self.responses, self.counts
        self.responses = index + 1
        self.responded_s = now_s
        if response.error is not None or response.is_empty:
            counts.responded_without_outputs(index, now_s - since_s, response.error)
            return
        counts.responded(index, now_s - since_s, now_s - begun_s)
        if index == 0 and counts.first_response is not None:
            counts.first_response.observe((begun_s - self.arrival_s) * 1e3)

    # --- ends that no stub gives -----------------------------------------------------------------

    def fail(self, error: ActorserveError) -> None:
        """End with an error; no stub works on the request (any more)."""
        self._do(self.step(ERROR), error)

    def expire(self, error: ActorserveError) -> None:
        """End with an error now, whatever a stub does."""
        self._do(self.step(DEADLINE), error)

    def lose_stub(self, error: ActorserveError) -> bool:
        """Take the death of the stub that had it; True when the request is to be queued again."""
        self.place = None
        todo = self.stub_died(self._desk.retries)
        if todo & REQUEUE:
            return True
        if todo & FAIL:
            text = self.death_message(self._desk.retries, error.message)
            error = error if text == error.message else type(error)(text)
        self.reason = Reason.BACKEND
        self._do(todo, error)
        return False

    def take_back(self) -> bool:
        """Take it back from a stub that never began it; True when it is to be queued again."""
        self.place = None
        todo = self.step(STUB_DIED_RETRY)
        if todo & REQUEUE:
            return True
        self._do(todo, Cancelled("the request was cancelled"))
        return False

    def cancel(self) -> None:
        """Cancel: a queued request ends now, a running one is told and answers in its own time."""
        self._do(self.step(CANCEL), Cancelled("the request was cancelled"))

    def disconnect(self) -> None:
        """Cancel without an answer: nobody is left to hear one."""
        self._do(self.step(DISCONNECT), Cancelled("the client is gone"))

    @property
    def is_cancelled(self) -> bool:
        """Whether somebody asked for the end of a request that a stub works on."""
        return self.state >= CANCELLING

    @property
    def is_gone(self) -> bool:
        """Whether only the stub's last word on it is awaited: its client has its end."""
        return self.state == GONE

    def _do(self, todo: int, error: ActorserveError) -> None:
        if todo & UNQUEUE:
            self._desk.remove(self)
        if todo & TELL:
            if self.place is not None:
                self.place.tell_cancelled(self)
            for child in list(self.children or ()):
                child.parent_cancelled()
        if self.state == GONE and self.place is not None:
            self.place.lift_credit(self)
        if todo & FAIL:
            self._deliver(self._failure(error))
        if todo & END:
            self.has_failed = True  # also where nobody is left to hear so
            if isinstance(error, Cancelled):
                self.reason = Reason.CANCELED
            self._end()

    def _end(self) -> None:
        self._drop_inputs()
        self._desk.ended(self)
