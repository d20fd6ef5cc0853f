# SPDX-License-Identifier: Apache-2.0
"""A supervised child, over the whole product of situations and events.

A situation is a state with what is known of the process; each is reached by a few events.
"""

from __future__ import annotations

import msgspec
import pytest

from actorserve.state import lifecycle as life
from actorserve.state.lifecycle import Phase, State, Timer
from actorserve.state.restart import Restart
from actorserve.state.supervision import ChildMachine

POLICY = Restart(first_s=1.0)
NOW_S = 100.0

EVENTS = {
    "start": life.Start(NOW_S),
    "stop": life.Stop(NOW_S),
    "quick": life.Stop(NOW_S, is_quick=True),
    "escalate": life.Escalate(NOW_S, "too often"),
    "spawned": life.Spawned(1, NOW_S),
    "spawn_failed": life.SpawnFailed(1, NOW_S, "EAGAIN"),
    "phase": life.PhaseBegan(1, NOW_S, Phase.INITIALIZING),
    "ready": life.Ready(1, NOW_S),
    "refused": life.BootRefused(1, NOW_S, "no module named torch"),
    "exited": life.Exited(1, NOW_S, "killed by SIGKILL"),
    "hung": life.Hung(1, NOW_S, "stopped"),
    "t_phase": life.TimerFired(1, NOW_S, Timer.PHASE),
    "t_kill": life.TimerFired(1, NOW_S, Timer.KILL),
    "t_backoff": life.TimerFired(1, NOW_S, Timer.BACKOFF),
}

PATHS = {
    "STOPPED none": "",
    "STARTING spawning": "start",
    "STARTING alive": "start spawned",
    "RUNNING alive": "start spawned ready",
    "BACKOFF none": "start spawned ready exited",
    "BACKOFF spawning": "start hung",
    "BACKOFF aborted": "start spawned ready hung",
    "BACKOFF killed": "start spawned ready hung t_kill",
    "STOPPING spawning": "start stop",
    "STOPPING asked": "start spawned ready stop",
    "STOPPING aborted": "start spawned ready stop hung",
    "STOPPING killed": "start spawned ready quick",
    "FATAL none": "start spawned refused exited",
    "FATAL spawning": "start refused",
    "FATAL leaving": "start spawned refused",
    "FATAL asked": "start spawned ready escalate",
    "FATAL aborted": "start spawned ready escalate hung",
    "FATAL killed": "start spawned refused t_kill",
}

