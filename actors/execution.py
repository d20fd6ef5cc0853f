# SPDX-License-Identifier: Apache-2.0
"""Run batches in a stub: wire requests to the user's `execute` and its answers back.

Every request of a batch is answered exactly once: with its response, with the error of its
response, or with the error of the batch. Whatever user code raises, the process goes on.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from functools import partial
from typing import Any

import msgspec

from actorserve.actors.forked import end_if_forked
from actorserve.clock import monotonic_ns
from actorserve.errors import ActorserveError, Code
from actorserve.fault import fault_point
from actorserve.runtime.peer_end import PeerEnd
from actorserve.triton.error import TritonModelException
from actorserve.triton.failure import format_exception, plain_text
from actorserve.triton.logger import Logger
from actorserve.triton.request import InferenceRequest
from actorserve.triton.response import InferenceResponse
from actorserve.triton.tensor import Tensor
from actorserve.wire.codec import encode
from actorserve.wire.messages import (
    INLINE_BYTES,
    Execute,
    Executed,
    Handle,
    Initialize,
    Responded,
    WireError,
    WireRequest,
    WireResponse,
    WireTensor,
)

INLINE_TOTAL_BYTES = 256 << 10
"""Bodies inside one frame altogether; those beyond travel through the arena."""


class Execution:
    """The model of this stub, ready to run batches."""

    def __init__(self, end: PeerEnd, model: Any, setting: Initialize) -> None:
        self._end = end
        self._model = model
        self._model_path = setting.model_path
        self._decoupled = setting.decoupled
        self._shared_inputs = setting.shared_inputs
        self._instance = end.instance
        self._execute = getattr(model, "execute", None)
        self.is_async = inspect.iscoroutinefunction(self._execute)
        self._loop_thread = LoopThread() if self.is_async else None
        self._inline_left = 0
        self._unseen: list[Handle] = []  # the inputs of a batch that have no view yet, last first

    def close(self) -> None:
        """End the loop's thread, where there is one."""
        if self._loop_thread is not None:
            self._loop_thread.close()

    # --- one batch -------------------------------------------------------------------------------

    def run(self, message: Execute) -> None:
        """Run one batch and send its answers."""
        end = self._end
        page = end.page
        page.begin_batch(message.batch, monotonic_ns())
        fault_point("stub.decode")
        live = [wire for wire in message.requests if not self._is_cancelled(wire)]
        responses = []
        if len(live) < len(message.requests):
            ids = {wire.id for wire in live}
            cancelled = [wire for wire in message.requests if wire.id not in ids]
            end.give_back(_handles(cancelled))
            responses = [_cancelled(wire) for wire in cancelled]
        started_ns = monotonic_ns()
        if live:
            responses += self._answers(live)
        executed_ns = monotonic_ns() - started_ns
        fault_point("stub.respond")
        page.end_batch()
        self._send(Executed(message.batch, responses, executed_ns))
        del responses
        end.settle()

    def _is_cancelled(self, wire: WireRequest) -> bool:
        return wire.cancel_slot >= 0 and self._end.page.is_cancelled(wire.cancel_slot, wire.id)

    def _answers(self, wires: list[WireRequest]) -> list[WireResponse]:
        """Call the user's code and turn what it gives into one response per request."""
        self._inline_left = INLINE_TOTAL_BYTES
        self._unseen = _handles(wires)
        self._unseen.reverse()
        try:
            requests = [self._request(wire) for wire in wires]
            result = self._call(requests)
        except BaseException as error:
            end_if_forked(self._end, error)
            self._end.give_back(self._unseen)
            # SystemExit and KeyboardInterrupt too: a stub that only its model could end at will
            # would be a death for every other request.
            if isinstance(error, _NoExecute):
                return self._failed(wires, str(error))
            return self._failed(wires, format_exception(error, self._model_path))
        end_if_forked(self._end)
        problem = self._problem_of(result, len(wires))
        if problem is not None:
            return self._failed(wires, problem)
        answers = [self._answer(wire, answer) for wire, answer in zip(wires, result)]
        # What the model has not kept is gone with these: only then can be seen what it has kept.
        del requests, result
        return [self._settled(answer) for answer in answers]

    def _settled(self, answer: WireResponse) -> WireResponse:
        """Make an answer final: no array that the model has kept may change it afterwards."""
        if not any(isinstance(tensor.data, Handle) for tensor in answer.outputs):
            return answer
        outputs: list[WireTensor] = []
        try:
            for tensor in answer.outputs:
                data = tensor.data
                if isinstance(data, Handle):
                    tensor = msgspec.structs.replace(tensor, data=self._end.own(data))
                outputs.append(tensor)
        except ActorserveError as problem:
            self._end.withdraw([*outputs, *answer.outputs[len(outputs) :]])
            return WireResponse(answer.id, [], WireError(int(problem.code), problem.message))
        return msgspec.structs.replace(answer, outputs=outputs)

    def _call(self, requests: list[InferenceRequest]) -> Any:
        if self._execute is None:
            raise _NoExecute(
                f"Python model {self._model_path} does not implement `execute` method."
            )
        fault_point("stub.execute")
        if self._loop_thread is not None:
            return self._loop_thread.run(self._end, self._execute, requests)
        return self._execute(requests)

    def _problem_of(self, result: Any, count: int) -> str | None:
        """Return what is wrong with the whole result of execute, in the documented order."""
        if result is None:
            return (
                "execute returned None and no response sender was taken: "
                "nothing could ever answer the request(s)"
            )
        if self._decoupled:
            return (
                f"Python model '{self._instance}' is using the decoupled mode and the execute "
                "function must return None."
            )
        if not isinstance(result, list):
            return f"Expected a list in the execute return, found type '{type(result)}'."
        if len(result) != count:
            return (
                "Number of InferenceResponse objects do not match the number of InferenceRequest "
                f"objects. InferenceRequest(s) size is:{count}, and InferenceResponse(s) size "
                f"is:{len(result)}\n"
            )
        for answer in result:
            if answer is not None and not isinstance(answer, InferenceResponse):
                return (
                    "Expected an 'InferenceResponse' object in the execute function return list, "
                    f"found type '{type(answer)}'."
                )
        return None

    def _failed(self, wires: list[WireRequest], text: str) -> list[WireResponse]:
        message = f"Failed to process the request(s) for model '{self._instance}', message: {text}"
        Logger.log_error(message)
        error = WireError(int(Code.INTERNAL), message)
        return [WireResponse(wire.id, [], error) for wire in wires]

    # --- wire to user and back -------------------------------------------------------------------

    def _request(self, wire: WireRequest) -> InferenceRequest:
        return InferenceRequest._received(
            [self._tensor(tensor) for tensor in wire.inputs],
            wire.request_id,
            wire.correlation_id,
            wire.requested_outputs,
            wire.parameters,
            wire.flags,
            wire.timeout_us,
            partial(self._is_cancelled, wire),
        )

    def _tensor(self, wire: WireTensor) -> Tensor:
        body = wire.data
        if not isinstance(body, Handle):
            return Tensor._received(wire.name, wire.datatype, wire.shape, body)
        is_own = not body.shared
        view = self._end.view(body, writable=is_own)
        self._unseen.pop()
        copy = body.shared and not self._shared_inputs
        return Tensor._received(wire.name, wire.datatype, wire.shape, view, copy)

    def _answer(self, wire: WireRequest, answer: InferenceResponse | None) -> WireResponse:
        if answer is None:
            message = (
                f"Failed to process the request(s) for model '{self._instance}', message: execute "
                "returned None for a request whose response sender was not taken"
            )
            return WireResponse(wire.id, [], WireError(int(Code.INTERNAL), message))
        outputs: list[WireTensor] = []
        try:
            error = answer._error
            if error is not None:
                text = plain_text(error.message())
                return WireResponse(wire.id, [], WireError(int(error.code()), text))
            for tensor in answer._outputs:
                if tensor._name in wire.requested_outputs:
                    outputs.append(self._wire_tensor(tensor))
            return WireResponse(wire.id, outputs, None, answer._parameters or "{}")
        except Exception as problem:
            # Objects of the model's own making may do anything: that is this request's error, and
            # none of its neighbours in the batch.
            self._end.withdraw(outputs)
            code = int(problem.code) if isinstance(problem, ActorserveError) else Code.INTERNAL
            return WireResponse(wire.id, [], WireError(int(code), self._refusal(problem)))

    def _refusal(self, problem: Exception) -> str:
        if isinstance(problem, (ActorserveError, TritonModelException)):
            return plain_text(str(problem))
        return (
            f"Failed to process the request(s) for model '{self._instance}', message: the response "
            f"cannot be sent: {format_exception(problem, self._model_path)}"
        )

    def _wire_tensor(self, tensor: Tensor) -> WireTensor:
        """Put a small body into the frame and a large one into shared memory."""
        number, shape, body = tensor._body()
        nbytes = body.nbytes
        if nbytes > INLINE_BYTES or nbytes > self._inline_left:
            return WireTensor(tensor._name, number, shape, self._end.place(body))
        self._inline_left -= nbytes
        return WireTensor(tensor._name, number, shape, body.tobytes())

    def _send(self, executed: Executed) -> None:
        """Send a batch's answers: in one frame, or one by one where they do not fit."""
        end = self._end
        data = encode(executed)
        if len(data) <= end.max_frame_bytes:
            end.send_encoded(data)
            return
        for response in executed.responses:
            message = Responded([response])
            if len(encode(message)) > end.max_frame_bytes:
                end.withdraw(response.outputs)
                error = WireError(
                    int(Code.RESOURCE_EXHAUSTED),
                    f"the response of '{self._instance}' has names or parameters beyond "
                    f"{end.max_frame_bytes} bytes",
                )
                message = Responded([WireResponse(response.id, [], error)])
            end.send(message)
        end.send(Executed(executed.batch, [], executed.execute_ns))


