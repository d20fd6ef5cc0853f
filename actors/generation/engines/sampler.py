# SPDX-License-Identifier: Apache-2.0
"""Choose the next token of many sequences at once.

Settings lie in arrays by slot, so that a batch of rows is served by a few array operations. A
row's choice depends on its own logits and settings alone: on its seed and on how many tokens it
has drawn, never on its neighbours. Random numbers are those of SplitMix64, counted rather than
carried: number t of a stream is a function of (key, t).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt

from actorserve.actors.generation.engine import Sampling
from actorserve.actors.generation.engines.decoder import FloatArray, IntArray

__all__ = ["FORBIDDEN", "Sampler", "log_normaliser", "logprob_pairs", "stream_key"]

FORBIDDEN = -1
"""What `choose` gives for a row in which no token is possible."""

Chances = npt.NDArray[np.float64]
U64 = npt.NDArray[np.uint64]
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_COLDEST, _HOTTEST = 1e-4, 1e6
_MOST = 1 << 31
_FEW = 256
"""How many of the most probable tokens are sorted first; all are, where these do not suffice."""


def _mixed(z: U64) -> U64:
    """Scramble 64 bits, as SplitMix64 does with its counter."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def stream_key(seed: int, sequence: int) -> int:
    """Return the key of the random numbers of one sequence of a request with this seed."""
    counter = np.array([(seed + sequence * _GOLDEN) & _MASK], np.uint64)
    return int(_mixed(counter)[0])


def log_normaliser(logits: FloatArray) -> FloatArray:
    """Return the logarithm of the sum of exponentials of each row, as a column."""
    peak = np.maximum.reduce(logits, axis=1, keepdims=True)
    shifted = np.exp(logits - peak)
    normaliser: FloatArray = peak + np.log(np.add.reduce(shifted, axis=1, keepdims=True))
    return normaliser


def logprob_pairs(
    logprobs: FloatArray, tokens: SequenceOf[int], most: SequenceOf[int]
) -> list[list[tuple[int, float]]]:
    """Return for each row its token, then as many of the most probable as `most` says for it."""
    chosen = logprobs[np.arange(len(tokens)), tokens].tolist()
    pairs = [[pair] for pair in zip(tokens, chosen)]
    highest = max(most)
    if highest:
        best = _most_probable(logprobs, highest)
        values = np.take_along_axis(logprobs, best, axis=1).tolist()
        for own, ids, row, count in zip(pairs, best.tolist(), values, most):
            own += zip(ids[:count], row[:count])
    return pairs