LADDER = "abort continue arm-kill"
# What changes: situation, event, the situation after, the actions in order (ReportState is
# checked apart). A pair that is not here changes nothing, but for "it is wanted again".
TABLE = """
STOPPED none      | start        | STARTING spawning | arm-phase spawn

STARTING spawning | stop         | STOPPING spawning | cancel-phase
STARTING spawning | quick        | STOPPING spawning | cancel-phase
STARTING spawning | escalate     | FATAL spawning    | cancel-phase fatal
STARTING spawning | spawned      | STARTING alive    |
STARTING spawning | spawn_failed | BACKOFF none      | cancel-phase arm-backoff
STARTING spawning | phase        | STARTING spawning | arm-phase
STARTING spawning | ready        | RUNNING alive     | cancel-phase
STARTING spawning | refused      | FATAL spawning    | cancel-phase fatal
STARTING spawning | exited       | BACKOFF none      | cancel-phase arm-backoff
STARTING spawning | hung         | BACKOFF spawning  | cancel-phase
STARTING spawning | t_phase      | BACKOFF spawning  |
STARTING alive    | stop         | STOPPING killed   | cancel-phase kill
STARTING alive    | quick        | STOPPING killed   | cancel-phase kill
STARTING alive    | escalate     | FATAL killed      | cancel-phase kill fatal
STARTING alive    | phase        | STARTING alive    | arm-phase
STARTING alive    | ready        | RUNNING alive     | cancel-phase
STARTING alive    | refused      | FATAL leaving     | cancel-phase arm-kill fatal
STARTING alive    | exited       | BACKOFF none      | cancel-phase arm-backoff
STARTING alive    | hung         | BACKOFF aborted   | cancel-phase LADDER
STARTING alive    | t_phase      | BACKOFF aborted   | LADDER

RUNNING alive     | stop         | STOPPING asked    | ask arm-phase
RUNNING alive     | quick        | STOPPING killed   | kill
RUNNING alive     | escalate     | FATAL asked       | ask arm-phase fatal
RUNNING alive     | exited       | BACKOFF none      | arm-backoff
RUNNING alive     | hung         | BACKOFF aborted   | LADDER

BACKOFF none      | stop         | STOPPED none      | cancel-backoff
BACKOFF none      | quick        | STOPPED none      | cancel-backoff
BACKOFF none      | escalate     | FATAL none        | cancel-backoff fatal
BACKOFF none      | t_backoff    | STARTING spawning | arm-phase spawn
BACKOFF spawning  | stop         | STOPPING spawning |
BACKOFF spawning  | quick        | STOPPING spawning |
BACKOFF spawning  | escalate     | FATAL spawning    | fatal
BACKOFF spawning  | spawned      | BACKOFF killed    | kill
BACKOFF spawning  | spawn_failed | BACKOFF none      | arm-backoff
BACKOFF spawning  | exited       | BACKOFF none      | arm-backoff
BACKOFF aborted   | stop         | STOPPING aborted  |
BACKOFF aborted   | quick        | STOPPING killed   | cancel-kill kill
BACKOFF aborted   | escalate     | FATAL aborted     | fatal
BACKOFF aborted   | exited       | BACKOFF none      | cancel-kill arm-backoff
BACKOFF aborted   | t_kill       | BACKOFF killed    | kill
BACKOFF killed    | stop         | STOPPING killed   |
BACKOFF killed    | quick        | STOPPING killed   |
BACKOFF killed    | escalate     | FATAL killed      | fatal
BACKOFF killed    | exited       | BACKOFF none      | arm-backoff

STOPPING spawning | spawned      | STOPPING killed   | kill
STOPPING spawning | spawn_failed | STOPPED none      |
STOPPING spawning | exited       | STOPPED none      |
STOPPING asked    | quick        | STOPPING killed   | cancel-phase kill
STOPPING asked    | exited       | STOPPED none      | cancel-phase
STOPPING asked    | hung         | STOPPING aborted  | cancel-phase LADDER
STOPPING asked    | t_phase      | STOPPING aborted  | LADDER
STOPPING aborted  | quick        | STOPPING killed   | cancel-kill kill
STOPPING aborted  | exited       | STOPPED none      | cancel-kill
STOPPING aborted  | t_kill       | STOPPING killed   | kill
STOPPING killed   | exited       | STOPPED none      |

FATAL none        | start        | STARTING spawning | arm-phase spawn
FATAL none        | stop         | STOPPED none      |
FATAL none        | quick        | STOPPED none      |
FATAL spawning    | stop         | STOPPING spawning |
FATAL spawning    | quick        | STOPPING spawning |
FATAL spawning    | spawned      | FATAL killed      | kill
FATAL spawning    | spawn_failed | FATAL none        |
FATAL spawning    | exited       | FATAL none        |
FATAL leaving     | stop         | STOPPING leaving  |
FATAL leaving     | quick        | STOPPING killed   | cancel-kill kill
FATAL leaving     | exited       | FATAL none        | cancel-kill
FATAL leaving     | t_kill       | FATAL killed      | kill
FATAL asked       | stop         | STOPPING asked    |
FATAL asked       | quick        | STOPPING killed   | cancel-phase kill
FATAL asked       | exited       | FATAL none        | cancel-phase
FATAL asked       | hung         | FATAL aborted     | cancel-phase LADDER
FATAL asked       | t_phase      | FATAL aborted     | LADDER
FATAL aborted     | stop         | STOPPING aborted  |
FATAL aborted     | quick        | STOPPING killed   | cancel-kill kill
FATAL aborted     | exited       | FATAL none        | cancel-kill
FATAL aborted     | t_kill       | FATAL killed      | kill
FATAL killed      | stop         | STOPPING killed   |
FATAL killed      | quick        | STOPPING killed   |
FATAL killed      | exited       | FATAL none        |
"""

WORDS = {
    life.Spawn: "spawn",
    life.SignalAbort: "abort",
    life.SignalContinue: "continue",
    life.SignalKill: "kill",
    life.AskFinalize: "ask",
    life.ReportFatal: "fatal",
}


