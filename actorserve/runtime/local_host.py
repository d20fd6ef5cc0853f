# SPDX-License-Identifier: Apache-2.0
"""Hosts in the system's own process: an actor in its loop, or in a thread."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from actorserve.errors import ActorserveError
from actorserve.runtime.actor import Actor, ActorContext
from actorserve.runtime.call import Call
from actorserve.runtime.engine import Engine, died, end_fork
from actorserve.runtime.failure import crash_reason
from actorserve.runtime.host import HostOwner, HostStats
from actorserve.runtime.life import Life, is_async
from actorserve.runtime.loop_engine import LoopEngine
from actorserve.runtime.thread_engine import ThreadEngine
from actorserve.state.lifecycle import Phase

_log = logging.getLogger("actorserve")

JOIN_S = 1.0


class Birth:
    """What a host of this process needs to know of its actor."""

    __slots__ = ("args", "context", "incarnation", "kind", "kwargs")

    def __init__(
        self,
        incarnation: int,
        kind: type[Actor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: ActorContext,
    ) -> None:
        self.incarnation = incarnation
        self.kind = kind
        self.args = args
        self.kwargs = kwargs
        self.context = context

    def life(self) -> Life:
        """Return the life, not begun."""
        return Life(self.kind, self.args, self.kwargs, self.context)


class _LocalHost:
    """What both share: reports to the cell, and the end by force, which is giving it up."""

    def __init__(self, birth: Birth, cell: HostOwner, post: Callable[..., object]) -> None:
        self._birth = birth
        self._cell = cell
        self._post = post
        self._is_gone = False
        self._engine: Engine

    # --- EngineOwner, in the engine's thread -----------------------------------------------------

    def on_started(self) -> None:
        """See EngineOwner."""
        self._post(self._cell.ready, self._birth.incarnation)

    def on_start_failed(self, reason: str, error: BaseException) -> None:
        """See EngineOwner."""
        self._end_with(self._start_failed, reason)

    def on_ended(self, reason: str, is_normal: bool) -> None:
        """See EngineOwner."""
        self._end_with(self._exited, reason, is_normal)

    def on_idle(self) -> None:
        """See EngineOwner."""
        self._cell.idle()

    def _end_with(self, report: Callable[..., None], *args: Any) -> None:
        self._post(report, *args)

    # --- Host, in the system's loop --------------------------------------------------------------

    def _born(self) -> None:
        self._cell.spawned(self._birth.incarnation)
        self._cell.phase_began(self._birth.incarnation, Phase.INITIALIZING, "in its first hook")

    def wake(self) -> None:
        """See Host."""
        self._engine.wake()

    def drop_waiting(self, error: ActorserveError) -> None:
        """See Host: it takes nothing that it does not begin."""

    def finish(self) -> None:
        """See Host."""
        self._engine.end("stopped")

    def end(self) -> None:
        """End of the actor's own will. From any thread."""
        self._engine.end("ended of itself")

    def abort(self) -> None:
        """See Host: there is no way to end user code in this process, and it is given up."""
        self.kill("killed: it did not end in time")

    def resume(self) -> None:
        """See Host."""

    def kill(self, reason: str) -> None:
        """Fail what it has begun, and forget it; a thread goes on until its message ends."""
        if not self._is_gone:
            self._engine.abandon(died(self._cell.name, reason))
            self._cut()
            self._post(self._exited, reason, False)

    def _cut(self) -> None:
        """Cancel what is awaited."""

    def is_traced(self) -> bool:
        """See Host."""
        return False

    def is_idle(self) -> bool:
        """See Host."""
        return self._engine.is_idle()

    def stats(self) -> HostStats:
        """See Host."""
        return HostStats(self._engine.handled, self._engine.failed)

    def _start_failed(self, reason: str) -> None:
        if not self._is_gone:
            self._cell.start_failed(self._birth.incarnation, reason)
            self._exited(reason, False)

    def _exited(self, reason: str, is_normal: bool) -> None:
        if not self._is_gone:
            self._is_gone = True
            self._cell.exited(self._birth.incarnation, reason, is_normal=is_normal)


