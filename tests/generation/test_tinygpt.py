# SPDX-License-Identifier: Apache-2.0
"""The conformance cases that depend on the engine, with a real model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from actorserve.actors.generation import (
    EngineSpec,
    ExecutorConfig,
    GenerationExecutor,
    GenerationResult,
    SamplingParams,
)
from actorserve.errors import Cancelled
from tests.generation.asking import PATIENCE_S


@pytest.fixture(params=["thread", "process"], scope="module")
def tinygpt(request: pytest.FixtureRequest) -> Iterator[GenerationExecutor]:
    """Return an executor over the model, which all tests here share."""
    config = ExecutorConfig(max_beam_width=4, worker=request.param)
    with GenerationExecutor.create(EngineSpec("tinygpt"), config) as executor:
        yield executor


def one(executor: GenerationExecutor, prompt: str, **fields: object) -> GenerationResult:
    """Return the result of one prompt."""
    result = executor.generate(prompt, SamplingParams(**fields))  # type: ignore[arg-type]
    assert isinstance(result, GenerationResult)
    return result


def test_c1_deltas_make_the_whole(tinygpt: GenerationExecutor):
    """Tokens and text, greedy and with a seed, alone and among others."""
    others = [tinygpt.generate_async("def f(", SamplingParams(max_tokens=60)) for _ in range(5)]
    for fields in ({}, {"temperature": 0.9, "seed": 4}):
        params = SamplingParams(max_tokens=40, **fields)  # type: ignore[arg-type]
        whole = tinygpt.generate("import ", params)
        assert isinstance(whole, GenerationResult)
        tokens, text = [], ""
        for step in tinygpt.generate_async("import ", params, streaming=True):
            tokens += step.outputs[0].token_ids_diff
            text += step.outputs[0].text_diff
        assert tokens == whole.outputs[0].token_ids and len(tokens) == 40
        assert text == whole.outputs[0].text != ""
    assert [each.result(PATIENCE_S).outputs[0].length for each in others] == [60] * 5


def test_c5_a_cancelled_request_frees_its_slot(tinygpt: GenerationExecutor):
    """As many as there are slots are cancelled; as many again are served."""
    slots = tinygpt.info.slots if tinygpt.info else 0
    params = SamplingParams(max_tokens=100)
    held = [tinygpt.generate_async("a", params, streaming=True) for _ in range(slots)]
    held[0].result_step(PATIENCE_S)
    for each in held:
        each.cancel()
    assert all(isinstance(each.exception(PATIENCE_S), Cancelled) for each in held)
    again = [tinygpt.generate_async("a", SamplingParams(max_tokens=2)) for _ in range(slots)]
    assert [each.result(PATIENCE_S).outputs[0].length for each in again] == [2] * slots


def test_c19_beams_are_replaced_and_cut_together(tinygpt: GenerationExecutor):
    """Streamed beams end as the unstreamed ones, with as many logarithms as tokens."""
    params = SamplingParams(max_tokens=12, beam_width=3, logprobs=0)
    whole = one(tinygpt, "class A", max_tokens=12, beam_width=3, logprobs=0)
    result = tinygpt.generate_async("class A", params, streaming=True)
    for step in result:
        assert all(beam.length == len(beam.logprobs) for beam in step.outputs)
    assert [each.token_ids for each in result.outputs] == [each.token_ids for each in whole.outputs]
    assert [each.text for each in result.outputs] == [each.text for each in whole.outputs]


def test_c19_stop_texts_and_stop_words_stop_alike(tinygpt: GenerationExecutor):
    """What follows is cut, as text or as tokens, and never streamed."""
    free = one(tinygpt, "import ", max_tokens=40).outputs[0]
    stop = free.text[10:14]
    place = free.text.index(stop)
    result = tinygpt.generate_async("import ", SamplingParams(max_tokens=40, stop=stop), None, True)
    for step in result:
        assert free.text[:place].startswith(step.outputs[0].text)
    assert result.outputs[0].text == free.text[:place]
    assert (result.outputs[0].finish_reason, result.outputs[0].stop_reason) == ("stop", stop)
    word = free.token_ids[6:8]
    first = next(n for n in range(len(free.token_ids)) if free.token_ids[n : n + 2] == word)
    cut = one(tinygpt, "import ", max_tokens=40, stop_token_ids=[word]).outputs[0]
    assert (cut.token_ids, cut.finish_reason) == (free.token_ids[:first], "stop")


def test_c20_every_sequence_has_its_end(tinygpt: GenerationExecutor):
    """Of n sampled sequences each is whole."""
    result = one(tinygpt, "import ", max_tokens=9, n=3, temperature=1.0, seed=5)
    assert [each.length for each in result.outputs] == [9] * 3
    assert [each.finish_reason for each in result.outputs] == ["length"] * 3
    assert len({tuple(each.token_ids) for each in result.outputs}) > 1


@pytest.mark.parametrize("stop", ["func", "ion", "line"])
def test_beams_are_the_same_with_a_stop_text_but_for_what_is_behind_it(
    tinygpt: GenerationExecutor, stop: str
):
    """A text in a beam that is given up later stops nothing."""
    whole = one(tinygpt, "The list", max_tokens=12, beam_width=4)
    cut = one(tinygpt, "The list", max_tokens=12, beam_width=4, stop=stop)
    assert [each.text for each in cut.outputs] == [
        each.text.partition(stop)[0] for each in whole.outputs
    ]
    assert [each.finish_reason for each in cut.outputs] == [
        "stop" if stop in each.text else "length" for each in whole.outputs
    ]


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_a_stop_text_cuts_the_logits_with_the_tokens(worker: Any):
    """There is a row for each token, also where the engine gives them only at the end."""
    config = ExecutorConfig(max_beam_width=4, worker=worker)
    with GenerationExecutor.create("tinygpt", config) as executor:
        for fields in ({}, {"n": 3, "temperature": 1.0, "seed": 3}, {"beam_width": 4}):
            asked = {"max_tokens": 20, "return_generation_logits": True, **fields}
            whole = one(executor, "The list", **asked).outputs
            cut = one(executor, "The list", stop=whole[0].text[4:8], **asked).outputs
            assert cut[0].finish_reason == "stop" and cut[0].length < 20
            for each, before in zip(cut, whole):
                assert each.generation_logits is not None and before.generation_logits is not None
                assert len(each.generation_logits) == each.length
                np.testing.assert_allclose(
                    each.generation_logits, before.generation_logits[: each.length], atol=1e-3
                )
