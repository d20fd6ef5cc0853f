# SPDX-License-Identifier: Apache-2.0
"""A model's own `is_ready`, in its stub: asked beside `execute`, one check at a time.

    AskReady ─► control thread ─► the hook's thread ─► is_ready() ─► SaidReady
                                        └─ a coroutine ─► the model's event loop, or one of its own

The thread is started by the first question and kept; a check that never returns keeps it, and
nothing else: the supervisor asks again only when it has the answer. A coroutine that takes longer
than CHECK_LIMIT_S is cancelled; a plain method cannot be.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from queue import SimpleQueue

from actorserve.actors.forked import end_if_forked
from actorserve.runtime.child import PeerGone
from actorserve.runtime.stub_end import StubEnd
from actorserve.triton.failure import format_exception
from actorserve.wire.messages import SaidReady

CHECK_LIMIT_S = 5.0
NOT_A_BOOL = "is_ready() must return a boolean value"
TIMED_OUT = "Timed out waiting for user-defined is_ready() response"
MOST_PROBLEM_CHARS = 16 << 10

Outcome = tuple[bool, str]


class ReadinessHook:
    """See the module's head. `ask` belongs to the control thread."""

    def __init__(
        self,
        end: StubEnd,
        hook: Callable[[], object],
        model_path: str,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """`loop` is the model's own, which its coroutines run in; None where it has none."""
        self._end = end
        self._hook = hook
        self._model_path = model_path
        self._model_loop = loop
        self._own_loop: asyncio.AbstractEventLoop | None = None
        self._numbers: SimpleQueue[int] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def ask(self, number: int) -> None:
        """Have the hook called; never waits."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="actorserve-is-ready", daemon=True
            )
            self._thread.start()
        self._numbers.put(number)

    # --- the hook's thread -----------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            number = self._numbers.get()
            is_ready, problem = self._check()
            try:
                self._end.send(SaidReady(number, is_ready, problem[:MOST_PROBLEM_CHARS]))
            except PeerGone:
                return  # the control thread ends the process

    def _check(self) -> Outcome:
        try:
            result = self._hook()
            end_if_forked(self._end)
            if inspect.isawaitable(result):
                return self._complete(result)
            return _outcome(result)
        except BaseException as error:
            end_if_forked(self._end, error)
            return False, format_exception(error, self._model_path)

    def _complete(self, result: Awaitable[object]) -> Outcome:
        """Run a coroutine to its end: in the loop that the model's other ones run in."""
        check = self._limited(result)
        loop = self._model_loop
        if loop is None:
            if self._own_loop is None:
                self._own_loop = asyncio.new_event_loop()
            return self._own_loop.run_until_complete(check)
        try:
            future = asyncio.run_coroutine_threadsafe(check, loop)
        except RuntimeError:  # it is closed: the model is finalized
            check.close()
            getattr(result, "close", lambda: None)()
            return False, "its event loop has ended"
        return future.result()

    async def _limited(self, result: Awaitable[object]) -> Outcome:
        """Await it for CHECK_LIMIT_S; return only when it has really ended."""
        task = asyncio.ensure_future(self._awaited(result))
        done, _ = await asyncio.wait([task], timeout=CHECK_LIMIT_S)
        if not done:
            task.cancel()
            await asyncio.wait([task])
            return False, TIMED_OUT
        return (False, "is_ready() was cancelled") if task.cancelled() else task.result()

    async def _awaited(self, result: Awaitable[object]) -> Outcome:
        try:
            return _outcome(await result)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            # Here, because a SystemExit in a task would leave the model's loop.
            return False, format_exception(error, self._model_path)


def _outcome(result: object) -> Outcome:
    return (result, "") if isinstance(result, bool) else (False, NOT_A_BOOL)
