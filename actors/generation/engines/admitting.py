# SPDX-License-Identifier: Apache-2.0
"""Which requests an engine of numpy can serve: every field is looked at before a slot is taken."""

from __future__ import annotations

import math
from collections.abc import Sequence

from actorserve.actors.generation.engine import GenRequest, RequestError, Sampling

__all__ = ["check_request"]

_BOUNDS = {  # beyond these, powers and products leave what numbers can hold
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-1e3, 1e3),
    "frequency_penalty": (-1e3, 1e3),
    "repetition_penalty": (1e-3, 1e3),
    "length_penalty": (-10.0, 10.0),
}


def check_request(request: GenRequest, *, vocabulary: int, context_tokens: int, slots: int) -> None:
    """Raise RequestError, naming the field, what was given and what is possible."""
    sampling = request.sampling
    if not request.prompt:
        raise RequestError("prompt: empty; expected at least one token")
    if len(request.prompt) > context_tokens:
        raise RequestError(
            f"prompt: {len(request.prompt)} tokens; this engine has room for {context_tokens}"
        )
    _tokens_exist("prompt", request.prompt, vocabulary)
    _check_lengths(sampling)
    _check_chances(sampling)
    _check_words(sampling, vocabulary)
    _check_widths(sampling, slots)
    if sampling.logprobs is not None and not 0 <= sampling.logprobs <= vocabulary:
        raise RequestError(f"logprobs: {sampling.logprobs}; expected 0 to {vocabulary}")


def _tokens_exist(where: str, tokens: Sequence[int], vocabulary: int) -> None:
    least, most = min(tokens), max(tokens)
    if least < 0 or most >= vocabulary:
        wrong = least if least < 0 else most
        raise RequestError(f"{where}: token {wrong}; the vocabulary is 0 to {vocabulary - 1}")


def _check_lengths(sampling: Sampling) -> None:
    if sampling.max_tokens < 1:
        raise RequestError(f"max_tokens: {sampling.max_tokens}; expected 1 or more")
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        raise RequestError(
            f"min_tokens: {sampling.min_tokens}; expected 0 to max_tokens, {sampling.max_tokens}"
        )
    if sampling.no_repeat_ngram_size < 0:
        raise RequestError(
            f"no_repeat_ngram_size: {sampling.no_repeat_ngram_size}; expected 0 or more"
        )


def _check_chances(sampling: Sampling) -> None:
    for name, (least, most) in _BOUNDS.items():
        value = getattr(sampling, name)
        if not least <= value <= most:  # NaN is never between
            raise RequestError(f"{name}: {value}; expected {least:g} to {most:g}")
    if sampling.top_p == 0:
        raise RequestError("top_p: 0; expected more than 0")
    if not (sampling.temperature >= 0 and math.isfinite(sampling.temperature)):
        raise RequestError(f"temperature: {sampling.temperature}; expected 0 or more")
    if sampling.top_k < 0:
        raise RequestError(f"top_k: {sampling.top_k}; expected 0 (all) or more")


def _check_words(sampling: Sampling, vocabulary: int) -> None:
    for name, words in (("stop_words", sampling.stop_words), ("bad_words", sampling.bad_words)):
        for index, word in enumerate(words):
            if not word:
                raise RequestError(f"{name}[{index}]: empty; expected at least one token")
            _tokens_exist(f"{name}[{index}]", word, vocabulary)
    if sampling.logit_bias:
        _tokens_exist("logit_bias", list(sampling.logit_bias), vocabulary)
        if any(math.isnan(bias) or bias == math.inf for bias in sampling.logit_bias.values()):
            raise RequestError("logit_bias: expected finite numbers, or minus infinity")
    if sampling.end_id is not None:
        _tokens_exist("end_id", [sampling.end_id], vocabulary)


def _check_widths(sampling: Sampling, slots: int) -> None:
    n, best_of, beams = sampling.n, sampling.best_of, sampling.beam_width
    if n < 1:
        raise RequestError(f"n: {n}; expected 1 or more")
    if beams < 1:
        raise RequestError(f"beam_width: {beams}; expected 1 or more")
    if beams > 1 and n > beams:
        raise RequestError(f"n: {n}; beam search of width {beams} has no more results")
    if beams > 1 and best_of > 1:
        raise RequestError(f"best_of: {best_of}; beam search takes the best by itself")
    width = max(n, best_of) if beams == 1 else beams
    if width > slots:
        raise RequestError(
            f"{'beam_width' if beams > 1 else 'n or best_of'}: {width} sequences; "
            f"this engine has {slots} slots"
        )
