# SPDX-License-Identifier: Apache-2.0
"""The engine "llama_cpp": any GGUF file through llama.cpp, as a model of the batching engine.

    pip install llama-cpp-python             builds llama.cpp, which takes minutes

Slots are sequences of one unified cache, so that a copy of a slot shares its cells. Sampling,
stop words, beams and the rest are the batching engine's.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from actorserve.actors.generation.engine import RequestError, World
from actorserve.actors.generation.engines.batching import BatchEngine
from actorserve.actors.generation.engines.chat_template import ChatTemplate
from actorserve.actors.generation.engines.decoder import Batch, FloatArray
from actorserve.actors.generation.engines.extra_packages import extra_package
from actorserve.actors.generation.engines.smollm2 import find_weights
from actorserve.errors import InvalidArgument, ResourceExhausted

__all__ = ["LlamaCpp", "LlamaCppModel", "LlamaCppTokenizer"]


def _library() -> Any:
    return extra_package("llama_cpp", "llama_cpp", "pip install llama-cpp-python")


class LlamaCppModel:
    """A DecoderModel whose forward pass is llama_decode."""

    def __init__(self, path: str, context_tokens: int, chunk_tokens: int, threads: int) -> None:
        self._lib = lib = _library()
        params = lib.llama_model_default_params()
        self._model = lib.llama_model_load_from_file(path.encode(), params)
        if not self._model:
            raise InvalidArgument(f"llama.cpp cannot load {path!r}; its log says why")
        weakref.finalize(self, lib.llama_model_free, self._model)
        vocab = lib.llama_model_get_vocab(self._model)
        self.name = Path(path).stem
        self.vocab_size: int = lib.llama_vocab_n_tokens(vocab)
        self.end_id = None if (end := lib.llama_vocab_eos(vocab)) < 0 else end
        self.context_tokens = min(context_tokens, lib.llama_model_n_ctx_train(self._model))
        self._chunk_tokens, self._threads = chunk_tokens, threads

    def allocate(self, slots: int) -> None:
        """Make the context, with a sequence for each slot."""
        lib, params = self._lib, self._lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max = slots * self.context_tokens, slots
        params.n_batch, params.kv_unified = self._chunk_tokens + slots, True
        params.n_threads = params.n_threads_batch = self._threads
        self._context = lib.llama_init_from_model(self._model, params)
        if not self._context:
            raise ResourceExhausted(f"llama.cpp made no context of {params.n_ctx} tokens")
        # What was made last is freed first.
        weakref.finalize(self, lib.llama_free, self._context)
        self._memory = lib.llama_get_memory(self._context)
        self._batch = lib.llama_batch_init(params.n_batch, 0, 1)
        weakref.finalize(self, lib.llama_batch_free, self._batch)

    def forward(self, batch: Batch) -> FloatArray:
        """Run the rows. What a slot has beyond its first row here is another request's."""
        lib, to = self._lib, self._batch
        slots, positions = batch.slots.tolist(), batch.positions.tolist()
        rows = range(len(slots))
        wanted = list(rows) if batch.wanted is None else batch.wanted.tolist()
        for row in (*range(batch.decode), *(span.row for span in batch.spans)):
            lib.llama_memory_seq_rm(self._memory, slots[row], positions[row], -1)
        to.n_tokens = len(rows)
        for row, token in enumerate(batch.tokens.tolist()):
            to.token[row], to.pos[row], to.logits[row] = token, positions[row], 0
            to.n_seq_id[row], to.seq_id[row][0] = 1, slots[row]
        for row in wanted:
            to.logits[row] = 1
        if (status := lib.llama_decode(self._context, to)) != 0:
            raise ResourceExhausted(f"llama_decode of {len(rows)} rows failed with {status}")
        out = np.empty((len(wanted), self.vocab_size), np.float32)
        for number, row in enumerate(wanted):
            pointer = lib.llama_get_logits_ith(self._context, row)
            out[number] = np.ctypeslib.as_array(pointer, (self.vocab_size,))
        return out

    def copy_slot(self, source: int, target: int, tokens: int) -> None:
        """Let the target share the first cells of the source."""
        self._lib.llama_memory_seq_rm(self._memory, target, -1, -1)
        self._lib.llama_memory_seq_cp(self._memory, source, target, 0, tokens)

    def load_adapter(self, path: str) -> NoReturn:
        """Refuse: an adapter of llama.cpp applies to all sequences at once."""
        raise RequestError(f"engine 'llama_cpp' takes no adapters a request; got {path!r}")


class LlamaCppTokenizer:
    """The vocabulary of a file, read by llama.cpp."""

    def __init__(self, path: str) -> None:
        self._llama = _library().Llama(model_path=path, vocab_only=True, verbose=False)
        self.vocab_size: int = self._llama.n_vocab()
        self.end_id = None if (end := self._llama.token_eos()) < 0 else int(end)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, behind those that the model wants first."""
        return list(self._llama.tokenize(text.encode(), add_bos=True, special=True))

    def decode_bytes(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes of tokens; special ones give none."""
        return bytes(self._llama.detokenize(list(tokens), special=False))

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return the prompt of a conversation; marks within a content are plain text."""
        template = ChatTemplate.parse(self._llama.metadata.get("tokenizer.chat_template"))
        out: list[int] = []
        for text, is_mark in template.pieces(messages):
            out += self._llama.tokenize(text.encode(), add_bos=False, special=is_mark)
        return out


class LlamaCpp(BatchEngine):
    """Options: `slots`, `chunk_tokens`, `context_tokens` a slot, `weights`, `threads`."""

    def __init__(
        self,
        *,
        slots: int = 8,
        chunk_tokens: int = 128,
        context_tokens: int = 2048,
        weights: str = "",
        threads: int = 1,
    ) -> None:
        super().__init__(slots=slots, chunk_tokens=chunk_tokens)
        self._load = (weights, context_tokens, chunk_tokens, threads)

    def load_model(self, rank: int, world: World | None) -> LlamaCppModel:
        """Load the file; without one, that of the engine "smollm2"."""
        if world is not None and world.size > 1:
            raise InvalidArgument(f"engine 'llama_cpp' runs on one rank, got {world.size}")
        weights, *others = self._load
        return LlamaCppModel(find_weights(weights, "llama_cpp"), *others)

    @classmethod
    def tokenizer(cls, options: dict[str, Any]) -> LlamaCppTokenizer:
        """Return the tokenizer of the file."""
        return LlamaCppTokenizer(find_weights(options.get("weights", ""), "llama_cpp"))
