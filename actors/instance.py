# SPDX-License-Identifier: Apache-2.0
"""One instance of a model version: a stub process, started again as its machine says.

    ChildMachine ── actions ──► spawn an Incarnation, signal it, ask it, arm timers
         ▲                                │
         └────────── events ◄─────────────┘

The machine (state/supervision.py) decides; this carries out. Each incarnation has a process and a
channel of its own, so that nothing of a dead one is ever read by the next.
"""

from __future__ import annotations

import asyncio
import logging
import random
import signal
from collections.abc import Coroutine
from typing import Protocol

import msgspec

from actorserve.actors.call_desk import CallDesk
from actorserve.actors.disk import on_disk
from actorserve.actors.in_flight import Lost
from actorserve.actors.incarnation import Incarnation, InstancePlan
from actorserve.actors.machine import resident_bytes
from actorserve.actors.node import Node
from actorserve.actors.response_factory import ResponseFactory
from actorserve.clock import monotonic_s
from actorserve.errors import ActorserveError, BootError, InvalidArgument
from actorserve.state import lifecycle as life
from actorserve.state.statistics import VersionStatistics
from actorserve.state.supervision import ChildMachine
from actorserve.wire.messages import Executed

PREFETCH_TARGET_NS = 500_000
PREFETCH_OVERHEAD_NS = 20_000
RUNNING = life.State.RUNNING

_log = logging.getLogger("actorserve")


class Owner(Protocol):
    """The scheduler, as an instance needs it."""

    counts: VersionStatistics

    def instance_changed(self, instance: Instance) -> None:
        """Hear that the instance's state or room changed."""

    def has_room(self) -> None:
        """Hear that an instance has ended a batch or more and has room again."""

    def requeue(self, factories: list[ResponseFactory], *, is_alone: bool = False) -> None:
        """Take requests back to the front of the queue; `is_alone` keeps them out of batches."""


class InstanceStats(msgspec.Struct, frozen=True):
    """Where an instance stands; `last_exit` says how its last process ended, "" if none did."""

    name: str
    state: str
    reason: str
    pid: int
    restarts: int
    outstanding_batches: int
    executed_batches: int
    last_exit: str = ""
    last_exit_age_s: float = 0.0


