# SPDX-License-Identifier: Apache-2.0
"""What a type checker sees of `generate`, and what it gives."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from mypy import api

from actorserve.actors.generation import (
    EngineSpec,
    ExecutorConfig,
    GenerationExecutor,
    GenerationResult,
    RequestError,
    SamplingParams,
)
from actorserve.errors import InvalidArgument
from tests.generation.asking import LONG, is_idle, short, tokens_of

USER = """
import numpy as np
from typing_extensions import assert_type

from actorserve.actors.generation import GenerationExecutor, GenerationResult, SamplingParams

executor = GenerationExecutor.create("tinygpt")
params = SamplingParams(max_tokens=3)
tokens: list[int] = [1, 2]
texts = ["one", "two"]

assert_type(executor.generate("one prompt"), GenerationResult)
assert_type(executor.generate([1, 2, 3], params), GenerationResult)
assert_type(executor.generate(tokens, params), GenerationResult)
assert_type(executor.generate((1, 2)), GenerationResult)
assert_type(executor.generate(["one", "two"]), list[GenerationResult])
assert_type(executor.generate(texts, [params, params]), list[GenerationResult])
assert_type(executor.generate(("one", "two")), list[GenerationResult])
assert_type(executor.generate([[1], [2, 3]], params), list[GenerationResult])
executor.generate(np.arange(3))  # one or several: only its dimensions tell

text: str = executor.generate("one prompt").outputs[0].text
lengths: list[int] = [each.outputs[0].length for each in executor.generate(texts)]
stats = executor.group_stats()
pids = [] if stats is None else [rank.pid for rank in stats.ranks]


async def main() -> None:
    assert_type(await executor.agenerate("one prompt"), GenerationResult)
    assert_type(await executor.agenerate(texts), list[GenerationResult])
    assert_type(await executor.agenerate([[1], [2]]), list[GenerationResult])
"""


def test_one_prompt_is_one_result_and_a_list_a_list(tmp_path: Path) -> None:
    """A user's file passes `mypy --strict`, without a cast and without an ignore."""
    path = tmp_path / "user.py"
    path.write_text(USER)
    config = tmp_path / "mypy.ini"
    config.write_text("[mypy]\nfollow_imports = silent\n")
    options = ["--strict", "--config-file", str(config), "--cache-dir", str(tmp_path / "cache")]
    said, wrong, status = api.run([*options, "--python-executable", sys.executable, str(path)])
    assert (status, wrong) == (0, ""), said


@pytest.fixture
def executor() -> GenerationExecutor:
    """Return an executor in a thread."""
    spec = EngineSpec("scripted", {"delay_s": 0.001})
    return GenerationExecutor.create(spec, ExecutorConfig(worker="thread", max_in_flight=2))


def test_in_a_loop_one_prompt_is_one_result_and_a_list_a_list(
    executor: GenerationExecutor,
) -> None:
    """More than there is room for wait for room."""

    async def main() -> None:
        one = await executor.agenerate([1], short(2))
        assert isinstance(one, GenerationResult) and tokens_of(one) == [2, 3]
        several = await executor.agenerate([[1], [5], [7]], short(2))
        assert [tokens_of(each) for each in several] == [[2, 3], [6, 7], [8, 9]]

    with executor:
        asyncio.run(main())


def test_in_a_loop_the_first_error_is_raised_when_all_have_ended(
    executor: GenerationExecutor,
) -> None:
    """Before anything is sent, everything is checked."""

    async def main() -> None:
        with pytest.raises(RequestError, match="token 5000"):
            await executor.agenerate([[1], [5000]], short(2))
        assert executor.stats().finished == 2
        with pytest.raises(InvalidArgument, match=r"2 prompts and 1 sampling_params"):
            await executor.agenerate([[1], [2]], [SamplingParams()])
        assert executor.stats().submitted == 2

    with executor:
        asyncio.run(main())


def test_a_cancelled_wait_for_several_ends_them_all(executor: GenerationExecutor) -> None:
    """Those that run, and those that still wait for room."""

    async def main() -> None:
        task = asyncio.ensure_future(executor.agenerate([[1], [2], [3]], LONG))
        while executor.stats().submitted < 2:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while not is_idle(executor):
            await asyncio.sleep(0)

    with executor:
        asyncio.run(main())
        assert executor.group_stats() is None
