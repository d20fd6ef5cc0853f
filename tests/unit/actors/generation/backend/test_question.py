# SPDX-License-Identifier: Apache-2.0
"""What a request of the backend "generation" asks for, and what is wrong with it."""

from __future__ import annotations

import inspect
import json
from typing import Any, cast

import numpy as np
import pytest

from actorserve.actors.generation.backend.question import Question, read_question
from actorserve.errors import InvalidArgument
from actorserve.triton.generation_tensors import INPUTS
from actorserve.triton.pb_utils import InferenceRequest, Tensor
from actorserve.triton.tensor_config import DataType

_DTYPES = {
    DataType.TYPE_STRING: np.object_,
    DataType.TYPE_INT32: np.int32,
    DataType.TYPE_INT64: np.int64,
    DataType.TYPE_FP32: np.float32,
    DataType.TYPE_BOOL: np.bool_,
}


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Leave out the look for leaks: all here is pure, and the look costs more than a case."""


def asked(parameters: dict[str, Any] | None = None, **inputs: Any) -> Question:
    """Read a request with these inputs, of the types that they have."""
    types = {each.name: each.data_type for each in INPUTS}
    tensors = []
    for name, value in inputs.items():
        values = value if isinstance(value, list) else [value]
        values = [each.encode() if isinstance(each, str) else each for each in values]
        tensors.append(Tensor(name, np.array(values, _DTYPES[types[name]])))
    request = InferenceRequest._received(
        tensors, "", 0, [], json.dumps(parameters or {}), 0, 0, cast(Any, None)
    )
    return read_question(request, 99)


def test_a_text_alone_is_a_question() -> None:
    """Everything else has its default."""
    found = asked(text_input="Grüße")
    assert (found.text, found.tokens, found.messages) == ("Grüße", None, None)
    assert not (found.streams or found.with_input or found.adapter or found.has_logprobs)
    assert found.params.max_tokens == 99
    assert found.params.temperature is None


def test_every_input_has_its_place() -> None:
    """Names that differ are mapped, single values are plain ones."""
    found = asked(
        input_ids=[1, 2],
        max_tokens=5,
        min_tokens=2,
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        no_repeat_ngram_size=4,
        random_seed=1 << 40,
        stop_words=["a", "b"],
        include_stop=True,
        bad_words=["c"],
        end_id=7,
        beam_width=2,
        n=2,
        best_of=3,
        length_penalty=1.0,
        logit_bias='{"42": -100}',
        return_log_probs=True,
        num_logprobs=2,
        return_context_logits=True,
        return_generation_logits=True,
        exclude_input_in_output=False,
        stream=True,
        lora_name="pirate",
    )
    params = found.params
    assert found.tokens == [1, 2]
    assert (params.max_tokens, params.min_tokens, params.temperature) == (5, 2, 0.5)
    assert (params.top_k, params.top_p, params.min_p) == (3, 0.25, 0.125)
    assert (params.repetition_penalty, params.presence_penalty) == (1.5, 0.5)
    assert (params.frequency_penalty, params.no_repeat_ngram_size) == (-0.5, 4)
    assert (params.seed, params.stop, params.bad) == (1 << 40, ["a", "b"], ["c"])
    assert params.include_stop_str_in_output
    assert (params.end_id, params.beam_width, params.n, params.best_of) == (7, 2, 2, 3)
    assert (params.length_penalty, params.logit_bias) == (1.0, {42: -100.0})
    assert (params.return_log_probs, params.logprobs) == (True, 2)
    assert params.return_context_logits
    assert params.return_generation_logits
    assert found.with_input
    assert found.streams
    assert found.has_logprobs
    assert found.adapter == "pirate"


def test_each_input_is_read_by_the_test_above() -> None:
    """No input can be declared and forgotten."""
    text = inspect.getsource(test_every_input_has_its_place)
    prompts = {"text_input", "messages"}
    assert [each.name for each in INPUTS if f"{each.name}=" not in text] == sorted(
        prompts, reverse=True
    )


def test_a_conversation_is_a_json_list() -> None:
    """Role and content count; more is left out."""
    text = '[{"role": "user", "content": "Hi", "name": "x"}]'
    assert asked(messages=text).messages == [{"role": "user", "content": "Hi"}]


def test_parameters_stand_for_inputs() -> None:
    """A single stop word is a text; parameters that mean nothing here are left alone."""
    found = asked(
        {"max_tokens": 3, "temperature": 1, "stream": True, "stop_words": "x", "user": "me"},
        text_input="t",
    )
    assert (found.params.max_tokens, found.params.temperature) == (3, 1.0)
    assert found.streams
    assert found.params.stop == ["x"]


@pytest.mark.parametrize(
    ("parameters", "inputs", "expected"),
    [
        ({}, {}, "exactly one of text_input, input_ids, messages, got none of them"),
        ({}, {"text_input": "a", "input_ids": [1]}, "got text_input and input_ids"),
        ({}, {"text_input": b"\xff"}, "input 'text_input' is not valid UTF-8"),
        ({}, {"messages": "{}"}, "input 'messages' is no JSON list of objects"),
        ({}, {"messages": "[]"}, "expected at least one message"),
        ({}, {"messages": '[{"role": "user"}]'}, "message 0 has no text as its 'content'"),
        ({}, {"text_input": "a", "logit_bias": "[]"}, "input 'logit_bias' is no JSON object"),
        ({"max_tokens": 1}, {"text_input": "a", "max_tokens": 1}, "as an input and as a parameter"),
        ({"max_tokens": "1"}, {"text_input": "a"}, "'max_tokens' is '1', expected a whole number"),
        ({"top_p": "x"}, {"text_input": "a"}, "'top_p' is 'x', expected a number"),
        ({"top_p": 10**400}, {"text_input": "a"}, "'top_p' is larger than any number can be"),
        ({"stream": 1}, {"text_input": "a"}, "'stream' is 1, expected true or false"),
        ({"lora_name": 1}, {"text_input": "a"}, "'lora_name' is 1, expected a text"),
        ({"max_token": 1}, {"text_input": "a"}, "unknown parameter 'max_token': perhaps max_tok"),
    ],
)
def test_what_is_wrong_is_named(
    parameters: dict[str, Any], inputs: dict[str, Any], expected: str
) -> None:
    """With the input or parameter, and what was expected."""
    with pytest.raises(InvalidArgument) as caught:
        asked(parameters, **inputs)
    assert expected in caught.value.message
