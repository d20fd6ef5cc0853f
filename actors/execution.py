# SPDX-License-Identifier: Apache-2.0
"""Run batches in a stub: wire requests to the user's `execute` and its answers back.

    Execute ─► _begin ─► user's execute ─► _finish ─► Executed (answers, and what is still open)
                            └─► Reply.send, in any thread, as long as it likes

Every request of a batch is answered exactly once: with its response, with the error of its
response, or with the error of the batch; those whose sender the model has taken are answered by
that (reply.py). Whatever user code raises, the process goes on.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import msgspec

from actorserve.actors.bodies import Bodies, Room
from actorserve.actors.forked import end_if_forked
from actorserve.actors.replies import Replies, error_response
from actorserve.actors.reply import Reply
from actorserve.clock import monotonic_ns
from actorserve.errors import Code
from actorserve.fault import fault_point
from actorserve.runtime.stub_end import StubEnd
from actorserve.triton.calling import calling_for
from actorserve.triton.failure import format_exception
from actorserve.triton.logger import Logger
from actorserve.triton.request import InferenceRequest
from actorserve.triton.response import InferenceResponse
from actorserve.wire.codec import encode
from actorserve.wire.device_ref import DeviceRef
from actorserve.wire.messages import (
    Execute,
    Executed,
    Handle,
    Initialize,
    WireRequest,
    WireResponse,
)


class Batch:
    """A batch in execution. `responses` are those that go with its end."""

    __slots__ = (
        "borrowed",
        "called_ns",
        "count",
        "live",
        "number",
        "replies",
        "responses",
        "returned_ns",
        "seen",
        "started_ns",
    )

    def __init__(self, number: int, count: int) -> None:
        self.number = number
        self.count = count
        self.live: list[WireRequest] = []
        self.replies: list[Reply] = []
        self.responses: list[WireResponse] = []
        self.started_ns = self.called_ns = self.returned_ns = 0
        self.seen = 0  # inputs by handle that have a view
        self.borrowed = 0  # inputs on a device that were borrowed


class Execution:
    """The model of this stub, ready to run batches."""

    def __init__(self, end: StubEnd, model: Any, setting: Initialize, bodies: Bodies) -> None:
        self._end = end
        self._model_path = setting.model_path
        self._decoupled = setting.decoupled
        self._instance = end.instance
        self._bodies = bodies
        self._execute = getattr(model, "execute", None)
        self._running: dict[int, int] = {}  # batches and when they began, the oldest first
        self.is_async = inspect.iscoroutinefunction(self._execute)
        self.replies = Replies(
            end,
            bodies,
            instance=end.instance,
            model_path=setting.model_path,
            decoupled=setting.decoupled,
        )

    # --- one batch -------------------------------------------------------------------------------

    def run(self, message: Execute) -> None:
        """Run one batch and send its answers."""
        batch = self._begin(message)
        if batch.live:
            calling_for.set([wire.id for wire in batch.live])
            error: BaseException | None = None
            result = None
            requests: list[InferenceRequest] = []
            try:
                requests = self._requests(batch)
                batch.called_ns = monotonic_ns()
                result = self._callable()(requests)
            except BaseException as problem:
                # SystemExit and KeyboardInterrupt too: a stub that only its model could end at
                # will would be a death for every other request.
                error = problem
            batch.returned_ns = monotonic_ns()
            self._conclude(batch, result, error)
            del requests, result
            error = None
        self._finish(batch)

    async def run_async(self, message: Execute) -> None:
        """Run one batch of an asynchronous model; in a task of its own."""
        batch = self._begin(message)
        if batch.live:
            calling_for.set([wire.id for wire in batch.live])
            error: BaseException | None = None
            result = None
            requests: list[InferenceRequest] = []
            try:
                requests = self._requests(batch)
                batch.called_ns = monotonic_ns()
                result = await self._callable()(requests)
            except BaseException as problem:
                error = problem
            batch.returned_ns = monotonic_ns()
            self._conclude(batch, result, error)
            del requests, result
            error = None
            if any(self.replies.is_moving(each) for each in batch.responses):
                # Whatever woke this task has what it awaited in its hands until the next turn:
                # another model's tensors, perhaps, which need no copy once they are let go.
                await asyncio.sleep(0)
        self._finish(batch)

    def _begin(self, message: Execute) -> Batch:
        """Note the beginning on the health page, and leave out what is cancelled already."""
        end = self._end
        now_ns = monotonic_ns()
        if self.is_async:
            self._running[message.batch] = now_ns
        end.page.begin_batch(message.batch, now_ns)
        fault_point("stub.decode")
        batch = Batch(message.batch, len(message.requests))
        for wire in message.requests:
            slot = wire.cancel_slot
            if slot >= 0 and end.page.is_cancelled(slot, wire.id):
                self._give_back([wire])
                batch.responses.append(_cancelled(wire))
            elif end.devices is not None and not end.devices.can_map(_refs([wire])):
                self._give_back([wire])
                batch.responses.append(_unreachable(wire))
            else:
                batch.live.append(wire)
        batch.started_ns = monotonic_ns()
        return batch

    def _requests(self, batch: Batch) -> list[InferenceRequest]:
        batch.replies = [Reply(self.replies, wire) for wire in batch.live]
        requests = [
            self._request(wire, reply, batch) for wire, reply in zip(batch.live, batch.replies)
        ]
        fault_point("stub.execute")
        return requests

    def _request(self, wire: WireRequest, reply: Reply, batch: Batch) -> InferenceRequest:
        inputs = []
        for tensor in wire.inputs:
            inputs.append(self._bodies.tensor(tensor, is_input=True))
            if type(tensor.data) is Handle:
                batch.seen += 1
            elif tensor.device is not None:
                batch.borrowed += 1
        return InferenceRequest._received(
            inputs,
            wire.request_id,
            wire.correlation_id,
            wire.requested_outputs,
            wire.parameters,
            wire.flags,
            wire.timeout_us,
            reply,
        )

    def _callable(self) -> Any:
        if self._execute is None:
            raise _NoExecute(
                f"Python model {self._model_path} does not implement `execute` method."
            )
        return self._execute

    def _give_back(self, wires: list[WireRequest], seen: int = 0, borrowed: int = 0) -> None:
        """Return inputs that nobody looks at, all but the first ones."""
        self._end.give_back(_handles(wires)[seen:])
        if self._end.devices is not None:
            self._end.devices.give_back(_refs(wires)[borrowed:])

    # --- its end ---------------------------------------------------------------------------------

    def _conclude(self, batch: Batch, result: Any, error: BaseException | None) -> None:
        """Turn what execute returned or raised into answers, for those that have none yet."""
        end_if_forked(self._end, error)
        if error is not None:
            self._give_back(batch.live, batch.seen, batch.borrowed)
            if self._end.devices is not None:
                self._end.devices.judge(error)
            is_ours = isinstance(error, _NoExecute)
            text = str(error) if is_ours else format_exception(error, self._model_path)
            self._fail(batch, text)
            return
        problem = self._problem_of(result, len(batch.live))
        if problem is not None:
            self._fail(batch, problem)
            return
        room = Room()
        for reply, answer in zip(batch.replies, result or [None] * len(batch.live)):
            if answer is not None:
                self._answer(batch, reply, answer, room)
            else:
                reply.stay_open()

    def _answer(self, batch: Batch, reply: Reply, answer: InferenceResponse, room: Room) -> None:
        if reply.answered():
            batch.responses.append(self.replies.wire_response(reply.wire, answer, room))
        else:
            Logger.log_error(
                f"'{self._instance}' returned a response to a request that its sender has answered"
            )

    def _problem_of(self, result: Any, count: int) -> str | None:
        """Return what is wrong with the whole result of execute, in the documented order."""
        if result is None:
            return None
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

    def _fail(self, batch: Batch, text: str) -> None:
        """Answer all that have no end yet with an error."""
        message = self.replies.failure(text)
        Logger.log_error(message)
        if not batch.replies:  # not even the requests could be made
            batch.responses += [error_response(wire.id, message) for wire in batch.live]
        for reply in batch.replies:
            if reply.fail(message):
                batch.responses.append(error_response(reply.wire.id, message))

    def _finish(self, batch: Batch) -> None:
        """Send the batch's end. The requests are gone: only now is seen what the model has kept."""
        end, page = self._end, self._end.page
        responses = [self.replies.settled(each) for each in batch.responses]
        still_open = (
            [reply.wire.id for reply in batch.replies if not reply.is_done]
            if len(responses) < batch.count
            else []
        )
        fault_point("stub.respond")
        page.end_batch()
        if self.is_async:
            del self._running[batch.number]
            for number, since_ns in self._running.items():
                page.resume_batch(number, since_ns)
                break
        self.replies.before_send()
        if end.devices is not None:
            end.devices.settle(rings=False)  # the answer wakes the supervisor for both
        self._send(Executed(batch.number, responses, *_times(batch, still_open)))
        batch.replies.clear()
        del responses
        end.settle()
        if end.devices is not None and end.devices.lost:
            end.devices.end_process()

    def _send(self, executed: Executed) -> None:
        """Send a batch's answers: in one frame, or one by one where they do not fit."""
        end = self._end
        data = encode(executed)
        if len(data) <= end.max_frame_bytes:
            end.send_encoded(data)
            for response in executed.responses:
                for tensor in response.outputs:
                    if type(tensor.data) is Handle or tensor.device is not None:
                        end.forwarded(response.outputs)
                        break
            return
        for response in executed.responses:
            self.replies.send(response)
        end.send(msgspec.structs.replace(executed, responses=[]))


