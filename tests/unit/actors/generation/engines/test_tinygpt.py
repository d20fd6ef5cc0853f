# SPDX-License-Identifier: Apache-2.0
"""TinyGPT: a real model, alone, in batches, and shared by ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actorserve.actors.generation.engine import GenRequest, RequestError
from actorserve.actors.generation.engines.lora import Lora, write_lora
from actorserve.actors.generation.engines.tinygpt import BUNDLED, TinyGPT
from actorserve.errors import InvalidArgument
from tests.unit.actors.generation.engines.toy import (
    Client,
    ThreadWorld,
    generate,
    on_ranks,
    request,
    run,
)

EXAMPLES = Path(__file__).parents[5] / "examples" / "llm"
TOKENIZER = TinyGPT.tokenizer({})
PROMPTS = [
    TOKENIZER.encode(text)
    for text in ("The for statement", 'If a "finally" clause', "import", "Class definitions are ")
]


@pytest.fixture
def engine() -> TinyGPT:
    """Return an engine that runs."""
    made = TinyGPT(slots=16)
    made.start(0, None)
    return made


def _mixed(adapter: int = 0) -> list[GenRequest]:
    """Return requests of every kind."""
    first, second, third, fourth = PROMPTS
    return [
        request(1, first, max_tokens=30),
        request(2, second, max_tokens=25, temperature=0.8, seed=7),
        request(3, third, max_tokens=20, temperature=1.0, top_k=20, top_p=0.9, seed=1, n=2),
        request(4, fourth, max_tokens=12, beam_width=3, n=2),
        request(5, first, max_tokens=30, repetition_penalty=1.2, logprobs=2),
        request(6, second * 3, max_tokens=15, adapter=adapter),
        request(7, third, max_tokens=9, temperature=1.5, seed=3, best_of=3, stream=False),
    ]


def _tokens(client: Client) -> dict[tuple[int, int], list[int]]:
    return {
        (number, index): answer.tokens
        for number, answers in client.answers.items()
        for index, answer in answers.items()
    }


def _adapter(path: Path, seed: int = 2) -> str:
    random = np.random.default_rng(seed)
    shapes = {"layer0.qkv": (96, 288), "layer1.out": (96, 96), "layer2.up": (96, 384)}
    shapes["layer2.down"] = (384, 96)
    lora: Lora = {}
    for name, (inputs, outputs) in shapes.items():
        a = random.normal(0, 0.3, (inputs, 4)).astype(np.float32)
        lora[name] = (a, random.normal(0, 0.3, (4, outputs)).astype(np.float32))
    write_lora(path, lora)
    return str(path)


def test_it_says_what_it_is() -> None:
    """Sizes come from the file; the tokenizer fits them and needs no weights."""
    info = TinyGPT(slots=3).start(0, None)
    assert (info.name, info.vocab_size, info.context_tokens) == ("tinygpt", 1024, 128)
    assert (info.slots, info.kv_tokens, info.adapters) == (3, 384, True)
    assert TOKENIZER.vocab_size == info.vocab_size
    assert TOKENIZER.decode_bytes(PROMPTS[0]) == b"The for statement"


def test_it_reads_like_the_documentation(engine: TinyGPT) -> None:
    """What it says are words that the documentation is full of."""
    answer = generate(engine, TOKENIZER.encode("The for statement is used to "), max_tokens=60)
    text = TOKENIZER.decode_bytes(answer.tokens).decode()
    assert "statement" in text and "the" in text.split()


def test_alone_and_mixed_give_the_same_tokens(engine: TinyGPT) -> None:
    """In-flight batching, chunks and neighbours change nothing."""
    together = _tokens(run(engine, *_mixed()))
    small = TinyGPT(slots=16, chunk_tokens=5)
    small.start(0, None)
    assert _tokens(run(small, *_mixed())) == together
    for single in _mixed():
        alone = _tokens(run(engine, single))
        assert alone == {key: together[key] for key in alone}


def test_logits_do_not_depend_on_how_a_prompt_was_cut(engine: TinyGPT) -> None:
    """Read at once, in pieces, or token by token as an answer: equal but for rounding."""
    prompt = PROMPTS[1] * 4
    settings: dict[str, Any] = {"max_tokens": 1, "context_logits": True}
    whole = generate(engine, prompt, **settings).arrays["context_logits"]
    assert whole.shape == (len(prompt), 1024) and whole.dtype == np.float32
    pieces = TinyGPT(slots=1, chunk_tokens=3)
    pieces.start(0, None)
    in_pieces = generate(pieces, prompt, **settings).arrays["context_logits"]
    np.testing.assert_allclose(whole, in_pieces, atol=1e-4)
    answer = generate(engine, prompt[:5], max_tokens=9, generation_logits=True)
    again = generate(engine, prompt[:5] + answer.tokens, **settings).arrays["context_logits"]
    np.testing.assert_allclose(answer.arrays["generation_logits"], again[4:-1], atol=1e-4)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_together_say_what_one_says(size: int, tmp_path: Path) -> None:
    """Heads, hidden units and vocabulary are shared; every rank has the same answer in the end."""
    path = _adapter(tmp_path / "adapter.npz")

    def work(rank: int, world: ThreadWorld | None) -> Any:
        engine = TinyGPT(slots=16)
        engine.start(rank, world)
        engine.load_adapter(3, path)
        requests = [*_mixed(adapter=3), request(8, PROMPTS[0], max_tokens=8, temperature=2.0)]
        client = run(engine, *requests)
        return _tokens(client), client.answers[5][0].logprobs

    ranks = on_ranks(size, work)
    assert all(each == ranks[0] for each in ranks), "bit by bit, open seeds too"
    tokens, logprobs = work(0, None)
    for key, expected in tokens.items():
        if key[0] != 8:  # whose seed is open
            assert ranks[0][0][key] == expected
    for ours, theirs in zip(logprobs, ranks[0][1]):
        assert [token for token, _ in ours] == [token for token, _ in theirs]
        assert [p for _, p in ours] == pytest.approx([p for _, p in theirs], abs=1e-4)


def test_ranks_that_cannot_share_are_refused() -> None:
    """Four heads are for 1, 2 or 4 ranks."""
    world = ThreadWorld(0, 3, None, [])  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="3 ranks cannot share 4 heads"):
        TinyGPT().start(0, world)


def test_an_adapter_changes_its_requests_alone(engine: TinyGPT, tmp_path: Path) -> None:
    """The same prompt with two adapters and without, in one batch."""
    engine.load_adapter(1, _adapter(tmp_path / "one.npz", 1))
    engine.load_adapter(2, _adapter(tmp_path / "two.npz", 2))
    prompt = PROMPTS[0]
    requests = [request(i + 1, prompt, max_tokens=12, adapter=i) for i in range(3)]
    together = _tokens(run(engine, *requests))
    assert len({tuple(tokens) for tokens in together.values()}) == 3
    for single in requests:
        assert _tokens(run(engine, single))[single.id, 0] == together[single.id, 0]
    assert generate(engine, prompt, max_tokens=12).tokens == together[1, 0]


@pytest.mark.parametrize("size", [1, 2])
def test_a_trained_adapter_knows_its_text(size: int) -> None:
    """The one among the examples has learnt a text by heart; ranks share it as they do weights."""

    def work(rank: int, world: ThreadWorld) -> str:
        engine = TinyGPT(slots=1)
        engine.start(rank, world)
        engine.load_adapter(1, str(EXAMPLES / "zen_adapter.npz"))
        prompt = TOKENIZER.encode("The Zen of Python, by")
        answer = generate(engine, prompt, max_tokens=40, adapter=1)
        return TOKENIZER.decode_bytes(answer.tokens).decode()

    for text in on_ranks(size, work):
        assert "Beautiful is better than ugly.\nExplicit is better than implicit." in text


def test_an_adapter_for_another_model_is_refused(engine: TinyGPT, tmp_path: Path) -> None:
    """And the engine goes on without it."""
    ones = np.ones((5, 1), np.float32)
    write_lora(tmp_path / "other.npz", {"layer0.qkv": (ones, ones.T)})
    with pytest.raises(RequestError, match=r"layer0\.qkv has the shapes"):
        engine.load_adapter(1, str(tmp_path / "other.npz"))
    with pytest.raises(RequestError, match="adapter: 1 is not loaded"):
        engine.add(request(1, PROMPTS[0], adapter=1))


def test_weights_of_ones_own_can_be_named(tmp_path: Path) -> None:
    """By the option `weights`, for the tokenizer as well."""
    own = tmp_path / "own.npz"
    own.write_bytes(BUNDLED.read_bytes())
    assert TinyGPT(weights=str(own)).start(0, None).vocab_size == 1024
    assert TinyGPT.tokenizer({"weights": str(own)}).encode("import") == PROMPTS[2]


@pytest.mark.parametrize("content", [None, b"", b"nothing like it"])
def test_weights_that_cannot_be_read_are_named(tmp_path: Path, content: bytes | None) -> None:
    """The error says which file it is."""
    path = tmp_path / "broken.npz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidArgument, match=r"broken\.npz"):
        TinyGPT(weights=str(path)).start(0, None)


def test_weights_of_something_else_are_refused(tmp_path: Path) -> None:
    """A file of arrays that is no model."""
    other = str(tmp_path / "other.npz")
    np.savez(other, shape=np.ones(3), tokens=np.ones(3))
    with pytest.raises(InvalidArgument, match="have the sizes"):
        TinyGPT(weights=other).start(0, None)
    np.savez(other, shape=[8, 1, 4, 8, 16], tokens=np.ones((16, 8)))
    with pytest.raises(InvalidArgument, match="lack 'positions'"):
        TinyGPT(weights=other).start(0, None)
    np.savez(other, shape=np.ones(3))
    with pytest.raises(InvalidArgument, match="lack tokens"):
        TinyGPT(weights=other).start(0, None)
    with pytest.raises(InvalidArgument, match="lack joins"):
        TinyGPT.tokenizer({"weights": other})
