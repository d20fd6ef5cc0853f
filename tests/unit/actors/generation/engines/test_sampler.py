# SPDX-License-Identifier: Apache-2.0
"""The choice of tokens: who can be chosen, how often, and that neighbours have no say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from actorserve.actors.generation.engine import Sampling
from actorserve.actors.generation.engines import sampler as module
from actorserve.actors.generation.engines.sampler import (
    FORBIDDEN,
    Sampler,
    log_normaliser,
    logprob_pairs,
    stream_key,
)

ROW = np.log(np.array([0.05, 0.4, 0.1, 0.25, 0.2], np.float32))


def _draws(count: int, row: Any = ROW, **settings: Any) -> np.ndarray[Any, Any]:
    sampler = Sampler(count)
    for slot in range(count):
        sampler.set(slot, Sampling(**settings), stream_key(11, slot))
    return sampler.choose(np.tile(row, (count, 1)).astype(np.float32), np.arange(count))


def _shares(**settings: Any) -> np.ndarray[Any, Any]:
    return np.bincount(_draws(20_000, **settings), minlength=5) / 20_000


def test_temperature_zero_takes_the_most_probable() -> None:
    """Greedy needs no chance."""
    assert _draws(3).tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"temperature": 1.0}, [0.05, 0.4, 0.1, 0.25, 0.2]),
        ({"temperature": 0.5}, np.array([0.05, 0.4, 0.1, 0.25, 0.2]) ** 2 / 0.275),
        ({"temperature": 1.0, "top_k": 2}, [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
        ({"temperature": 1.0, "top_k": 99}, [0.05, 0.4, 0.1, 0.25, 0.2]),
        ({"temperature": 1.0, "top_p": 0.6}, [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
        ({"temperature": 1.0, "top_p": 0.01}, [0, 1, 0, 0, 0]),
        ({"temperature": 1.0, "top_k": 3, "top_p": 0.6}, [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
        ({"temperature": 1.0, "min_p": 0.3}, np.array([0, 0.4, 0, 0.25, 0.2]) / 0.85),
        ({"temperature": 1.0, "min_p": 0.55, "top_k": 4}, [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
    ],
)
def test_shares_are_those_of_the_distribution(settings: dict[str, Any], expected: Any) -> None:
    """Each token comes as often as its probability says, after what was cut is cut."""
    assert np.abs(_shares(**settings) - expected).max() < 0.015


def test_a_row_is_chosen_alike_alone_and_among_others() -> None:
    """Same seed, same step, same logits: the same token, whatever the neighbours' settings are."""
    random = np.random.default_rng(3)
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.9},
        {"temperature": 1.3, "top_k": 7},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 1.1, "top_k": 300, "top_p": 0.95, "min_p": 0.01},
    ]
    together = Sampler(len(kinds))
    alone = [Sampler(1) for _ in kinds]
    for slot, kind in enumerate(kinds):
        together.set(slot, Sampling(**kind), stream_key(slot, 0))
        alone[slot].set(0, Sampling(**kind), stream_key(slot, 0))
    for _ in range(40):
        logits = random.normal(0, 2, (len(kinds), 600)).astype(np.float32)
        mixed = together.choose(logits.copy(), np.arange(len(kinds))).tolist()
        single = [
            int(each.choose(logits[row : row + 1].copy(), np.zeros(1, np.int64))[0])
            for row, each in enumerate(alone)
        ]
        assert mixed == single


def test_a_flat_distribution_sorts_more_than_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the few most probable tokens have not enough, all are looked at, with one result."""
    row = np.linspace(0, 0.2, 500).astype(np.float32)
    few = _draws(300, row, temperature=1.0, top_p=0.9)
    monkeypatch.setattr(module, "_FEW", 500)
    assert few.tolist() == _draws(300, row, temperature=1.0, top_p=0.9).tolist()
    assert len(set(few.tolist())) > 100


def test_a_row_without_a_possible_token_is_forbidden() -> None:
    """Nothing is chosen where nothing can be; others are not affected."""
    sampler = Sampler(3)
    for slot, temperature in enumerate((0.0, 1.0, 1.0)):
        sampler.set(slot, Sampling(temperature=temperature), slot)
    logits = np.full((3, 4), -np.inf, np.float32)
    logits[2, 3] = 1.0
    assert sampler.choose(logits, np.arange(3)).tolist() == [FORBIDDEN, FORBIDDEN, 3]


@pytest.mark.parametrize("temperature", [1e-30, 1e30])
def test_extreme_temperatures_are_harmless(temperature: float) -> None:
    """The coldest is greedy, the hottest is even; no arithmetic overflows."""
    chosen = set(_draws(200, temperature=temperature).tolist())
    assert chosen == ({1} if temperature < 1 else {0, 1, 2, 3, 4})


def test_seeds_and_sequences_have_streams_of_their_own() -> None:
    """Keys differ for every seed and every sequence, and are the same each time."""
    keys = {stream_key(seed, sequence) for seed in range(-50, 50) for sequence in range(8)}
    assert len(keys) == 800
    assert stream_key(5, 1) == stream_key(5, 1)


def test_logprobs_name_the_chosen_token_first() -> None:
    """Then come as many of the most probable as were asked for, best first."""
    logits = np.stack([ROW + 3, ROW])
    pairs = logprob_pairs(logits - log_normaliser(logits), [2, 1], [2, 0])
    assert [token for token, _ in pairs[0]] == [2, 1, 3]
    assert [round(float(np.exp(value)), 3) for _, value in pairs[0]] == [0.1, 0.4, 0.25]
    assert [token for token, _ in pairs[1]] == [1]
