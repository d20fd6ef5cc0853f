# SPDX-License-Identifier: Apache-2.0
"""One instance of a model version: a stub process, started again as its machine says.

    ChildMachine ── actions ──► spawn, signal, ask, arm timers
         ▲                         │
         └── events ◄── messages, exit, timers, verdicts

The machine (state/supervision.py) decides; this carries out. Each incarnation has a channel of
its own, which is read to its end when the stub dies: what it had published counts, batches that
it had begun fail, and batches that only waited in its lane go back to the queue.
"""

from __future__ import annotations

import asyncio
import logging
import random
import signal
from collections import deque
from collections.abc import Coroutine
from typing import Protocol

import msgspec

from actorserve.actors.in_flight import InFlight, Lost
from actorserve.actors.node import Node
from actorserve.actors.response_factory import ResponseFactory
from actorserve.clock import monotonic_s
from actorserve.errors import (
    ActorserveError,
    BootError,
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    ProtocolError,
    Unavailable,
)
from actorserve.process.exit import Exit
from actorserve.process.spawn import SpawnSpec
from actorserve.process.watch import Child
from actorserve.runtime.host_end import HostEnd
from actorserve.state import lifecycle as life
from actorserve.state.health import Evidence, HangJudge, Level
from actorserve.state.restart import Restart
from actorserve.state.supervision import ChildMachine
from actorserve.wire.messages import (
    Attached,
    BootFailed,
    Executed,
    Finalize,
    Finalized,
    Initialize,
    Initialized,
    LogRecord,
    PhaseEntered,
    Responded,
    ToSupervisor,
    WireResponse,
)

LAST_LINES = 200
RETRY_AFTER_S = 1.0
PREFETCH_TARGET_NS = 500_000
PREFETCH_OVERHEAD_NS = 20_000

RUNNING = life.State.RUNNING

_log = logging.getLogger("actorserve")
_PHASES = {
    "importing": (life.Phase.IMPORTING, "importing model.py"),
    "initializing": (life.Phase.INITIALIZING, "initializing"),
}
LEVELS = {0: logging.INFO, 1: logging.WARNING, 2: logging.ERROR, 3: logging.DEBUG}


class Owner(Protocol):
    """The scheduler, as an instance needs it."""

    def instance_changed(self, instance: Instance) -> None:
        """Hear that the instance's state or room changed."""

    def has_room(self) -> None:
        """Hear that an instance has ended a batch or more and has room again."""

    def requeue(self, factories: list[ResponseFactory], *, is_alone: bool = False) -> None:
        """Take requests back to the front of the queue; `is_alone` keeps them out of batches."""


class InstancePlan(msgspec.Struct, frozen=True):
    """How an instance is run: its name, process, first message and policies."""

    name: str
    spec: SpawnSpec
    initialize: Initialize
    budgets: life.Budgets
    restart: Restart
    prefetch_most: int = 0


class InstanceStats(msgspec.Struct, frozen=True):
    """Where an instance stands."""

    name: str
    state: str
    reason: str
    pid: int
    restarts: int
    outstanding_batches: int
    executed_batches: int


