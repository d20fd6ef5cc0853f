# SPDX-License-Identifier: Apache-2.0
"""What requests forbid and discourage."""

from __future__ import annotations

from typing import Any

import numpy as np

from actorserve.actors.generation.engine import Sampling
from actorserve.actors.generation.engines.constraints import Constraints


def _after(prompt: list[int], tokens: list[int], **settings: Any) -> list[float]:
    constraints = Constraints(Sampling(**settings), prompt, 6)
    for token in tokens:
        constraints.take(token)
    logits = np.array([1, -1, 2, -2, 3, -3], np.float32)
    constraints.apply(logits)
    return logits.tolist()


NO = float("-inf")


def test_bias_is_added_and_may_forbid() -> None:
    """Minus infinity forbids; anything else is added, within what a float holds."""
    assert _after([0], [], logit_bias={0: 2.5, 3: NO}) == [3.5, -1, 2, NO, 3, -3]
    assert np.isfinite(_after([0], [], logit_bias={0: 1e300, 1: -1e300})).all()


def test_repetition_counts_prompt_and_answer() -> None:
    """What was there is less probable, whichever sign its logit has."""
    assert _after([0, 1], [2], repetition_penalty=2.0) == [0.5, -2, 1, -2, 3, -3]


def test_presence_and_frequency_count_the_answer_alone() -> None:
    """One is for being there, the other for each time."""
    settings = {"presence_penalty": 0.5, "frequency_penalty": 0.25}
    assert _after([5], [0, 0, 2], **settings) == [0, -1, 1.25, -2, 3, -3]


def test_bad_words_lose_their_last_token_when_the_rest_is_there() -> None:
    """Across prompt and answer; one of a single token always."""
    words = [[4], [0, 1, 2], [1, 3]]
    assert _after([0], [1], bad_words=words) == [1, -1, NO, NO, NO, -3]
    assert _after([0], [5], bad_words=words) == [1, -1, 2, -2, NO, -3]


def test_no_ngram_comes_twice() -> None:
    """Neither one of the prompt nor one of the answer."""
    assert _after([0, 1, 2, 0], [1], no_repeat_ngram_size=3) == [1, -1, NO, -2, 3, -3]
    assert _after([0], [1], no_repeat_ngram_size=1) == [NO, NO, 2, -2, 3, -3]
    assert _after([0, 1], [0], no_repeat_ngram_size=2) == [1, NO, 2, -2, 3, -3]


def test_the_end_waits_for_its_time() -> None:
    """Before `min_tokens` the end id is impossible."""
    assert _after([0], [1], min_tokens=2, end_id=4)[4] == NO
    assert _after([0], [1, 1], min_tokens=2, end_id=4)[4] == 3


def test_a_fork_goes_its_own_way() -> None:
    """What one twin says later does not matter to the other."""
    sampling = Sampling(
        repetition_penalty=2.0, frequency_penalty=1.0, no_repeat_ngram_size=1, bad_words=[[0, 1]]
    )
    first = Constraints(sampling, [5], 6)
    second = first.fork()
    first.take(0)
    logits = np.ones(6, np.float32)
    second.apply(logits)
    assert logits.tolist() == [1, 1, 1, 1, 1, NO]
    assert Constraints.needed(sampling) and not Constraints.needed(Sampling())
