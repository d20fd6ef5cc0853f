# SPDX-License-Identifier: Apache-2.0
"""Beam search, compared with looking at every answer there is."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from actorserve.actors.generation.engine import GenRequest
from tests.unit.actors.generation.engines.toy import (
    VOCABULARY,
    Answer,
    Client,
    request,
    run,
    started,
    toy_logits,
)


def _logprob(prompt: list[int], tokens: list[int]) -> float:
    total = 0.0
    for index, token in enumerate(tokens):
        logits = toy_logits(prompt + tokens[:index]).astype(np.float64)
        total += logits[token] - np.log(np.exp(logits).sum())
    return total


def _beams(**settings: Any) -> list[Answer]:
    engine = started(slots=VOCABULARY)
    answers = run(engine, request(1, [2, 6], **settings)).answers[1]
    assert engine.capacity()[0] == VOCABULARY
    return [answers[index] for index in range(len(answers))]


def test_beams_of_full_width_find_the_best_answers() -> None:
    """As wide as the vocabulary, a search over two tokens misses nothing."""
    found = _beams(max_tokens=2, beam_width=VOCABULARY, n=5)
    every = [list(pair) for pair in itertools.product(range(VOCABULARY), repeat=2)]
    every.sort(key=lambda tokens: -_logprob([2, 6], tokens))
    assert [answer.tokens for answer in found] == every[:5]
    for answer in found:
        assert answer.cum_logprob == pytest.approx(_logprob([2, 6], answer.tokens), abs=1e-3)


def test_an_end_makes_a_shorter_result() -> None:
    """Beams that end compete with the longer ones; the end itself is cut."""
    end = 3
    found = _beams(max_tokens=2, beam_width=VOCABULARY, n=4, end_id=end)
    every = [[end], *([a, b] for a in range(VOCABULARY) if a != end for b in range(VOCABULARY))]
    every.sort(key=lambda tokens: -_logprob([2, 6], tokens))
    assert [answer.tokens for answer in found] == [
        [token for token in tokens if token != end] for tokens in every[:4]
    ]
    for answer, tokens in zip(found, every):
        assert (answer.finish == "stop") == (tokens[-1] == end)
        assert answer.stop_reason == (end if tokens[-1] == end else None)


def _beam_search(width: int, steps: int) -> list[list[int]]:
    """Return the beams of a plain search, without memory or ends."""
    beams: list[list[int]] = [[]]
    for _ in range(steps):
        grown = [beam + [token] for beam in beams for token in range(VOCABULARY)]
        grown.sort(key=lambda tokens: -_logprob([2, 6], tokens))
        beams = grown[:width]
    return beams


def test_memory_follows_the_beams() -> None:
    """Beams that fork take their memory along: as in a search that has none."""
    found = _beams(max_tokens=9, beam_width=4, n=4)
    assert [answer.tokens for answer in found] == _beam_search(4, 9)


def test_streams_show_the_best_of_each_moment() -> None:
    """Every output replaces what came before; the logprobs go with the tokens."""
    engine = started()
    engine.add(request(1, [2, 6], max_tokens=4, beam_width=3, n=2, logprobs=1))
    client, shown = Client(), []
    while not client.over:
        outputs = engine.poll(0.0)
        assert all(output.replace for output in outputs)
        client.take(outputs)
        shown.append([client.answers[1][index].tokens for index in range(2)])
    assert shown == [_beam_search(3, steps)[:2] for steps in range(1, 5)]
    for answer in client.answers[1].values():
        assert [pairs[0][0] for pairs in answer.logprobs] == answer.tokens
        assert all(len(pairs) == 2 for pairs in answer.logprobs)


def test_a_length_penalty_prefers_the_longer() -> None:
    """Divided by their length, long answers lose less."""
    end = int(toy_logits([2, 6]).argmax())
    settings: dict[str, Any] = {"max_tokens": 8, "beam_width": 4, "end_id": end}
    short = _beams(**settings, length_penalty=-5.0)[0]
    long = _beams(**settings, length_penalty=5.0)[0]
    assert len(short.tokens) < len(long.tokens)


def test_constraints_bind_each_beam() -> None:
    """No beam says what is forbidden, by what it said itself."""
    for answer in _beams(max_tokens=12, beam_width=4, n=4, no_repeat_ngram_size=1):
        assert len(set(answer.tokens)) == len(answer.tokens)
        assert not {2, 6} & set(answer.tokens)


def test_stop_words_end_beams() -> None:
    """Beams that complete one are results without it; others go on."""
    best = _beam_search(3, 6)[0]
    found = _beams(max_tokens=6, beam_width=3, n=3, stop_words=[best[2:4]])
    for answer in found:
        text = answer.tokens
        assert all(text[i : i + 2] != best[2:4] for i in range(len(text)))
    assert any(answer.finish == "stop" and answer.stop_reason == 0 for answer in found)


def test_fewer_ways_than_beams_end_all_the_same() -> None:
    """Where hardly anything is possible, every asked for answer still has its finish."""
    bias = dict.fromkeys(range(2, VOCABULARY), float("-inf"))
    found = _beams(max_tokens=1, beam_width=4, n=4, logit_bias=bias)
    assert sorted(answer.tokens for answer in found) == [[], [], [0], [1]]
    assert all(answer.finish for answer in found)


def test_beams_and_samples_share_batches() -> None:
    """Neither is changed by the other."""
    requests: list[GenRequest] = [
        request(1, [2, 6], max_tokens=7, beam_width=3, n=3),
        request(2, [2], max_tokens=9, temperature=1.0, seed=1),
        request(3, [2, 6], max_tokens=5, beam_width=2, n=2),
    ]
    engine = started(slots=6)
    together = run(engine, *requests).answers
    for each in requests:
        alone = run(started(slots=6), each).answers[each.id]
        assert {index: answer.tokens for index, answer in alone.items()} == {
            index: answer.tokens for index, answer in together[each.id].items()
        }
