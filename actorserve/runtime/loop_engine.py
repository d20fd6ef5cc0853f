# SPDX-License-Identifier: Apache-2.0
"""Run an actor in an event loop: plain functions at once, async ones in a task, one at a time."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from actorserve.runtime.call import Work
from actorserve.runtime.engine import Engine, EngineOwner, Running, Source
from actorserve.runtime.failure import cut, start_reason
from actorserve.runtime.life import Life

_log = logging.getLogger("actorserve")

TURN = 32
"""Messages, or items of a stream, before others in the loop have their turn."""


class LoopEngine(Engine):
    """The life of an actor in a loop; `is_interruptible` where Ctrl-C may strike in it."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        life: Life,
        source: Source,
        owner: EngineOwner,
        *,
        is_interruptible: bool = False,
    ) -> None:
        super().__init__(life, source, owner)
        self._loop = loop
        self._is_interruptible = is_interruptible
        self._thread = 0  # known when it begins
        self._is_running = False  # between the first hook and the last
        self._is_due = False
        self._task: asyncio.Task[Any] | None = None
        self._unbegun: Any = None  # what the task will wait for, until its first step

    # --- turns -----------------------------------------------------------------------------------

    def wake(self) -> None:
        """See Engine."""
        if self._is_due:
            return
        self._is_due = True
        try:
            if threading.get_ident() == self._thread:
                self._loop.call_soon(self._turn, context=self._context)
            else:
                self._loop.call_soon_threadsafe(self._turn, context=self._context)
        except RuntimeError:
            pass  # the loop is closed: its owner tells those who wait

    def start(self) -> None:
        """Construct the actor and call its first hook, in a later turn. In the loop's thread."""
        self._loop.call_soon(self._begin, context=self._context)

    def is_here(self) -> bool:
        """See Engine."""
        try:
            task = asyncio.current_task()
        except RuntimeError:
            return False
        return task is None or task is self._task

    def _turn(self) -> None:
        """Do what there is to do, until it is much or has to be waited for."""
        self._is_due = self._is_resting = False
        for _ in range(TURN):
            if self._task is not None:
                self._cut_unread(self._task)
                return
            if self._is_over or not self._is_running:
                return
            if self._grants:
                self._resume(*self._grants.popleft())
            elif self._is_ending:
                self._finish()
                return
            else:
                call = self._source.take()
                if call is None:
                    self._is_resting = True
                    self._owner.on_idle()
                    return
                self._run(call)
        self.wake()

    def _later(self, awaitable: Awaitable[Any], then: Callable[[Any], None], call: Work) -> None:
        """Wait in a task, then go on; nothing else is begun meanwhile."""
        self._unbegun = awaitable
        self._run_task(self._wait(awaitable, then, call))

    def _run_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run it in the task that the actor waits for."""
        task = self._loop.create_task(coroutine)
        if not task.done():  # an eager task factory may have run it to its end, and others after it
            self._task = task

    async def _wait(
        self, awaitable: Awaitable[Any], then: Callable[[Any], None], call: Work
    ) -> None:
        self._enter_task()
        try:
            result = await awaitable
            while hasattr(result, "__await__"):  # passed on, from another actor for one
                result = await result
        except BaseException as error:
            cut(error)
            self._task = None
            self._caught(call, error)
        else:
            self._task = None
            then(result)
        self.wake()

    def _enter_task(self) -> None:
        """Take note of the task in its first step, which may be within its creation."""
        self._task = asyncio.current_task()
        self._unbegun = None

    # --- one message -----------------------------------------------------------------------------

    def _run(self, call: Work) -> None:
        self._current = call
        call.runner = self
        try:
            result = self._life.receive(call.message())
        except BaseException as error:
            cut(error)
            self._caught(call, error)
            return
        if hasattr(result, "__await__"):
            self._later(result, lambda value: self._received(call, value), call)
        else:
            self._received(call, result)

    def _received(self, call: Work, result: Any) -> None:
        self._current = None
        if not self._is_over and self._settle(call, result):
            self._advance(call, self._streams[call])

    def _caught(self, call: Work, error: BaseException) -> None:
        """Take what user code raised."""
        self._current = None
        running = self._streams.pop(call, None)
        if self._is_over:
            return
        if isinstance(error, asyncio.CancelledError):
            if running is not None and running.is_cut:
                self.handled += 1
                return
            error = RuntimeError("its task was cancelled")
        reason = self._raised(call, error)
        if reason:
            self._leave(reason, is_normal=False)
        self._pass_on(error)

    def _pass_on(self, error: BaseException) -> None:
        """Let a Ctrl-C that struck in user code end the program, as it would elsewhere."""
        is_here = self._is_interruptible and threading.current_thread() is threading.main_thread()
        if is_here and isinstance(error, KeyboardInterrupt):
            raise error

    # --- streams ---------------------------------------------------------------------------------

    def _resume(self, call: Work, count: int) -> None:
        running = self._streams.get(call)
        if running is not None:
            running.credit += count
            self._advance(call, running)

    def _advance(self, call: Work, running: Running) -> None:
        """Send items as far as there is credit, a turn's worth at a time."""
        if call.is_over:
            self._drop(call, running)
        elif running.credit <= 0:
            return
        elif hasattr(running.iterator, "__anext__"):
            self._current = call
            self._later(self._send_all(call, running), lambda _: self._paused(call), call)
        else:
            self._send_some(call, running)

    def _send_some(self, call: Work, running: Running) -> None:
        self._current = call
        try:
            for _ in range(min(TURN, running.credit)):
                item = next(running.iterator)
                running.credit -= 1
                call.item(item)
        except StopIteration:
            self._ended(call)
        except BaseException as error:
            cut(error)
            self._caught(call, error)
        else:
            self._current = None
            self._grants.appendleft((call, 0))  # goes on in its next turn, before anything else
            self.wake()

    def _cut_unread(self, task: asyncio.Task[Any]) -> None:
        """Cancel what a generator waits for, once, if nobody reads its stream any more."""
        call = self._current
        running = self._streams.get(call) if call is not None else None
        if call is not None and running is not None and call.is_over and not running.is_cut:
            running.is_cut = True
            task.cancel()

    async def _send_all(self, call: Work, running: Running) -> None:
        while running.credit > 0 and not call.is_over:
            try:
                item = await running.iterator.__anext__()
            except StopAsyncIteration:
                self._ended(call)
                return
            running.credit -= 1
            call.item(item)

    def _paused(self, call: Work) -> None:
        self._current = None
        running = self._streams.get(call)
        if running is not None and call.is_over:
            self._drop(call, running)

    def _ended(self, call: Work) -> None:
        self._current = None
        self._streams.pop(call, None)
        self.handled += 1
        call.end()

    def _drop(self, call: Work, running: Running) -> None:
        """Close the generator of a stream that nobody reads."""
        if hasattr(running.iterator, "aclose"):
            self._streams.pop(call, None)
            self.handled += 1
            closing = _quietly(running.iterator.aclose(), self._life.name)
            self._later(closing, lambda _: None, call)
        else:
            self._forget(call)

    # --- beginning and end -----------------------------------------------------------------------

    def _begin(self) -> None:
        self._thread = threading.get_ident()
        try:
            result = self._life.begin()
        except BaseException as error:
            cut(error)
            self._start_failed(error)
            return
        if hasattr(result, "__await__"):
            self._unbegun = result
            self._run_task(self._await_start(result))
        else:
            self._started()

    async def _await_start(self, awaitable: Awaitable[Any]) -> None:
        self._enter_task()
        try:
            await awaitable
        except BaseException as error:
            cut(error)
            self._task = None
            self._start_failed(error)
            return
        self._task = None
        self._started()

    def _started(self) -> None:
        if not self._is_over:
            self._is_running = True
            self._owner.on_started()
            self.wake()

    def _start_failed(self, error: BaseException) -> None:
        if not self._is_over:
            self._is_over = True
            self._owner.on_start_failed(start_reason(error), error)
        self._pass_on(error)

    def _finish(self) -> None:
        self._is_running = False
        self._run_task(self._await_end())

    async def _await_end(self) -> None:
        self._enter_task()
        for running in list(self._streams.values()):
            if hasattr(running.iterator, "aclose"):
                await _quietly(running.iterator.aclose(), self._life.name)
        try:
            result = self._life.finish()
            if hasattr(result, "__await__"):
                await result
        except BaseException as error:
            cut(error)
            if not self._is_over:
                _log.error("stopping of %r failed", self._life.name, exc_info=error)
        self._task = None
        self._leave(self._end_reason, is_normal=True)

    def cut(self) -> None:
        """Cancel the task that an abandoned actor waits in. In the loop's thread."""
        if self._task is not None:
            self._task.cancel()
        unbegun, self._unbegun = self._unbegun, None
        if hasattr(unbegun, "close"):
            unbegun.close()  # else Python complains that nobody awaited it


async def _quietly(closing: Awaitable[None], name: str) -> None:
    try:
        await closing
    except Exception as error:
        cut(error)
        _log.error("closing a stream of %r failed", name, exc_info=error)
