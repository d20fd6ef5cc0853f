# SPDX-License-Identifier: Apache-2.0
"""A supervised child in a small world: a process, timers and a clock, all pretended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from actorserve.state import lifecycle as life
from actorserve.state.alarms import LATE_S
from actorserve.state.lifecycle import Budgets, Phase, State, Timer
from actorserve.state.restart import Restart
from actorserve.state.supervision import SPAWN_RETRY_S


def test_1_killed_child_is_started_again_at_once(world: Any) -> None:
    """The first restart comes at once, and every state on the way is told."""
    world.start()
    world.run()
    world.exit()
    world.run()
    assert world.states == [
        State.STARTING,
        State.RUNNING,
        State.BACKOFF,
        State.STARTING,
        State.RUNNING,
    ]
    assert world.machine.stats().restarts == 1


def test_2_deaths_before_ready_are_final_after_five(world: Any) -> None:
    """A child that never gets ready is given up, with the reason of its last death."""
    world.start()
    for number in range(5):
        world.spawn()
        world.feed(
            life.PhaseBegan(world.machine.incarnation, world.now_s, Phase.INITIALIZING, "booting")
        )
        world.exit("killed by SIGKILL (perhaps out of memory)")
        assert (world.machine.state is State.FATAL) == (number == 4)
        world.back_off()
    expected = (
        "died 5 times in a row before it was ready:"
        " killed by SIGKILL (perhaps out of memory) while booting"
    )
    assert world.fatal == [expected]
    assert world.machine.reason() == expected


def test_ready_interrupts_the_row_of_early_deaths(world: Any) -> None:
    """Only deaths in a row, without being ready in between, count as "cannot start"."""
    world.start()
    for _ in range(20):
        for _ in range(4):
            world.spawn()
            world.exit()
            world.back_off()
        world.run()
        world.exit()
        world.back_off()
    assert world.fatal == []


def test_22_hung_child_is_aborted_continued_and_killed(world: Any) -> None:
    """The ladder: SIGABRT for the stacks, SIGCONT in case that it is stopped, 2 s, SIGKILL."""
    world.start()
    world.run()
    world.feed(life.Hung(1, world.now_s, "stopped (state T) for 10 s"))
    assert world.machine.state is State.BACKOFF
    assert world.signals == ["SignalAbort", "SignalContinue"]
    assert world.next_timer() is Timer.KILL and world.now_s == 2.0
    assert world.signals[-1] == "SignalKill"
    world.exit("killed by SIGKILL")
    assert world.machine.state is State.STARTING
    assert "stopped (state T) for 10 s" in world.machine.reason()
    assert world.machine.stats().deaths == 1


@pytest.mark.parametrize("phase", [Phase.IMPORTING, Phase.INITIALIZING])
def test_26_27_endless_start_is_ended_and_given_up(
    make_world: Callable[..., Any], phase: Phase
) -> None:
    """A phase that outlives its budget ends the child; five of them are final and say where."""
    world = make_world(budgets=Budgets(initialize_s=600))
    world.start()
    for _ in range(5):
        world.spawn()
        incarnation = world.machine.incarnation
        world.feed(life.PhaseBegan(incarnation, world.now_s, phase, f"{phase.value} model.py"))
        started_s = world.now_s
        assert world.next_timer() is Timer.PHASE
        assert world.now_s == started_s + 600
        world.exit("killed by SIGABRT")
        world.back_off()
    assert world.machine.state is State.FATAL
    assert f"still {phase.value} model.py after 600 s" in world.fatal[0]


def test_28_finalize_that_hangs_is_killed(world: Any) -> None:
    """A stop always ends, and the reason stays for the log."""
    world.start()
    world.run()
    world.stop()
    assert world.signals == ["AskFinalize"]
    assert world.next_timer() is Timer.PHASE and world.now_s == 30.0
    assert world.next_timer() is Timer.KILL
    assert world.signals[1:] == ["SignalAbort", "SignalContinue", "SignalKill"]
    world.exit()
    assert world.machine.state is State.STOPPED
    assert world.machine.reason() == "timed out: still finalizing after 30 s"


def test_30_boot_error_is_final_at_once(world: Any) -> None:
    """What no retry cures is not retried; a process that stays all the same is killed."""
    world.start()
    world.spawn()
    world.feed(life.BootRefused(1, world.now_s, "ModuleNotFoundError: torch"))
    assert (world.machine.state, world.fatal) == (State.FATAL, ["ModuleNotFoundError: torch"])
    assert world.next_timer() is Timer.KILL
    world.exit()
    assert world.machine.state is State.FATAL
    assert world.machine.stats().deaths == 0


def test_31_child_that_dies_again_and_again_backs_off_for_ever(world: Any) -> None:
    """First at once, then doubling to 30 s, never given up without an intensity."""
    world.start()
    delays = []
    for _ in range(30):
        world.run()
        world.now_s += 5.0
        died_s = world.now_s
        world.exit()
        world.back_off()
        delays.append(round(world.now_s - died_s, 3))
    assert delays[:5] == [0, 0.1, 0.2, 0.4, 0.8] and delays[-1] == 30
    assert world.fatal == []


def test_31_intensity_gives_it_up(make_world: Callable[..., Any]) -> None:
    """More restarts within the period than the policy allows are final."""
    world = make_world(Restart(intensity=(3, 60.0), max_s=0.0))
    world.start()
    for _ in range(4):
        world.run()
        world.exit()
    assert world.fatal == ["restarted more than 3 times in 60 s: killed by SIGKILL"]


def test_33_death_while_stopping_is_no_restart(world: Any) -> None:
    """There is one owner: what dies after the order to stop stays down."""
    world.start()
    world.run()
    world.stop()
    world.exit("killed by SIGSEGV")
    assert world.machine.state is State.STOPPED
    assert world.machine.stats().restarts == 0
    assert not world.timers


def test_34_stop_in_backoff_stays_stopped(world: Any) -> None:
    """A pending restart is taken back, and a timer that was on its way does nothing."""
    world.start()
    for _ in range(2):
        world.run()
        world.exit()
    world.stop()
    assert world.machine.state is State.STOPPED and not world.timers
    world.feed(life.TimerFired(2, world.now_s + 1, Timer.BACKOFF))
    assert world.machine.state is State.STOPPED


def test_48_timer_that_fires_late_gives_the_phase_once_more(world: Any) -> None:
    """Our own SIGSTOP is not held against a child that was starting meanwhile."""
    world.start()
    world.spawn()
    world.next_timer(late_s=LATE_S + 30)
    assert world.machine.state is State.STARTING and not world.signals
    world.next_timer(late_s=LATE_S + 30)
    assert world.machine.state is State.BACKOFF


def test_child_in_a_debugger_is_never_ended(world: Any) -> None:
    """State 't' starts the budget again, however often."""
    world.start()
    world.spawn()
    for _ in range(20):
        world.next_timer(is_traced=True)
    assert world.machine.state is State.STARTING and not world.signals


def test_timer_that_fires_early_is_armed_for_the_rest(world: Any) -> None:
    """A clock's rounding does not shorten a budget, and the reason names the whole of it."""
    world.start()
    world.spawn()
    _, incarnation = world.timers.pop(Timer.PHASE)
    world.now_s = 9.0
    world.feed(life.TimerFired(incarnation, world.now_s, Timer.PHASE))
    assert world.timers[Timer.PHASE][0] == 10.0
    world.next_timer()
    assert "after 10 s" in world.machine.reason()


