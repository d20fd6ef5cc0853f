# SPDX-License-Identifier: Apache-2.0
"""One life of a stub: its process, its channel, its batches and its last words.

    Spawner ─► process ─► exit, lines ─┐
    HostEnd ─► messages ───────────────┴─► Incarnation ─► events ─► Instance (its machine)
                                                └─► InFlight ─► responses

What an incarnation hears it reports under its own number, so that what comes late from an earlier
one is told apart. When the process ends, everything that it had published is read first.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Protocol

import msgspec

from actorserve.actors.answers import AnswerDesk, Asker
from actorserve.actors.call_desk import CallDesk
from actorserve.actors.in_flight import InFlight, Lost
from actorserve.actors.metric_desk import MetricDesk
from actorserve.actors.node import Node
from actorserve.actors.readiness import Readiness
from actorserve.clock import monotonic_s
from actorserve.errors import (
    ActorserveError,
    BootError,
    DeadlineExceeded,
    InternalError,
    ProtocolError,
    Unavailable,
)
from actorserve.runtime.child import Child, Exit, SpawnSpec
from actorserve.runtime.device_desk import DeviceDesk
from actorserve.runtime.host_end import HostEnd
from actorserve.state import lifecycle as life
from actorserve.state.health import Evidence, HangJudge, Level
from actorserve.state.restart import Restart
from actorserve.triton.last_words import last_words_of
from actorserve.wire.codec import encode
from actorserve.wire.device import DeviceBroken, DeviceReleased, SlabAccepted, SlabRetired
from actorserve.wire.messages import (
    Asked,
    Attached,
    BootFailed,
    CallTaken,
    CancelCall,
    Executed,
    Finalize,
    Finalized,
    Infer,
    Initialize,
    Initialized,
    LoadModel,
    LogRecord,
    MetricsChanged,
    MoveCall,
    PhaseEntered,
    Responded,
    SaidReady,
    ToSupervisor,
)

LAST_LINES = 200
RETRY_AFTER_S = 1.0
LEVELS = {0: logging.INFO, 1: logging.WARNING, 2: logging.ERROR, 3: logging.DEBUG}

_log = logging.getLogger("actorserve")
_PHASES = {
    "importing": (life.Phase.IMPORTING, "importing model.py"),
    "initializing": (life.Phase.INITIALIZING, "initializing"),
}


class InstancePlan(msgspec.Struct, frozen=True):
    """How an instance is run: its name, process, first message and policies."""

    name: str
    spec: SpawnSpec
    initialize: Initialize
    budgets: life.Budgets
    restart: Restart
    prefetch_most: int = 0


class Keeper(Protocol):
    """The instance, as its incarnations need it.

    `metrics_holder` is who all its lives are where metrics are held.
    """

    metrics_holder: int

    def feed(self, event: life.Event) -> None:
        """Hear what happened."""

    def executed(self, executed: Executed) -> None:
        """Hear that a batch has ended."""

    def has_room(self) -> None:
        """Hear that there is room for batches again, once for any number that ended."""

    def ended(self, incarnation: Incarnation, reason: str, lost: Lost) -> None:
        """Hear that the process is gone and why, with what it leaves to others."""


class Incarnation:
    """One life of a stub; made for one spawn, and over with its process."""

    def __init__(self, number: int, node: Node, plan: InstancePlan, keeper: Keeper) -> None:
        """Make the channel. Raises ResourceExhausted."""
        self.number = number
        self.child: Child | None = None
        self.is_over = False
        self.is_async = False
        self.lines: deque[str] = deque(maxlen=LAST_LINES)
        self._name = plan.name
        self._why = ""  # we end it; beats what its exit says
        self._node = node
        self._plan = plan
        self._keeper = keeper
        self._phase = life.Phase.SPAWNING
        self._phase_since_s = monotonic_s()
        self._end = HostEnd(
            node.loop,
            node.exchange,
            node.arenas.next(),
            self,
            first_segment_bytes=node.backend.shm_default_bytes,
            growth_bytes=node.backend.shm_growth_bytes,
        )
        self.in_flight = InFlight(
            plan.name,
            self._end,
            node.exchange,
            decoupled=plan.initialize.decoupled,
            most_in_batch=max(1, plan.initialize.max_batch_size),
        )
        self.calls = CallDesk(node, plan.name, self._end, self.in_flight)
        self.answers = AnswerDesk(node, self._end, self._asker)
        session = node.metrics.registry.session(keeper.metrics_holder)
        self.metrics = MetricDesk(session, self.answers.answerers)
        self.readiness = Readiness(node.loop, self._end, plan.name, self._is_stopped)
        self._judge = HangJudge(plan.budgets, now_s=monotonic_s())

    # --- orders ----------------------------------------------------------------------------------

    async def spawn(self) -> None:
        """Make the process. Raises what the Spawner raises, and nothing is left then."""
        try:
            self.child = await self._node.spawner.spawn(
                self._plan.spec, self.on_exit, self.on_output
            )
        except BaseException:
            self._end.close()
            raise

    def open(self) -> None:
        """Hand the channel over and let the model be loaded."""
        self.enter(life.Phase.SPAWNING)
        assert self.child is not None
        try:
            self._end.open(self.child.boot, self._name)
            self._end.send(self._plan.initialize)
        except (ActorserveError, OSError):
            pass  # It died already: its exit is on the way and says why.

    def finalize(self) -> None:
        """Ask the stub to end."""
        self.enter(life.Phase.FINALIZING)
        self.readiness.close()
        # Whatever waits before it, the end is not refused: it is one message.
        self._end.send_with_handles(encode(Finalize()), (), is_bounded=False)

    def enter(self, phase: life.Phase) -> None:
        """Note what the stub does from now on."""
        self._phase = phase
        self._phase_since_s = monotonic_s()

    def pump(self) -> None:
        """Read what the stub has written and not yet rung for."""
        self._end.pump()

    @property
    def backlog(self) -> int:
        """How many messages wait for room in the stub's rings."""
        return self._end.stats().backlog

    def kill(self) -> None:
        """End the process and whatever it has started; harmless after its end."""
        if self.child is not None:
            self.child.kill_group()

    # --- what the stub says (HostEnd.Listener) ---------------------------------------------------

    def on_attached(self, message: Attached) -> None:
        """Hear from the stub that it is there."""
        self._begin(life.Phase.ATTACHED, "attached")

    def _begin(self, phase: life.Phase, label: str) -> None:
        self.enter(phase)
        self._keeper.feed(life.PhaseBegan(self.number, monotonic_s(), phase, label))

    def on_messages(self, messages: list[ToSupervisor]) -> None:
        """Take what the stub sent, in order."""
        has_room = False
        for message in messages:
            if isinstance(message, Executed):
                self.in_flight.finish(message)
                self._keeper.executed(message)
                has_room = True
            elif isinstance(message, Responded):
                for response in message.responses:
                    self.in_flight.respond(response)
                    has_room = has_room or response.final
            elif isinstance(message, Infer):
                self.calls.infer(message)
            elif isinstance(message, DeviceReleased):
                self._devices.released(self._end, message)
            else:
                self._on_report(message)
        if has_room:
            self._keeper.has_room()

    def _on_report(self, message: ToSupervisor) -> None:
        if isinstance(message, LogRecord):
            log_record(self._name, message)
            self.lines.append(f"{message.file}:{message.line}] {message.message}")
        elif isinstance(message, Asked):
            if isinstance(message.question, LoadModel):
                self.calls.has_called = True  # it waits, as for another model's answer
            self.answers.asked(message)
        elif isinstance(message, MetricsChanged):
            self.metrics.change(message)
        elif isinstance(message, SaidReady):
            self.readiness.take(message)
        elif isinstance(message, CancelCall):
            self.calls.cancel(message)
        elif isinstance(message, CallTaken):
            self.calls.taken(message)
        elif isinstance(message, MoveCall):
            self.calls.move(message)
        elif isinstance(message, (SlabAccepted, SlabRetired)):
            self._on_slab(message)
        elif isinstance(message, DeviceBroken):
            self.on_broken(InternalError(f"its device is lost: {message.reason}"))
        elif isinstance(message, PhaseEntered):
            if message.phase in _PHASES:
                self._begin(*_PHASES[message.phase])
        elif isinstance(message, Initialized):
            self.is_async = message.is_async
            self.readiness.has_hook = message.has_is_ready
            self.in_flight.looks_between = not message.is_async
            self.in_flight.tells_of_cancels = message.is_async
            plan = self._plan.initialize.device
            if plan is not None and message.device:
                self._end.device = (plan.driver, message.device)
            self._keeper.feed(life.Ready(self.number, monotonic_s()))
        elif isinstance(message, BootFailed):
            self._keeper.feed(life.BootRefused(self.number, monotonic_s(), message.reason))
        elif isinstance(message, Finalized) and message.error is not None:
            _log.info("%s: finalize failed: %s", self._name, message.error)

    @property
    def _devices(self) -> DeviceDesk:
        devices = self._node.exchange.devices
        if devices is None:
            raise ProtocolError("it speaks of device memory, and has none")
        return devices

    def _on_slab(self, message: SlabAccepted | SlabRetired) -> None:
        if isinstance(message, SlabAccepted):
            self._devices.accepted(self._end, message)
        else:
            self._devices.retired(self._end, message)

    def _asker(self) -> Asker:
        args = self._plan.initialize.args
        is_serving = self._phase in (life.Phase.IDLE, life.Phase.EXECUTING)
        return Asker(self._name, args["model_name"], args["model_version"], is_serving, self._end)

    def on_refused(self, error: BootError) -> None:
        """Take the word of a stub that it cannot start."""
        self._keeper.feed(life.BootRefused(self.number, monotonic_s(), error.message))

    def on_hung_up(self) -> None:
        """End a stub that closed its channel: most are dead already, and their exit is known."""
        self.kill()

    def on_broken(self, error: ActorserveError) -> None:
        """End a stub that broke the wire."""
        _log.error("%s: %s; the stub is replaced", self._name, error.message)
        self._why = f"replaced because of an error: {error.message}"
        self.kill()

    # --- what becomes of its process -------------------------------------------------------------

    def on_output(self, stream: str, line: str) -> None:
        """Log a line that the model printed."""
        self.lines.append(line)
        log_output(self._name, stream, line)

    def _is_stopped(self) -> bool:
        """Whether the process cannot answer, by its state: stopped, a zombie, gone."""
        return self.child is None or self.child.sample().state in "TZX"

    def on_exit(self, exit_: Exit) -> None:
        """Take the end of the process: read what it left, fail what it had begun."""
        self.is_over = True
        self._end.read_rest()
        reason = self._why or exit_.describe()
        if words := last_words_of(self.lines):
            reason = f"{reason}: {words}"
        if self._phase is life.Phase.SPAWNING and not self._why:
            refusal = exit_.as_refusal(self._plan.spec.python)
            if refusal is not None:
                self.on_refused(BootError(refusal))
        self.readiness.close()
        self.calls.close()
        self.metrics.close()
        lost = self.in_flight.lose(
            Unavailable(
                f"stub '{self._name}' died while it had the request: {reason}", RETRY_AFTER_S
            )
        )
        self._end.close()
        self._keeper.ended(self, reason, lost)

    def watch(self, now_s: float, *, is_running: bool) -> None:
        """Judge by what can be seen from outside whether the stub hangs; called now and then."""
        if self.child is None or self.is_over:
            return
        sample = self.child.sample()
        if is_running and self._end.lock.holder() is None and sample.state not in "XZ":
            self.on_broken(InternalError("it lost its health lock"))
            return
        phase, since_s = self._phase, self._phase_since_s
        batch, batch_ns = self._end.page.batch()
        if batch:
            phase, since_s = life.Phase.EXECUTING, batch_ns / 1e9
        beat_ns = self._end.page.stats().beat_ns
        beat_age_s = max(0.0, now_s - beat_ns / 1e9) if beat_ns else None
        if self.readiness.is_asked:
            beat_age_s = 0.0  # user code may run, and silence proves nothing then
        evidence = Evidence(
            now_s=now_s,
            phase=phase,
            phase_s=max(0.0, now_s - since_s),
            beat_age_s=beat_age_s,
            process_state=sample.state,
            cpu_s=sample.cpu_s,
        )
        verdict = self._judge.judge(evidence)
        if verdict.level is not Level.HUNG:
            return
        self._why = verdict.reason
        if phase is life.Phase.EXECUTING:
            self.in_flight.expire_batch(
                batch,
                DeadlineExceeded(f"stub '{self._name}' {verdict.reason} and is restarted"),
            )
        self._keeper.feed(life.Hung(self.number, now_s, verdict.reason))


def log_record(instance: str, record: LogRecord) -> None:
    """Log a line of a model's Logger."""
    where = {"instance": instance, "file": record.file, "file_line": record.line}
    _log.log(LEVELS.get(record.level, logging.INFO), "%s", record.message, extra=where)


def log_output(instance: str, stream: str, line: str) -> None:
    """Log a line that a model printed."""
    _log.info("%s", line, extra={"instance": instance, "stream": stream})