class LoopHost(_LocalHost):
    """An actor in the system's loop."""

    def __init__(
        self,
        birth: Birth,
        cell: HostOwner,
        post: Callable[..., object],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(birth, cell, post)
        self._loop = loop
        self._loop_engine = LoopEngine(
            loop, birth.life(), cell.mailbox, self, is_interruptible=True
        )
        self._engine = self._loop_engine

    def wake(self) -> None:
        """See Host."""
        if self._loop.is_closed():
            self._post(_nothing)  # which tells everybody who waits
        self._loop_engine.wake()

    def start(self) -> None:
        """See Host."""
        self._born()
        self._loop_engine.start()

    def _cut(self) -> None:
        self._loop_engine.cut()


class ThreadHost(_LocalHost):
    """An actor in a thread of its own; with async code, in an event loop of that thread."""

    def __init__(self, birth: Birth, cell: HostOwner, post: Callable[..., object]) -> None:
        super().__init__(birth, cell, post)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._report: Callable[[], object] = lambda: None  # the thread's last word
        target = self._run
        if is_async(birth.kind):
            self._loop = asyncio.new_event_loop()
            self._engine = LoopEngine(self._loop, birth.life(), self, self)
            target = self._run_loop
        else:
            self._engine = ThreadEngine(birth.life(), self, self)
        self._bell = threading.Lock()
        self._bell.acquire()
        self._sleeping: list[bool] = []  # whoever pops it rings the bell
        self._thread = threading.Thread(target=target, name=f"actorserve-{cell.name}", daemon=True)

    def start(self) -> None:
        """See Host."""
        try:
            self._thread.start()
        except RuntimeError as error:  # no room for another thread
            self._is_gone = True
            if self._loop is not None:
                self._loop.close()
            self._cell.spawn_failed(self._birth.incarnation, str(error))
            return
        self._born()

    def _run(self) -> None:
        assert isinstance(self._engine, ThreadEngine)
        self._live(self._engine.run)
        self._report()

    def _run_loop(self) -> None:
        assert self._loop is not None and isinstance(self._engine, LoopEngine)
        asyncio.set_event_loop(self._loop)
        self._engine.start()
        self._live(self._loop.run_forever)
        try:
            close_loop(self._loop)
        except BaseException as error:  # of tasks that the actor has left behind
            _log.error("ending the loop of %r failed", self._cell.name, exc_info=error)
        finally:
            self._report()

    def _live(self, run: Callable[[], None]) -> None:
        """Run to the end, whatever brings it about: the thread has a last word in any case."""
        reason = "its event loop was stopped"
        try:
            run()
        except BaseException as error:  # that of a background task, for one: it passes through
            reason = crash_reason(error)
            _log.error("the thread of %r: %s", self._cell.name, reason, exc_info=error)
        if not self._engine.is_over:
            self._engine.abandon(died(self._cell.name, reason))
            self._report = lambda: self._post(self._joined, self._exited, reason, False)

    def _end_with(self, report: Callable[..., None], *args: Any) -> None:
        self._report = lambda: self._post(self._joined, report, *args)
        if self._loop is not None:
            self._loop.stop()

    def _joined(self, report: Callable[..., None], *args: Any) -> None:
        self._thread.join(JOIN_S)  # this was its last word
        report(*args)

    def _cut(self) -> None:
        if self._loop is None:
            self.ring()
        else:
            try:
                self._loop.call_soon_threadsafe(self._cut_loop)
            except RuntimeError:
                pass  # it ended this moment

    def _cut_loop(self) -> None:
        assert self._loop is not None and isinstance(self._engine, LoopEngine)
        self._engine.cut()
        self._loop.stop()

    # --- BlockingSource --------------------------------------------------------------------------

    def take(self) -> Call | None:
        """See Source."""
        mailbox = self._cell.mailbox
        if mailbox.is_severed:
            end_fork()
        return mailbox.take()

    def sleep(self, has_news: Callable[[], bool]) -> None:
        """See BlockingSource."""
        self._sleeping.append(True)
        if self._cell.mailbox.has_calls() or has_news():
            try:
                self._sleeping.pop()
                return
            except IndexError:
                pass  # somebody has rung already: take the bell down
        self._bell.acquire()

    def ring(self) -> None:
        """See BlockingSource."""
        try:
            self._sleeping.pop()
        except IndexError:
            return
        self._bell.release()


def _nothing() -> None:
    pass


def close_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel what still runs in a loop, and close it.

    Raises SystemExit and its like where a task that was left behind did so at its end.
    """
    try:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        try:
            if tasks:
                _run_out(loop, asyncio.wait(tasks, timeout=JOIN_S), len(tasks))
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def _run_out(
    loop: asyncio.AbstractEventLoop, ending: Coroutine[Any, Any, object], most: int
) -> None:
    """Run it to its end, whatever others in the loop, `most` of them at most, let through."""
    task = loop.create_task(ending)
    error: BaseException | None = None
    for _ in range(most + 1):
        try:
            loop.run_until_complete(task)
        except BaseException as another:
            error = another
        if task.done():
            break
    if error is not None:
        raise error
