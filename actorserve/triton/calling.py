# SPDX-License-Identifier: Apache-2.0
"""How a model's call to another model leaves this process: whoever runs the model sets it.

Between the end of `initialize` and the start of `finalize` a stub offers a caller; at all other
times, and where no stub is, a call is refused with the documented text.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from actorserve.triton.error import TritonModelException

if TYPE_CHECKING:
    from actorserve.triton.request import InferenceRequest
    from actorserve.triton.response import InferenceResponse
    from actorserve.triton.response_iterator import ResponseIterator


calling_for: contextvars.ContextVar[Sequence[int]] = contextvars.ContextVar(
    "actorserve_calling_for", default=()
)
"""The ids of the requests that the running code works for, as far as context variables tell.

Whoever runs `execute` sets it; tasks, callbacks and `asyncio.to_thread` take it along.
"""


class Caller(Protocol):
    """Makes calls; any thread may use it."""

    def call(self, request: InferenceRequest) -> InferenceResponse:
        """Return the one response, waiting for it; failures of the callee are responses too."""

    def call_stream(self, request: InferenceRequest) -> ResponseIterator:
        """Return an iterator over the responses, at once."""

    def call_async(self, request: InferenceRequest) -> asyncio.Future[Any]:
        """Return a future of the one response, in the running loop."""


_caller: Caller | None = None


def set_caller(caller: Caller | None) -> None:
    """Let models call with this from now on; None refuses calls."""
    global _caller
    _caller = caller


def current_caller() -> Caller:
    """Return what calls are made with. Raises TritonModelException while none are allowed."""
    if _caller is None:
        raise TritonModelException("BLS is only supported during the 'execute' function.")
    return _caller
