# SPDX-License-Identifier: Apache-2.0
"""What all replies of a stub share: the road of responses, and those that have no end yet."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec

from actorserve.actors.bodies import Bodies, Room
from actorserve.errors import ActorserveError, Code
from actorserve.runtime.stub_end import StubEnd
from actorserve.triton.error import TritonModelException
from actorserve.triton.failure import format_exception, plain_text
from actorserve.triton.response import InferenceResponse
from actorserve.wire.codec import encode
from actorserve.wire.messages import (
    Handle,
    Responded,
    WireError,
    WireRequest,
    WireResponse,
    WireTensor,
)

UNLIMITED = 1 << 62
"""The credit of a request that the health page has no room for."""

thread_errors = threading.local()
"""`text`: what ended this thread's user code, for the requests that it leaves behind."""


class Waiting(Protocol):
    """A sender that waits for credit (sending.py)."""

    wire: WireRequest

    def granted(self) -> None:
        """Hear that there is more."""

    def end(self, wire: WireResponse) -> None:
        """Send this, and nothing more."""


class Kept(Protocol):
    """A request that may outlive its batch (reply.py)."""

    def disown(self, wire: WireResponse) -> None:
        """Hear that nobody is left to hear of it: send this, and nothing more."""


class Replies:
    """See the module's head."""

    def __init__(
        self, end: StubEnd, bodies: Bodies, *, instance: str, model_path: str, decoupled: bool
    ) -> None:
        self.end = end
        self.instance = instance
        self.decoupled = decoupled
        self.before_send: Callable[[], None] = lambda: None
        """Called before answers leave: what the model measured until then is to arrive before."""
        # Both are taken again by a finalizer of the model's that sends while this thread has them.
        self.lock = threading.RLock()  # for a moment: whether a request has a sender
        self._page_lock = threading.RLock()
        self._bodies = bodies
        self._model_path = model_path
        self._abandoned: deque[tuple[int, Waiting | None, str]] = deque()
        self._waiting: dict[int, Waiting] = {}
        self._on_cancel: dict[int, Callable[[], object]] = {}
        self._kept: dict[int, weakref.ref[Kept]] = {}

    # --- credit and finalizers -------------------------------------------------------------------

    def want_credit(self, sending: Waiting) -> int:
        """Announce on the page that a sender waits; returns what is granted now.

        The control thread tells it of more; it is kept alive meanwhile.
        """
        wire = sending.wire
        if wire.cancel_slot < 0:
            return UNLIMITED
        self._waiting[wire.id] = sending
        with self._page_lock:
            return self.end.page.want_credit(wire.cancel_slot, wire.id)

    def want_no_credit(self, sending: Waiting) -> None:
        """Take the announcement back, while the slot is still the request's."""
        if sending.wire.cancel_slot < 0:
            return
        with self._page_lock:
            self.end.page.stop_wanting_credit(sending.wire.cancel_slot)
        self._waiting.pop(sending.wire.id, None)

    def granted(self, requests: list[int]) -> None:
        """Tell senders that there is more credit. Control thread."""
        for number in requests:
            sending = self._waiting.get(number)
            if sending is not None:
                sending.granted()

    def watch_cancel(self, wire: WireRequest, on_cancel: Callable[[], object]) -> None:
        """Have `on_cancel` called once when the request is cancelled, or at once if it is."""
        self._on_cancel[wire.id] = on_cancel
        slot = wire.cancel_slot
        if slot >= 0 and self.end.page.is_cancelled(slot, wire.id):
            self.cancel_told([wire.id])

    def unwatch_cancel(self, request: int) -> None:
        """Forget what `watch_cancel` was told."""
        self._on_cancel.pop(request, None)

    def cancel_told(self, requests: list[int]) -> None:
        """Tell those who wait for it that their requests are cancelled. Control thread."""
        for number in requests:
            on_cancel = self._on_cancel.pop(number, None)
            if on_cancel is not None:
                on_cancel()

    def keep(self, request: int, kept: Kept) -> None:
        """Know a request that may outlive its batch, for as long as it does."""
        self._kept[request] = weakref.ref(kept)

    def forget(self, request: int) -> None:
        """Know it no more; called by finalizers."""
        self._kept.pop(request, None)

    def disowned(self, requests: list[int]) -> None:
        """End what the model has kept and nobody waits for. Control thread."""
        for number in requests:
            reference = self._kept.get(number)
            kept = reference() if reference is not None else None
            if kept is not None:
                kept.disown(error_response(number, "the client is gone", int(Code.CANCELLED)))

    def abandon(self, request: int, sending: Waiting | None, why: str) -> None:
        """Note a request that nobody can answer any more; called by finalizers, anywhere."""
        self._abandoned.append((request, sending, why))
        self.end.wake_control()

    def reap(self) -> None:
        """End what was abandoned. Control thread."""
        while self._abandoned:
            number, sending, why = self._abandoned.popleft()
            wire = error_response(number, self.failure(why))
            if sending is None:
                self.send(wire)
            else:
                sending.end(wire)  # after what it has kept

    # --- responses -------------------------------------------------------------------------------

    def failure(self, text: str) -> str:
        """Return the text that clients get when a model fails."""
        return f"Failed to process the request(s) for model '{self.instance}', message: {text}"

    def wire_response(
        self, wire: WireRequest, answer: InferenceResponse, room: Room, *, final: bool = True
    ) -> WireResponse:
        """Turn a response into what travels; what cannot travel is that response's error."""
        outputs: list[WireTensor] = []
        try:
            error = answer._error
            if error is not None:
                return error_response(
                    wire.id, plain_text(error.message()), int(error.code()), final=final
                )
            for tensor in answer._outputs:
                if tensor._name in wire.requested_outputs:
                    outputs.append(self._bodies.wire_tensor(tensor, room, wire.placement))
            return WireResponse(wire.id, outputs, None, answer._parameters or "{}", final)
        except Exception as problem:
            # Objects of the model's own making may do anything: that is this request's error, and
            # none of its neighbours in the batch.
            self.end.withdraw(outputs)
            if self.end.devices is not None:
                self.end.devices.note(problem)
            code = int(problem.code) if isinstance(problem, ActorserveError) else Code.INTERNAL
            return error_response(wire.id, self._refusal(problem), int(code), final=final)

    def _refusal(self, problem: Exception) -> str:
        if isinstance(problem, (ActorserveError, TritonModelException)):
            return plain_text(str(problem))
        return self.failure(
            f"the response cannot be sent: {format_exception(problem, self._model_path)}"
        )

    def is_moving(self, answer: WireResponse) -> bool:
        """Tell whether an answer hands on memory that is not this stub's own."""
        own = self.end.arena_id
        return any(
            isinstance(tensor.data, Handle) and tensor.data.arena != own
            for tensor in answer.outputs
        )

    def settled(self, answer: WireResponse) -> WireResponse:
        """Make an answer final: no array that the model has kept may change it afterwards."""
        for tensor in answer.outputs:
            if type(tensor.data) is Handle:
                return self._owned(answer)
        return answer

    def _owned(self, answer: WireResponse) -> WireResponse:
        outputs = list(answer.outputs)
        try:
            for at, tensor in enumerate(outputs):
                if isinstance(tensor.data, Handle):
                    owned = self.end.own(tensor.data)
                    outputs[at] = msgspec.structs.replace(tensor, data=owned)
        except ActorserveError as problem:
            self.end.withdraw(outputs)
            return error_response(answer.id, problem.message, int(problem.code), final=answer.final)
        return msgspec.structs.replace(answer, outputs=outputs)

    def send(self, response: WireResponse) -> None:
        """Send one response by itself; one that no frame can hold becomes an error."""
        end = self.end
        self.before_send()
        data = encode(Responded([response]))
        if len(data) > end.max_frame_bytes:
            end.withdraw(response.outputs)
            text = (
                f"the response of '{self.instance}' has names or parameters beyond "
                f"{end.max_frame_bytes} bytes"
            )
            code = int(Code.RESOURCE_EXHAUSTED)
            end.send(Responded([error_response(response.id, text, code, final=response.final)]))
            return
        if end.devices is not None:
            end.devices.settle(rings=False)
        end.send_encoded(data)
        if response.outputs:
            end.forwarded(response.outputs)


def error_response(
    request: int, text: str, code: int = int(Code.INTERNAL), *, final: bool = True
) -> WireResponse:
    """Return an error as a response."""
    return WireResponse(request, [], WireError(code, text), "{}", final)
