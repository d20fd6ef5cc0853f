# SPDX-License-Identifier: Apache-2.0
"""A stream of the loop's thread, read by another thread that may be interrupted at any moment.

    reader's thread ── next ──► a step in the loop ─► the asynchronous generator
                    ── close ─► the step that runs is cancelled, and only then it is closed

A KeyboardInterrupt leaves the reader's wait, or comes before it knows what it waits for, while the
step goes on. So whoever closes asks for the end of the step that runs, and waits its turn: an
asynchronous generator has one user at a time. Coroutines are made in the loop's thread, so that no
interrupt leaves one behind that nobody has begun.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from actorserve.actors.embedding import Outputs

T = TypeVar("T")


class SyncStream:
    """One stream; `next` and `close` are the reader's, everything else is the loop's."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        responses: AsyncGenerator[Outputs, None],
        waits: set[concurrent.futures.Future[Any]],
    ) -> None:
        """`waits` holds what somebody waits for; whoever closes the loop cancels what is left."""
        self._loop = loop
        self._waits = waits
        self._responses = responses
        self._turn = asyncio.Lock()
        self._step: asyncio.Task[object] | None = None
        self._is_closed = False

    def next(self) -> Outputs | None:
        """Return the next response, waiting for it; None at the end.

        Raises what the stream raises, CancelledError where the loop ends meanwhile.
        """
        return self._run(self._next).result()

    def close(self) -> None:
        """End the stream, whatever is under way. Idempotent; goes on if the wait is interrupted.

        In the loop's own thread, where a collector may find a stream that was dropped, nothing
        waits.
        """
        with contextlib.suppress(concurrent.futures.CancelledError, RuntimeError):
            closed = self._run(self._close)
            if asyncio._get_running_loop() is not self._loop:
                closed.result()

    def _run(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> concurrent.futures.Future[T]:
        outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

        def settle(task: asyncio.Task[T]) -> None:
            if task.cancelled():
                outcome.set_exception(concurrent.futures.CancelledError())
            elif (error := task.exception()) is not None:
                outcome.set_exception(error)
            else:
                outcome.set_result(task.result())

        self._loop.call_soon_threadsafe(
            lambda: self._loop.create_task(begin()).add_done_callback(settle)
        )
        self._waits.add(outcome)
        outcome.add_done_callback(self._waits.discard)
        if self._loop.is_closed():  # it came after the loop's last turn
            outcome.cancel()
        return outcome

    # --- in the loop -----------------------------------------------------------------------------

    async def _next(self) -> Outputs | None:
        async with self._turn:
            if self._is_closed:
                return None
            self._step = asyncio.current_task()
            try:
                return await self._responses.__anext__()
            except StopAsyncIteration:  # which crosses no future
                return None
            finally:
                self._step = None

    async def _close(self) -> None:
        self._is_closed = True
        if self._step is not None:
            self._step.cancel()
        async with self._turn:
            await self._responses.aclose()
