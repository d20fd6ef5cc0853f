# SPDX-License-Identifier: Apache-2.0
"""What all parts of one system share: its loop and the way into it, its actors, its processes."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from actorserve.errors import ActorStopped
from actorserve.ids import Ids
from actorserve.runtime.processes import Processes

if TYPE_CHECKING:
    from actorserve.runtime.cell import Cell

_log = logging.getLogger("actorserve")
_Handed = tuple[Callable[..., object], tuple[Any, ...], "Callable[[], object] | None"]


class Core:
    """Built in the system's loop, and belongs to it, but for `post` and `is_here`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.loop = asyncio.get_running_loop()
        self.ids = Ids()
        self.cells: dict[int, Cell] = {}
        self.failure: str = ""
        self._thread = threading.get_ident()
        self._processes: Processes | None = None
        self._handed: deque[_Handed] = deque()
        self._is_due = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_closed = False

    # --- into the loop ---------------------------------------------------------------------------

    def is_here(self) -> bool:
        """Whether this is the loop's thread."""
        return threading.get_ident() == self._thread

    def post(
        self,
        function: Callable[..., object],
        *args: Any,
        if_lost: Callable[[], object] | None = None,
    ) -> bool:
        """Call a function in the loop, in the order of the posts. From any thread.

        False when the loop is closed. It may also be closed before the function's turn: then, as
        soon as somebody notices, `if_lost` is called instead, in whatever thread; as it is when
        this returns False.
        """
        self._handed.append((function, args, if_lost))
        # The turn that is due never comes if the loop was closed before it.
        if self._is_due and not self.loop.is_closed():
            return True
        self._is_due = True
        try:
            if self.is_here():
                self.loop.call_soon(self._take_over)
            else:
                self.loop.call_soon_threadsafe(self._take_over)
        except RuntimeError:
            self.lose_loop()
            return False
        return True

    def lose_loop(self) -> None:
        """Let nobody wait for what will not come: the loop was closed under the actors."""
        self.is_closed = True
        self._is_due = False
        while self._handed:
            try:
                _, _, if_lost = self._handed.popleft()
            except IndexError:
                break  # another thread does this, too
            if if_lost is not None:
                if_lost()
        error = ActorStopped("the event loop of the actor system was closed")
        for cell in list(self.cells.values()):
            cell.lost(error)

    def _take_over(self) -> None:
        self._is_due = False
        for _ in range(len(self._handed)):
            function, args, _ = self._handed.popleft()
            try:
                function(*args)
            except Exception:
                _log.exception("a task of the actor system failed")

    def run(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine in a task that is kept alive; it begins in a later turn.

        Whatever the loop's task factory does: an eager one would begin within the caller's step.
        """
        task = asyncio.Task(coroutine, loop=self.loop)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("a task of the actor system failed", exc_info=task.exception())

    def waits_for(self, actor: int, number: int) -> bool:
        """Whether `number` cannot end before `actor` does: it is the same, or one above it."""
        cell = self.cells.get(actor)
        while cell is not None and cell.id != number:
            cell = cell.parent
        return cell is not None

    # --- processes -------------------------------------------------------------------------------

    @property
    def processes(self) -> Processes:
        """What process actors share; made when the first asks for it."""
        if self.is_closed:
            raise ActorStopped(f"the actor system {self.name!r} was stopped")
        if self._processes is None:
            self._processes = Processes(self.loop)
        return self._processes

    def has_processes(self) -> bool:
        """Whether there has been a process actor."""
        return self._processes is not None

    async def close(self) -> None:
        """End the processes; all actors have ended."""
        self.is_closed = True
        if self._processes is not None:
            await self._processes.stop()
