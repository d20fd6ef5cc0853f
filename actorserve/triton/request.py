# SPDX-License-Identifier: Apache-2.0
"""`pb_utils.InferenceRequest`: what `execute` gets, and what a call to another model is made of.

Public names are the model API's and no others, since models look at `dir()`; the stub makes a
request with `_received`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, TypeVar

from actorserve.triton.calling import calling_for, current_caller
from actorserve.triton.constants import (
    TRITONSERVER_REQUEST_RELEASE_ALL,
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
)
from actorserve.triton.error import TritonModelException, exact_str
from actorserve.triton.memory import MemoryType, PreferredMemory
from actorserve.triton.parameters import parameters_json
from actorserve.triton.response import InferenceResponse
from actorserve.triton.response_iterator import ResponseIterator
from actorserve.triton.response_sender import InferenceResponseSender, NoReply, Reply
from actorserve.triton.tensor import Tensor
from actorserve.triton.trace import InferenceTrace

T = TypeVar("T")

_ANYWHERE = PreferredMemory(MemoryType.DEFAULT)
_NO_TRACE = InferenceTrace()
_NO_REPLY = NoReply()


class InferenceRequest:
    """A request; see the module's head."""

    # Model name and version, preferred memory, trace and parents are of a request that a model
    # makes; the parents are those for which its code ran then.
    __slots__ = (
        "__weakref__",
        "_correlation_id",
        "_flags",
        "_inputs",
        "_model_name",
        "_model_version",
        "_parameters",
        "_parents",
        "_preferred_memory",
        "_reply",
        "_request_id",
        "_requested_outputs",
        "_timeout_us",
        "_trace",
    )

    _reply: Reply

    def __init__(
        self,
        *,
        inputs: list[Tensor],
        requested_output_names: list[str],
        model_name: str,
        request_id: str = "",
        correlation_id: int | str = 0,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory = _ANYWHERE,
        trace: InferenceTrace = _NO_TRACE,
        parameters: dict[str, Any] | None = None,
    ) -> None:
        """Make a request to another model; `timeout` is in microseconds, 0 for none.

        Raises TypeError for a wrong type, TritonModelException for an empty tensor or name, or
        parameters of other types than bool, int and str.
        """
        self._model_name = exact_str(model_name, "model_name")
        self._request_id = exact_str(request_id, "request_id")
        self._inputs = _checked_inputs(inputs, self._request_id, self._model_name)
        self._requested_outputs = _checked_names(
            requested_output_names, self._request_id, self._model_name
        )
        self._correlation_id = _correlation_id(correlation_id)
        self._model_version = _integer(model_version, "model_version", -(1 << 63), (1 << 63) - 1)
        self._flags = _integer(flags, "flags", 0, (1 << 32) - 1)
        self._timeout_us = _integer(timeout, "timeout", 0, (1 << 64) - 1)
        self._preferred_memory = _instance(preferred_memory, PreferredMemory, "preferred_memory")
        self._trace = _instance(trace, InferenceTrace, "trace")
        self._parameters = "{}" if parameters is None else parameters_json(parameters)
        self._reply = _NO_REPLY
        self._parents = calling_for.get()

    @classmethod
    def _received(
        cls,
        inputs: list[Tensor],
        request_id: str,
        correlation_id: int | str,
        requested_outputs: list[str],
        parameters: str,
        flags: int,
        timeout_us: int,
        reply: Reply,
    ) -> InferenceRequest:
        """Make what `execute` gets, of parts that are known to be right."""
        request = cls.__new__(cls)
        request._inputs = inputs
        request._request_id = request_id
        request._correlation_id = correlation_id
        request._requested_outputs = requested_outputs
        request._parameters = parameters
        request._flags = flags
        request._timeout_us = timeout_us
        request._reply = reply
        return request

    def inputs(self) -> list[Tensor]:
        """Return the input tensors."""
        return self._inputs[:]

    def request_id(self) -> str:
        """Return the client's id, empty for none."""
        return self._request_id

    def correlation_id(self) -> int | str:
        """Return the sequence's id, 0 for none."""
        return self._correlation_id

    def flags(self) -> int:
        """Return the sequence flags."""
        return self._flags

    def set_flags(self, flags: int) -> None:
        """Set the sequence flags. Raises TypeError for what is not a 32-bit number."""
        self._flags = _integer(flags, "flags", 0, (1 << 32) - 1)

    def timeout(self) -> int:
        """Return the timeout in microseconds, 0 for none."""
        return self._timeout_us

    def requested_output_names(self) -> set[str]:
        """Return the names of the wanted outputs, empty for all."""
        return set(self._requested_outputs)

    def parameters(self) -> str:
        """Return the request's own parameters as the text of a JSON object."""
        return self._parameters

    def trace(self) -> InferenceTrace:
        """Return the trace that the request belongs to."""
        return getattr(self, "_trace", _NO_TRACE)

    def is_cancelled(self) -> bool:
        """Tell whether the client has given up.

        Raises TritonModelException for a request that the model itself made.
        """
        return self._reply.is_cancelled()

    def set_release_flags(self, flags: int) -> None:
        """Say what happens to the request after `execute`.

        Raises TritonModelException for RESCHEDULE, which needs a model with iterative sequences:
        no such model can be loaded in this version.
        """
        if flags == TRITONSERVER_REQUEST_RELEASE_ALL:
            return
        if flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE:
            raise TritonModelException(
                "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model "
                "is not configured to handle such a flag"
            )
        raise TritonModelException(
            "Release flags must be TRITONSERVER_REQUEST_RELEASE_ALL or "
            f"TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, got {flags!r}."
        )

    def exec(self, decoupled: bool = False) -> InferenceResponse | ResponseIterator:
        """Call another model, and wait for its response.

        With `decoupled`, return an iterator over any number of responses, at once. Whatever fails
        on the other side is a response with an error. Raises TritonModelException where models may
        not be called: in `initialize`, `finalize` and outside of a server.
        """
        caller = current_caller()
        return caller.call_stream(self) if decoupled else caller.call(self)

    def async_exec(self, decoupled: bool = False) -> asyncio.Future[Any]:
        """Call another model from a coroutine: what `exec` returns is to be awaited.

        The call is on its way when this returns. A cancelled future cancels it. Raises as `exec`,
        and RuntimeError where no event loop runs.
        """
        caller = current_caller()
        if not decoupled:
            return caller.call_async(self)
        future = asyncio.get_running_loop().create_future()
        future.set_result(caller.call_stream(self))
        return future

    def get_response_sender(self) -> InferenceResponseSender:
        """Return the sender of this request's responses: the same one each time."""
        return self._reply.sender()

    def __repr__(self) -> str:
        return f"InferenceRequest(request_id={self._request_id!r}, inputs={self._inputs!r})"


