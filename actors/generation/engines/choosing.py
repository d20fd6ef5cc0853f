# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens: constraints, choice, and the log-probabilities of what was chosen.

Log-probabilities are those of the model, before constraints and temperature.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from actorserve.actors.generation.engines.decoder import FloatArray, IntArray
from actorserve.actors.generation.engines.sampler import (
    FORBIDDEN,
    Sampler,
    log_normaliser,
    logprob_pairs,
)
from actorserve.actors.generation.engines.sequence import Sequence

__all__ = ["next_tokens"]


def next_tokens(
    logits: FloatArray, answers: SequenceOf[Sequence], slots: IntArray, sampler: Sampler
) -> list[int]:
    """Return the next token of each answer, by its row of logits, which are changed.

    Log-probabilities and logits are noted in the answers that keep them. FORBIDDEN where no token
    is possible.
    """
    special = [row for row, answer in enumerate(answers) if answer.is_special]
    if not special:
        plain: list[int] = sampler.choose(logits, slots).tolist()
        return plain
    raw = logits[special]  # a copy
    for row in special:
        constraints = answers[row].constraints
        if constraints is not None:
            constraints.apply(logits[row])
    tokens: list[int] = sampler.choose(logits, slots).tolist()
    possible = [number for number, row in enumerate(special) if tokens[row] != FORBIDDEN]
    tracked = []
    for number in possible:
        answer = answers[special[number]]
        if answer.logits is not None:
            answer.logits.append(raw[number].copy())
        if answer.is_tracked:
            tracked.append(number)
    if tracked:
        rows = [special[number] for number in tracked]
        _note_logprobs(raw[tracked], [answers[row] for row in rows], [tokens[row] for row in rows])
    return tokens


def _note_logprobs(logits: FloatArray, answers: list[Sequence], tokens: list[int]) -> None:
    logits -= log_normaliser(logits)
    most = [answer.request.sampling.logprobs or 0 for answer in answers]
    for answer, pairs in zip(answers, logprob_pairs(logits, tokens, most)):
        answer.note(pairs[0][1], pairs)
