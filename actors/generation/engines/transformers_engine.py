# SPDX-License-Identifier: Apache-2.0
"""The engine "transformers": any causal language model of Hugging Face's package, on the CPU.

    pip install 'transformers>=4.56' torch   (and accelerate, gguf for GGUF files)

Each slot has a cache of its own and each sequence its own forward pass, so that many at once are
no quicker than one after the other: this is for models that nothing else here runs. Sampling,
stop words, beams and the rest are the batching engine's.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from actorserve.actors.generation.engine import RequestError, World
from actorserve.actors.generation.engines.batching import BatchEngine
from actorserve.actors.generation.engines.decoder import Batch, FloatArray, Span
from actorserve.actors.generation.engines.extra_packages import extra_package
from actorserve.actors.generation.engines.gguf_tokenizer import bytes_of_letters
from actorserve.errors import InvalidArgument

__all__ = ["Transformers", "TransformersModel", "TransformersTokenizer"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _package(name: str = "transformers") -> Any:
    return extra_package(name, "transformers", "pip install transformers torch")


class TransformersModel:
    """A DecoderModel with a DynamicCache a slot."""

    def __init__(self, weights: str, context_tokens: int, **loading: Any) -> None:
        self._torch, self._lib = _package("torch"), _package()
        model = self._lib.AutoModelForCausalLM.from_pretrained(weights, **loading)
        self._model, config = model.eval(), model.config
        self.name, self.vocab_size = weights, int(config.vocab_size)
        ends = config.eos_token_id
        self.end_id: int | None = ends[0] if isinstance(ends, list) else ends
        self.context_tokens = min(context_tokens, int(config.max_position_embeddings))
        # The argument has been renamed; both names are of released versions.
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

    def allocate(self, slots: int) -> None:
        """Make room for a cache in each slot."""
        self._caches: list[Any] = [None] * slots

    def forward(self, batch: Batch) -> FloatArray:
        """Run each sequence by itself and return the logits of the wanted rows."""
        slots, positions = batch.slots.tolist(), batch.positions.tolist()
        spans = [Span(slots[row], row, 1, positions[row]) for row in range(batch.decode)]
        parts = []
        with self._torch.no_grad():
            for span in [*spans, *batch.spans]:
                tokens = batch.tokens[span.row : span.row + span.count]
                cache = {self._cache_argument: self._cache(span.slot, span.position)}
                input_ids = self._torch.tensor([tokens.tolist()])
                logits = self._model(input_ids=input_ids, use_cache=True, **cache).logits[0]
                parts.append(np.asarray(logits.float().numpy(), np.float32))
        every = np.concatenate(parts)
        return every if batch.wanted is None else every[batch.wanted]

    def copy_slot(self, source: int, target: int, tokens: int) -> None:
        """Copy a cache, as far as wanted."""
        self._caches[target] = copy.deepcopy(self._caches[source])
        self._cache(target, tokens)

    def load_adapter(self, path: str) -> NoReturn:
        """Refuse: adapters are not supported here."""
        raise RequestError(f"engine 'transformers' takes no adapters; got {path!r}")

    def _cache(self, slot: int, position: int) -> Any:
        """Return the cache of a slot, with what it holds before a position and nothing more."""
        if position == 0:
            self._caches[slot] = self._lib.DynamicCache(config=self._model.config)
        cache = self._caches[slot]
        if (extra := cache.get_seq_length() - position) > 0:
            cache.crop(-extra)
        return cache


class TransformersTokenizer:
    """The tokenizer that comes with a model."""

    def __init__(self, weights: str, **loading: Any) -> None:
        self._tokenizer = _package().AutoTokenizer.from_pretrained(weights, **loading)
        self.vocab_size, self.end_id = len(self._tokenizer), self._tokenizer.eos_token_id
        self._special = set(self._tokenizer.all_special_ids)
        self._has_letters = "\u0120" in self._tokenizer.get_vocab()  # bytes written as letters

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, behind those that the model wants first."""
        return list(self._tokenizer.encode(text))

    def decode_bytes(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes of tokens; special ones give none."""
        plain = [int(token) for token in tokens if token not in self._special]
        words = self._tokenizer.convert_ids_to_tokens(plain)
        if self._has_letters:
            return bytes_of_letters("".join(words))
        return b"".join(
            bytes.fromhex(byte[1]) if (byte := _BYTE_TOKEN.fullmatch(word)) else word.encode()
            for word in (word.replace("\u2581", " ") for word in words)
        )

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return the prompt of a conversation by the model's own template."""
        try:
            return list(
                self._tokenizer.apply_chat_template(
                    list(messages), add_generation_prompt=True, return_dict=False
                )
            )
        except ValueError as error:
            raise RequestError(f"the model makes no prompt of these messages: {error}") from error


class Transformers(BatchEngine):
    """Options: `weights` (a folder or name), `slots`, `chunk_tokens`, `context_tokens`, `loading`.

    `loading` is passed on to from_pretrained, {"gguf_file": …} for example.
    """

    def __init__(
        self,
        *,
        weights: str,
        slots: int = 4,
        chunk_tokens: int = 512,
        context_tokens: int = 2048,
        loading: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(slots=slots, chunk_tokens=chunk_tokens)
        self._weights, self._context_tokens, self._loading = weights, context_tokens, loading or {}

    def load_model(self, rank: int, world: World | None) -> TransformersModel:
        """Load the model by its package."""
        if world is not None and world.size > 1:
            raise InvalidArgument(f"engine 'transformers' runs on one rank, got {world.size}")
        return TransformersModel(self._weights, self._context_tokens, **self._loading)

    @classmethod
    def tokenizer(cls, options: dict[str, Any]) -> TransformersTokenizer:
        """Return the tokenizer of the model."""
        return TransformersTokenizer(options.get("weights", ""), **(options.get("loading") or {}))