def _expected() -> dict[tuple[str, str], tuple[str, str]]:
    table = {}
    for line in filter(None, TABLE.strip().splitlines()):
        situation, event, after, actions = (part.strip() for part in line.split("|"))
        assert situation in PATHS and event in EVENTS, line
        table[situation, event] = (after, actions.replace("LADDER", LADDER))
    return table


EXPECTED = _expected()


def _situation(machine: ChildMachine) -> str:
    return f"{machine.state.value} {machine._process.value}"


def _words(actions: list[life.Action]) -> str:
    words = []
    for action in actions:
        if isinstance(action, life.ArmTimer):
            words.append(f"arm-{action.kind.value}")
        elif isinstance(action, life.CancelTimer):
            words.append(f"cancel-{action.kind.value}")
        elif not isinstance(action, life.ReportState):
            words.append(WORDS[type(action)])
    return " ".join(words)


def _feed(machine: ChildMachine, *names: str, now_s: float = NOW_S) -> list[life.Action]:
    """Feed events by name, about the current incarnation; timers fire when they are due."""
    actions: list[life.Action] = []
    for name in names:
        event = EVENTS[name]
        at_s = now_s
        if isinstance(event, life.TimerFired):
            at_s = machine._alarms._due_s.get(event.kind, now_s)
        event = msgspec.structs.replace(event, now_s=at_s)
        if isinstance(event, life.Report):
            event = msgspec.structs.replace(event, incarnation=machine.incarnation)
        actions = machine.handle(event)
    return actions


def _machine(situation: str) -> ChildMachine:
    machine = ChildMachine(POLICY)
    _feed(machine, *PATHS[situation].split())
    assert _situation(machine) == situation
    return machine


def _reports(actions: list[life.Action]) -> list[State]:
    return [action.state for action in actions if isinstance(action, life.ReportState)]


@pytest.mark.parametrize("situation", PATHS)
@pytest.mark.parametrize("event", EVENTS)
def test_each_situation_takes_each_event(situation: str, event: str) -> None:
    """Every pair does what the table says; each change of state is reported, and nothing else."""
    machine = _machine(situation)
    before, was_ignored = machine.state, machine.stats().ignored_events
    actions = _feed(machine, event)
    after, words = EXPECTED.get((situation, event), (situation, ""))
    assert (_situation(machine), _words(actions)) == (after, words)
    reports = _reports(actions)
    assert reports == ([machine.state] if machine.state is not before else [])
    if (situation, event) not in EXPECTED and event not in ("start", "stop", "quick"):
        assert machine.stats().ignored_events == was_ignored + 1


REPORTS = [name for name, event in EVENTS.items() if isinstance(event, life.Report)]


@pytest.mark.parametrize("situation", [each for each in PATHS if each != "STOPPED none"])
@pytest.mark.parametrize("event", REPORTS)
def test_report_about_an_earlier_incarnation_changes_nothing(situation: str, event: str) -> None:
    """What comes late from a process that is gone is ignored in every situation."""
    machine = _machine(situation)
    stale = msgspec.structs.replace(EVENTS[event], incarnation=machine.incarnation - 1)
    assert machine.handle(stale) == []
    assert _situation(machine) == situation


@pytest.mark.parametrize("situation", [each for each in PATHS if each.startswith("STOPPING")])
def test_start_while_stopping_starts_when_the_process_is_gone(situation: str) -> None:
    """An order to start is kept until the old process has ended: no child runs twice."""
    machine = _machine(situation)
    assert _feed(machine, "start") == []
    if "spawning" in situation:
        _feed(machine, "spawned")
    actions = _feed(machine, "exited")
    assert _reports(actions) == [State.STOPPED, State.STARTING]
    assert actions[-1] == life.Spawn(2)


def test_stop_takes_back_a_start_while_stopping() -> None:
    """The last order counts."""
    machine = _machine("STOPPING asked")
    _feed(machine, "start", "stop", "exited")
    assert machine.state is State.STOPPED


def test_every_state_and_process_of_the_table_is_a_situation() -> None:
    """The product above leaves no situation out that its own events lead to."""
    reached = {after for after, _ in EXPECTED.values()}
    assert reached - set(PATHS) == {"STOPPING leaving"}  # as "STOPPING aborted": see below
    machine = _machine("FATAL leaving")
    assert _words(_feed(machine, "stop", "t_kill")) == "kill"
    assert _words(_feed(machine, "exited")) == ""
    assert machine.state is State.STOPPED
