# SPDX-License-Identifier: Apache-2.0
"""The words of supervision: states, phases and their budgets, events, actions.

No decision is made here; supervision.py and health.py decide in these words.
"""

from __future__ import annotations

import enum
import math

import msgspec

from actorserve.errors import ConfigError


class State(enum.Enum):
    """What a supervised child is to everybody else; the values are what people read."""

    STARTING = "STARTING"
    """Its process is being made, or is loading."""
    RUNNING = "RUNNING"
    """It said that it is ready, and nothing has been said against it since."""
    BACKOFF = "BACKOFF"
    """It failed and will be started again: after a delay, once its old process is gone."""
    STOPPING = "STOPPING"
    """It was told to stop and its process is not gone yet."""
    STOPPED = "STOPPED"
    """It has no process and nobody wants one. The first state."""
    FATAL = "FATAL"
    """It failed for good: only a Start from outside tries again."""


class Process(enum.Enum):
    """What is known of the child's process, and how far its end has got."""

    NONE = "none"
    SPAWNING = "spawning"
    ALIVE = "alive"
    ASKED = "asked"  # to finalize
    LEAVING = "leaving"  # it reported a boot error and ends by itself
    ABORTED = "aborted"
    KILLED = "killed"


class Phase(enum.Enum):
    """What a child's main thread is doing; the values are what travels and what people read."""

    SPAWNING = "spawning"
    ATTACHED = "attached"
    IMPORTING = "importing"
    INITIALIZING = "initializing"
    IDLE = "idle"
    EXECUTING = "executing"
    FINALIZING = "finalizing"


START_PHASES = (Phase.SPAWNING, Phase.ATTACHED, Phase.IMPORTING, Phase.INITIALIZING)


class Budgets(msgspec.Struct, frozen=True):
    """How long a child may stay in each phase, in seconds. Raises ConfigError unless positive.

    `spawn_s` is the time to attached, and from there to the first phase of loading;
    `initialize_s` counts for import and initialize, each; `stopped_s` is how long a process may
    be stopped by a signal, in whatever phase; `silent_s` how long an idle child may show neither
    a beat nor any CPU time; `execute_s` is None (no limit) unless someone set one.
    """

    spawn_s: float = 10.0
    initialize_s: float = 600.0
    finalize_s: float = 30.0
    stopped_s: float = 10.0
    silent_s: float = 60.0
    execute_s: float | None = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"budget {name} is {value}, expected seconds, more than 0")

    def of(self, phase: Phase) -> float | None:
        """Return the seconds that a phase may last; None for no limit."""
        if phase in (Phase.SPAWNING, Phase.ATTACHED):
            return self.spawn_s
        if phase in (Phase.IMPORTING, Phase.INITIALIZING):
            return self.initialize_s
        if phase is Phase.EXECUTING:
            return self.execute_s
        return self.finalize_s if phase is Phase.FINALIZING else None


class Timer(enum.Enum):
    """The three timers of a child; arming one again replaces it."""

    PHASE = "phase"
    """A phase of loading, or finalize, takes too long."""
    KILL = "kill"
    """It was told to go (by SIGABRT, or by its own boot error) and did not."""
    BACKOFF = "backoff"
    """The time to start it again."""


class ChildStats(msgspec.Struct, frozen=True):
    """What a child has been through. Times are monotonic seconds, None for never or not now."""

    state: State
    incarnation: int
    restarts: int
    deaths: int
    early_deaths: int
    ignored_events: int
    reason: str
    state_since_s: float | None
    ready_since_s: float | None
    next_start_s: float | None


# --- events: orders from above ------------------------------------------------------------------


class Start(msgspec.Struct, frozen=True):
    """Start it, with a clean record. If it is still stopping, it starts when that is done."""

    now_s: float


class Stop(msgspec.Struct, frozen=True):
    """Stop it and keep it stopped. `is_quick` kills instead of asking."""

    now_s: float
    is_quick: bool = False


class Escalate(msgspec.Struct, frozen=True):
    """Give it up: its group has restarted too often, or its owner's policy says so."""

    now_s: float
    reason: str


# --- events: reports about one incarnation ------------------------------------------------------


class Report(msgspec.Struct, frozen=True):
    """Base of what is said about one incarnation of the child; late ones are ignored."""

    incarnation: int
    now_s: float


class Spawned(Report, frozen=True):
    """Its process exists. Each Spawn is answered by this or by SpawnFailed, always."""


class SpawnFailed(Report, frozen=True):
    """No process could be made (EAGAIN, the zygote is gone): nobody's fault, tried again."""

    reason: str


class PhaseBegan(Report, frozen=True):
    """It entered a phase of loading; `label` says so to people ("importing model.py")."""

    phase: Phase
    label: str = ""


class Ready(Report, frozen=True):
    """It can work."""


class BootRefused(Report, frozen=True):
    """It cannot start, whatever is tried: a boot error, or a handshake that does not match."""

    reason: str


class Exited(Report, frozen=True):
    """Its process is gone. `is_normal` means that it chose to end, as an actor may; no stub may."""

    reason: str
    is_normal: bool = False


class Hung(Report, frozen=True):
    """It was judged to be hung (health.HangJudge); `reason` is the verdict's."""

    reason: str


class TimerFired(Report, frozen=True):
    """A timer that was armed is due. `is_traced` says that the process is in state 't' now."""

    kind: Timer
    is_traced: bool = False


Event = (
    Start
    | Stop
    | Escalate
    | Spawned
    | SpawnFailed
    | PhaseBegan
    | Ready
    | BootRefused
    | Exited
    | Hung
    | TimerFired
)


# --- actions, to be carried out in the order given ----------------------------------------------


class Spawn(msgspec.Struct, frozen=True):
    """Make the process of this incarnation. Always the last action of a list."""

    incarnation: int


class ArmTimer(msgspec.Struct, frozen=True):
    """Send TimerFired(incarnation, …, kind) after `delay_s`; replaces a timer of this kind."""

    kind: Timer
    delay_s: float
    incarnation: int


class CancelTimer(msgspec.Struct, frozen=True):
    """Drop a timer that is armed."""

    kind: Timer


class SignalAbort(msgspec.Struct, frozen=True):
    """Send SIGABRT: the process dumps its stacks and ends."""


class SignalContinue(msgspec.Struct, frozen=True):
    """Send SIGCONT, so that a stopped process can take the SIGABRT before it."""


class SignalKill(msgspec.Struct, frozen=True):
    """Send SIGKILL to the process and its group."""


class AskFinalize(msgspec.Struct, frozen=True):
    """Ask the process to finalize and end."""


class ReportState(msgspec.Struct, frozen=True):
    """Tell everybody the new state, and why in words for people."""

    state: State
    reason: str


class ReportFatal(msgspec.Struct, frozen=True):
    """Tell the owner that it is given up; follows ReportState(FATAL)."""

    reason: str


Action = (
    Spawn
    | ArmTimer
    | CancelTimer
    | SignalAbort
    | SignalContinue
    | SignalKill
    | AskFinalize
    | ReportState
    | ReportFatal
)