class _NoExecute(Exception):
    """The model has no execute method."""


def _handles(wires: list[WireRequest]) -> list[Handle]:
    """Return the handles of requests' inputs, in order."""
    return [
        tensor.data for wire in wires for tensor in wire.inputs if isinstance(tensor.data, Handle)
    ]


def _cancelled(wire: WireRequest) -> WireResponse:
    error = WireError(int(Code.CANCELLED), "the request was cancelled before it was executed")
    return WireResponse(wire.id, [], error)


class LoopThread:
    """An event loop in a thread of its own, for models whose `execute` is a coroutine."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="actorserve-model-loop", daemon=True
        )
        self._thread.start()

    def run(self, end: PeerEnd, function: Any, *arguments: Any) -> Any:
        """Run the coroutine function to its end; return its result or raise its exception.

        The exception is carried as a value: a SystemExit that leaves a task ends its loop.
        """
        work = _captured(end, function, arguments)
        outcome = asyncio.run_coroutine_threadsafe(work, self._loop)
        result, error = outcome.result()
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """Stop the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        if not self._thread.is_alive():
            self._loop.close()


async def _captured(
    end: PeerEnd, function: Any, arguments: tuple[Any, ...]
) -> tuple[Any, BaseException | None]:
    result, problem = None, None
    try:
        result = await function(*arguments)
    except BaseException as error:
        problem = error
    end_if_forked(end, problem)
    return result, problem
