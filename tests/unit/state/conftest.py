# SPDX-License-Identifier: Apache-2.0
"""What the tests of the pure machines share: a small world, in which a child is supervised."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from actorserve.state import lifecycle as life
from actorserve.state.lifecycle import Budgets, State, Timer
from actorserve.state.restart import Restart
from actorserve.state.supervision import ChildMachine


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Stand in for the fixture of the same name above, which costs more than a hundred tests here.

    The machines touch nothing outside that could leak (test_purity.py).
    """


class World:
    """Carries out a machine's actions and checks, each time, that they make sense."""

    def __init__(self, restart: Restart | None = None, budgets: Budgets | None = None) -> None:
        self.machine = ChildMachine(restart, budgets)
        self.now_s = 0.0
        self.timers: dict[Timer, tuple[float, int]] = {}
        self.spawning: int | None = None  # the incarnation that is being made
        self.process: int | None = None  # the incarnation that lives
        self.signals: list[str] = []
        self.states: list[State] = []
        self.fatal: list[str] = []

    def feed(self, event: life.Event) -> None:
        actions = self.machine.handle(event)
        for place, action in enumerate(actions):
            self._act(action, is_last=place == len(actions) - 1)
        assert set(self.timers) == set(self.machine._alarms._due_s)

    def _act(self, action: life.Action, is_last: bool) -> None:
        if isinstance(action, life.Spawn):
            assert is_last and self.spawning is None and self.process is None
            self.spawning = action.incarnation
        elif isinstance(action, life.ArmTimer):
            self.timers[action.kind] = (self.now_s + action.delay_s, action.incarnation)
        elif isinstance(action, life.CancelTimer):
            del self.timers[action.kind]
        elif isinstance(action, life.ReportState):
            assert not self.states or self.states[-1] is not action.state
            self.states.append(action.state)
        elif isinstance(action, life.ReportFatal):
            assert self.states[-1] is State.FATAL
            self.fatal.append(action.reason)
        else:
            assert self.process is not None
            self.signals.append(type(action).__name__)

    def start(self) -> None:
        self.feed(life.Start(self.now_s))

    def stop(self, is_quick: bool = False) -> None:
        self.feed(life.Stop(self.now_s, is_quick))

    def spawn(self) -> None:
        assert self.spawning is not None
        self.process, self.spawning = self.spawning, None
        self.feed(life.Spawned(self.process, self.now_s))

    def fail_spawn(self, reason: str = "EAGAIN") -> None:
        assert self.spawning is not None
        incarnation, self.spawning = self.spawning, None
        self.feed(life.SpawnFailed(incarnation, self.now_s, reason))

    def ready(self) -> None:
        self.feed(life.Ready(self.machine.incarnation, self.now_s))

    def run(self) -> None:
        """Bring a child that was started to RUNNING."""
        self.spawn()
        self.ready()

    def exit(self, reason: str = "killed by SIGKILL", is_normal: bool = False) -> None:
        assert self.process is not None
        incarnation, self.process = self.process, None
        self.feed(life.Exited(incarnation, self.now_s, reason, is_normal))

    def next_timer(self, late_s: float = 0.0, is_traced: bool = False) -> Timer:
        """Let time pass until the next timer fires."""
        kind = min(self.timers, key=lambda each: self.timers[each])
        due_s, incarnation = self.timers.pop(kind)
        self.now_s = max(self.now_s, due_s) + late_s
        self.feed(life.TimerFired(incarnation, self.now_s, kind, is_traced))
        return kind

    def back_off(self) -> None:
        """Let the delay pass before the next start, if there is one."""
        if Timer.BACKOFF in self.timers:
            assert self.next_timer() is Timer.BACKOFF


@pytest.fixture
def world() -> World:
    """Return a world with the default policy."""
    return World()


@pytest.fixture
def make_world() -> Callable[..., World]:
    """Return the class, for worlds with other policies and budgets."""
    return World