@pytest.mark.parametrize("max_s", [0.0, 30.0])
def test_58_failed_spawns_are_retried_and_never_final(
    make_world: Callable[..., Any], max_s: float
) -> None:
    """EAGAIN or a dead zygote is not the child's fault, and not asked for in a busy loop."""
    world = make_world(Restart(max_s=max_s))
    world.start()
    for _ in range(20):
        before_s = world.now_s
        world.fail_spawn()
        assert world.next_timer() is Timer.BACKOFF
        assert world.now_s >= before_s + SPAWN_RETRY_S
    assert world.fatal == [] and world.machine.stats().deaths == 0
    assert "EAGAIN" in world.machine.reason()


def test_spawn_that_takes_too_long_is_not_blamed_on_the_child(world: Any) -> None:
    """A process that appears after its budget is killed and retried, and not counted."""
    world.start()
    for _ in range(10):
        assert world.next_timer() is Timer.PHASE
        world.spawn()
        assert world.signals.pop() == "SignalKill"
        world.exit()
        assert world.next_timer() is Timer.BACKOFF
    assert world.machine.stats().deaths == 0


def test_stop_while_starting_kills(world: Any) -> None:
    """Nothing was initialized, and the main thread may be busy for minutes."""
    world.start()
    world.spawn()
    world.stop()
    assert world.signals == ["SignalKill"]
    world.exit()
    assert world.states[-2:] == [State.STOPPING, State.STOPPED]


