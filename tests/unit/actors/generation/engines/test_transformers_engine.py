# SPDX-License-Identifier: Apache-2.0
"""The engine over transformers: against a stand-in of its API, and itself where installed."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from actorserve.actors.generation.engine import RequestError
from actorserve.actors.generation.engines.smollm2 import PACKAGE, find_weights
from actorserve.actors.generation.engines.transformers_engine import Transformers
from actorserve.errors import Unsupported
from tests.unit.actors.generation.engines.gguf_maker import letters
from tests.unit.actors.generation.engines.toy import (
    CONTEXT,
    VOCABULARY,
    generate,
    request,
    run,
    started,
    toy_logits,
)

NEEDED = ("transformers", "torch", "accelerate", "gguf", PACKAGE)
REQUESTS = [
    request(1, [3, 4, 5], max_tokens=9),
    request(2, [7, 1, 2, 8, 6, 4, 3], max_tokens=6, n=2, best_of=2, temperature=0.9, seed=4),
    request(3, [5], max_tokens=8, beam_width=2),
]


class FakeTensor:
    """As much of a tensor as is used."""

    def __init__(self, array: Any) -> None:
        self.array = np.asarray(array)

    def __getitem__(self, place: int) -> FakeTensor:
        return FakeTensor(self.array[place])

    def float(self) -> FakeTensor:
        return self

    def numpy(self) -> Any:
        return self.array


class FakeCache:
    """A DynamicCache whose keys are the tokens; crop takes how many to remove, negative."""

    def __init__(self, ddp_cache_data: Any = None, config: Any = None) -> None:
        assert config is not None
        self.tokens: list[int] = []

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return len(self.tokens)

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError("Calling `crop` with a positive value is not supported")
        del self.tokens[len(self.tokens) + tokens_to_remove :]


class FakeModel:
    """A causal model; a subclass has the name that the cache has in its version."""

    config = SimpleNamespace(
        vocab_size=VOCABULARY, eos_token_id=[0, 3], max_position_embeddings=CONTEXT
    )

    def eval(self) -> FakeModel:
        return self

    def _run(self, input_ids: FakeTensor, cache: FakeCache, use_cache: bool) -> Any:
        assert use_cache
        rows = []
        for token in input_ids.array[0].tolist():
            cache.tokens.append(token)
            rows.append(toy_logits(cache.tokens))
        return SimpleNamespace(logits=FakeTensor([rows]))


class NewModel(FakeModel):
    def forward(self, input_ids: Any = None, cache: Any = None, use_cache: Any = None) -> Any:
        return self._run(input_ids, cache, use_cache)

    __call__ = forward


class OldModel(FakeModel):
    def forward(
        self, input_ids: Any = None, past_key_values: Any = None, use_cache: Any = None
    ) -> Any:
        return self._run(input_ids, past_key_values, use_cache)

    __call__ = forward


class FakeTokenizer:
    """A tokenizer with a token for each byte, written in letters, and one that is special."""

    words: ClassVar = [*letters(), "<|im_end|>"]
    eos_token_id = 256
    all_special_ids: ClassVar = [256]

    def __len__(self) -> int:
        return len(self.words)

    def get_vocab(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}

    def encode(self, text: str) -> list[int]:
        order = [*range(33, 127), *range(161, 173), *range(174, 256)]
        order += [byte for byte in range(256) if byte not in order]
        return [order.index(byte) for byte in text.encode()]

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [self.words[number] for number in ids]

    def apply_chat_template(
        self, conversation: Any, add_generation_prompt: bool = False, return_dict: bool = True
    ) -> Any:
        assert add_generation_prompt
        if not conversation:
            raise ValueError("no messages")
        tokens = [token for each in conversation for token in self.encode(each["content"])]
        return {"input_ids": tokens} if return_dict else tokens


class PieceTokenizer(FakeTokenizer):
    """One of the SentencePiece kind: spaces are marked, odd bytes are written as numbers."""

    words: ClassVar = ["\u2581hé", "<0xE2>", "<0x82>", "<0xAC>", "</s>"]
    eos_token_id = 4
    all_special_ids: ClassVar = [4]


@pytest.fixture(params=[NewModel, OldModel])
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Put stand-ins of transformers, of a newer and an older version, and torch in place."""
    calls: list[Any] = []

    def model(weights: str, **loading: Any) -> Any:
        calls.append((weights, loading))
        return request.param()

    tokenizers = {"toy": FakeTokenizer, "pieces": PieceTokenizer}
    package = SimpleNamespace(
        AutoModelForCausalLM=SimpleNamespace(from_pretrained=model),
        AutoTokenizer=SimpleNamespace(from_pretrained=lambda name, **_: tokenizers[name]()),
        DynamicCache=FakeCache,
    )
    torch = SimpleNamespace(no_grad=contextlib.nullcontext, tensor=FakeTensor)
    monkeypatch.setitem(sys.modules, "transformers", package)
    monkeypatch.setitem(sys.modules, "torch", torch)
    return calls


