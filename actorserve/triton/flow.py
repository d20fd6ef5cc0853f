# SPDX-License-Identifier: Apache-2.0
"""What a coroutine may wait for beyond the model API: a client that gives up, or reads on.

`is_cancelled()` is a look, and a sender that runs ahead of its client fills a buffer. Models with
much work for each response do better to be told. Only for requests that `execute` was given.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol, cast

from actorserve.triton.request import InferenceRequest
from actorserve.triton.response_sender import InferenceResponseSender


class Flow(Protocol):
    """The way back of a request that `execute` was given, as these functions need it."""

    def watch_cancel(self, on_cancel: Callable[[], object]) -> None:
        """Have it called once, from any thread, when the client gives up or has already."""

    def unwatch_cancel(self) -> None:
        """Forget it."""

    def when_drained(self, on_drained: Callable[[], None]) -> bool:
        """Have it called once, from any thread, when all has gone; False where it has."""


@contextlib.contextmanager
def on_cancel(request: InferenceRequest, callback: Callable[[], object]) -> Iterator[None]:
    """Have `callback` called when the client gives up, once at most, while the block runs.

    From another thread, or at once and here where it has given up already.
    """
    flow = cast(Flow, request._reply)
    flow.watch_cancel(callback)
    try:
        yield
    finally:
        flow.unwatch_cancel()


async def drained(sender: InferenceResponseSender) -> None:
    """Return when the client has taken so much that everything sent is on its way."""
    loop = asyncio.get_running_loop()
    gone: asyncio.Future[None] = loop.create_future()

    def settle() -> None:
        if not gone.done():
            gone.set_result(None)

    def on_drained() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle)

    if cast(Flow, sender._reply).when_drained(on_drained):
        await gone
