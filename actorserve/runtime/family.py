# SPDX-License-Identifier: Apache-2.0
"""The children of one actor, or of the system: who is restarted together, and when to give up.

    a child dies ─► strategy.Group ─► Plan: stop these, start those
                                      or escalate: stop all, and the owner has failed

One death is dealt with after the other. A child learns of its own death (its machine gets Exited)
at its place in the plan, after those that have to be stopped before.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Protocol

from actorserve.clock import monotonic_s
from actorserve.errors import AlreadyExists
from actorserve.runtime.core import Core
from actorserve.state.lifecycle import State
from actorserve.state.strategy import Group, GroupStats, Plan, Strategy

if TYPE_CHECKING:
    from actorserve.runtime.cell import Cell

_log = logging.getLogger("actorserve")


class FamilyOwner(Protocol):
    """Whose children they are."""

    def children_failed(self, reason: str) -> None:
        """Hear that the children are given up and stopped: it is the owner's failure now."""


class Family:
    """Supervised children, in the order of their start."""

    def __init__(
        self,
        core: Core,
        owner: FamilyOwner,
        strategy: Strategy,
        intensity: tuple[int, float] | None,
        *,
        is_top: bool = False,
    ) -> None:
        self.cells: dict[str, Cell] = {}
        self._core = core
        self._owner = owner
        self._is_top = is_top
        self._strategy = strategy
        self._intensity = intensity
        self._group = Group(strategy, (), intensity)
        self._deaths: deque[Cell] = deque()
        self._task: asyncio.Task[None] | None = None
        self._number = 0

    def begin(self) -> None:
        """Start counting anew, in a new life of the owner: an escalation is final for one."""
        self._group = Group(self._strategy, tuple(self.cells), self._intensity)

    def name_for(self, wanted: str | None, kind: str) -> str:
        """Return the name of a new child. Raises AlreadyExists."""
        if wanted is not None:
            if wanted in self.cells:
                raise AlreadyExists(f"there is an actor {wanted!r} here already")
            return wanted
        while True:
            self._number += 1
            name = f"{kind.lower()}-{self._number}"
            if name not in self.cells:
                return name

    def add(self, cell: Cell) -> None:
        """Take a child in, as the last."""
        self.cells[cell.name] = cell
        self._group.order = tuple(self.cells)

    def remove(self, cell: Cell) -> None:
        """Let a child go that has ended for good."""
        if self.cells.get(cell.name) is cell:
            del self.cells[cell.name]
            self._group.order = tuple(self.cells)

    # --- deaths ----------------------------------------------------------------------------------

    def died(self, cell: Cell) -> None:
        """Deal with a child whose life has ended unasked, and that does not know it yet."""
        if self._group.strategy is Strategy.ONE_FOR_ONE and self._task is None:
            plan = self._plan(cell)
            if plan.is_escalated:
                self._run(self._escalate(cell, plan))
            else:
                cell.accept_end()
            return
        self._deal_with(cell)

    def gave_up(self, cell: Cell, reason: str) -> None:
        """Deal with a child that ran and has been given up by its own policy."""
        _log.error("actor %r is given up: %s", cell.name, reason)
        if not (self._is_top and self._group.strategy is Strategy.ONE_FOR_ONE):
            self._deal_with(cell)

    def _deal_with(self, cell: Cell) -> None:
        self._deaths.append(cell)
        if self._task is None:
            self._run(self._deal())

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._task = self._core.run(coroutine)
        self._task.add_done_callback(self._dealt)

    def _dealt(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if self._deaths and not task.cancelled():
            self._run(self._deal())

    def _plan(self, cell: Cell) -> Plan:
        return self._group.child_died(cell.name, monotonic_s(), cell.will_restart())

    async def _deal(self) -> None:
        while self._deaths:
            cell = self._deaths.popleft()
            if self.cells.get(cell.name) is not cell:
                continue  # it was stopped meanwhile
            failed: Cell | None = None
            if cell.has_ended_unasked():
                plan = self._plan(cell)
                if plan.is_escalated:
                    await self._escalate(cell, plan)
                    return
                failed = await self._carry_out(plan, cell)
            elif cell.machine.state is State.FATAL:
                failed = cell
            if failed is not None:
                await self._escalate(failed, self._group.escalate(failed.name))
                return

    async def _carry_out(self, plan: Plan, died: Cell) -> Cell | None:
        """Stop and start as planned; return the child that did not come back, if any."""
        if not plan.start:
            died.accept_end()
            return None
        for name in plan.stop:
            if name in self.cells:
                await self.cells[name].halt()
        for name in plan.start:
            cell = self.cells.get(name)
            if cell is None:
                continue
            if cell.machine.restart.kind == "temporary" and cell is not died:
                cell.end_halted()
                continue
            state = await (cell.come_back() if cell is died else cell.start_again())
            if state is State.FATAL:
                return cell
        return None

    async def _escalate(self, cell: Cell, plan: Plan) -> None:
        """Stop all siblings, the latest first, and pass the failure on."""
        reason = f"its child {cell.name!r} {cell.end_reason()}"
        limit = self._group.intensity
        if cell.has_ended_unasked():
            if limit is not None:
                reason = f"its children were restarted more than {limit[0]} times in {limit[1]:g} s"
            cell.escalate(reason)
        for name in plan.stop:
            if name in self.cells:
                await self.cells[name].stop_now()
        self._deaths.clear()
        self._owner.children_failed(reason)

    # --- the end ---------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Stop all children, the latest first."""
        task = self._task
        if task is not None and task is not asyncio.current_task():
            task.cancel()
            await asyncio.wait([task])
        self._deaths.clear()
        while self.cells:
            await next(reversed(self.cells.values())).stop_now()

    def stats(self) -> GroupStats:
        """Return the counts of the group."""
        return self._group.stats()
