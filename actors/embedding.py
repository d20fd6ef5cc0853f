# SPDX-License-Identifier: Apache-2.0
"""Inference for the app that embeds a supervisor: arrays in, arrays out.

infer ──┐                                       ┌──► the one response
├─► tensors (large ones into the arena) ─► submit
stream ─┘                                       └──► each response as it comes
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt

from actorserve.actors.node import Node
from actorserve.actors.response_factory import ResponseFactory
from actorserve.errors import DeadlineExceeded, InvalidArgument
from actorserve.runtime.exchange import ArenaSlab
from actorserve.triton.arrays import array_of, tensor_of
from actorserve.triton.inference import InferRequest, InferResponse, InferTensor, Parameter

LONGEST_S = 1e9
"""What a longer limit of a request counts as: no timer of a loop takes more."""

COPY_ON_LOOP_BYTES = 1 << 20

_MOST_PRIORITY = (1 << 64) - 1

Outputs = dict[str, npt.NDArray[Any]]


class Embedding(ABC):
    """What a supervisor offers to Python callers; see the module's head."""

    @property
    @abstractmethod
    def _node(self) -> Node:
        """Return what all actors share. Raises Unavailable where nothing runs."""

    @abstractmethod
    def submit(
        self, request: InferRequest, on_response: Callable[[InferResponse], None]
    ) -> ResponseFactory:
        """Validate and enqueue a request."""

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, npt.ArrayLike],
        *,
        version: str = "",
        outputs: Sequence[str] = (),
        timeout_s: float | None = None,
        request_id: str = "",
        priority: int = 0,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> Outputs:
        """Run one inference and return the outputs by name.

        Inputs are arrays, or what numpy makes arrays of, in the data types of the model (strings
        and bytes for BYTES). Outputs are read-only; those of more than 4 KiB are views of shared
        memory, valid as long as they are referenced. Cancelling the task cancels the request.
        `timeout_s` is more than 0, or None for no limit; `priority` is 0 (the model's default) or
        more. Raises ActorserveError: InvalidArgument, NotFound, Unavailable, the model's own
        error, or DeadlineExceeded after `timeout_s`.
        """
        _check_limits(timeout_s, priority)
        request = InferRequest(
            model,
            await self._tensors(inputs),
            version,
            request_id,
            list(outputs),
            dict(parameters) if parameters else {},
            priority=priority,
            timeout_us=_microseconds(timeout_s),
        )
        loop = self._node.loop
        answer: asyncio.Future[InferResponse] = loop.create_future()

        def take(response: InferResponse) -> None:
            if not answer.done():
                answer.set_result(response)

        factory = self.submit(request, take)
        timer = None if timeout_s is None else _expire_in(loop, factory, model, timeout_s)
        try:
            response = await answer
        except asyncio.CancelledError:
            factory.disconnect()
            raise
        finally:
            if timer is not None:
                timer.cancel()
        if response.error is None:
            return {tensor.name: array_of(tensor) for tensor in response.outputs}
        try:
            raise response.error
        finally:
            # Else error, traceback, this frame and the response keep each other alive, and with
            # them whatever views the callers' frames hold.
            del response

    async def stream(
        self,
        model: str,
        inputs: Mapping[str, npt.ArrayLike],
        *,
        version: str = "",
        outputs: Sequence[str] = (),
        timeout_s: float | None = None,
        request_id: str = "",
        priority: int = 0,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> AsyncGenerator[Outputs, None]:
        """Yield the responses to one request as they come; a plain model has exactly one.

        A decoupled model is at most a window of responses ahead of the loop. A response that is an
        error is raised, and ends the request.

        Arguments and errors are those of `infer`; `timeout_s` is for the whole of it. Leaving the
        loop early cancels the request.
        """
        _check_limits(timeout_s, priority)
        request = InferRequest(
            model,
            await self._tensors(inputs),
            version,
            request_id,
            list(outputs),
            dict(parameters) if parameters else {},
            priority=priority,
            timeout_us=_microseconds(timeout_s),
            takes_stream=True,
        )
        loop = self._node.loop
        inbox = _Inbox(loop)
        factory = self.submit(request, inbox.put)
        timer = None if timeout_s is None else _expire_in(loop, factory, model, timeout_s)
        is_over = False
        try:
            while not is_over:
                response = await inbox.take()
                is_over = response.final
                if response.error is not None:
                    try:
                        raise response.error
                    finally:
                        del response  # as in infer
                factory.consumed()
                if not response.is_empty:
                    outputs_now = {tensor.name: array_of(tensor) for tensor in response.outputs}
                    del response
                    yield outputs_now
        finally:
            if timer is not None:
                timer.cancel()
            if not is_over:
                factory.disconnect()

    async def _tensors(self, inputs: Mapping[str, npt.ArrayLike]) -> list[InferTensor]:
        tensors: list[InferTensor] = []
        try:
            for name, value in inputs.items():
                tensor, body = tensor_of(name, value)
                if body is not None:
                    tensor.data = await self._slab_of(body)
                tensors.append(tensor)
        except BaseException:
            for tensor in tensors:
                if isinstance(tensor.data, ArenaSlab):
                    tensor.data.release()
            raise
        return tensors

    async def _slab_of(self, body: npt.NDArray[np.uint8]) -> ArenaSlab:
        """Copy a large body into shared memory, off the loop where that takes long."""
        node = self._node
        slab = node.exchange.allocate(body.nbytes)
        while slab is None:
            await node.exchange.grow(body.nbytes, node.executor)
            slab = node.exchange.allocate(body.nbytes)
        target = np.frombuffer(slab.buffer, np.uint8)
        if body.nbytes < COPY_ON_LOOP_BYTES:
            np.copyto(target, body)
            return slab
        copying = node.loop.run_in_executor(node.executor, np.copyto, target, body)
        try:
            await asyncio.shield(copying)
        except BaseException:
            # A thread that copies cannot be stopped: the block is its own until it has done.
            copying.add_done_callback(lambda _: slab.release())
            raise
        return slab


def _check_limits(timeout_s: Any, priority: Any) -> None:
    """Raise InvalidArgument for a time or a priority that cannot be meant."""
    is_number = isinstance(timeout_s, Real) and not isinstance(timeout_s, bool)
    if timeout_s is not None and not (is_number and timeout_s > 0):
        raise InvalidArgument(
            f"timeout_s: expected a number of seconds above 0, or None for no limit, "
            f"got {timeout_s!r}"
        )
    is_count = isinstance(priority, int) and not isinstance(priority, bool)
    if not is_count or not 0 <= priority <= _MOST_PRIORITY:
        raise InvalidArgument(
            "priority: expected an int from 1 (the first) up, or 0 for the model's default, "
            f"got {priority!r}"
        )


def _microseconds(timeout_s: float | None) -> int:
    if timeout_s is None:
        return 0
    return max(1, int(min(timeout_s, LONGEST_S) * 1e6))  # 0 would be none


def _expire_in(
    loop: asyncio.AbstractEventLoop, factory: ResponseFactory, model: str, timeout_s: float
) -> asyncio.TimerHandle:
    late = DeadlineExceeded(f"model '{model}' did not answer within {timeout_s:g} s")
    return loop.call_later(min(timeout_s, LONGEST_S), factory.expire, late)


class _Inbox:
    """Responses on their way from the loop's callbacks to one waiting task."""

    __slots__ = ("_loop", "_responses", "_waiter")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._responses: deque[InferResponse] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, response: InferResponse) -> None:
        """Take a response and wake the task."""
        self._responses.append(response)
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def take(self) -> InferResponse:
        """Return the next response, waiting for it."""
        while not self._responses:
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._responses.popleft()
