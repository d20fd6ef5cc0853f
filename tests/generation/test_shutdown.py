# SPDX-License-Identifier: Apache-2.0
"""How executors end: in how much time, and what those are told who wait."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from actorserve.actors.generation import (
    ExecutorConfig,
    GenerationExecutor,
    LoRARequest,
    SamplingParams,
)
from actorserve.clock import monotonic_s
from actorserve.errors import Cancelled, EngineDeadError, Unavailable
from tests.conftest import wait_until
from tests.generation.asking import LONG, PATIENCE_S
from tests.generation.conftest import Make
from tests.generation.odd_engines import Hanging, SlowToClose

FEW = SamplingParams(max_tokens=5)


def _in_loop(executor: GenerationExecutor) -> None:
    asyncio.run(executor.ashutdown())


@pytest.mark.parametrize("shut", [GenerationExecutor.shutdown, _in_loop])
def test_a_hung_thread_does_not_hold_a_shutdown_up(
    shut: Callable[[GenerationExecutor], None], caplog: pytest.LogCaptureFixture
) -> None:
    """What was pending fails, and the thread that is left behind is named."""
    engine = Hanging()
    executor = GenerationExecutor.create(engine, ExecutorConfig(worker="thread"))
    result = executor.generate_async([1], LONG)
    engine.is_in.wait(PATIENCE_S)
    began_s = monotonic_s()
    try:
        with caplog.at_level(logging.WARNING, "actorserve"):
            shut(executor)
        assert monotonic_s() - began_s < 2.5  # it takes less than one
        assert "thread 'generation Hanging' of Hanging hangs in its engine" in caplog.text
        with pytest.raises(Unavailable, match="shut down"):
            result.result(0)
    finally:
        engine.released.set()
    wait_until(lambda: not executor._thread.is_alive())  # type: ignore[attr-defined]


def test_a_thread_that_was_given_up_is_not_waited_for() -> None:
    """After `hang_timeout_s` everybody has been told: there is nothing to wait for."""
    engine = Hanging()
    config = ExecutorConfig(worker="thread", hang_timeout_s=0.2)
    executor = GenerationExecutor.create(engine, config)
    try:
        with pytest.raises(EngineDeadError, match=r"an iteration has taken over 0\.2 s"):
            executor.generate([1], LONG)
        began_s = monotonic_s()
        executor.shutdown(drain=True)  # ten seconds by default
        assert monotonic_s() - began_s < 2.0
    finally:
        engine.released.set()
    wait_until(lambda: not executor._thread.is_alive())  # type: ignore[attr-defined]


def test_an_engine_that_closes_slowly_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    """It has begun to end: that is no hang."""
    engine = SlowToClose(1.2)
    executor = GenerationExecutor.create(engine, ExecutorConfig(worker="thread"))
    executor.shutdown()
    assert engine.is_closed
    assert "left behind" not in caplog.text


def test_whoever_waits_at_a_shutdown_is_told_of_it(make: Make) -> None:
    """Nobody cancelled the request: the executor was shut down."""
    executor = make({"slots": 1, "delay_s": 0.001})
    running, waiting = (executor.generate_async([1], LONG, streaming=True) for _ in range(2))
    running.result_step(PATIENCE_S)
    executor.shutdown()
    for result in (running, waiting):
        with pytest.raises(Cancelled, match="the executor was shut down before"):
            result.result(PATIENCE_S)


def test_a_cancelled_request_is_told_of_that(make: Make) -> None:
    """As before."""
    result: Any = make().generate_async([1], LONG)
    result.cancel()
    with pytest.raises(Cancelled, match=r"^the request was cancelled$"):
        result.result(PATIENCE_S)


def test_a_drain_finishes_what_waits_for_the_engine(make: Make) -> None:
    """Requests that came before the engine had loaded were accepted."""
    executor = make({"load_s": 0.3}, wait=False)
    result = executor.generate_async([1], FEW)
    executor.shutdown(drain=True, timeout=PATIENCE_S)
    assert len(result.result(0).outputs[0].token_ids) == FEW.max_tokens


def test_a_drain_finishes_what_waits_for_an_adapter(make: Make) -> None:
    """It is sent when the adapter is there, and only then nothing more is taken."""
    executor = make({"adapters": True, "any_path": True, "adapter_s": 0.3})
    lora = LoRARequest("style", 1, "/somewhere")
    results = [executor.generate_async([1], FEW, lora) for _ in range(3)]
    executor.shutdown(drain=True, timeout=PATIENCE_S)
    for result in results:
        assert len(result.result(0).outputs[0].token_ids) == FEW.max_tokens


def test_a_drain_can_be_cut_short_while_the_engine_loads(make: Make) -> None:
    """By a second shutdown, from another thread."""
    executor = make({"load_s": 2.0}, wait=False)
    result = executor.generate_async([1], FEW)
    draining = threading.Thread(target=executor.shutdown, kwargs={"drain": True})
    draining.start()
    executor.shutdown()
    with pytest.raises(Unavailable):
        result.result(PATIENCE_S)
    draining.join(PATIENCE_S)
    assert not draining.is_alive()