def _engine(**options: Any) -> Transformers:
    engine = Transformers(weights="toy", **options)
    engine.start(0, None)
    return engine


def test_answers_are_those_of_the_same_model_without_it(fake: list[Any]) -> None:
    """Prompts in chunks, several answers and beams go through the package unharmed."""
    options: dict[str, Any] = {"slots": 4, "chunk_tokens": 3}
    theirs, ours = run(_engine(**options), *REQUESTS), run(started(**options), *REQUESTS)
    assert theirs.answers == ours.answers


def test_a_slot_is_used_again_from_its_start(fake: list[Any]) -> None:
    """A new request in a slot gets a new cache."""
    engine = _engine(slots=1)
    first = generate(engine, [3, 4, 5], max_tokens=5).tokens
    generate(engine, [8], max_tokens=9)
    assert generate(engine, [3, 4, 5], max_tokens=5).tokens == first


def test_options_reach_the_package(fake: list[Any]) -> None:
    """What `loading` holds is passed on; sizes come from the model's configuration."""
    engine = Transformers(weights="toy", loading={"gguf_file": "m.gguf"}, context_tokens=1000)
    info = engine.start(0, None)
    assert fake == [("toy", {"gguf_file": "m.gguf"})]
    assert (info.vocab_size, info.context_tokens, info.end_id) == (VOCABULARY, CONTEXT, 0)


def test_text_goes_through_its_tokenizer(fake: list[Any]) -> None:
    """Bytes come back one by one from vocabularies of both kinds, special tokens as nothing."""
    tokenizer = Transformers.tokenizer({"weights": "toy"})
    tokens = tokenizer.encode("hé €")
    assert b"".join(tokenizer.decode_bytes([token]) for token in tokens) == "hé €".encode()
    assert tokenizer.decode_bytes([256]) == b""
    pieces = Transformers.tokenizer({"weights": "pieces"})
    assert [pieces.decode_bytes([n]) for n in range(5)] == [
        " hé".encode(),
        b"\xe2",
        b"\x82",
        b"\xac",
        b"",
    ]


def test_a_conversation_goes_through_its_template(fake: list[Any]) -> None:
    """The package's own template makes the prompt; what it refuses is that request's error."""
    tokenizer = Transformers.tokenizer({"weights": "toy"})
    assert tokenizer.chat([{"role": "user", "content": "hi"}]) == tokenizer.encode("hi")
    with pytest.raises(RequestError, match="no messages"):
        tokenizer.chat([])


def test_adapters_are_refused(fake: list[Any]) -> None:
    """An adapter is an error of whoever asked."""
    with pytest.raises(RequestError, match="no adapters"):
        _engine().load_adapter(1, "x")


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package, the error names it and how to get it."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(Unsupported, match="pip install transformers torch"):
        Transformers(weights="x").start(0, None)


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in NEEDED),
    reason=f"not all of {', '.join(NEEDED)} are installed",
)
def test_the_real_package_answers() -> None:
    """SmolLM2 through transformers says what it says through numpy.

    Where this was written the packages were not installed (1.2 GB with torch), so that this test
    has not been run: the tests above ran, against the names and arguments that stand in the
    sources of transformers 5.24 (`cache`) and, from memory, of 4.56 (`past_key_values`).
    """
    path = Path(find_weights("", "transformers"))
    options: dict[str, Any] = {"weights": str(path.parent), "loading": {"gguf_file": path.name}}
    engine = Transformers(slots=2, **options)
    engine.start(0, None)
    tokenizer = Transformers.tokenizer(options)
    prompt = tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
    answer = generate(engine, prompt, max_tokens=20, end_id=tokenizer.end_id)
    assert tokenizer.decode_bytes(answer.tokens) == b"The capital of France is Paris."
    engine.close()
