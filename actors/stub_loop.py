# SPDX-License-Identifier: Apache-2.0
"""The main thread's event loop, in the stub of a model whose `execute` is a coroutine.

    work lane ─► bell ─► _on_news ─► a task for each batch, `limit` at a time
                             └─────► answers to calls, straight to their futures

Batches and calls need no other thread, so an `await` of another model costs no switch. When the
model is finalized, the loop goes on in a thread of its own until `finalize` has returned: models
use it there.
"""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections import deque
from typing import Any

from actorserve.actors.calls import Calls
from actorserve.actors.execution import Execution
from actorserve.actors.failed_code import let_go, watched_task
from actorserve.errors import ProtocolError
from actorserve.runtime.lookout import Lookout
from actorserve.runtime.stub_end import StubEnd
from actorserve.wire.messages import Execute, Finalize

CLOSE_TIMEOUT_S = 5.0


class StubLoop:
    """See the module's head. Belongs to the main thread."""

    def __init__(self, end: StubEnd, execution: Execution, calls: Calls, limit: int) -> None:
        """`limit` is how many batches may be in execution at a time."""
        self._end = end
        self._execution = execution
        self._limit = limit
        self._loop = asyncio.new_event_loop()
        self._lookout = Lookout(self._loop, end, self._on_news)
        self._waiting: deque[Execute] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_finalizing = False
        self._is_over = False
        self._thread: threading.Thread | None = None
        calls.after_main_wait = self._look_again
        calls.main_loop = self._loop

    def run(self) -> None:
        """Run batches until the supervisor wants the model to be finalized."""
        loop = self._loop
        asyncio.set_event_loop(loop)
        loop.set_exception_handler(_on_error)
        loop.set_task_factory(watched_task)
        self._end.attach(loop, self._on_news)
        loop.call_soon(self._on_news)
        while not self._is_over:
            try:
                loop.run_forever()
            except BaseException:
                # A SystemExit or KeyboardInterrupt in a task of the model's own leaves the loop.
                traceback.print_exc()
        self._end.detach(loop)

    def hand_over(self) -> None:
        """Let the loop go on in another thread."""
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="actorserve-model-loop", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Cancel what is left and end the loop and its thread."""
        if self._thread is None:
            self._loop.close()
            return
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).add_done_callback(
            lambda _: self._loop.call_soon_threadsafe(self._loop.stop)
        )
        self._thread.join(CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()

    # --- in the loop -----------------------------------------------------------------------------

    def _on_news(self) -> None:
        """Take everything that is there, then look out for the next: calls may be under way."""
        self._lookout.patience.end()
        while not self._is_over:
            message = self._end.receive_nowait()
            if message is None:
                self._lookout.rest(is_due=bool(self._tasks))
                return
            self._take(message)

    def _look_again(self) -> None:
        """Look at the lane soon: the main thread has read it while it waited for an answer."""
        if not self._loop.is_closed() and self._loop.is_running():
            self._loop.call_soon(self._on_news)

    def _take(self, message: object) -> None:
        if isinstance(message, Execute):
            self._waiting.append(message)
            self._start()
        elif isinstance(message, Finalize):
            self._is_finalizing = True
            self._end_if_idle()
        else:
            raise ProtocolError(f"{type(message).__name__} came while the model serves")

    def _start(self) -> None:
        while self._waiting and len(self._tasks) < self._limit:
            batch = self._execution.run_async(self._waiting.popleft())
            task = asyncio.Task(batch, loop=self._loop)  # ours: it raises nothing of the model's
            self._tasks.add(task)
            task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            # Ours: what the model raises is caught where it is called.
            self._loop.call_exception_handler(
                {"message": "a batch could not be ended", "exception": task.exception()}
            )
        self._start()
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        if self._is_finalizing and not self._tasks and not self._waiting:
            self._is_over = True
            self._loop.stop()


def _on_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Say what nobody has looked at, such as the error of a task of the model's own."""
    loop.default_exception_handler(context)
    error = context.get("exception")
    if isinstance(error, BaseException):
        let_go(error)


async def _cancel_all() -> None:
    """Cancel every other task, and wait for their ends."""
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
