# SPDX-License-Identifier: Apache-2.0
"""Outputs made one say what they said one by one."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from actorserve.actors.generation.feed import FOLD_AT, Feed
from actorserve.actors.generation.merge import Merged, merged
from actorserve.actors.generation.output import CompletionOutput
from actorserve.wire.generation import Output


def random_output(dice: random.Random, seq: int) -> Output:
    """Return an output that may have anything but an end of its request."""
    tokens = [dice.randrange(100) for _ in range(dice.randrange(4))]
    output = Output(1, seq, tokens)
    if dice.random() < 0.3:
        output.logprobs = [[(token, -float(token))] for token in tokens]
        output.cum_logprob = -dice.random()
    if dice.random() < 0.1:
        output.replace = True
    if dice.random() < 0.1:
        output.finish, output.stop_reason = "stop", dice.randrange(9)
    if tokens and dice.random() < 0.2:
        output.arrays = {"generation_logits": np.array([[token] for token in tokens])}
    return output


def applied(outputs: list[Output]) -> list[dict[str, Any]]:
    """Return what a client sees after these."""
    found = []
    for seq in (0, 1):
        completion = CompletionOutput(seq)
        for output in outputs:
            if output.seq == seq:
                completion.apply(output)
        logits = completion.generation_logits
        found.append(
            {
                "tokens": completion.token_ids,
                "logprobs": completion.logprobs,
                "cumulative": completion.cumulative_logprob,
                "finish": (completion.finish_reason, completion.stop_reason),
                "logits": None if logits is None else logits.tolist(),
            }
        )
    return found


@pytest.mark.parametrize("seed", range(50))
def test_merging_changes_nothing(seed: int):
    """In any portions, merged again and again."""
    dice = random.Random(seed)
    outputs = [random_output(dice, dice.randrange(2)) for _ in range(40)]
    expected = applied(outputs)
    copies = [list(each.tokens) for each in outputs]
    whole: list[Output] = []
    for output in outputs:
        whole.append(output)
        if dice.random() < 0.3:
            whole = merged(whole)
    whole = merged(whole)
    assert applied(whole) == expected
    assert len(whole) <= 2
    assert [each.tokens for each in outputs] == copies  # an engine's own lists stay as they are


def test_the_final_one_stays_last():
    """Nobody sees the end before what came earlier."""
    outputs = [
        Output(1, 0, [1]),
        Output(1, 1, [2]),
        Output(1, 0, [3]),
        Output(1, 1, [4], final=True),
    ]
    assert [(each.seq, each.final) for each in merged(outputs)] == [(0, False), (1, True)]


def test_a_feed_is_folded_in_place():
    """What is folded is the feed's own, and grows without being copied."""
    feed = Feed(1, 1, 0.0)
    for token in range(3 * FOLD_AT):
        feed.inbox.append(Output(1, 0, [token]))
        if len(feed.inbox) > feed.fold_at:
            feed.fold()
    feed.fold()
    assert [type(each) for each in feed.inbox] == [Merged]
    assert feed.inbox[0].tokens == list(range(3 * FOLD_AT))