def _times(batch: Batch, still_open: list[int]) -> tuple[int, list[int], int, int]:
    """Return what Executed says after the responses: the times, with what is still open."""
    if not batch.live:
        return 0, still_open, 0, 0
    called_ns = batch.called_ns or batch.returned_ns
    execute_ns = max(1, batch.returned_ns - called_ns)
    return (
        execute_ns,
        still_open,
        called_ns - batch.started_ns,
        monotonic_ns() - batch.returned_ns,
    )


class _NoExecute(Exception):
    """The model has no execute method."""


def _handles(wires: list[WireRequest]) -> list[Handle]:
    """Return the handles of requests' inputs, in order."""
    return [
        tensor.data for wire in wires for tensor in wire.inputs if isinstance(tensor.data, Handle)
    ]


def _refs(wires: list[WireRequest]) -> list[DeviceRef]:
    """Return the references of requests' inputs, in order."""
    return [t.device for wire in wires for t in wire.inputs if t.device is not None]


def _unreachable(wire: WireRequest) -> WireResponse:
    text = "an input lies on a device that cannot be used here"
    return error_response(wire.id, text, int(Code.DEVICE_UNREACHABLE))


def _cancelled(wire: WireRequest) -> WireResponse:
    text = "the request was cancelled before it was executed"
    return error_response(wire.id, text, int(Code.CANCELLED))
