# SPDX-License-Identifier: Apache-2.0
"""What a client says, and what an engine gets."""

from __future__ import annotations

from typing import Any

import pytest

from actorserve.actors.generation import GenerationRequest, LoRARequest, SamplingParams
from actorserve.actors.generation.engines.scripted_text import ByteTokenizer
from actorserve.errors import InvalidArgument, Unsupported
from actorserve.wire.generation import Sampling


def test_the_defaults_are_greedy():
    """With nothing said, the most probable token is taken, 32 times."""
    assert SamplingParams().to_sampling() == Sampling()


def test_sampling_is_on_when_anything_of_it_is_said():
    """A top_k or top_p without a temperature means the temperature 1."""
    assert SamplingParams(top_k=5).to_sampling().temperature == 1.0
    assert SamplingParams(top_p=0.5).to_sampling().temperature == 1.0
    assert SamplingParams(temperature=0.3).to_sampling().temperature == 0.3


def test_the_models_end_is_used_unless_told_otherwise():
    """-1, or ignore_eos, never ends."""
    assert SamplingParams().to_sampling(end_id=7).end_id == 7
    assert SamplingParams(end_id=3).to_sampling(end_id=7).end_id == 3
    assert SamplingParams(end_id=-1).to_sampling(end_id=7).end_id is None
    assert SamplingParams(ignore_eos=True).to_sampling(end_id=7).end_id is None


def test_older_names_mean_the_same():
    """max_new_tokens, random_seed, return_log_probs."""
    params = SamplingParams(max_new_tokens=5, random_seed=9, return_log_probs=True)
    sampling = params.to_sampling()
    assert (sampling.max_tokens, sampling.seed, sampling.logprobs) == (5, 9, 0)
    assert SamplingParams(return_log_probs=True, logprobs=3).to_sampling().logprobs == 3


def test_beams_are_all_returned_unless_told_otherwise():
    """`n` of them, or as wide as the search is."""
    wide = SamplingParams(beam_width=4).to_sampling()
    assert (wide.n, wide.beam_width) == (4, 4)
    assert SamplingParams(beam_width=4, n=2).sequences == 2
    best = SamplingParams(n=2, best_of=5).to_sampling()
    assert (best.n, best.best_of) == (2, 5)


def test_words_are_token_sequences():
    """Single tokens and sequences; bad texts also as they look within a line."""
    params = SamplingParams(stop_token_ids=[1, [2, 3]], bad="no", bad_token_ids=[4])
    sampling = params.to_sampling(ByteTokenizer())
    assert sampling.stop_words == [[1], [2, 3]]
    assert sampling.bad_words == [[4], list(b"no"), list(b" no")]


def test_biases_add_up():
    """A whole vocabulary's and single tokens'."""
    params = SamplingParams(embedding_bias=[0.0, 1.0, 0.0], logit_bias={1: 0.5, 2: -1.0})
    assert params.to_sampling().logit_bias == {1: 1.5, 2: -1.0}


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 0},
        {"max_tokens": 2.5},
        {"max_tokens": True},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": "hot"},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": 2},
        {"repetition_penalty": 0},
        {"n": 0},
        {"n": 3, "best_of": 2},
        {"beam_width": 2, "n": 3},
        {"stop_token_ids": [[]]},
        {"stop_token_ids": [-1]},
        {"stop": ["a", ""]},
        {"stop": ["a"]},
        {"bad": "a"},
        {"logprobs": -1},
    ],
)
def test_wrong_values_are_said(fields: dict[str, Any]):
    """The text names the field; texts need a tokenizer."""
    with pytest.raises(InvalidArgument, match=list(fields)[-1]):
        SamplingParams(**fields).to_sampling()


@pytest.mark.parametrize("name", ["top_p_decay", "early_stopping", "prompt_tuning_config"])
def test_what_no_engine_can_do_is_refused(name: str):
    """It is never silently left out."""
    with pytest.raises(Unsupported, match=name):
        SamplingParams(**{name: 1}).to_sampling()


def test_a_prompt_is_copied():
    """Whoever changes the list later changes nothing."""
    tokens = [1, 2, 3]
    request = GenerationRequest(tokens)
    tokens.append(4)
    assert request.prompt_token_ids == [1, 2, 3]
    assert request.set_id(5) is request and request.id == 5


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_token_ids": "text"},
        {"prompt_token_ids": {1, 2}},
        {"prompt_token_ids": [1 << 40]},
        {"sampling_params": {"n": 1}},
        {"lora_request": "adapter"},
        {"timeout": 0},
        {"timeout": float("nan")},
        {"timeout": True},
        {"priority": 1.5},
    ],
)
def test_a_wrong_request_is_said(fields: dict[str, Any]):
    """Before anything is sent."""
    with pytest.raises(InvalidArgument):
        GenerationRequest(**{"prompt_token_ids": [1], **fields})


def test_an_adapter_has_a_number_and_a_path():
    """Neither can be left out."""
    lora = LoRARequest("name", 3, "path")
    assert (lora.adapter_id, lora.name, lora.path) == (3, "name", "path")
    with pytest.raises(InvalidArgument, match="lora_path"):
        LoRARequest("name", 3)
    for number in (0, -1, "3"):
        with pytest.raises(InvalidArgument, match="lora_int_id"):
            LoRARequest("name", number, "path")  # type: ignore[arg-type]
