# SPDX-License-Identifier: Apache-2.0
"""One supervised actor, over all its lives: a mailbox, a machine, and a host at a time.

    ChildMachine ── actions ──► host: start, finish, kill; timers; the mailbox opens and refuses
         ▲                         │
         └── events ◄── reports of the host, timers, orders

The machine (state/supervision.py) decides; this carries out. An end that nobody asked for passes
the family first (family.py), which may have to stop others before the actor is started again.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

import msgspec

from actorserve.clock import monotonic_s
from actorserve.errors import ActorDead, ActorRestarting, ActorserveError, ActorStopped
from actorserve.runtime.answer import Answer
from actorserve.runtime.core import Core
from actorserve.runtime.errand import Errand
from actorserve.runtime.family import Family
from actorserve.runtime.host import Host, HostStats
from actorserve.runtime.mailbox import Mailbox
from actorserve.runtime.news import News, is_past
from actorserve.runtime.ref import ActorRef, Door
from actorserve.runtime.spec import ActorSpec
from actorserve.runtime.stats import ActorStats, actor_stats
from actorserve.runtime.stop_order import StopOrder
from actorserve.runtime.timers import Timers
from actorserve.state import lifecycle as life
from actorserve.state.supervision import ChildMachine

State = life.State
RETRY_WITHIN_S = 1.0
"""A message for an actor whose next start is due within this waits for it; later, it fails."""

_log = logging.getLogger("actorserve")
_GONE = (State.STOPPED, State.FATAL)
_UP_OR_GONE = (State.RUNNING, *_GONE)


class Cell:
    """A supervised actor. Belongs to the system's loop, but for `mailbox`, `idle`, `stats`."""

    def __init__(
        self,
        core: Core,
        door: Door,
        spec: ActorSpec,
        name: str,
        siblings: Family,
        parent: Cell | None,
        make_host: Callable[[Cell, int], Host],
    ) -> None:
        self.id = core.ids.next()
        self.name = name
        self.spec = spec
        self.parent = parent
        self.is_remote = spec.is_remote
        self.mailbox = Mailbox(name, spec.mailbox, self._wake)
        self.ref = ActorRef(door, self.id, name, self)
        self.family = Family(core, self, spec.strategy, spec.intensity)
        self.machine = ChildMachine(spec.where.restart, spec.where.budgets(), random.random)
        self.last_end = ""
        self._core = core
        self._door = door
        self._siblings = siblings
        self._make_host = make_host
        self._host: Host | None = None
        self._timers = Timers(core.loop, self._on_timer)
        self._start_answer: Answer[ActorRef] | None = None
        self._order = StopOrder()
        self._end: life.Exited | None = None  # unasked, and the machine does not know it yet
        self._has_run = False
        self._is_halted = False
        self._is_removed = False
        self._news = News(core.loop)
        self._earlier = HostStats()  # the counts of earlier lives

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
        self.mailbox.refuse(ActorStopped(f"actor {self.name!r} is stopping"))
        if not is_drained:
            self._drop_waiting()
        if self._order.add(answer, is_drained=is_drained, timeout_s=timeout_s):
            self._core.run(self._stop())
        self._news.tell()  # who waits for the end has a new deadline, or a hurry

    def _drop_waiting(self) -> None:
        """Fail all that has not been begun."""
        error = ActorStopped(f"actor {self.name!r} was stopped")
        self.mailbox.clear(error)
        if self._host is not None:
            self._host.drop_waiting(error)

    async def stop_now(self) -> None:
        """Stop for good, without what waits; returns when it is gone."""
        answer: Answer[None] = Answer(Errand(self._door, f"the end of {self.name!r}"))
        self.stop(answer, is_drained=False, timeout_s=None)
        await answer

    async def _stop(self) -> None:
        order = self._order
        await self._news.wait_while_until(self._is_worked_off, order.due)
        self._drop_waiting()
        await self.family.stop()
        self._is_halted = False
        if self.machine.state in _GONE:
            self._remove_if_gone()
            return
        self._feed(life.Stop(monotonic_s(), is_past(order.due_s)))
        self.accept_end()
        await self._news.wait_while_until(lambda: not self._is_removed, order.due)
        if not self._is_removed:
            self._feed(life.Stop(monotonic_s(), True))

    def _is_worked_off(self) -> bool:
        return not (self._order.is_hurried or self.is_idle())

    async def drained(self, deadline_s: float | None) -> bool:
        """Wait until it has nothing to do; False where the deadline, or a hurry, came first."""
        await self._news.wait_while(self._is_worked_off, deadline_s)
        return self.is_idle()

    def is_idle(self) -> bool:
        """Whether nothing waits and nothing is in hand."""
        if self.machine.state in _GONE:
            return True
        if self.mailbox.has_calls():
            return False
        is_up = self._host is not None and self.machine.state is State.RUNNING
        return not is_up or self._host is None or self._host.is_idle()

    # --- orders of the family --------------------------------------------------------------------

    async def halt(self) -> None:
        """Stop for a while, because of a sibling; what waits in the mailbox stays."""
        self._is_halted = True
        await self.family.stop()
        self._feed(life.Stop(monotonic_s()))
        self.accept_end()
        await self._news.wait_while(lambda: self.machine.state not in _GONE)

    async def start_again(self) -> State:
        """Start after `halt`; return how that went."""
        self._is_halted = False
        self._feed(life.Start(monotonic_s()))
        return await self._up_or_gone()

    def end_halted(self) -> None:
        """End for good after `halt`: a temporary actor is not started again."""
        self._is_halted = False
        self.mailbox.clear(ActorStopped(f"actor {self.name!r} was stopped with its siblings"))
        self._remove_if_gone()

    def will_restart(self) -> bool:
        """Whether its own policy starts it again after the end that it had."""
        end = self._end
        return end is not None and self.machine.restart.is_restarted_after(end.is_normal)

    def has_ended_unasked(self) -> bool:
        """Whether its life is over, and the machine does not know it yet."""
        return self._end is not None

    def accept_end(self) -> None:
        """Tell the machine of the end, which decides what comes next."""
        end, self._end = self._end, None
        if end is not None:
            self._feed(msgspec.structs.replace(end, now_s=monotonic_s()))

    async def come_back(self) -> State:
        """Accept the end, and wait for what comes of it."""
        self.accept_end()
        return await self._up_or_gone()

    async def _up_or_gone(self) -> State:
        await self._news.wait_while(lambda: self.machine.state not in _UP_OR_GONE)
        return self.machine.state

    def escalate(self, reason: str) -> None:
        """Give it up: its family has restarted too often."""
        self._feed(life.Escalate(monotonic_s(), reason))
        self.accept_end()

    def end_reason(self) -> str:
        """Say why it is not there."""
        return self._end.reason if self._end is not None else self.machine.reason()

    def children_failed(self, reason: str) -> None:
        """See FamilyOwner: it cannot go on without them."""
        if self._host is not None:
            self._host.kill(reason)

    # --- the machine's actions -------------------------------------------------------------------

    def _feed(self, event: life.Event) -> None:
        for action in self.machine.handle(event):
            self._act(action)
        self._news.tell()

    def _act(self, action: life.Action) -> None:
        host = self._host
        if isinstance(action, life.Spawn):
            self._begin_life(action.incarnation)
        elif isinstance(action, life.ArmTimer):
            self._timers.arm(action)
        elif isinstance(action, life.CancelTimer):
            self._timers.cancel(action.kind)
        elif isinstance(action, life.ReportState):
            self._entered(action.state, action.reason)
        elif host is None:
            return  # its end is known here, and will be to the machine
        elif isinstance(action, life.AskFinalize):
            host.finish()
        elif isinstance(action, life.SignalAbort):
            host.abort()
        elif isinstance(action, life.SignalContinue):
            host.resume()
        elif isinstance(action, life.SignalKill):
            host.kill("killed: it did not end in time")

    def _begin_life(self, incarnation: int) -> None:
        self.family.begin()
        try:
            self._host = self._make_host(self, incarnation)
            self._host.start()
        except Exception as error:  # no descriptors, no threads: each Spawn has to be answered
            _log.exception("starting actor %r failed", self.name)
            self._core.post(self.spawn_failed, incarnation, str(error))

    def _on_timer(self, kind: life.Timer, incarnation: int) -> None:
        is_traced = self._host is not None and self._host.is_traced()
        self._feed(life.TimerFired(incarnation, monotonic_s(), kind, is_traced))

    def _entered(self, state: State, reason: str) -> None:
        if state is State.RUNNING:
            self._has_run = True
            self._open()
            self._answer_start(None)
        elif state is State.STARTING:
            self._open()
        elif state is State.BACKOFF:
            self._wait_for_start(reason)
        elif state is State.FATAL:
            self._give_up(reason)
        elif state is State.STOPPED:
            self._core.loop.call_soon(self._remove_if_gone)

    def _open(self) -> None:
        if not self._order.is_given:
            self.mailbox.open()

    def _wait_for_start(self, reason: str) -> None:
        due_s = self.machine.start_due_s(monotonic_s()) or 0.0
        _log.warning("actor %r: %s; it is started again in %.1f s", self.name, reason, due_s)
        if due_s > RETRY_WITHIN_S and not self._order.is_given:
            text = f"actor {self.name!r} died ({reason}) and is started again in {due_s:.1f} s"
            self.mailbox.refuse(ActorRestarting(text, due_s))

    def _give_up(self, reason: str) -> None:
        error = ActorDead(f"actor {self.name!r} is given up: {reason}")
        self.mailbox.refuse(error)
        self.mailbox.clear(error)
        if not self._answer_start(ActorDead(f"actor {self.name!r} did not start: {reason}")):
            self._siblings.gave_up(self, reason)
        self._core.run(self._after_family())

    def _answer_start(self, error: ActorserveError | None) -> bool:
        """Tell whoever spawned it; False if that has been done before."""
        answer, self._start_answer = self._start_answer, None
        if answer is not None:
            answer.settle(self.ref) if error is None else answer.fail(error)
        return answer is not None

    def _remove_if_gone(self) -> None:
        """Leave the tree at the end of the last life; one that failed later stays, to be seen."""
        state = self.machine.state
        is_there = self._host is not None or self.family.cells or state not in _GONE
        is_shown = state is State.FATAL and self._has_run and not self._order.is_given
        if self._is_removed or self._is_halted or is_there or is_shown:
            return
        self._is_removed = True
        error = ActorStopped(f"actor {self.name!r} is not there any more: {self.machine.reason()}")
        if state is State.STOPPED:
            self.mailbox.refuse(error)
        self.mailbox.clear(error)
        self._answer_start(error)
        self._siblings.remove(self)
        self._core.cells.pop(self.id, None)
        self._order.settle()
        self._news.tell()

    def lost(self, error: ActorserveError) -> None:
        """Let nobody wait any more: the loop was closed. From any thread."""
        self.mailbox.refuse(error)
        self.mailbox.clear(error)
        self._answer_start(error)
        self._order.settle()

    # --- what the host reports -------------------------------------------------------------------

    def spawned(self, incarnation: int) -> None:
        """See HostOwner."""
        self._feed(life.Spawned(incarnation, monotonic_s()))

    def spawn_failed(self, incarnation: int, reason: str) -> None:
        """See HostOwner: whoever spawns is told at once; later it is tried again."""
        if incarnation == self.machine.incarnation:
            self._host = None
            self.start_failed(incarnation, reason)
            self._feed(life.SpawnFailed(incarnation, monotonic_s(), reason))

    def phase_began(self, incarnation: int, phase: life.Phase, label: str) -> None:
        """See HostOwner."""
        self._feed(life.PhaseBegan(incarnation, monotonic_s(), phase, label))

    def ready(self, incarnation: int) -> None:
        """See HostOwner."""
        self._feed(life.Ready(incarnation, monotonic_s()))
        self._wake()

    def start_failed(self, incarnation: int, reason: str) -> None:
        """See HostOwner: final at the first start; later it counts as a death."""
        if not self._has_run:
            self._feed(life.BootRefused(incarnation, monotonic_s(), reason))

    def hung(self, incarnation: int, reason: str) -> None:
        """See HostOwner."""
        self._feed(life.Hung(incarnation, monotonic_s(), reason))

    def exited(self, incarnation: int, reason: str, *, is_normal: bool) -> None:
        """See HostOwner."""
        host = self._host
        if host is None or incarnation != self.machine.incarnation:
            return
        self._earlier = self._earlier.plus(host.stats())
        self._host = None
        self.last_end = reason
        self._end = life.Exited(incarnation, monotonic_s(), reason, is_normal)
        if self.family.cells:
            self._core.run(self._after_family())
        else:
            self._after_life()

    async def _after_family(self) -> None:
        """End the children of a life that is over, before there is another."""
        await self.family.stop()
        self._after_life()

    def _after_life(self) -> None:
        state = self.machine.state
        if self._end is not None:
            if state is State.RUNNING or (state is State.BACKOFF and self._has_run):
                self._siblings.died(self)
                return
            self.accept_end()
        self._remove_if_gone()

    def has_life(self) -> bool:
        """Whether there is a life that children may belong to."""
        return self._host is not None and self.machine.state not in _GONE

    def idle(self) -> None:
        """See HostOwner."""
        if self._news.is_awaited():
            self._core.post(self._news.tell)

    def _wake(self) -> None:
        """Let the host look into the mailbox. From any thread."""
        host = self._host
        if host is not None:
            host.wake()

    def stats(self) -> ActorStats:
        """Return where it and its children stand. From any thread."""
        host = self._host
        now = host.stats() if host is not None else HostStats()
        children = [cell.stats() for cell in list(self.family.cells.values())]
        where = type(self.spec.where).__name__.lower()
        return actor_stats(
            (self.name, self.spec.short_name, where),
            self.machine.stats(),
            self._earlier.plus(now),
            self.mailbox.stats(),
            children,
        )
