# SPDX-License-Identifier: Apache-2.0
"""A supervised child under random events: whatever happened, it can be stopped."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from actorserve.state import lifecycle as life
from actorserve.state.lifecycle import Phase, State, Timer
from actorserve.state.restart import Restart


def _stir(world: Any, dice: random.Random) -> None:
    """Let one thing happen that can happen, or one that races with another."""
    incarnation = world.machine.incarnation - (dice.random() < 0.1)
    choices = [
        world.start,
        lambda: world.stop(is_quick=dice.random() < 0.3),
        lambda: world.feed(life.BootRefused(incarnation, world.now_s, "no")),
        lambda: world.feed(life.Hung(incarnation, world.now_s, "hung")),
        lambda: world.feed(life.PhaseBegan(incarnation, world.now_s, dice.choice(list(Phase)))),
        lambda: world.feed(
            life.TimerFired(incarnation, world.now_s + 50, dice.choice(list(Timer)))
            if not world.timers
            else life.Spawned(incarnation - 1, world.now_s)
        ),
    ]
    if dice.random() < 0.05:
        choices = [lambda: world.feed(life.Escalate(world.now_s, "enough"))]
    if world.spawning is not None:
        choices += [world.spawn] * 6 + [world.fail_spawn]
    if world.process == world.machine.incarnation:
        choices += [world.exit, world.ready] * 2
    if world.timers:
        choices += [world.next_timer] * 2
    dice.choice(choices)()


@pytest.mark.parametrize("seed", range(25))
def test_any_story_can_be_stopped(make_world: Callable[..., Any], seed: int) -> None:
    """Whatever happened before: no child ran twice, and after a stop nothing is left and stays."""
    dice = random.Random(seed)
    world = make_world(
        Restart(
            first_s=dice.choice([0.0, 0.5]),
            max_s=dice.choice([0.5, 30.0]),
            intensity=dice.choice([None, (3, 5.0)]),
            kind=dice.choice(["permanent", "transient", "temporary"]),
        )
    )
    for _ in range(40):
        for _ in range(dice.randint(1, 40)):
            _stir(world, dice)
        world.stop()
        while world.spawning is not None or world.process is not None:
            if world.spawning is not None:
                dice.choice([world.spawn, world.fail_spawn])()
            elif world.signals and world.signals[-1] == "SignalKill":
                world.exit()
            else:
                world.next_timer()
        assert world.machine.state is State.STOPPED
        assert not world.timers
        world.signals.clear()