def test_45_second_stop_is_quick(world: Any) -> None:
    """A quick stop does not wait for finalize."""
    world.start()
    world.run()
    world.stop()
    world.stop(is_quick=True)
    assert world.signals == ["AskFinalize", "SignalKill"]


def test_exit_before_spawned_is_a_death(world: Any) -> None:
    """The report of an exit may overtake the answer to the spawn."""
    world.start()
    world.process, world.spawning = world.spawning, None
    world.exit("exited with code 3")
    world.feed(life.Spawned(1, world.now_s))
    assert world.machine.incarnation == 2
    assert world.machine.stats().deaths == 1


@pytest.mark.parametrize(
    ("kind", "is_normal", "is_restarted"),
    [
        ("permanent", False, True),
        ("permanent", True, True),
        ("transient", False, True),
        ("transient", True, False),
        ("temporary", False, False),
        ("temporary", True, False),
    ],
)
def test_kind_decides_who_is_restarted(
    make_world: Callable[..., Any], kind: str, is_normal: bool, is_restarted: bool
) -> None:
    """OTP's table; who is not restarted is STOPPED, not FATAL."""
    world = make_world(Restart(kind=kind))  # type: ignore[arg-type]
    world.start()
    world.run()
    world.exit("ended", is_normal=is_normal)
    assert world.machine.state is (State.STARTING if is_restarted else State.STOPPED)
    assert world.fatal == []


def test_hung_temporary_child_is_ended_for_good(make_world: Callable[..., Any]) -> None:
    """It would be a lie to call that BACKOFF."""
    world = make_world(Restart(kind="temporary"))
    world.start()
    world.run()
    world.feed(life.Hung(1, world.now_s, "silent"))
    assert world.machine.state is State.STOPPING
    world.exit()
    assert (world.machine.state, world.machine.reason()) == (State.STOPPED, "silent")
    assert world.machine.stats().deaths == 1


def test_start_after_fatal_has_a_clean_record(world: Any) -> None:
    """An operator's start gives all tries again."""
    world.start()
    for _ in range(2):
        while world.machine.state is not State.FATAL:
            world.spawn()
            world.exit()
            world.back_off()
        assert world.machine.stats().early_deaths == 5
        world.start()
    assert len(world.fatal) == 2 and world.machine.state is State.STARTING


def test_next_start_is_known(world: Any) -> None:
    """Callers can say when it is worth another try."""
    machine = world.machine
    assert machine.start_due_s(0.0) is None
    world.start()
    assert machine.start_due_s(0.0) == 0.0
    for _ in range(5):
        world.back_off()
        world.run()
        world.exit()
    assert machine.start_due_s(world.now_s) == pytest.approx(0.8)
    assert machine.stats().next_start_s == pytest.approx(world.now_s + 0.8)
    world.next_timer()
    world.run()
    assert machine.start_due_s(world.now_s) is None
    world.feed(life.Hung(machine.incarnation, world.now_s, "silent"))
    assert machine.start_due_s(world.now_s) == 2.0


def test_phase_is_followed(world: Any) -> None:
    """What the main thread does is known from the events alone."""
    phases = [world.machine.phase]
    world.start()
    world.spawn()
    for phase in (Phase.ATTACHED, Phase.IMPORTING, Phase.INITIALIZING):
        world.feed(life.PhaseBegan(1, world.now_s, phase))
        phases.append(world.machine.phase)
    world.ready()
    phases.append(world.machine.phase)
    world.stop()
    assert [*phases, world.machine.phase] == [
        Phase.SPAWNING,
        Phase.ATTACHED,
        Phase.IMPORTING,
        Phase.INITIALIZING,
        Phase.IDLE,
        Phase.FINALIZING,
    ]
