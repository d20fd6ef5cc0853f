# SPDX-License-Identifier: Apache-2.0
"""What `create` says of engines, options and fields that cannot be, and what policies do."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from actorserve.actors.generation import (
    EngineDeadError,
    EngineSpec,
    ExecutorConfig,
    GenerationExecutor,
    SamplingParams,
)
from actorserve.actors.generation.engines.scripted import Scripted
from actorserve.errors import InvalidArgument
from actorserve.state.restart import Restart
from tests.conftest import wait_until

WORKERS = pytest.mark.parametrize("worker", ["thread", "process"])


@WORKERS
def test_an_option_that_an_engine_lacks_is_named(worker: Any) -> None:
    """Before anything is started, and with those that it has."""
    with pytest.raises(InvalidArgument, match="'tinygpt' has no option 'slot': it has slots, "):
        GenerationExecutor.create(EngineSpec("tinygpt", {"slot": 3}), ExecutorConfig(worker=worker))


@pytest.mark.parametrize("attribute", ["mode", "ranks"])
def test_an_engine_says_how_it_runs(attribute: str) -> None:
    """One that does not is refused, and does not die later."""
    engine = Scripted()
    setattr(engine, attribute, "sideways")
    with pytest.raises(InvalidArgument, match=f"its {attribute} is 'sideways', expected '"):
        GenerationExecutor.create(engine, ExecutorConfig(worker="thread"))


def test_a_rank_that_loads_too_long_is_the_groups_error() -> None:
    """It says which rank, and not only that there was no answer."""
    spec = EngineSpec("scripted", {"load_s": 30.0})
    with pytest.raises(EngineDeadError, match=r"not loaded within 0.5 s \(ranks: 0\)"):
        GenerationExecutor.create(spec, ExecutorConfig(load_timeout_s=0.5))


@WORKERS
def test_no_load_timeout_is_no_limit(worker: Any) -> None:
    """0 does not mean at once."""
    config = ExecutorConfig(worker=worker, load_timeout_s=0)
    with GenerationExecutor.create(EngineSpec("scripted", {"load_s": 0.2}), config) as executor:
        assert executor.generate([1]).outputs[0].token_ids[0] == 2  # type: ignore[union-attr]


def test_a_field_that_a_request_lacks_is_named() -> None:
    """Most often it is one of SamplingParams."""
    config = ExecutorConfig(worker="thread")
    with (
        GenerationExecutor.create("scripted", config) as executor,
        pytest.raises(InvalidArgument, match="no field 'max_tokens': it has .*SamplingParams"),
    ):
        executor.generate([1], max_tokens=3)


def test_a_temporary_group_is_not_restarted() -> None:
    """Its policy says never."""
    spec = EngineSpec("scripted", {"fail_at": 2})
    config = ExecutorConfig(restart=Restart(kind="temporary"))
    with GenerationExecutor.create(spec, config) as executor:
        with pytest.raises(EngineDeadError):
            executor.generate([1], SamplingParams(max_tokens=5))
        wait_until(lambda: executor.group_stats().state == "dead")  # type: ignore[attr-defined]


def test_whoever_waits_for_a_restart_gets_the_next_engine() -> None:
    """`wait_ready` does not give the error of the engine that is gone."""
    config = ExecutorConfig(restart=Restart(first_s=0.3, max_s=1.0))
    with GenerationExecutor.create("scripted", config) as executor:
        before = executor.group_stats()  # type: ignore[attr-defined]
        os.kill(before.ranks[0].pid, signal.SIGKILL)
        wait_until(lambda: executor.error is not None)
        with pytest.raises(EngineDeadError):
            executor.generate([1])
        executor.wait_ready(20)
        assert executor.generate([1], SamplingParams(max_tokens=1)).outputs[0].token_ids == [2]
        assert executor.group_stats().epoch == before.epoch + 1  # type: ignore[attr-defined]


def test_a_restart_that_is_given_up_is_the_last_error() -> None:
    """Whoever waits hears it, and nobody is told to come back."""
    spec = EngineSpec("scripted", {"fail_at": 1})
    config = ExecutorConfig(restart=Restart(first_s=0.0, base_s=0.0, max_s=0.0, intensity=(1, 60)))
    with GenerationExecutor.create(spec, config) as executor:
        with pytest.raises(EngineDeadError) as first:
            executor.generate([1])
        assert first.value.retry_after_s is not None
        executor.wait_ready(20)
        with pytest.raises(EngineDeadError):
            executor.generate([1])
        with pytest.raises(EngineDeadError) as last:
            executor.wait_ready(20)
        assert last.value.retry_after_s is None