def _integer(value: object, what: str, least: int, most: int) -> int:
    if not isinstance(value, int) or not least <= value <= most:
        raise TypeError(f"{what} must be an int from {least} to {most}, got {value!r}")
    return int(value)


def _instance(value: object, kind: type[T], what: str) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"{what} must be of type {kind.__name__}, got {type(value)}")
    return value


def _correlation_id(value: object) -> int | str:
    if isinstance(value, str):
        return exact_str(value, "correlation_id")
    if not isinstance(value, int):
        raise TypeError(f"Correlation ID must be integer or string, got {type(value)}")
    return _integer(value, "correlation_id", 0, (1 << 64) - 1)


def _checked_inputs(inputs: object, request_id: str, model_name: str) -> list[Tensor]:
    if not isinstance(inputs, (list, tuple)):
        raise TypeError(f"inputs must be a list of Tensor, got {type(inputs)}")
    for tensor in inputs:
        if tensor is None:
            raise TritonModelException(
                f"Input tensor for request with id '{request_id}' and model name '{model_name}' "
                "should not be empty."
            )
        _instance(tensor, Tensor, "each of inputs")
    return list(inputs)


def _checked_names(names: object, request_id: str, model_name: str) -> list[str]:
    if not isinstance(names, Iterable) or isinstance(names, (str, bytes, dict)):
        raise TypeError(f"requested_output_names must be a list of str, got {type(names)}")
    checked = {exact_str(name, "each of requested_output_names") for name in names}
    if "" in checked:
        raise TritonModelException(
            f"Requested output name for request with id '{request_id}' and model name "
            f"'{model_name}' should not be empty."
        )
    return sorted(checked)
