# SPDX-License-Identifier: Apache-2.0
"""How often the executor is woken for what an engine brings: not for each step of a quick one."""

from __future__ import annotations

from typing import Any

import pytest

from actorserve.actors.generation import rank_sink
from actorserve.actors.generation.rank_sink import WAKE_EVERY_S, RankSink
from actorserve.wire.generation import Output

STEP_S = WAKE_EVERY_S / 4


class End:
    """A rank's end that notes what wakes."""

    def __init__(self) -> None:
        self.sent: list[bool] = []
        self.woken = 0

    def send(self, message: Any, *, wakes: bool = True) -> None:
        """Note it."""
        self.sent.append(wakes)

    def wake(self) -> None:
        """Count it."""
        self.woken += 1

    def place(self, *_: object) -> None:
        """Not needed: there are no arrays."""
        raise AssertionError


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock that the sink looks at."""
    clock = Clock()
    monkeypatch.setattr(rank_sink, "monotonic_s", clock)
    return clock


def step(sink: RankSink, clock: Clock, after_s: float) -> None:
    """Bring one output, so long after the last one."""
    clock.now_s += after_s
    sink.outputs([Output(1, tokens=[1])])


def test_outputs_of_quick_steps_wake_once_in_a_while(clock):
    """Every millisecond, and nothing is left lying when the steps end."""
    end = End()
    sink = RankSink(end)  # type: ignore[arg-type]
    for _ in range(13):
        step(sink, clock, STEP_S)
    assert end.sent == [True, False, False, False] * 3 + [True]
    sink.wake()
    assert end.woken == 0
    step(sink, clock, STEP_S)
    sink.wake()
    sink.wake()
    assert end.woken == 1


def test_outputs_of_slow_steps_wake_each_time(clock):
    """A reader of a real model gets each token when it is there."""
    end = End()
    sink = RankSink(end)  # type: ignore[arg-type]
    for _ in range(5):
        step(sink, clock, WAKE_EVERY_S * 1.01)
    assert end.sent == [True] * 5
