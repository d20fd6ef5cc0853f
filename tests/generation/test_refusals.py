# SPDX-License-Identifier: Apache-2.0
"""What an engine says against what was asked of it reaches the caller as it is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from actorserve.actors.generation import (
    EngineDeadError,
    EngineSpec,
    ExecutorConfig,
    GenerationExecutor,
    RequestError,
    SamplingParams,
)
from actorserve.errors import InvalidArgument, Unsupported
from tests.generation.odd_engines import Mute, One, Split

WORKERS = pytest.mark.parametrize("worker", ["thread", "process"])
ENGINES = "tests.generation.odd_engines"
THREAD = ExecutorConfig(worker="thread")


@WORKERS
@pytest.mark.parametrize("where", ["init", "start"])
def test_an_engine_that_refuses_to_load_is_heard_as_it_is(worker: Any, where: str) -> None:
    """Its class and its text, and neither a dead rank nor a traceback."""
    spec = EngineSpec(f"{ENGINES}:Refusing", {"where": where})
    with pytest.raises(InvalidArgument) as caught:
        GenerationExecutor.create(spec, ExecutorConfig(worker=worker))
    assert str(caught.value) == "option 'slots' is 0, expected 1 or more"


@WORKERS
def test_what_an_engine_does_not_support_is_unsupported(worker: Any) -> None:
    """The code travels too; asked again, in a loop, it is the same."""
    spec = EngineSpec(f"{ENGINES}:Refusing", {"how": "unsupported"})
    with pytest.raises(Unsupported, match=r"^this processor has no AVX2$"):
        asyncio.run(GenerationExecutor.acreate(spec, ExecutorConfig(worker=worker)))


def test_one_rank_of_several_that_refuses_is_enough() -> None:
    """Whichever it is."""
    spec = EngineSpec(f"{ENGINES}:Refusing")
    with pytest.raises(InvalidArgument, match=r"^option 'slots' is 0, expected 1 or more$"):
        GenerationExecutor.create(spec, model_world_size=2)


@WORKERS
def test_an_engine_that_fails_to_load_is_dead(worker: Any) -> None:
    """A fault is no refusal: its traceback is shown."""
    spec = EngineSpec("tests.generation.rank_engines:Counting", {"fail_load": 0})
    with pytest.raises(EngineDeadError, match="RuntimeError: no weights on rank 0") as caught:
        GenerationExecutor.create(spec, ExecutorConfig(worker=worker))
    assert "rank_engines.py" in caught.value.traceback


def test_a_call_that_is_refused_says_only_why() -> None:
    """No class's name stands before what an engine says to its caller; before a fault it does."""
    with GenerationExecutor.create("scripted", THREAD) as executor:
        with pytest.raises(RequestError, match=r"^there is no adapter 3$"):
            executor.unload_adapter(3)
        with pytest.raises(RequestError, match=r"^InternalError: oh no$"):
            executor.call("fail", "oh no")


def test_an_engine_that_forgets_sequences_has_not_answered() -> None:
    """Half of what was asked for is no result, and the error says what is missing."""
    with GenerationExecutor.create(One(), THREAD) as executor:
        params = SamplingParams(max_tokens=2, n=3, temperature=1.0)
        result = executor.generate_async([1], params)
        with pytest.raises(RequestError, match=r"without an end of its sequences: 1, 2$"):
            result.result(20)
        assert result.outputs[0].token_ids == [2, 3]
        assert executor.stats().failed == 1


def test_an_engine_that_does_not_say_why_it_ended_has_not_answered() -> None:
    """Each sequence needs a `finish`."""
    with (
        GenerationExecutor.create(Mute(), THREAD) as executor,
        pytest.raises(RequestError, match="without an end of its sequences: 0"),
    ):
        executor.generate([1], SamplingParams(max_tokens=2))


def test_an_end_of_a_request_may_follow_those_of_its_sequences() -> None:
    """As an output of its own."""
    with GenerationExecutor.create(Split(), THREAD) as executor:
        result = executor.generate([1], SamplingParams(max_tokens=2))
        assert result.outputs[0].token_ids == [2, 3]
        assert result.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    "wait",
    [
        lambda executor, result: result.result(-1),
        lambda executor, result: result.result_step(-1),
        lambda executor, result: executor.get_stats(-1),
        lambda executor, result: executor.wait_ready(-1),
        lambda executor, result: executor.call("echo", timeout=-1),
        lambda executor, result: next(executor.wait_first_completed([result], -1)),
    ],
)
def test_a_wrong_timeout_is_called_what_its_user_calls_it(wait: Any) -> None:
    """It is `timeout` everywhere here."""
    with GenerationExecutor.create("scripted", THREAD) as executor:
        result = executor.generate_async([1], SamplingParams(max_tokens=1_000_000))
        with pytest.raises(InvalidArgument, match=r"^timeout is -1, expected seconds, 0 or more"):
            wait(executor, result)
