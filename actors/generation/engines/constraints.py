# SPDX-License-Identifier: Apache-2.0
"""What a request forbids or discourages: changes to the logits of one sequence.

Order of application: bias, repetition, presence and frequency penalties, then what is forbidden
outright (bad words, repeated n-grams, the end before its time). Repetition, bad words and
n-grams look at prompt and answer; presence and frequency at the answer alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from actorserve.actors.generation.engine import Sampling
from actorserve.actors.generation.engines.decoder import FloatArray
from actorserve.actors.generation.engines.stop_words import WordAutomaton

__all__ = ["Constraints"]

_MOST_BIAS = 1e30
NOTHING = np.float32(-np.inf)


def _bounded(bias: float) -> float:
    """Keep a bias within what float32 can add up; minus infinity forbids a token."""
    return bias if bias == -math.inf else min(max(bias, -_MOST_BIAS), _MOST_BIAS)


class _Ngrams:
    """Which tokens would repeat an n-gram of the sequence."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._last: tuple[int, ...] = ()
        self._following: dict[tuple[int, ...], list[int]] = {}

    def take(self, token: int) -> None:
        behind = self._size - 1
        if len(self._last) == behind:
            self._following.setdefault(self._last, []).append(token)
        self._last = (*self._last, token)[-behind:] if behind else ()

    def repeating(self) -> list[int]:
        return self._following.get(self._last, [])

    def fork(self) -> _Ngrams:
        twin = _Ngrams(self._size)
        twin._last = self._last
        twin._following = {key: list(tokens) for key, tokens in self._following.items()}
        return twin


class Constraints:
    """The constraints of one sequence, and what it has said so far as far as they need it."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int], vocabulary: int) -> None:
        self._sampling = sampling
        self._generated = 0
        bias = sampling.logit_bias
        self._bias_ids = np.array(list(bias), np.int64)
        self._bias = np.array([_bounded(value) for value in bias.values()], np.float32)
        self._counts: npt.NDArray[np.float32] | None = None
        self._seen: npt.NDArray[np.bool_] | None = None
        if sampling.presence_penalty or sampling.frequency_penalty:
            self._counts = np.zeros(vocabulary, np.float32)
        if sampling.repetition_penalty != 1.0:
            self._seen = np.zeros(vocabulary, np.bool_)
            self._seen[list(prompt)] = True
        self._bad = WordAutomaton(sampling.bad_words) if sampling.bad_words else None
        self._bad_state = WordAutomaton.START
        size = sampling.no_repeat_ngram_size
        self._ngrams = _Ngrams(size) if size else None
        if self._bad is not None or self._ngrams is not None:
            for token in prompt:
                self._follow(token)

    @staticmethod
    def needed(sampling: Sampling) -> bool:
        """Say whether a request constrains anything at all."""
        return bool(
            sampling.logit_bias
            or sampling.bad_words
            or sampling.no_repeat_ngram_size
            or sampling.presence_penalty
            or sampling.frequency_penalty
            or sampling.repetition_penalty != 1.0
            or (sampling.min_tokens and sampling.end_id is not None)
        )

    def _follow(self, token: int) -> None:
        if self._bad is not None:
            self._bad_state = self._bad.advance(self._bad_state, token)
        if self._ngrams is not None:
            self._ngrams.take(token)

    def take(self, token: int) -> None:
        """Take note of a token that the sequence now has."""
        self._generated += 1
        if self._counts is not None:
            self._counts[token] += 1
        if self._seen is not None:
            self._seen[token] = True
        self._follow(token)

    def apply(self, logits: FloatArray) -> None:
        """Change the logits of the next token, in place."""
        sampling = self._sampling
        if len(self._bias):
            logits[self._bias_ids] += self._bias
        if self._seen is not None:
            seen = logits[self._seen]
            penalty = np.float32(sampling.repetition_penalty)
            logits[self._seen] = np.where(seen > 0, seen / penalty, seen * penalty)
        if self._counts is not None:
            if sampling.frequency_penalty:
                logits -= np.float32(sampling.frequency_penalty) * self._counts
            if sampling.presence_penalty:
                logits -= np.float32(sampling.presence_penalty) * (self._counts > 0)
        if self._bad is not None:
            logits[list(self._bad.completing(self._bad_state))] = NOTHING
        if self._ngrams is not None:
            logits[self._ngrams.repeating()] = NOTHING
        if sampling.end_id is not None and self._generated < sampling.min_tokens:
            logits[sampling.end_id] = NOTHING

    def fork(self) -> Constraints:
        """Return a copy that goes its own way."""
        twin = object.__new__(Constraints)
        twin.__dict__.update(self.__dict__)
        if self._counts is not None:
            twin._counts = self._counts.copy()
        if self._seen is not None:
            twin._seen = self._seen.copy()
        if self._ngrams is not None:
            twin._ngrams = self._ngrams.fork()
        return twin
