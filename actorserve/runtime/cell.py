# SPDX-License-Identifier: Apache-2.0
"""One supervised actor, over all its lives: a mailbox, a machine, and a host at a time.

    ChildMachine ── actions ──► host: start, finish, kill; timers; the mailbox opens and refuses
         ▲                         │
         └── events ◄── reports of the host, timers, orders

The machine (state/supervision.py) decides; this carries out. An end that nobody asked for passes
the family first (family.py), which may have to stop others before the actor is started again.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any

from actorserve.clock import monotonic_s
from actorserve.errors import (
    ActorDead,
    ActorRestarting,
    ActorserveError,
    ActorStopped,
)
from actorserve.runtime.actor import ActorContext
from actorserve.runtime.answer import Answer
from actorserve.runtime.core import Core
from actorserve.runtime.family import Family
from actorserve.runtime.host import Host, HostStats
from actorserve.runtime.mailbox import Mailbox
from actorserve.runtime.ref import ActorRef, Door
from actorserve.runtime.spec import ActorSpec, HostMaker
from actorserve.runtime.stats import ActorStats
from actorserve.state import lifecycle as life
from actorserve.state.supervision import ChildMachine

State = life.State
RETRY_WITHIN_S = 1.0
"""A message for an actor whose next start is due within this waits for it; later, it fails."""

_log = logging.getLogger("actorserve")
_GONE = (State.STOPPED, State.FATAL)


class Cell:
    """A supervised actor. Belongs to the system's loop, but for `mailbox`, `idle`, `stats`."""

    def __init__(
        self,
        core: Core,
        door: Door,
        spec: ActorSpec,
        siblings: Family,
        make_host: HostMaker,
        parent: Cell | None,
    ) -> None:
        self.id = core.ids.next()
        self.name = spec.name
        self.spec = spec
        self.parent = parent
        self.is_remote = spec.is_remote
        self.mailbox = Mailbox(self.name, spec.mailbox, self._wake)
        self.ref = ActorRef(door, self.id, self.name, self)
        self.family = Family(core, self, spec.strategy, spec.intensity)
        self.machine = ChildMachine(spec.where.restart, spec.where.budgets(), random.random)
        self._core = core
        self._siblings = siblings
        self._make_host = make_host
        self._host: Host | None = None
        self._timers: dict[life.Timer, asyncio.TimerHandle] = {}
        self._start_answer: Answer[ActorRef] | None = None
        self._stop_answers: list[Answer[None]] = []
        self._end: life.Exited | None = None  # unasked, and the machine does not know it yet
        self._has_run = False
        self._is_stopping = False
        self._is_halted = False
        self._is_removed = False
        self._settled: list[asyncio.Future[State]] = []
        self._idle: asyncio.Future[None] | None = None
        self._hurry = asyncio.Event()
        self._done = HostStats()  # of earlier lives

    # --- orders ----------------------------------------------------------------------------------

    def start(self, answer: Answer[ActorRef]) -> None:
        """Start; the answer is the reference when it runs, or the reason why it does not."""
        self._start_answer = answer
        self._feed(life.Start(monotonic_s()))

    def stop(self, answer: Answer[None], *, is_drained: bool, timeout_s: float | None) -> None:
        """Stop for good; see ActorRef.stop."""
        if self._is_removed:
            answer.settle(None)
            return
        self._stop_answers.append(answer)
        if not is_drained:
            self._hurry.set()
        if self._is_stopping:
            return
        self._is_stopping = True
        self.mailbox.refuse(ActorStopped(f"actor {self.name!r} is stopping"))
        deadline_s = None if timeout_s is None else monotonic_s() + timeout_s
        self._core.run(self._stop(is_drained, deadline_s))

    async def stop_now(self) -> None:
        """Stop for good, without what waits; returns when it is gone."""
        answer: Answer[None] = Answer(Errand(self.ref, "the end"))
        self.stop(answer, is_drained=False, timeout_s=None)
        await answer

    async def _stop(self, is_drained: bool, deadline_s: float | None) -> None:
        if is_drained and not self._hurry.is_set():
            await self.drained(deadline_s)
        self.mailbox.clear(ActorStopped(f"actor {self.name!r} was stopped"))
        await self.family.stop()
        self._is_halted = False
        self._feed(life.Stop(monotonic_s(), _is_past(deadline_s)))
        if self._end is not None:
            self.accept_end()
        if self.machine.state in _GONE:
            self._check_gone()
        elif deadline_s is not None:
            self._core.loop.call_at(
                self._core.loop.time() + max(0.0, deadline_s - monotonic_s()), self._stop_quickly
            )

    def _stop_quickly(self) -> None:
        if not self._is_removed:
            self._feed(life.Stop(monotonic_s(), True))

    async def drained(self, deadline_s: float | None) -> bool:
        """Wait until it has nothing to do; False if it still has at the deadline."""
        while not self.is_idle():
            self._idle = self._core.loop.create_future()
            hurry = asyncio.ensure_future(self._hurry.wait())
            left_s = None if deadline_s is None else max(0.0, deadline_s - monotonic_s())
            await asyncio.wait(
                [self._idle, hurry], timeout=left_s, return_when=asyncio.FIRST_COMPLETED
            )
            hurry.cancel()
            self._idle = None
            if self._hurry.is_set() or _is_past(deadline_s):
                return self.is_idle()
        return True

    def is_idle(self) -> bool:
        """Whether nothing waits and nothing is in hand."""
        if self.machine.state in _GONE:
            return True
        host = self._host
        if host is None or self.mailbox.has_calls():
            return False
        return self.machine.state is not State.STARTING and host.is_idle()

    # --- orders of the family --------------------------------------------------------------------

    async def halt(self) -> None:
        """Stop for a while, because of a sibling; what waits in the mailbox stays."""
        self._is_halted = True
        await self.family.stop()
        self._feed(life.Stop(monotonic_s()))
        if self._end is not None:
            self.accept_end()
        while self.machine.state not in _GONE:
            await self.settled()

    def start_again(self) -> None:
        """Start after `halt`."""
        self._is_halted = False
        self._feed(life.Start(monotonic_s()))

    def end_halted(self) -> None:
        """End for good after `halt`: a temporary actor is not started again."""
        self._is_halted = False
        self._check_gone()

    def will_restart(self) -> bool:
        """Whether its own policy starts it again after the end that it had."""
        end = self._end
        return end is not None and self.machine.restart.is_restarted_after(end.is_normal)

    def has_ended_unasked(self) -> bool:
        """Whether it is gone, and does not know it yet."""
        return self._end is not None

    def accept_end(self) -> None:
        """Tell the machine of the end, which decides what comes next."""
        end, self._end = self._end, None
        if end is not None:
            self._feed(msgspec_now(end))

    def escalate(self, reason: str) -> None:
        """Give it up: its family has restarted too often."""
        end, self._end = self._end, None
        self._feed(life.Escalate(monotonic_s(), reason))
        if end is not None:
            self._feed(msgspec_now(end))

    def end_reason(self) -> str:
        """Say why it is not there."""
        return self._end.reason if self._end is not None else self.machine.reason()

    async def settled(self) -> State:
        """Wait until it is RUNNING, STOPPED or FATAL; return which."""
        state = self.machine.state
        if state is State.RUNNING and self._end is None or state in _GONE:
            await asyncio.sleep(0)
            if self.machine.state is state and state is not State.RUNNING:
                return state
            if self.machine.state is State.RUNNING and self._is_wanted_running():
                return State.RUNNING
        future: asyncio.Future[State] = self._core.loop.create_future()
        self._settled.append(future)
        return await future

    def _is_wanted_running(self) -> bool:
        return not self._is_halted

    def children_failed(self, reason: str) -> None:
        """See FamilyOwner."""
        if self._host is not None:
            self._host.kill(reason)