class Sampler:
    """The settings of each slot, and the choice by them."""

    def __init__(self, slots: int) -> None:
        self._temperature: FloatArray = np.zeros(slots, np.float32)
        self._top_k = np.zeros(slots, np.int64)
        self._top_p = np.ones(slots)
        self._min_p: FloatArray = np.zeros(slots, np.float32)
        self._key: U64 = np.zeros(slots, np.uint64)
        self._drawn: U64 = np.zeros(slots, np.uint64)

    def set(self, slot: int, sampling: Sampling, key: int) -> None:
        """Prepare a slot for a new sequence."""
        temperature = sampling.temperature
        if temperature > 0:  # within what float32 can divide by
            temperature = min(max(temperature, _COLDEST), _HOTTEST)
        self._temperature[slot] = temperature
        self._top_k[slot] = min(sampling.top_k, _MOST)
        self._top_p[slot] = sampling.top_p
        self._min_p[slot] = sampling.min_p
        self._key[slot] = key
        self._drawn[slot] = 0

    def choose(self, logits: FloatArray, slots: IntArray) -> IntArray:
        """Return the token of each row; FORBIDDEN where every logit is minus infinity."""
        tokens: IntArray = logits.argmax(axis=1)
        peaks = logits[np.arange(len(slots)), tokens]
        drawing = np.flatnonzero((self._temperature[slots] > 0) & (peaks > -np.inf))
        if len(drawing):
            rows = slice(None) if len(drawing) == len(slots) else drawing
            tokens[rows] = self._draw(logits[rows], peaks[rows], slots[rows])
        tokens[peaks == -np.inf] = FORBIDDEN
        return tokens

    def _draw(self, logits: FloatArray, peaks: FloatArray, slots: IntArray) -> IntArray:
        weights = logits - peaks[:, None]
        weights /= self._temperature[slots][:, None]
        np.exp(weights, out=weights)  # of the most probable one: 1
        vocabulary = weights.shape[1]
        top_k = self._top_k[slots]
        top_k = np.where((top_k <= 0) | (top_k > vocabulary), vocabulary, top_k)
        chances = self._chances(slots)
        cut = (top_k < vocabulary) | (self._top_p[slots] < 1.0)
        if not cut.any():
            return _plain(weights, self._min_p[slots], chances)
        if cut.all():
            return self._filtered(weights, slots, top_k, chances)
        tokens = np.empty(len(slots), np.int64)
        whole = ~cut
        tokens[whole] = _plain(weights[whole], self._min_p[slots[whole]], chances[whole])
        tokens[cut] = self._filtered(weights[cut], slots[cut], top_k[cut], chances[cut])
        return tokens

    def _chances(self, slots: IntArray) -> Chances:
        """Draw one number in [0, 1) for each slot."""
        self._drawn[slots] += np.uint64(1)
        mixed = _mixed(self._key[slots] + self._drawn[slots] * np.uint64(_GOLDEN))
        # 52 bits, not 53: a product with it is always below the other factor
        return (mixed >> np.uint64(12)).astype(np.float64) * 2.0**-52

    def _filtered(
        self,
        weights: FloatArray,
        slots: IntArray,
        top_k: IntArray,
        chances: Chances,
    ) -> IntArray:
        """Choose among the most probable tokens, sorting as few of them as will do."""
        vocabulary = weights.shape[1]
        limited = top_k < vocabulary
        few = int(top_k[limited].max(initial=0 if limited.all() else min(_FEW, vocabulary)))
        totals = np.add.reduce(weights, axis=1, dtype=np.float64)
        order = _most_probable(weights, few)
        sorted_weights = np.take_along_axis(weights, order, axis=1).astype(np.float64)
        if few < vocabulary:
            short = ~limited & (sorted_weights.sum(axis=1) < self._top_p[slots] * totals)
            if short.any():
                return self._in_two(weights, slots, top_k, chances, short)
        sorted_weights *= np.arange(few) < top_k[:, None]
        totals = np.where(limited, np.add.reduce(sorted_weights, axis=1), totals)
        before = np.cumsum(sorted_weights, axis=1) - sorted_weights
        kept = before < (self._top_p[slots] * totals)[:, None]
        kept[:, 0] = True
        kept &= sorted_weights >= self._min_p[slots][:, None]
        sorted_weights *= kept
        picked = _by_chance(sorted_weights, chances)
        return order[np.arange(len(slots)), picked]

    def _in_two(
        self,
        weights: FloatArray,
        slots: IntArray,
        top_k: IntArray,
        chances: Chances,
        short: npt.NDArray[np.bool_],
    ) -> IntArray:
        """Sort all tokens of the rows where a few were not enough."""
        tokens = np.empty(len(slots), np.int64)
        for row in np.flatnonzero(short).tolist():
            order = np.argsort(-weights[row], kind="stable")
            ranked = weights[row][order].astype(np.float64)
            before = np.cumsum(ranked) - ranked
            kept = before < self._top_p[slots[row]] * np.add.reduce(weights[row], dtype=np.float64)
            kept &= ranked >= self._min_p[slots[row]]
            kept[0] = True
            picked = _by_chance((ranked * kept)[None], chances[row : row + 1])
            tokens[row] = order[picked[0]]
        rest = ~short
        if rest.any():
            tokens[rest] = self._filtered(weights[rest], slots[rest], top_k[rest], chances[rest])
        return tokens


def _most_probable(weights: FloatArray, count: int) -> IntArray:
    """Return the tokens of the `count` greatest weights of each row, greatest first."""
    if count == weights.shape[1]:
        return np.argsort(-weights, axis=1, kind="stable")
    best = np.argpartition(-weights, count - 1, axis=1)[:, :count]
    best.sort(axis=1)  # equal weights keep the order of tokens
    order = np.argsort(-np.take_along_axis(weights, best, axis=1), axis=1, kind="stable")
    return np.take_along_axis(best, order, axis=1)


def _plain(weights: FloatArray, min_p: FloatArray, chances: Chances) -> IntArray:
    """Choose among all tokens, those below the least share apart; needs no sorting."""
    if min_p.any():
        weights = np.where(weights < min_p[:, None], np.float32(0.0), weights)
    return _by_chance(weights, chances)


def _by_chance(weights: npt.NDArray[np.floating], chances: Chances) -> IntArray:
    """Return in which column of each row the running sum of weights passes the chance's share."""
    sums = np.cumsum(weights, axis=1, dtype=np.float64)
    picked: IntArray = np.add.reduce(sums <= (chances * sums[:, -1])[:, None], axis=1)
    return picked
