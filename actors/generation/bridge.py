# SPDX-License-Identifier: Apache-2.0
"""Between an executor's registry, which any thread uses, and a group of ranks in one loop.

    any thread   send ─► queue ─ one wake ─► flush: neighbours made one ─► RankGroup
    the loop     RankGroup ─► outputs, statistics, events, the end ─► Registry

What comes before the ranks have loaded waits in the queue. It knows no executor, so that a thread
which runs it keeps none alive.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from actorserve.actors.generation.group import RankGroup
from actorserve.actors.generation.group_life import RANK_MODULE, GroupPlan
from actorserve.actors.generation.registry import Registry
from actorserve.errors import (
    ActorserveError,
    EngineDeadError,
    InvalidArgument,
    Unavailable,
)
from actorserve.forking import sever_after_fork
from actorserve.runtime.child import Spawner
from actorserve.runtime.loop_bell import LoopBell
from actorserve.state.restart import Restart
from actorserve.wire.generation import (
    Abort,
    Call,
    CallEnded,
    Close,
    EngineInfo,
    FromRank,
    IterationStats,
    KvEvents,
    Outputs,
    Submit,
)

_log = logging.getLogger("actorserve")
_LEVELS = {0: logging.DEBUG, 1: logging.WARNING, 2: logging.ERROR, 3: logging.DEBUG}

Queued = Submit | Abort | Call
Sendable = Queued | Close

DRAIN_S = 1e6
"""Whoever shuts down waits as long as it likes, and kills then."""


class Bridge:
    """See the module's head. `run` is its whole life, in whatever loop."""

    def __init__(
        self,
        plan: GroupPlan,
        registry: Registry,
        restart: Restart | None,
        on_revive: Callable[[], object],
    ) -> None:
        """`on_revive` is called when another life serves again; it has to call registry.revive."""
        self._plan = plan
        self._registry = registry
        self._restart = restart
        self._on_revive = on_revive
        self._queue: deque[Queued] = deque()
        self._is_due = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._bell: LoopBell | None = None
        self._group: RankGroup | None = None
        self._is_up = False
        self._look_lock = threading.Lock()
        self._stop = asyncio.Event()
        self._hurried = asyncio.Event()  # it is to stop without draining
        self._drain_s: float | None = None  # how long to drain, once it is to stop
        sever_after_fork(self)

    @property
    def group(self) -> RankGroup | None:
        """The group, once it is being started; for its loop's thread, and for a look."""
        return self._group

    def sever(self) -> None:
        """In a forked child: loop and processes are its parent's, and there is nothing to end."""
        self._loop = self._group = self._bell = None
        self._registry.gone.open()

    # --- from any thread --------------------------------------------------------------------------

    def send(self, message: Sendable) -> None:
        """Send a message in its turn; it never waits. Close ends everything, see `stop`."""
        if isinstance(message, Close):
            self.stop(DRAIN_S if message.drain else 0.0)
            return
        self._queue.append(message)
        if not self._is_due:
            try:
                self._is_due = True
                bell = self._bell
                if bell is not None:  # else `run` looks for what has come when it begins
                    bell.ring()
            except BaseException:  # an interrupt: whoever sends next calls
                self._is_due = False
                raise

    def stop(self, drain_s: float) -> None:
        """Have everything ended, after what runs for up to `drain_s`; a second time: sooner."""
        is_first = self._drain_s is None
        if self._drain_s is None or drain_s < self._drain_s:
            self._drain_s = drain_s
        self._call(self._stop.set)
        if drain_s == 0:
            self._call(self._hurried.set)
        if not is_first and drain_s == 0 and self._group is not None:
            self._call(self._group.hurry)

    def kill(self) -> None:
        """Have everything ended at once, by force."""
        self.stop(0.0)
        if self._group is not None:
            self._call(self._group.kill)

    def latest_stats(self) -> dict[str, Any] | None:
        """Return the snapshot of the last iteration, read from shared memory; None if none is."""
        try:
            with self._look_lock:
                return None if self._group is None else self._group.latest_stats()
        except ValueError:  # it was closed meanwhile
            return None

    def _call(self, function: Callable[[], object]) -> None:
        loop = self._loop
        if loop is None:
            return  # `run` looks for it when it begins
        try:
            loop.call_soon_threadsafe(function)
        except RuntimeError:
            pass  # the loop is closed: everybody has been told

    # --- its life, in the loop --------------------------------------------------------------------

    async def run(self, spawner: Spawner | None = None) -> None:
        """Start the ranks, serve until `stop`, end them. Errors are the registry's to tell.

        Without a `spawner` it has one of its own.
        """
        self._loop = asyncio.get_running_loop()
        own = None
        try:
            self._bell = LoopBell(self._loop, self._flush)
            if spawner is None:
                spawner = own = Spawner(preload=(RANK_MODULE,), log=_log_process)
            await self._serve(spawner, is_own=own is not None)
        except ActorserveError as error:
            self._registry.fail_all(_dead(error))
        except BaseException as error:
            self._registry.fail_all(EngineDeadError(f"its executor failed: {error!r}"))
            raise
        finally:
            self._is_up = False
            if self._group is not None:
                await self._group.close()
            if own is not None:
                await own.stop()
            bell, self._bell = self._bell, None
            if bell is not None:
                bell.close()
            self._registry.fail_all(Unavailable("the executor was shut down"))
            self._registry.gone.open()

    async def _serve(self, spawner: Spawner, *, is_own: bool) -> None:
        stopping = asyncio.ensure_future(self._stop.wait())
        if self._drain_s is not None:
            self._stop.set()
        starting = asyncio.ensure_future(self._start(spawner, is_own=is_own))
        try:
            await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not starting.done() and not await self._may_drain(starting):
                return  # it is not wanted any more; what waits for it is told by `run`
            info = starting.result()
            self._registry.info = info
            self._is_up = True
            self._registry.ready.open()
            self._flush()
            await stopping
            await self._close()
        finally:
            for task in (starting, stopping):
                task.cancel()
            await asyncio.wait([starting, stopping])

    async def _may_drain(self, starting: asyncio.Task[EngineInfo]) -> bool:
        """Whether the ranks have loaded in time for what was sent before they are to stop."""
        if not (self._drain_s and self._queue):
            return False
        hurried = asyncio.ensure_future(self._hurried.wait())
        try:
            await asyncio.wait(
                [starting, hurried],
                timeout=self._drain_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            hurried.cancel()
        return starting.done()

    async def _start(self, spawner: Spawner, *, is_own: bool) -> EngineInfo:
        if is_own:
            await spawner.start()
        self._group = RankGroup(self._plan, spawner, self, restart=self._restart)
        return await self._group.start()

    async def _close(self) -> None:
        """Close the group, with what has been sent so far."""
        assert self._group is not None
        self._flush()
        await self._group.close(drain_s=self._drain_s or 0.0)

    # --- sending, in the loop ---------------------------------------------------------------------

    def _flush(self) -> None:
        """Send what is queued, neighbours of one kind as one message."""
        self._is_due = False
        if not self._is_up:
            return
        queue = self._queue
        while queue:
            message = queue.popleft()
            if type(message) is Submit and queue and type(queue[0]) is Submit:
                requests = list(message.requests)
                while queue and type(queue[0]) is Submit:
                    requests += queue.popleft().requests  # type: ignore[union-attr]
                message = Submit(requests)
            elif type(message) is Abort and queue and type(queue[0]) is Abort:
                ids = list(message.ids)
                while queue and type(queue[0]) is Abort:
                    ids += queue.popleft().ids  # type: ignore[union-attr]
                message = Abort(ids)
            self._send(message)

    def _send(self, message: Queued) -> None:
        assert self._group is not None
        try:
            self._group.send(message)
        except EngineDeadError:
            pass  # everybody has been told, or is on entering
        except Exception as error:
            self._refuse(message, error)

    def _refuse(self, message: Queued, error: Exception) -> None:
        """End what could not be sent, alone: too large, or not to be written down."""
        if isinstance(message, Submit) and len(message.requests) > 1:
            for request in message.requests:
                self._send(Submit([request]))
            return
        if not isinstance(error, ActorserveError):
            error = InvalidArgument(f"it cannot be sent to the engine: {error}")
        if isinstance(message, Submit):
            feed = self._registry.feeds.get(message.requests[0].id)
            if feed is not None:
                self._registry.end(feed, error)
        elif isinstance(message, Call):
            self._registry.call_ended(message.number, None, error.message)

    # --- GroupListener ----------------------------------------------------------------------------

    def group_said(self, message: FromRank) -> None:
        """See GroupListener."""
        registry = self._registry
        if isinstance(message, Outputs):
            stopped = registry.deliver(message.outputs)
            if stopped:
                self.send(Abort(stopped))
        elif isinstance(message, IterationStats):
            registry.take_stats(message.snapshots, message.dropped)
        elif isinstance(message, KvEvents):
            registry.take_kv_events(message.first, message.events)
        elif isinstance(message, CallEnded):
            registry.call_ended(message.number, message.result, message.error)

    def group_died(self, error: EngineDeadError, *, is_last: bool) -> None:
        """See GroupListener."""
        self._is_up = False
        self._registry.fail_all(error)
        self._queue.clear()

    def group_ready(self, info: EngineInfo, epoch: int) -> None:
        """See GroupListener."""
        self._registry.info = info
        self._queue.clear()  # whoever came between has been told that the engine is dead
        self._is_up = True
        self._on_revive()
        self._flush()


def _dead(error: ActorserveError) -> ActorserveError:
    """Return the error as everybody gets it: an engine's own, where it refused to load."""
    if isinstance(error, EngineDeadError):
        return error.refusal or error
    return EngineDeadError(f"it could not be started: {error.message}")


def _log_process(level: int, text: str) -> None:
    _log.log(_LEVELS.get(level, logging.INFO), "%s", text)
