# SPDX-License-Identifier: Apache-2.0
"""Two things at one moment: each test makes the second happen in the middle of the first."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest

from actorserve.actors.generation import (
    EngineDeadError,
    LoRARequest,
    Output,
    SamplingParams,
)
from actorserve.actors.generation.engines.scripted_text import ByteTokenizer
from actorserve.actors.generation.text import StopWatch
from actorserve.errors import Cancelled, InternalError
from actorserve.wire.generation import Abort, Call, Submit
from tests.generation.immediate import Immediate, nothing

LONG = SamplingParams(max_tokens=1_000_000)
LORA = LoRARequest("style", 1, "/somewhere")


class _Interfering(Immediate):
    """Calls `meanwhile` just before requests are sent."""

    meanwhile: Any = None

    def _send(self, message: Any) -> None:
        if isinstance(message, Submit) and self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        super()._send(message)

    def order(self) -> list[str]:
        """Return what was sent of requests, in order."""
        return [type(each).__name__ for each in self.sent if isinstance(each, (Submit, Abort))]

    def end_load(self) -> None:
        """Say that the adapter is loaded."""
        call = next(each for each in self.sent if isinstance(each, Call))
        self.call_ended(call.number, None, None)


def test_a_cancel_does_not_overtake_a_request_that_waited_for_an_adapter():
    """In the moment of sending: the engine hears of the request first, and then of its end."""
    executor = _Interfering(nothing)
    result = executor.generate_async([1], LONG, LORA)
    executor.meanwhile = result.cancel
    executor.end_load()
    assert executor.order()[-2:] == ["Submit", "Abort"]
    assert executor.aborted[-1] == result.request_id
    executor.deliver([Output(result.request_id, finish="cancelled", final=True)])
    assert result.cancelled()


def test_a_forgotten_result_does_not_either():
    """As its finalizer may run anywhere."""
    executor = _Interfering(nothing)
    results = [executor.generate_async([1], LONG, LORA)]
    number = results[0].request_id
    executor.meanwhile = lambda: (results.clear(), gc.collect())
    executor.end_load()
    assert executor.order()[-1] == "Abort"
    assert executor.aborted[-1] == number


def test_a_parked_request_that_has_ended_is_not_left_to_the_engine():
    """It was over before it was sent: it does not run unwatched."""
    executor = _Interfering(nothing)
    result = executor.generate_async([1], LONG, LORA)
    executor.meanwhile = lambda: executor._registry.end_by_id(result.request_id, Cancelled("over"))
    executor.end_load()
    assert executor.order()[-1] == "Abort"


def test_a_request_that_races_a_restart_is_not_left_to_the_next_engine():
    """Its engine died after it was entered, and the next one is there when it is sent."""
    executor = _Interfering(nothing)

    def restart() -> None:
        executor.fail_all(EngineDeadError("just now", retry_after_s=1.0))
        executor.revive()

    executor.meanwhile = restart
    result = executor.generate_async([1], LONG)
    with pytest.raises(EngineDeadError, match="just now"):
        result.result(0)
    assert executor.order() == ["Submit", "Abort"]
    assert executor.aborted == [result.request_id]


@pytest.mark.parametrize("other", ["end", "fail_all"])
def test_a_stop_text_and_another_end_count_once(
    monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """Whoever is first gives the outcome, and the other one changes nothing."""
    executor = Immediate(nothing, ByteTokenizer())
    result = executor.generate_async("a", SamplingParams(max_tokens=100, stop="x"), streaming=True)
    look = StopWatch.look

    def slow_look(watch: StopWatch, output: Output) -> Output | None:
        found = look(watch, output)
        if other == "end":
            executor.end_early(result._feed, InternalError("first"))
        else:
            executor.fail_all(EngineDeadError("first"))
        return found

    monkeypatch.setattr(StopWatch, "look", slow_look)
    executor.deliver([Output(result.request_id, 0, list(b"yx"))])
    stats = executor.stats()
    assert (stats.finished, stats.failed, stats.in_flight) == (1, 1, 0)
    with pytest.raises((InternalError, EngineDeadError), match="first"):
        result.result(0)


def test_what_a_stop_text_ended_is_in_flight_until_the_engine_has_ended_it():
    """It takes up room there; with a dead engine it does not."""
    executor = Immediate(nothing, ByteTokenizer())
    params = SamplingParams(max_tokens=100, stop="x")
    first, second = (executor.generate_async("a", params) for _ in range(2))
    executor.deliver([Output(each.request_id, 0, list(b"yx")) for each in (first, second)])
    assert first.result(0).outputs[0].text == "y"
    assert executor.aborted == [first.request_id, second.request_id]
    assert executor.stats().in_flight == 2
    executor.deliver([Output(first.request_id, 0, finish="cancelled", final=True)])
    assert executor.stats().in_flight == 1
    executor.fail_all(EngineDeadError("gone"))
    stats = executor.stats()
    assert (stats.in_flight, stats.finished, stats.failed) == (0, 2, 0)


def test_an_interrupt_while_a_request_is_sent_leaves_nothing():
    """The table is empty, and the engine is told, should it have heard of the request."""
    executor = _Interfering(nothing)

    def interrupt() -> None:
        raise KeyboardInterrupt

    executor.meanwhile = interrupt
    with pytest.raises(KeyboardInterrupt):
        executor.generate_async([1], LONG)
    assert executor.stats().in_flight == 0
    assert len(executor.aborted) == 1


def test_an_interrupt_before_there_is_a_result_leaves_nothing(monkeypatch: pytest.MonkeyPatch):
    """The request was entered, and nobody has it."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    executor = Immediate(nothing)
    monkeypatch.setattr("actorserve.actors.generation.executor.GenerationResult", interrupt)
    with pytest.raises(KeyboardInterrupt):
        executor.generate_async([1], LONG)
    assert executor.stats().in_flight == 0


def test_a_listener_that_leaves_takes_nothing_from_the_next():
    """All that listen when events come hear of them."""
    executor = Immediate(nothing)
    heard: list[str] = []
    stops: list[Any] = []

    def leaving(first: int, events: list[Any]) -> None:
        heard.append("leaving")
        stops[0]()

    stops.append(executor.on_kv_event(leaving))
    executor.on_kv_event(lambda first, events: heard.append("staying"))
    executor.take_kv_events(0, ["stored"])
    executor.take_kv_events(1, ["stored"])
    assert heard == ["leaving", "staying", "staying"]


def test_a_call_that_a_fork_takes_along_is_answered_there(tmp_path: Path):
    """In the child nobody will ever answer: whoever asks there does not wait for ever."""
    path = tmp_path / "said"
    executor = Immediate(nothing)
    answer = executor._calls.start("echo", [], None)
    pid = os.fork()
    if not pid:
        try:
            answer.result(5)
        except BaseException as error:
            path.write_text(f"{type(error).__name__}: {error}")
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert path.read_text().startswith("EngineDeadError")
    assert "was forked" in path.read_text()
    assert not answer.is_over()


def test_who_hears_of_a_death_waits_for_the_next_life_and_not_for_the_last():
    """Woken by the error, `wait_ready` must not find the gate of the dead engine's life open."""
    executor = Immediate(nothing)
    executor.generate_async([1], LONG)
    registry = executor._registry
    seen = []
    registry.on_finished = lambda _: seen.append(registry.ready.is_open)
    registry.fail_all(EngineDeadError("killed", rank=1, pid=2, retry_after_s=0.0))
    assert seen == [False]
    registry.revive()
    assert registry.ready.is_open
