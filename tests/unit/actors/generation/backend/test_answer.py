# SPDX-License-Identifier: Apache-2.0
"""What was generated, as tensors: deltas and whole sequences."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from actorserve.actors.generation import CompletionOutput, SamplingParams
from actorserve.actors.generation.backend.answer import Answer
from actorserve.actors.generation.backend.question import Question
from actorserve.triton.generation_tensors import OUTPUTS
from actorserve.triton.pb_utils import InferenceResponse

ALL = [each.name for each in OUTPUTS]


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Leave out the look for leaks: all here is pure, and the look costs more than a case."""


class Letters:
    """A tokenizer whose tokens are bytes."""

    end_id = None
    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        """Return the bytes."""
        return list(text.encode())

    def decode_bytes(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes."""
        return bytes(tokens)

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return the last message."""
        return self.encode(messages[-1]["content"])


def answer(wanted: Sequence[str] = ALL, **changes: Any) -> Answer:
    """Return the answer to a request with the prompt "ab"."""
    params = changes.pop("params", SamplingParams())
    question = Question(params, text="ab", **changes)
    return Answer(question, wanted, [97, 98], "ab", Letters())


def read(response: InferenceResponse | None) -> dict[str, Any]:
    """Return the outputs as plain values, single ones unwrapped."""
    assert response is not None
    found = {}
    for tensor in response.output_tensors():
        array = tensor.as_numpy()
        values = array.tolist()
        found[tensor.name()] = values[0] if array.shape == (1,) else values
    return found


def grown(output: CompletionOutput, text: str, finish: str | None = None) -> CompletionOutput:
    """Let a sequence take a step."""
    output.begin_step()
    output.text += text
    output.token_ids += list(text.encode())
    output.finish_reason = finish
    return output


def test_deltas_and_the_end() -> None:
    """What a step added; the counts come with the last one, and nothing after it."""
    told, output = answer(), CompletionOutput(0)
    assert told.delta(output) is None
    assert read(told.delta(grown(output, "hi"))) == {
        "text_output": b"hi",
        "output_ids": [104, 105],
        "index": 0,
        "finish_reason": b"",
    }
    assert told.delta(grown(output, "")) is None
    assert read(told.delta(grown(output, "!?", "stop"))) == {
        "text_output": b"!?",
        "output_ids": [33, 63],
        "index": 0,
        "finish_reason": b"stop",
        "prompt_tokens": 2,
        "completion_tokens": 4,
    }
    assert told.delta(grown(output, "", "stop")) is None


def test_a_bare_end_is_a_response() -> None:
    """It has no text and no tokens."""
    told, output = answer(), CompletionOutput(1)
    told.delta(grown(output, "hi"))
    found = read(told.delta(grown(output, "", "length")))
    assert (found["text_output"], found["output_ids"], found["index"]) == (b"", [], 1)
    assert found["finish_reason"] == b"length"


def test_whole_sequences_begin_with_the_prompt_where_that_is_wanted() -> None:
    """Each of them, in text and tokens; the counts are without it."""
    told = answer(with_input=True)
    for index in range(2):
        found = read(told.whole(grown(CompletionOutput(index), "cd", "stop")))
        assert found["text_output"] == b"abcd"
        assert found["output_ids"] == [97, 98, 99, 100]
        assert (found["index"], found["completion_tokens"]) == (index, 2)


def test_the_prompt_comes_once_in_a_stream() -> None:
    """With the first delta."""
    told, output = answer(with_input=True), CompletionOutput(0)
    assert read(told.delta(grown(output, "cd")))["text_output"] == b"abcd"
    assert read(told.delta(grown(output, "ef")))["text_output"] == b"ef"


def test_only_wanted_outputs_are_made() -> None:
    """Whoever wants the text gets that."""
    told = answer(["text_output"], params=SamplingParams(logprobs=1))
    output = grown(CompletionOutput(0), "hi", "stop")
    output.logprobs, output.top_logprobs = [-1.0, -1.0], [[(104, -1.0)], [(105, -1.0)]]
    assert read(told.delta(output)) == {"text_output": b"hi"}


def test_log_probabilities() -> None:
    """Those of the tokens of this response, with the most probable ones, best first."""
    told, output = answer(params=SamplingParams(logprobs=2)), CompletionOutput(0)
    grown(output, "h")
    output.logprobs, output.top_logprobs = [-2.0], [[(104, -2.0), (255, -0.5), (97, -1.0)]]
    found = read(told.delta(output))
    assert found["output_log_probs"] == -2.0
    (place,) = json.loads(found["top_logprobs"])
    best = place.pop("top_logprobs")
    assert place == {"id": 104, "token": "h", "bytes": [104], "logprob": -2.0}
    assert [each["id"] for each in best] == [255, 97]
    assert (best[0]["token"], best[0]["bytes"]) == ("�", [255])
    grown(output, "i", "stop")
    output.logprobs.append(-1.0)
    output.top_logprobs.append([(105, -1.0), (104, -3.0)])
    output.cumulative_logprob = -3.0
    found = read(told.delta(output))
    assert [each["id"] for each in json.loads(found["top_logprobs"])] == [105]
    assert (found["output_log_probs"], found["cum_log_probs"]) == (-1.0, -3.0)


def test_beams_are_told_at_their_ends() -> None:
    """Before, what was said of one might be taken back."""
    told, output = answer(params=SamplingParams(beam_width=2)), CompletionOutput(0)
    assert told.delta(grown(output, "h")) is None
    assert read(told.delta(grown(output, "i", "stop")))["text_output"] == b"hi"


def test_logits_come_with_the_end() -> None:
    """Two-dimensional, as they are."""
    output = grown(CompletionOutput(0), "h", "length")
    output.generation_logits = np.ones((1, 3), np.float32)
    found = read(answer().whole(output, np.zeros((2, 3), np.float32)))
    assert found["generation_logits"] == [[1.0, 1.0, 1.0]]
    assert found["context_logits"] == [[0.0] * 3] * 2