class Instance:
    """A supervised stub."""

    def __init__(self, node: Node, plan: InstancePlan, owner: Owner) -> None:
        self.name = plan.name
        self.reason = ""
        self.metrics_holder = node.metrics.holders.next()
        self._node = node
        self._plan = plan
        self._owner = owner
        self._machine = ChildMachine(plan.restart, plan.budgets, chance=random.random)
        self._current: Incarnation | None = None
        self._timers: dict[life.Timer, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop_waiters: list[asyncio.Future[None]] = []
        self._idle_waiters: list[asyncio.Future[None]] = []
        self._execute_ns = 0.0
        self._most_batches = 1
        self._is_overlapping = False
        self._executed = 0
        self._last_exit = ""
        self._last_exit_s = 0.0
        self._has_served = False

    # --- what others ask -------------------------------------------------------------------------

    @property
    def state(self) -> life.State:
        """The machine's state."""
        return self._machine.state

    @property
    def is_running(self) -> bool:
        """Whether it can take batches."""
        return self._machine.state is RUNNING

    @property
    def has_readiness_hook(self) -> bool:
        """Whether its model has a word in its readiness."""
        return self._current is not None and self._current.readiness.has_hook

    async def check_ready(self, max_age_s: float = 0.0) -> bool:
        """Whether it can take batches and its model says so, at most `max_age_s` ago."""
        current = self._current
        if current is None or not self.is_running:
            return False
        return await current.readiness.check(max_age_s) and self.is_running

    @property
    def could_take(self) -> bool:
        """Whether it has room, or will without anybody else's doing: while it starts."""
        return self.room > 0 or (self.start_due_s is not None and not self.is_running)

    @property
    def calls(self) -> CallDesk | None:
        """The calls of its stub; None while there is none."""
        return self._current.calls if self._current is not None else None

    @property
    def outstanding(self) -> int:
        """How many batches are at the stub."""
        return len(self._current.in_flight) if self._current is not None else 0

    @property
    def room(self) -> int:
        """How many more batches it takes now.

        Short work is sent ahead, so that the stub does not sleep between two batches: as many as
        take about PREFETCH_TARGET_NS by the moving average. Work that was sent ahead and never
        begun is not lost when the stub dies (see InFlight.lose).
        """
        current = self._current
        if current is None or current.is_over or self._machine.state is not RUNNING:
            return 0
        most = self._most_batches
        if current.calls.has_called and not self._is_overlapping:
            most = 1  # it waits for other models, and nothing behind it can move meanwhile
        return current.in_flight.room(most)

    @property
    def could_run_next(self) -> bool:
        """Whether a stub that calls other models can have the batch after the one that it runs.

        For work that no other instance could do and for which no model waits: anything else would
        wait behind a call, perhaps for ever.
        """
        current = self._current
        if current is None or not current.calls.has_called:
            return False
        if current.is_over or self._machine.state is not RUNNING:
            return False
        in_flight = current.in_flight
        return in_flight.has_slots and len(in_flight) == 1

    @property
    def start_due_s(self) -> float | None:
        """Seconds until the next start, 0 while it starts; None where none is planned."""
        return self._machine.start_due_s(monotonic_s())

    def stats(self) -> InstanceStats:
        """Return where it stands."""
        current = self._current
        child = current.child if current is not None else None
        return InstanceStats(
            self.name,
            self.state.value,
            current.readiness.refusal if current is not None and self.is_running else self.reason,
            child.pid if child is not None else 0,
            self._machine.stats().restarts,
            self.outstanding,
            self._executed,
            self._last_exit,
            monotonic_s() - self._last_exit_s if self._last_exit else 0.0,
        )

    def resident_bytes(self) -> int:
        """Return the memory of its process, with what it shares; 0 while there is none."""
        child = self._current.child if self._current is not None else None
        return resident_bytes(child.pid) if child is not None else 0

    # --- orders ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the stub."""
        self.feed(life.Start(monotonic_s()))

    async def stop(self, *, is_quick: bool = False) -> None:
        """Finalize and end the stub; returns when its process is gone."""
        self.feed(life.Stop(monotonic_s(), is_quick))
        if not self._is_gone:
            waiter = self._node.loop.create_future()
            self._stop_waiters.append(waiter)
            await waiter
        self._node.metrics.registry.retire(self.metrics_holder)

    @property
    def _is_gone(self) -> bool:
        is_down = self.state in (life.State.STOPPED, life.State.FATAL)
        return is_down and self._current is None

    async def idle(self) -> None:
        """Wait until its stub has no request any more; who waits sees to it that none comes."""
        while self._current is not None and self._current.in_flight.requests:
            waiter = self._node.loop.create_future()
            self._idle_waiters.append(waiter)
            await waiter

    def kept(self) -> list[ResponseFactory]:
        """Return the requests whose senders its model has kept."""
        return self._current.in_flight.kept() if self._current is not None else []

    def _tell_idle(self) -> None:
        if self._idle_waiters and not (self._current and self._current.in_flight.requests):
            waiters, self._idle_waiters = self._idle_waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    @property
    def plan(self) -> InstancePlan:
        """How it is run."""
        return self._plan

    def replan(self, plan: InstancePlan) -> None:
        """Run it in another way from its next start on."""
        self._plan = plan

    def dispatch(self, factories: list[ResponseFactory]) -> None:
        """Send a batch to the stub; the instance has room."""
        assert self._current is not None
        self._current.in_flight.send(factories)

    @property
    def backlog(self) -> int:
        """How many messages wait for room in the stub's rings."""
        return self._current.backlog if self._current is not None else 0

    def pump(self) -> None:
        """Read what the stub has written and not yet rung for."""
        if self._current is not None:
            self._current.pump()

    def watch(self, now_s: float) -> None:
        """Look whether the stub hangs; called now and then."""
        if self._current is not None:
            self._current.watch(now_s, is_running=self.is_running)

    # --- the machine's actions -------------------------------------------------------------------

    def feed(self, event: life.Event) -> None:
        """Let the machine take an event, and carry out what it says."""
        for action in self._machine.handle(event):
            self._act(action)
        if self._is_gone:
            waiters, self._stop_waiters = self._stop_waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def _act(self, action: life.Action) -> None:
        if isinstance(action, life.Spawn):
            self._run(self._spawn(action.incarnation))
        elif isinstance(action, life.ArmTimer):
            self._arm(action)
        elif isinstance(action, life.CancelTimer):
            timer = self._timers.pop(action.kind, None)
            if timer is not None:
                timer.cancel()
        elif isinstance(action, life.ReportState):
            self._report(action)
        elif isinstance(action, life.ReportFatal):
            # What was never ready fails the load of its version, which is logged with the reason.
            level = logging.ERROR if self._has_served else logging.DEBUG
            _log.log(level, "%s: %s", self.name, action.reason)
        elif self._current is not None:
            _order(self._current, action)

    def _arm(self, action: life.ArmTimer) -> None:
        old = self._timers.pop(action.kind, None)
        if old is not None:
            old.cancel()
        self._timers[action.kind] = self._node.loop.call_later(
            action.delay_s, self._on_timer, action.kind, action.incarnation
        )

    def _on_timer(self, kind: life.Timer, incarnation: int) -> None:
        self._timers.pop(kind, None)
        child = self._current.child if self._current is not None else None
        is_traced = child is not None and child.sample().state == "t"
        self.feed(life.TimerFired(incarnation, monotonic_s(), kind, is_traced))

    def _report(self, action: life.ReportState) -> None:
        self.reason = action.reason
        state = action.state
        if state is RUNNING:
            self._has_served = True
            if self._current is not None:
                self._current.enter(life.Phase.IDLE)
                limit = self._plan.initialize.concurrent_executes
                self._is_overlapping = self._current.is_async and limit > 1
                self._most_batches = limit if self._is_overlapping else 1
            _log.info("%s: ready", self.name)
        elif state is life.State.BACKOFF:
            _log.warning("%s: %s; it will be restarted", self.name, action.reason)
        else:
            _log.debug("%s: %s (%s)", self.name, state.value, action.reason)
        self._owner.instance_changed(self)

    def _run(self, coroutine: Coroutine[None, None, None]) -> None:
        task = self._node.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _spawn(self, number: int) -> None:
        """Begin an incarnation; the machine hears how that went."""
        if number > 1:
            self._owner.counts.restarts += 1
        try:
            incarnation = Incarnation(number, self._node, self._plan, self)
            await incarnation.spawn()
        except Exception as error:
            # Whatever it was: each Spawn has to be answered, or the machine waits for ever.
            if not isinstance(error, ActorserveError):
                _log.exception("%s: spawning failed", self.name)
            if isinstance(error, (BootError, InvalidArgument)):
                self.feed(life.BootRefused(number, monotonic_s(), error.message))
            self.feed(life.SpawnFailed(number, monotonic_s(), str(error)))
            return
        self._current = incarnation
        incarnation.in_flight.owner = self
        incarnation.open()
        self.feed(life.Spawned(number, monotonic_s()))

    # --- what its incarnations say (incarnation.Keeper) ------------------------------------------

    def executed(self, executed: Executed) -> None:
        """Count a batch, and learn how long one takes."""
        self._executed += 1
        if self._is_overlapping:
            return
        batch_ns = executed.input_ns + executed.execute_ns + executed.output_ns
        self._execute_ns += (batch_ns - self._execute_ns) * 0.125
        ahead = int(PREFETCH_TARGET_NS / (self._execute_ns + PREFETCH_OVERHEAD_NS))
        self._most_batches = 1 + min(ahead, self._plan.prefetch_most)

    def has_room(self) -> None:
        """Tell the scheduler."""
        self._owner.has_room()
        self._tell_idle()

    async def _keep_last_words(self, pid: int, reason: str, lines: list[str]) -> None:
        crashes = self._node.crashes
        kept = await on_disk(lambda: crashes.write(self.name, pid, reason, lines))
        if kept is not None:
            _log.info("%s: %s; its last output is kept in %s", self.name, reason, kept)

    def ended(self, incarnation: Incarnation, reason: str, lost: Lost) -> None:
        """Take the end of a process: keep its last words, tell the machine, queue again."""
        self._current = None
        self._last_exit, self._last_exit_s = reason, monotonic_s()
        if self.state is not life.State.STOPPING and incarnation.lines:
            assert incarnation.child is not None
            pid, lines = incarnation.child.pid, list(incarnation.lines)
            self._node.run(self._keep_last_words(pid, reason, lines))
        self.feed(life.Exited(incarnation.number, monotonic_s(), reason))
        if lost.untouched:
            self._owner.requeue(lost.untouched)
        if lost.retried:
            self._owner.requeue(lost.retried, is_alone=True)
        self._tell_idle()


def _order(incarnation: Incarnation, action: life.Action) -> None:
    """Pass on what is for the process itself."""
    child = incarnation.child
    if isinstance(action, life.AskFinalize):
        incarnation.finalize()
    elif isinstance(action, life.SignalKill):
        incarnation.kill()
    elif child is not None and isinstance(action, life.SignalAbort):
        child.signal(signal.SIGABRT)
    elif child is not None and isinstance(action, life.SignalContinue):
        child.signal(signal.SIGCONT)
