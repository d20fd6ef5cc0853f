# SPDX-License-Identifier: Apache-2.0
"""What an engine of numpy refuses, and that nothing it accepts can break it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from actorserve.actors.generation.engine import RequestError
from tests.unit.actors.generation.engines.toy import Client, generate, request, started


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"prompt": []}, "prompt: empty"),
        ({"prompt": [1] * 41}, "prompt: 41 tokens; this engine has room for 40"),
        ({"prompt": [13]}, "prompt: token 13; the vocabulary is 0 to 12"),
        ({"prompt": [-1]}, "prompt: token -1"),
        ({"adapter": 3}, "adapter: 3 is not loaded"),
        ({"max_tokens": 0}, "max_tokens: 0"),
        ({"min_tokens": 40}, "min_tokens: 40"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"top_k": -1}, "top_k"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"frequency_penalty": 1e30}, "frequency_penalty"),
        ({"length_penalty": 1e3}, "length_penalty"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size"),
        ({"stop_words": [[1], []]}, r"stop_words\[1\]: empty"),
        ({"bad_words": [[1, 99]]}, r"bad_words\[0\]: token 99"),
        ({"logit_bias": {99: 1.0}}, "logit_bias: token 99"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias"),
        ({"end_id": 13}, "end_id: token 13"),
        ({"logprobs": 14}, "logprobs: 14"),
        ({"n": 0}, "n: 0"),
        ({"n": 9}, "9 sequences; this engine has 8 slots"),
        ({"beam_width": 9}, "beam_width: 9"),
        ({"beam_width": 0}, "beam_width: 0"),
        ({"beam_width": 2, "n": 3}, "has no more results"),
        ({"beam_width": 2, "best_of": 2}, "best_of: 2"),
    ],
)
def test_what_cannot_be_served_is_refused(settings: dict[str, Any], text: str) -> None:
    """The error names the field; the engine goes on."""
    engine = started()
    prompt = settings.pop("prompt", [1])
    with pytest.raises(RequestError, match=text):
        engine.add(request(1, prompt, **settings))
    assert generate(engine, [1], max_tokens=2).finish == "length"


EXTREMES: dict[str, list[Any]] = {
    "temperature": [1e-300, 1e300, 0.0, -0.0],
    "top_k": [1, 1 << 70],
    "top_p": [1e-300, 1.0],
    "min_p": [1.0],
    "repetition_penalty": [1e-3, 1e3, 1e4],
    "presence_penalty": [1e3, -1e3],
    "frequency_penalty": [1e3, -1e3, float("inf")],
    "length_penalty": [10.0, -10.0],
    "no_repeat_ngram_size": [1, 1 << 40],
    "seed": [-(1 << 90), 1 << 90, 0],
    "max_tokens": [1, 1 << 70],
    "min_tokens": [0, 1],
    "logit_bias": [{0: -1e308, 1: 1e308}, {2: float("-inf")}],
    "stop_words": [[[1]] * 50, [[token] for token in range(13)]],
    "bad_words": [[[token] for token in range(13)], [[1] * 100]],
    "end_id": [0],
    "logprobs": [0, 13],
    "beam_width": [1, 3],
    "generation_logits": [True],
    "context_logits": [True],
}


def test_no_request_ends_the_engine() -> None:
    """Extreme settings, in any combination, are refused or come to one final output."""
    chance = random.Random(1)
    engine, client, accepted = started(slots=6), Client(), 0
    for number in range(300):
        names = chance.sample(sorted(EXTREMES), chance.randint(1, 6))
        settings = {name: chance.choice(EXTREMES[name]) for name in names}
        try:
            engine.add(request(number, [1, 2], **settings))
            accepted += 1
        except RequestError:
            continue
        client.take(engine.poll(0.0))
    while len(client.over) < accepted:
        client.take(engine.poll(0.0))
    assert accepted > 100 and engine.capacity()[0] == 6
