# SPDX-License-Identifier: Apache-2.0
"""One supervised child: what may happen to it, and what is done about it. No clock, no I/O.

Whoever owns the child feeds events and carries out the actions, in their order:

        orders ─────────┐                      ┌──► Spawn, Signal…, AskFinalize
        reports ────────┤  handle(event)       ├──► ArmTimer, CancelTimer
        timers ─────────┴──► [ChildMachine] ───┴──► ReportState, ReportFatal

There are two machines in here: the **state** is what everybody sees, the **process** what we know
of the operating system's part. They are apart because a process outlives the decision about it: a
child that hangs is in BACKOFF at once, so that nobody counts on it, while its process is still
being aborted. What goes together:

    state      process                                   a timer that is armed
    STARTING   SPAWNING, ALIVE                           PHASE
    RUNNING    ALIVE                                     -
    BACKOFF    NONE                                      BACKOFF
               SPAWNING, ABORTED, KILLED (hung)          KILL while ABORTED
    STOPPING   SPAWNING, ASKED, ABORTED, KILLED          PHASE while ASKED, KILL while ABORTED
    STOPPED    NONE                                      -
    FATAL      NONE, SPAWNING, LEAVING, ASKED, …         as above; KILL while LEAVING

What always holds:
- A Spawn is only ever given while the process is NONE: no child runs twice.
- Nothing is signalled or asked before Spawned: what has to end before it exists is marked by the
  state, and killed as soon as it does.
- Reports carry the incarnation that they are about; one about an earlier one changes nothing.
- A death is counted once, however many reports, verdicts and timers announce it.
- FATAL comes from a boot error, too many deaths, or an Escalate; the rest is tried again.
- Only a Start makes a STOPPED or FATAL child run again, never a death or a timer.

The pairs of state and event that mean something are in `_RULES`; any other pair is ignored and
counted, because reports race with orders by nature. The end of a hung process is a ladder:
SIGABRT (it dumps its stacks) and SIGCONT (it may be stopped), `ABORT_GRACE_S`, SIGKILL. A child
that is told to stop while it starts is killed: finalize has nothing to undo yet, and its main
thread may be busy for minutes.

Which timers are armed, and whether one that fires counts, is in alarms.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from actorserve.state.alarms import Alarms
from actorserve.state.lifecycle import (
    START_PHASES,
    Action,
    AskFinalize,
    BootRefused,
    Budgets,
    ChildStats,
    Escalate,
    Event,
    Exited,
    Hung,
    Phase,
    PhaseBegan,
    Process,
    Ready,
    Report,
    ReportFatal,
    ReportState,
    SignalAbort,
    SignalContinue,
    SignalKill,
    Spawn,
    Spawned,
    SpawnFailed,
    Start,
    State,
    Stop,
    Timer,
    TimerFired,
)
from actorserve.state.restart import History, Restart

ABORT_GRACE_S = 2.0
"""From SIGABRT to SIGKILL, and from a reported boot error to SIGKILL."""
SPAWN_RETRY_S = 0.1
"""The least delay after a spawn that failed, whatever the policy: the host lacks something."""


class ChildMachine:
    """Decide about one supervised child.

    `state`, `phase` (what its main thread does, as far as is known here: IDLE while RUNNING) and
    `incarnation` (0 before the first Spawn, then counting up) may be read at any time. `chance`
    yields numbers from 0 to 1 for the jitter of the back-off, as random.random does.
    """

    def __init__(
        self,
        restart: Restart | None = None,
        budgets: Budgets | None = None,
        chance: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.restart = restart or Restart()
        self.budgets = budgets or Budgets()
        self.state = State.STOPPED
        self.phase = Phase.SPAWNING
        self.incarnation = 0
        self._chance = chance
        self._process = Process.NONE
        self._reason = "not started"
        self._doing = ""  # the phase of loading, in words
        self._end_reason = ""  # why we end the process; beats what its exit says
        self._ready_since_s: float | None = None  # this incarnation; None if it never was
        self._was_alive = False  # this incarnation had a process before it was given up
        self._is_wanted = False  # Start came while the old process was still going
        self._alarms = Alarms()
        self._history = History(self.restart)
        self._restarts = 0
        self._ignored = 0
        self._state_since_s: float | None = None
        self._actions: list[Action] = []

    def handle(self, event: Event) -> list[Action]:
        """Take an event; return what has to be done now, in this order."""
        actions: list[Action] = []
        self._actions = self._alarms.actions = actions
        rule = _RULES.get((self.state, type(event)))
        if rule is None or (isinstance(event, Report) and event.incarnation != self.incarnation):
            self._ignored += 1
        else:
            rule(self, event)
        return actions

    def reason(self) -> str:
        """Say why the child is in its state, in words for people."""
        return self._reason

    def start_due_s(self, now_s: float) -> float | None:
        """Return the seconds until the next start, 0 while it starts; None if none is planned."""
        if self.state is State.BACKOFF:
            due_s = self._alarms.due_s(Timer.BACKOFF)
            if due_s is None:
                due_s = self._alarms.due_s(Timer.KILL)
            return 0.0 if due_s is None else max(0.0, due_s - now_s)
        return 0.0 if self.state is State.STARTING else None

    def stats(self) -> ChildStats:
        """Return the counts and times."""
        return ChildStats(
            state=self.state,
            incarnation=self.incarnation,
            restarts=self._restarts,
            deaths=self._history.deaths,
            early_deaths=self._history.early_deaths,
            ignored_events=self._ignored,
            reason=self._reason,
            state_since_s=self._state_since_s,
            ready_since_s=self._ready_since_s if self.state is State.RUNNING else None,
            next_start_s=self._alarms.due_s(Timer.BACKOFF),
        )

    def _start(self, event: Start) -> None:
        if self._process is not Process.NONE:
            self._is_wanted = True
            return
        self._history.forgive()
        self._spawn(event.now_s, "starting")

    def _stop(self, event: Stop) -> None:
        self._is_wanted = False
        self._disarm(Timer.BACKOFF)
        if self._process is Process.NONE:
            self._enter(State.STOPPED, event.now_s, "stopped")
            return
        if event.is_quick or self.state is State.STARTING:
            self._kill()
        elif self._process is Process.ALIVE:
            self._ask(event.now_s)
        self._enter(State.STOPPING, event.now_s, "told to stop")

    def _escalate(self, event: Escalate) -> None:
        self._disarm(Timer.BACKOFF)
        if self.state is State.STARTING:
            self._kill()
        elif self._process is Process.ALIVE:
            self._ask(event.now_s)
        self._give_up(event.now_s, event.reason)

    # --- reports and timers ---------------------------------------------------------------------

    def _spawned(self, event: Spawned) -> None:
        if self._process is not Process.SPAWNING:
            self._ignored += 1  # its exit, or Ready, was told first
            return
        self._process = Process.ALIVE
        self._was_alive = self.state is State.STARTING
        if not self._was_alive:
            self._kill()  # it became unwanted before it existed

    def _spawn_failed(self, event: SpawnFailed) -> None:
        if self._process is not Process.SPAWNING:
            self._ignored += 1  # it was made after all, and is gone
            return
        self._clear_process()
        reason = f"no process could be made: {event.reason}"
        if self.state in (State.STARTING, State.BACKOFF):
            self._retry(event.now_s, reason, floor_s=SPAWN_RETRY_S)
        else:
            self._gone(event.now_s, reason)

    def _phase_began(self, event: PhaseBegan) -> None:
        if event.phase in START_PHASES:
            self.phase = event.phase
            self._doing = event.label or event.phase.value
            self._begin_phase(event.now_s, self.budgets.of(event.phase) or 0.0)
        else:
            self._ignored += 1

    def _ready(self, event: Ready) -> None:
        self._disarm(Timer.PHASE)
        self._process = Process.ALIVE
        self._was_alive = True
        self._history.became_ready()
        self._ready_since_s = event.now_s
        self.phase = Phase.IDLE
        self._enter(State.RUNNING, event.now_s, "ready")

    def _boot_refused(self, event: BootRefused) -> None:
        self._disarm(Timer.PHASE)
        if self._process is Process.ALIVE:
            self._process = Process.LEAVING
            self._arm(Timer.KILL, event.now_s, ABORT_GRACE_S)
        self._give_up(event.now_s, event.reason)

    def _exited(self, event: Exited) -> None:
        if self._process is Process.NONE:
            self._ignored += 1  # told twice
            return
        reason = self._end_reason or event.reason
        is_normal = event.is_normal and not self._end_reason
        self._clear_process()
        if self.state in (State.STOPPING, State.FATAL):
            self._gone(event.now_s, reason)
        elif self.state is State.BACKOFF and not self._was_alive:
            self._retry(event.now_s, reason, floor_s=SPAWN_RETRY_S)  # the spawner was slow, not it
        else:
            self._died(event.now_s, reason, is_normal)

    def _hung(self, event: Hung) -> None:
        is_there = self._process in (Process.ALIVE, Process.ASKED)
        if not is_there and self.state is not State.STARTING:
            self._ignored += 1  # its end is under way already
            return
        self._disarm(Timer.PHASE)
        self._end_reason = event.reason
        if self.state in (State.STARTING, State.RUNNING):
            is_last = self.restart.kind == "temporary"
            self._history.deaths += is_last  # the others' are counted when they are gone
            self._enter(State.STOPPING if is_last else State.BACKOFF, event.now_s, event.reason)
        if is_there:
            self._process = Process.ABORTED
            self._actions += (SignalAbort(), SignalContinue())
            self._arm(Timer.KILL, event.now_s, ABORT_GRACE_S)

    def _timer_fired(self, event: TimerFired) -> None:
        is_due = self._alarms.is_due(event)
        if is_due is None:
            self._ignored += 1  # cancelled while it was on its way
        elif is_due and event.kind is Timer.PHASE:
            reason = f"timed out: still {self._doing} after {self._alarms.phase_budget_s:g} s"
            self._hung(Hung(event.incarnation, event.now_s, reason))
        elif is_due and event.kind is Timer.KILL:
            self._kill()
        elif is_due:
            self._respawn(event.now_s)

    # --- what follows ---------------------------------------------------------------------------

    def _died(self, now_s: float, reason: str, is_normal: bool) -> None:
        """Take an end that nobody asked for: try again, or not."""
        if self._ready_since_s is None and not self._end_reason:
            reason = f"{reason} while {self._doing}"
        if not self.restart.is_restarted_after(is_normal):
            self._history.deaths += not is_normal
            self._enter(State.STOPPED, now_s, reason)
            return
        final = self._history.died(now_s, self._ready_since_s)
        if final:
            self._give_up(now_s, f"{final}: {reason}")
        else:
            self._retry(now_s, reason)

    def _retry(self, now_s: float, reason: str, floor_s: float = 0.0) -> None:
        delay_s = max(floor_s, self._history.next_delay_s(self._chance()))
        self._enter(State.BACKOFF, now_s, reason)
        if delay_s > 0:
            self._arm(Timer.BACKOFF, now_s, delay_s)
        else:
            self._respawn(now_s)

    def _respawn(self, now_s: float) -> None:
        self._restarts += 1
        self._spawn(now_s, f"restart {self._restarts}: {self._reason}")

    def _gone(self, now_s: float, reason: str) -> None:
        """Take the end of a process that was not to come back."""
        if self.state is State.STOPPING:
            self._enter(State.STOPPED, now_s, reason)
        if self._is_wanted:
            self._is_wanted = False
            self._start(Start(now_s))

    def _give_up(self, now_s: float, reason: str) -> None:
        self._enter(State.FATAL, now_s, reason)
        self._actions.append(ReportFatal(reason))

    def _spawn(self, now_s: float, reason: str) -> None:
        self.incarnation += 1
        self._process = Process.SPAWNING
        self._was_alive = False
        self._ready_since_s = None
        self._end_reason = ""
        self.phase = Phase.SPAWNING
        self._doing = self.phase.value
        self._enter(State.STARTING, now_s, reason)
        self._begin_phase(now_s, self.budgets.spawn_s)
        self._actions.append(Spawn(self.incarnation))

    def _ask(self, now_s: float) -> None:
        self._process = Process.ASKED
        self.phase = Phase.FINALIZING
        self._doing = self.phase.value
        self._actions.append(AskFinalize())
        self._begin_phase(now_s, self.budgets.finalize_s)

    def _begin_phase(self, now_s: float, budget_s: float) -> None:
        self._alarms.begin_phase(now_s, budget_s, self.incarnation)

    def _kill(self) -> None:
        """End the process now; one that does not exist yet is killed by `_spawned`."""
        self._disarm(Timer.PHASE)
        self._disarm(Timer.KILL)
        if self._process not in (Process.SPAWNING, Process.KILLED, Process.NONE):
            self._process = Process.KILLED
            self._actions.append(SignalKill())

    def _clear_process(self) -> None:
        self._process = Process.NONE
        self._alarms.disarm_all()

    def _enter(self, state: State, now_s: float, reason: str) -> None:
        self._reason = reason
        if state is not self.state:
            self.state = state
            self._state_since_s = now_s
            self._actions.append(ReportState(state, reason))

    def _arm(self, kind: Timer, now_s: float, delay_s: float) -> None:
        self._alarms.arm(kind, now_s, delay_s, self.incarnation)

    def _disarm(self, kind: Timer) -> None:
        self._alarms.disarm(kind)


_RULES: dict[tuple[State, type], Callable[[ChildMachine, Any], None]] = {
    (state, event): rule
    for event, rule, states in (
        (Start, ChildMachine._start, "STOPPED STOPPING FATAL"),
        (Stop, ChildMachine._stop, "STARTING RUNNING BACKOFF STOPPING FATAL"),
        (Escalate, ChildMachine._escalate, "STARTING RUNNING BACKOFF"),
        (Spawned, ChildMachine._spawned, "STARTING BACKOFF STOPPING FATAL"),
        (SpawnFailed, ChildMachine._spawn_failed, "STARTING BACKOFF STOPPING FATAL"),
        (PhaseBegan, ChildMachine._phase_began, "STARTING"),
        (Ready, ChildMachine._ready, "STARTING"),
        (BootRefused, ChildMachine._boot_refused, "STARTING"),
        (Exited, ChildMachine._exited, "STARTING RUNNING BACKOFF STOPPING FATAL"),
        (Hung, ChildMachine._hung, "STARTING RUNNING STOPPING FATAL"),
        (TimerFired, ChildMachine._timer_fired, "STARTING BACKOFF STOPPING FATAL"),
    )
    for state in map(State, states.split())
}
