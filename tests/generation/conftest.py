# SPDX-License-Identifier: Apache-2.0
"""Executors over the scripted engine, in a thread and in processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from actorserve.actors.generation import EngineSpec, ExecutorConfig, GenerationExecutor

Make = Callable[..., GenerationExecutor]
WORKERS = ["thread", "process"]


def _create(worker: str, options: dict[str, Any], **fields: Any) -> GenerationExecutor:
    wait = fields.pop("wait", True)
    config = ExecutorConfig(worker=worker, **fields)  # type: ignore[arg-type]
    return GenerationExecutor.create(EngineSpec("scripted", options), config, wait=wait)


@pytest.fixture(params=WORKERS)
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Return `make(options of the engine, **config)`; what it made is shut down in the end."""
    made = []

    def make(options: dict[str, Any] | None = None, **fields: Any) -> GenerationExecutor:
        executor = _create(request.param, options or {}, **fields)
        made.append(executor)
        return executor

    yield make
    for executor in made:
        executor.shutdown()


@pytest.fixture(params=WORKERS, scope="session")
def plain(request: pytest.FixtureRequest) -> Iterator[GenerationExecutor]:
    """Return an executor that many tests share: it has adapters and events, and lets beams be."""
    options = {"adapters": True, "kv_events": True}
    executor = _create(request.param, options, max_beam_width=4)
    yield executor
    executor.shutdown()


@pytest.fixture(params=WORKERS, scope="session")
def speaking(request: pytest.FixtureRequest) -> Iterator[GenerationExecutor]:
    """Return an executor with a tokenizer of bytes, which many tests share."""
    executor = _create(request.param, {"text": True}, max_beam_width=4)
    yield executor
    executor.shutdown()
