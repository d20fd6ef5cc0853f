# SPDX-License-Identifier: Apache-2.0
"""Those functions of llama_cpp 0.3.36 that the engine calls, with the same names, argument types
and structures (ctypes refuses here what it would refuse there), over the toy model.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from tests.unit.actors.generation.engines.gguf_maker import TEMPLATE
from tests.unit.actors.generation.engines.toy import CONTEXT, VOCABULARY, toy_logits


class llama_model_params(ctypes.Structure):
    _fields_ = [("n_gpu_layers", ctypes.c_int32)]


class llama_context_params(ctypes.Structure):
    _fields_ = [
        ("n_ctx", ctypes.c_uint32),
        ("n_batch", ctypes.c_uint32),
        ("n_ubatch", ctypes.c_uint32),
        ("n_seq_max", ctypes.c_uint32),
        ("n_threads", ctypes.c_int32),
        ("n_threads_batch", ctypes.c_int32),
        ("kv_unified", ctypes.c_bool),
    ]
    __slots__ = ()


class llama_batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


def _ints(*values: Any) -> None:
    """Refuse what ctypes would not take as an int."""
    for value in values:
        ctypes.c_int32.from_param(value)


class FakeLlamaCpp:
    """The module. It keeps its one context's cells, and counts what was freed."""

    def __init__(self) -> None:
        self.freed: list[str] = []
        self.params = llama_context_params()
        self.sequences: dict[int, dict[int, int]] = {}
        self._rows: dict[int, Any] = {}
        self._kept: list[Any] = []

    def llama_backend_init(self) -> None: ...

    def llama_model_default_params(self) -> llama_model_params:
        return llama_model_params()

    def llama_model_load_from_file(self, path: bytes, params: llama_model_params) -> int | None:
        assert isinstance(path, bytes)
        return None if path == b"broken.gguf" else 11

    def llama_model_get_vocab(self, model: int) -> int:
        return 12

    def llama_vocab_n_tokens(self, vocab: int) -> int:
        return VOCABULARY

    def llama_vocab_eos(self, vocab: int) -> int:
        return 0

    def llama_model_n_ctx_train(self, model: int) -> int:
        return CONTEXT

    def llama_context_default_params(self) -> llama_context_params:
        return llama_context_params()

    def llama_init_from_model(self, model: int, params: llama_context_params) -> int:
        self.params = params
        return 13

    def llama_get_memory(self, context: int) -> int:
        return 14

    def llama_batch_init(self, n_tokens: int, embd: int, n_seq_max: int) -> llama_batch:
        def array(kind: Any, count: int) -> Any:
            self._kept.append((kind * count)())
            return self._kept[-1]

        def pointer(kind: Any, count: int) -> Any:
            return ctypes.cast(array(kind, count), ctypes.POINTER(kind))

        batch = llama_batch()
        for name in ("token", "pos", "n_seq_id"):
            setattr(batch, name, pointer(ctypes.c_int32, n_tokens))
        batch.logits = pointer(ctypes.c_int8, n_tokens)
        ids = array(ctypes.POINTER(ctypes.c_int32), n_tokens)
        for row in range(n_tokens):
            ids[row] = pointer(ctypes.c_int32, n_seq_max)
        batch.seq_id = ctypes.cast(ids, ctypes.POINTER(ctypes.POINTER(ctypes.c_int32)))
        return batch

    def llama_decode(self, context: int, batch: llama_batch) -> int:
        assert batch.n_tokens <= self.params.n_batch
        self._rows = {}
        for row in range(batch.n_tokens):
            assert batch.n_seq_id[row] == 1
            sequence, position = batch.seq_id[row][0], batch.pos[row]
            assert sequence < self.params.n_seq_max
            cells = self.sequences.setdefault(sequence, {})
            # As llama.cpp demands: the positions of a sequence have neither gaps nor doubles.
            if position != len(cells):
                return -1
            cells[position] = batch.token[row]
            if batch.logits[row]:
                history = [cells[place] for place in range(position + 1)]
                self._rows[row] = (ctypes.c_float * VOCABULARY)(*toy_logits(history))
        if sum(map(len, self.sequences.values())) > self.params.n_ctx:
            return 1
        return 0

    def llama_get_logits_ith(self, context: int, i: int) -> Any:
        _ints(i)
        return ctypes.cast(self._rows[i], ctypes.POINTER(ctypes.c_float))

    def llama_memory_seq_rm(self, memory: int, sequence: int, p0: int, p1: int) -> bool:
        _ints(sequence, p0, p1)
        assert p1 < 0
        cells = self.sequences.get(sequence, {})
        self.sequences[sequence] = {p: t for p, t in cells.items() if p < max(p0, 0)}
        return True

    def llama_memory_seq_cp(self, memory: int, source: int, target: int, p0: int, p1: int) -> None:
        _ints(source, target, p0, p1)
        assert self.params.kv_unified, "llama.cpp copies parts only within one unified cache"
        cells = self.sequences[source].items()
        self.sequences.setdefault(target, {}).update({p: t for p, t in cells if p0 <= p < p1})

    def llama_batch_free(self, batch: llama_batch) -> None:
        self.freed.append("batch")

    def llama_free(self, context: int) -> None:
        self.freed.append("context")

    def llama_model_free(self, model: int) -> None:
        self.freed.append("model")

    class Llama:
        """The package's tokenizer: here, one token a byte, and marks that stand in brackets."""

        MARKS = ("<|im_start|>", "<|im_end|>")

        def __init__(self, model_path: str, *, vocab_only: bool, verbose: bool) -> None:
            assert vocab_only
            assert not verbose
            self.metadata = {"tokenizer.chat_template": TEMPLATE}

        def n_vocab(self) -> int:
            return 258

        def token_eos(self) -> int:
            return 257

        def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
            if special and text.decode() in self.MARKS:
                return [256 + self.MARKS.index(text.decode())]
            return list(text)

        def detokenize(
            self,
            tokens: list[int],
            prev_tokens: list[int] | None = None,
            special: bool = False,
        ) -> bytes:
            return bytes(np.array([t for t in tokens if t < 256], np.uint8))
