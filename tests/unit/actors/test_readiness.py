# SPDX-License-Identifier: Apache-2.0
"""The supervisor's side of `is_ready`: one check at a time, limits, and what is logged."""

from __future__ import annotations

import asyncio
import logging

import pytest

from actorserve.actors import readiness
from actorserve.actors.readiness import Readiness, ReadinessStats
from actorserve.wire.codec import decode_to_stub
from actorserve.wire.messages import AskReady, SaidReady


class FakeEnd:
    """Notes what is asked."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def send_with_handles(self, data, handles, *, on_control=False, is_bounded=True) -> None:
        message = decode_to_stub(data)
        assert isinstance(message, AskReady) and on_control and not handles
        self.numbers.append(message.number)


@pytest.fixture
def end() -> FakeEnd:
    """Return a stub's end."""
    return FakeEnd()


@pytest.fixture
def make(loop, end):
    """Return `make(limit_s, is_stopped)`: the checks of a stub whose model has the hook."""

    def make(limit_s: float = 60.0, is_stopped=lambda: False) -> Readiness:
        made = Readiness(loop, end, "m_0", is_stopped, limit_s)
        made.has_hook = True
        return made

    return make


@pytest.fixture
def probe(loop):
    """Return `probe(readiness, max_age_s)`: a probe that has begun."""

    def probe(of: Readiness, max_age_s: float = 0.0) -> asyncio.Task[bool]:
        task = loop.create_task(of.check(max_age_s))
        loop.run_until_complete(asyncio.wait([task], timeout=0))
        return task

    return probe


def test_without_a_hook_nobody_is_asked(loop, end):
    """A stub is ready then."""
    assert loop.run_until_complete(Readiness(loop, end, "m_0", lambda: True).check())
    assert end.numbers == []


@pytest.mark.parametrize("verdict", [True, False])
def test_probes_share_a_check(make, probe, loop, end, verdict):
    """Whatever comes out; the next one is a new check."""
    checks = make()
    probes = [probe(checks) for _ in range(5)]
    assert checks.is_asked
    checks.take(SaidReady(1, verdict))
    assert loop.run_until_complete(asyncio.gather(*probes)) == [verdict] * 5
    last = probe(checks)
    checks.take(SaidReady(2, not verdict))
    assert loop.run_until_complete(last) is not verdict
    assert end.numbers == [1, 2]
    assert checks.stats() == ReadinessStats(True, 2, 1, False)


def test_a_check_may_be_late_and_is_never_repeated_meanwhile(make, probe, loop, end, turn):
    """Not ready, at once for those that come then; what it says at last counts no more."""
    checks = make(limit_s=0.01)
    first = probe(checks)
    turn(10, first.done)
    assert first.result() is False
    assert loop.run_until_complete(checks.check()) is False
    assert end.numbers == [1]
    checks.take(SaidReady(1, True))
    probe(checks).cancel()
    assert end.numbers == [1, 2]
    checks.close()


def test_an_answer_to_another_question_is_nothing(make, probe, loop):
    """Nor is one that nobody has asked."""
    checks = make()
    checks.take(SaidReady(1, True))
    first = probe(checks)
    checks.take(SaidReady(7, True))
    assert not first.done()
    checks.take(SaidReady(1, False))
    assert loop.run_until_complete(first) is False


def test_a_recent_word_may_do(make, probe, loop, end):
    """For those that say how old it may be."""
    checks = make()
    first = probe(checks)
    checks.take(SaidReady(1, True))
    assert loop.run_until_complete(first)
    assert loop.run_until_complete(checks.check(60.0))
    assert end.numbers == [1]


def test_the_end_of_the_stub_answers_everybody(make, probe, loop, end):
    """Those that wait, and those that come."""
    checks = make()
    first = probe(checks)
    checks.close()
    checks.close()
    assert loop.run_until_complete(first) is False
    assert loop.run_until_complete(checks.check()) is False
    assert end.numbers == [1]


def test_a_stopped_stub_is_not_asked(make, loop, end):
    """It could not answer."""
    assert loop.run_until_complete(make(is_stopped=lambda: True).check()) is False
    assert end.numbers == []


def test_a_probe_that_is_cancelled_leaves_the_others(make, probe, loop):
    """They share the check, not their fate."""
    checks = make()
    first, second = probe(checks), probe(checks)
    first.cancel()
    checks.take(SaidReady(1, True))
    assert loop.run_until_complete(second)


def test_reasons_are_logged_now_and_then(make, probe, loop, monkeypatch, caplog):
    """The first, a new one after some seconds, the same after a minute, and the end of it."""
    now_s = 100.0
    monkeypatch.setattr(readiness, "monotonic_s", lambda: now_s)
    caplog.set_level(logging.INFO, "actorserve")
    checks = make()

    def say(is_ready: bool, problem: str = "", after_s: float = 1.0) -> list[str]:
        nonlocal now_s
        now_s += after_s
        caplog.clear()
        probe(checks)
        checks.take(SaidReady(checks.stats().checks, is_ready, problem))
        loop.run_until_complete(asyncio.sleep(0))
        return caplog.messages

    assert say(True) == []
    assert say(False) == ["Model 'm_0' is not ready (user-defined check failed)."]
    assert say(False) == []
    assert say(False, "boom", 3.0) == []
    assert say(False, "boom", 2.0) == ["Model 'm_0' is not ready: boom"]
    assert say(False, "boom", 50.0) == []
    assert say(False, "boom", 11.0) == ["Model 'm_0' is not ready: boom"]
    assert say(True) == ["Model 'm_0' is ready again"]
    assert say(True) == []
    assert say(False, "boom") == []
    assert say(True) == []
    assert say(False, "boom", 5.0) == ["Model 'm_0' is not ready: boom"]