class Instance:
    """A supervised stub."""

    def __init__(self, node: Node, plan: InstancePlan, owner: Owner) -> None:
        self.name = plan.name
        self._node = node
        self._plan = plan
        self._owner = owner
        self._machine = ChildMachine(plan.restart, plan.budgets, chance=random.random)
        self._judge = HangJudge(plan.budgets)
        self._timers: dict[life.Timer, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._child: Child | None = None
        self._end: HostEnd | None = None
        self._stop_waiters: list[asyncio.Future[None]] = []
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._in_flight: InFlight | None = None
        self._execute_ns = 0.0
        self._most_batches = 1
        self._executed_before = 0
        self._phase = life.Phase.SPAWNING
        self._phase_since_s = 0.0
        self.reason = ""

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
    def outstanding(self) -> int:
        """How many batches are at the stub."""
        return len(self._in_flight) if self._in_flight is not None else 0

    @property
    def room(self) -> int:
        """How many more batches it takes now.

        Short work is sent ahead, so that the stub does not sleep between two batches: as many as
        take about PREFETCH_TARGET_NS by the moving average. Work that was sent ahead and never
        begun is not lost when the stub dies (see InFlight.lose).
        """
        in_flight = self._in_flight
        if in_flight is None or self._child is None or self._machine.state is not RUNNING:
            return 0
        return self._most_batches - len(in_flight)

    @property
    def start_due_s(self) -> float | None:
        """Seconds until the next start, 0 while it starts; None where none is planned."""
        return self._machine.start_due_s(monotonic_s())

    def stats(self) -> InstanceStats:
        """Return where it stands."""
        return InstanceStats(
            self.name,
            self.state.value,
            self.reason,
            self._child.pid if self._child is not None else 0,
            self._machine.stats().restarts,
            self.outstanding,
            self._executed_before
            + (self._in_flight.executed if self._in_flight is not None else 0),
        )

    # --- orders ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the stub."""
        self._feed(life.Start(monotonic_s()))

    async def stop(self, *, is_quick: bool = False) -> None:
        """Finalize and end the stub; returns when its process is gone."""
        self._feed(life.Stop(monotonic_s(), is_quick))
        if self.state not in (life.State.STOPPED, life.State.FATAL) or self._child is not None:
            waiter = self._node.loop.create_future()
            self._stop_waiters.append(waiter)
            await waiter

    def dispatch(self, factories: list[ResponseFactory]) -> None:
        """Send a batch to the stub; the instance is running."""
        assert self._in_flight is not None
        self._in_flight.send(factories)

    def pump(self) -> None:
        """Read what the stub has written and not yet rung for."""
        if self._end is not None:
            self._end.pump()

    def tell_cancelled(self, factory: ResponseFactory) -> bool:
        """Tell the stub of a cancelled request; False where it does not have it."""
        return self._in_flight is not None and self._in_flight.tell_cancelled(factory)

    # --- the machine's actions -------------------------------------------------------------------

    def _feed(self, event: life.Event) -> None:
        for action in self._machine.handle(event):
            self._act(action)
        if self.state in (life.State.STOPPED, life.State.FATAL) and self._child is None:
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
        elif isinstance(action, life.AskFinalize):
            if self._end is not None:
                self._enter(life.Phase.FINALIZING)
                self._end.send(Finalize())
        elif isinstance(action, life.ReportState):
            self._report(action)
        elif isinstance(action, life.ReportFatal):
            _log.error("%s: %s", self.name, action.reason)
        elif self._child is not None:
            self._signal(self._child, action)

    def _signal(self, child: Child, action: life.Action) -> None:
        if isinstance(action, life.SignalAbort):
            child.signal(signal.SIGABRT)
        elif isinstance(action, life.SignalContinue):
            child.signal(signal.SIGCONT)
        elif isinstance(action, life.SignalKill):
            child.kill_group()

    def _arm(self, action: life.ArmTimer) -> None:
        old = self._timers.pop(action.kind, None)
        if old is not None:
            old.cancel()
        self._timers[action.kind] = self._node.loop.call_later(
            action.delay_s, self._on_timer, action.kind, action.incarnation
        )

    def _on_timer(self, kind: life.Timer, incarnation: int) -> None:
        self._timers.pop(kind, None)
        sample = self._child.sample() if self._child is not None else None
        is_traced = sample is not None and sample.state == "t"
        self._feed(life.TimerFired(incarnation, monotonic_s(), kind, is_traced))

    def _report(self, action: life.ReportState) -> None:
        self.reason = action.reason
        state = action.state
        if state is life.State.RUNNING:
            self._enter(life.Phase.IDLE)
            _log.info("%s: ready", self.name)
        elif state is life.State.BACKOFF:
            _log.warning("%s: %s; it will be restarted", self.name, action.reason)
        else:
            _log.debug("%s: %s (%s)", self.name, state.value, action.reason)
        self._owner.instance_changed(self)

    def _enter(self, phase: life.Phase) -> None:
        self._phase = phase
        self._phase_since_s = monotonic_s()

    def _run(self, coroutine: Coroutine[None, None, None]) -> None:
        task = self._node.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- one incarnation -------------------------------------------------------------------------

    async def _spawn(self, incarnation: int) -> None:
        """Make the channel and the process; the machine hears how that went."""
        node = self._node
        end: HostEnd | None = None
        try:
            listener = Incarnation(self, incarnation)
            end = HostEnd(
                node.loop,
                node.exchange,
                node.arenas.next(),
                listener,
                first_segment_bytes=node.backend.shm_default_bytes,
                growth_bytes=node.backend.shm_growth_bytes,
            )
            child = await node.spawner.spawn(self._plan.spec, listener.on_exit, listener.on_output)
        except Exception as error:
            # Whatever it was: each Spawn has to be answered, or the machine waits for ever.
            if not isinstance(error, ActorserveError):
                _log.exception("%s: spawning failed", self.name)
            if end is not None:
                end.close()
            if isinstance(error, (BootError, InvalidArgument)):
                self._feed(life.BootRefused(incarnation, monotonic_s(), error.message))
            self._feed(life.SpawnFailed(incarnation, monotonic_s(), str(error)))
            return
        self._child, self._end = child, end
        self._in_flight = InFlight(self.name, end, node.exchange)
        self._judge = HangJudge(self._plan.budgets, now_s=monotonic_s())
        self._enter(life.Phase.SPAWNING)
        try:
            end.open(child.boot, self.name)
            end.send(self._plan.initialize)
        except (ActorserveError, OSError):
            pass  # It died already: its exit is on the way and says why.
        self._feed(life.Spawned(incarnation, monotonic_s()))

    def on_attached(self, incarnation: int, message: Attached) -> None:
        """Hear from the stub that it is there."""
        self._enter(life.Phase.ATTACHED)
        phase = life.PhaseBegan(incarnation, monotonic_s(), life.Phase.ATTACHED, "attached")
        self._feed(phase)

    def on_messages(self, incarnation: int, messages: list[ToSupervisor]) -> None:
        """Take what the stub sent, in order."""
        has_room = False
        for message in messages:
            if isinstance(message, Executed):
                self._on_executed(message)
                has_room = True
            elif isinstance(message, Responded):
                for response in message.responses:
                    self._on_response(response)
            else:
                self._on_report(incarnation, message)
        if has_room:
            self._owner.has_room()

    def _on_report(self, incarnation: int, message: ToSupervisor) -> None:
        now_s = monotonic_s()
        if isinstance(message, LogRecord):
            _log.log(
                LEVELS.get(message.level, logging.INFO),
                "%s",
                message.message,
                extra={
                    "instance": self.name,
                    "file": message.file,
                    "file_line": message.line,
                },
            )
        elif isinstance(message, PhaseEntered):
            phase = _PHASES.get(message.phase)
            if phase is not None:
                self._enter(phase[0])
                self._feed(life.PhaseBegan(incarnation, now_s, *phase))
        elif isinstance(message, Initialized):
            self._feed(life.Ready(incarnation, now_s))
        elif isinstance(message, BootFailed):
            self._feed(life.BootRefused(incarnation, now_s, message.reason))
        elif isinstance(message, Finalized) and message.error is not None:
            _log.info("%s: finalize failed: %s", self.name, message.error)

    def on_output(self, stream: str, line: str) -> None:
        """Log a line that the model printed."""
        self._lines.append(line)
        _log.info("%s", line, extra={"instance": self.name, "stream": stream})

    def on_refused(self, incarnation: int, error: BootError) -> None:
        """Take the word of a stub that it cannot start."""
        self._feed(life.BootRefused(incarnation, monotonic_s(), error.message))

    def on_hung_up(self, incarnation: int) -> None:
        """End a stub that closed its channel: most are dead already, and their exit is known."""
        if self._child is not None and incarnation == self._machine.incarnation:
            self._child.kill_group()

    def on_broken(self, incarnation: int, error: ActorserveError) -> None:
        """End a stub that broke the wire."""
        _log.error("%s: %s; the stub is replaced", self.name, error.message)
        if self._child is not None and incarnation == self._machine.incarnation:
            self._child.kill_group()

    def on_exit(self, incarnation: int, exit_: Exit) -> None:
        """Take the end of the process: read what it left, fail and requeue, tell the machine."""
        child, self._child = self._child, None
        reason = exit_.describe()
        lost = self._settle(reason)
        if child is not None and self.state is not life.State.STOPPING and self._lines:
            kept = self._node.crashes.write(self.name, child.pid, reason, list(self._lines))
            if kept is not None:
                _log.info("%s: %s; its last output is kept in %s", self.name, reason, kept)
        self._lines.clear()
        self._feed(life.Exited(incarnation, monotonic_s(), reason))
        if lost is not None:
            if lost.untouched:
                self._owner.requeue(lost.untouched)
            if lost.retried:
                self._owner.requeue(lost.retried, is_alone=True)

    def _settle(self, reason: str) -> Lost | None:
        """Read what the dead stub left and fail what it had begun."""
        end, in_flight = self._end, self._in_flight
        if end is None or in_flight is None:
            return None
        end.read_rest()
        self._end = self._in_flight = None
        self._executed_before += in_flight.executed
        lost = in_flight.lose(
            Unavailable(
                f"stub '{self.name}' died while it had the request: {reason}", RETRY_AFTER_S
            )
        )
        end.close()
        return lost

    def _on_response(self, response: WireResponse) -> None:
        if self._in_flight is None:
            raise ProtocolError(f"'{self.name}' sent a response before it was ready")
        self._in_flight.respond(response)

    def _on_executed(self, executed: Executed) -> None:
        if self._in_flight is None:
            raise ProtocolError(f"'{self.name}' answered a batch before it was ready")
        self._in_flight.finish(executed)
        self._execute_ns += (executed.execute_ns - self._execute_ns) * 0.125
        ahead = int(PREFETCH_TARGET_NS / (self._execute_ns + PREFETCH_OVERHEAD_NS))
        self._most_batches = 1 + min(ahead, self._plan.prefetch_most)

    # --- hang watch ------------------------------------------------------------------------------

    def watch(self, now_s: float) -> None:
        """Judge by what can be seen from outside whether the stub hangs; called now and then."""
        child, end = self._child, self._end
        sample = child.sample() if child is not None else None
        if end is None or sample is None:
            return
        holder = end.lock.holder()
        if self.is_running and holder is None and sample.state not in "XZ":
            self.on_broken(
                self._machine.incarnation,
                InternalError("it lost its health lock"),
            )
            return
        phase, since_s = self._phase, self._phase_since_s
        batch, batch_ns = end.page.batch()
        if batch:
            phase, since_s = life.Phase.EXECUTING, batch_ns / 1e9
        beat_ns = end.page.stats().beat_ns
        evidence = Evidence(
            now_s=now_s,
            phase=phase,
            phase_s=max(0.0, now_s - since_s),
            beat_age_s=max(0.0, now_s - beat_ns / 1e9) if beat_ns else None,
            process_state=sample.state,
            cpu_s=sample.cpu_s,
        )
        verdict = self._judge.judge(evidence)
        if verdict.level is Level.HUNG:
            if phase is life.Phase.EXECUTING and self._in_flight is not None:
                self._in_flight.expire_begun(
                    DeadlineExceeded(f"stub '{self.name}' {verdict.reason} and is restarted")
                )
            self._feed(life.Hung(self._machine.incarnation, now_s, verdict.reason))


class Incarnation:
    """The ear of one incarnation: what comes late from an earlier one is told apart."""

    __slots__ = ("_instance", "_number")

    def __init__(self, instance: Instance, number: int) -> None:
        self._instance = instance
        self._number = number

    def on_attached(self, message: Attached) -> None:
        """See HostEnd.Listener."""
        self._instance.on_attached(self._number, message)

    def on_messages(self, messages: list[ToSupervisor]) -> None:
        """See HostEnd.Listener."""
        self._instance.on_messages(self._number, messages)

    def on_refused(self, error: BootError) -> None:
        """See HostEnd.Listener."""
        self._instance.on_refused(self._number, error)

    def on_hung_up(self) -> None:
        """See HostEnd.Listener."""
        self._instance.on_hung_up(self._number)

    def on_broken(self, error: ActorserveError) -> None:
        """See HostEnd.Listener."""
        self._instance.on_broken(self._number, error)

    def on_exit(self, exit_: Exit) -> None:
        """Pass the end of the process on."""
        self._instance.on_exit(self._number, exit_)

    def on_output(self, stream: str, line: str) -> None:
        """Pass a line of output on."""
        self._instance.on_output(stream, line)
