# SPDX-License-Identifier: Apache-2.0
"""The scripted engine does what it is told."""

from __future__ import annotations

from typing import Any

import pytest

from actorserve.actors.generation import GenRequest, Output, RequestError, Sampling
from actorserve.actors.generation.engines.scripted import Scripted
from actorserve.actors.generation.engines.scripted_text import END, ByteTokenizer
from actorserve.errors import InternalError, InvalidArgument


def ask(number: int, max_tokens: int = 4, **fields: Any) -> GenRequest:
    """Return a request whose prompt is its number."""
    extra = fields.pop("extra", None)
    return GenRequest(number, [number], Sampling(max_tokens=max_tokens, **fields), extra=extra)


def run(engine: Scripted, *requests: GenRequest) -> list[Output]:
    """Return everything that comes of these requests."""
    engine.start(0, None)
    for request in requests:
        engine.add(request)
    outputs: list[Output] = []
    while came := engine.poll(0.0):
        outputs += came
    return outputs


def tokens(outputs: list[Output], number: int) -> list[int]:
    """Return the tokens of one request's first sequence."""
    found = [each.tokens for each in outputs if each.id == number and each.seq == 0]
    return [token for each in found for token in each]


def test_tokens_follow_the_prompt():
    """They count up and wrap at the end of the vocabulary."""
    outputs = run(Scripted(vocab_size=10), ask(1), ask(8))
    assert tokens(outputs, 1) == [2, 3, 4, 5]
    assert tokens(outputs, 8) == [9, 0, 1, 2]
    assert [each.finish for each in outputs if each.final] == ["length"] * 2


def test_scripts_say_more():
    """Tokens, chunks, ends, errors."""
    outputs = run(
        Scripted(),
        ask(1, 5, extra={"tokens": [7, 8]}),
        ask(2, 5, extra={"chunk": 3}),
        ask(3, 5, extra={"end": 2}),
        ask(4, 5, extra={"error": "oh", "error_at": 1}),
        ask(5, 9, extra={"tokens": [1, 2, END, 3]}, end_id=END),
    )
    assert tokens(outputs, 1) == [7, 8, 7, 8, 7]
    assert [len(each.tokens) for each in outputs if each.id == 2] == [3, 2]
    assert [each.finish for each in outputs if each.id == 3] == [None, "stop"]
    assert [(each.error, each.final) for each in outputs if each.id == 4][-1] == ("oh", True)
    assert tokens(outputs, 5) == [1, 2]
    assert outputs[-1].final or outputs[-2].final


def test_prefill_takes_iterations():
    """Nothing comes in them, and the engine is not idle for that."""
    engine = Scripted()
    engine.start(0, None)
    engine.add(ask(1, 1, extra={"prefill": 2}))
    assert [len(engine.poll(0.0)) for _ in range(3)] == [0, 0, 1]


def test_capacity_counts_slots_and_tokens():
    """Without a limit it is as good as endless."""
    engine = Scripted(slots=3, kv_tokens=100)
    engine.start(0, None)
    engine.add(ask(1, 9))
    assert engine.capacity() == (2, 90)
    engine.abort([1, 99])
    assert engine.capacity() == (3, 100)
    assert [each.finish for each in engine.poll(0.0)] == ["cancelled"]
    assert Scripted().capacity()[0] > 1 << 20


def test_failures_come_when_they_are_due():
    """At their iteration and on their rank only."""
    engine = Scripted(fail_at=2, on_rank=1)
    engine.start(0, None)
    engine.add(ask(1))
    engine.poll(0.0)
    engine.poll(0.0)
    engine.rank = 1
    engine.iterations = 1
    with pytest.raises(InternalError, match="iteration 2"):
        engine.poll(0.0)
    with pytest.raises(RequestError, match="vocabulary"):
        engine.add(ask(5000))
    with pytest.raises(RequestError, match="no adapter 4"):
        engine.add(GenRequest(9, [1], Sampling(), adapter=4))


def test_its_tokenizer_knows_bytes():
    """And conversations, as lines."""
    tokenizer = ByteTokenizer()
    assert tokenizer.decode_bytes([*tokenizer.encode("hé"), END]).decode() == "hé"
    chat = tokenizer.chat([{"role": "user", "content": "hi"}])
    assert bytes(chat) == b"user: hi\nassistant: "
    with pytest.raises(InvalidArgument, match="role"):
        tokenizer.chat([{"role": "judge", "content": "hi"}])
