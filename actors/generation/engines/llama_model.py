# SPDX-License-Identifier: Apache-2.0
"""A decoder of the llama architecture in numpy, with the weights of a GGUF file.

    x ─ norm ─ Q,K,V ─ rotate Q,K ─ attend ─ out ─(+)─ norm ─ gate,up ─ silu(gate)·up ─ down ─(+)
    └────────────────────────────────────────────┘ └────────────────────────────────────────┘
                                     … layers … norm ─ head ─► logits

Weights are float32, [inputs, outputs]: the order in which a few rows multiply quickest. The
factors of each norm are multiplied into the matrix behind it. Embeddings stay as the file has
them and are converted row by row. Pairs of numbers that a rotation turns lie side by side in a
GGUF file, so that a rotation is one multiplication of complex numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from actorserve.actors.generation.engine import RequestError
from actorserve.actors.generation.engines import gguf_weights
from actorserve.actors.generation.engines.decoder import Batch, FloatArray
from actorserve.actors.generation.engines.gguf_file import GgufFile, Tensor
from actorserve.actors.generation.engines.kv_slots import KvSlots
from actorserve.errors import InvalidArgument

__all__ = ["LlamaModel", "LlamaShape"]


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The sizes of a model, as its metadata gives them."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    context_tokens: int
    vocab_size: int
    rotation_base: float
    epsilon: float

    @property
    def head_dim(self) -> int:
        """Numbers a head has."""
        return self.width // self.heads

    @classmethod
    def of(cls, file: GgufFile) -> LlamaShape:
        """Read the sizes. Raises InvalidArgument for another architecture or a variant of it."""
        architecture = file.get("general.architecture", str)
        if architecture != "llama":
            raise InvalidArgument(
                f"the model of {file.path!r} is of the architecture {architecture!r}; this engine"
                " runs 'llama'"
            )
        heads = int(file.get("llama.attention.head_count", int))
        shape = cls(
            layers=int(file.get("llama.block_count", int)),
            width=int(file.get("llama.embedding_length", int)),
            heads=heads,
            kv_heads=int(file.metadata.get("llama.attention.head_count_kv", heads)),
            hidden=int(file.get("llama.feed_forward_length", int)),
            context_tokens=int(file.get("llama.context_length", int)),
            vocab_size=len(file.get("tokenizer.ggml.tokens", list)),
            rotation_base=float(file.metadata.get("llama.rope.freq_base", 10000.0)),
            epsilon=float(file.get("llama.attention.layer_norm_rms_epsilon", float)),
        )
        shape._check(file)
        return shape

    def _check(self, file: GgufFile) -> None:
        counts = (self.layers, self.width, self.heads, self.kv_heads, self.hidden)
        if min(counts) < 1 or self.width % self.heads or self.heads % self.kv_heads:
            raise InvalidArgument(f"the sizes in {file.path!r} do not fit each other: {self}")
        rotated = file.metadata.get("llama.rope.dimension_count", self.head_dim)
        scaling = file.metadata.get("llama.rope.scaling.type", "none")
        if rotated != self.head_dim or self.head_dim % 2 or scaling != "none":
            raise InvalidArgument(
                f"{file.path!r} rotates {rotated} of {self.head_dim} numbers with scaling"
                f" {scaling!r}; this engine rotates whole heads without scaling"
            )


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_in: FloatArray  # [width, heads + 2 · key heads, of head size]
    attention_out: FloatArray
    hidden_in: FloatArray  # [width, gate │ up]
    hidden_out: FloatArray


class LlamaModel:
    """A DecoderModel with the weights of one file."""

    def __init__(self, file: GgufFile, *, context_tokens: int = 0) -> None:
        """Convert the weights of a file; `context_tokens` 0 is the most that the model knows.

        Raises InvalidArgument for a file that holds something else than this architecture.
        """
        self.shape = shape = LlamaShape.of(file)
        self.name = str(file.metadata.get("general.name", "llama"))
        self.vocab_size = shape.vocab_size
        self.context_tokens = min(context_tokens or shape.context_tokens, shape.context_tokens)
        self.end_id: int | None = file.metadata.get("tokenizer.ggml.eos_token_id")
        reader = _Reader(file, shape)
        self._embedding = reader.embedding()
        self._layers = [reader.layer(number) for number in range(shape.layers)]
        self._head = reader.head()
        reader.expect_no_more()
        self._turns = _turns(shape, self.context_tokens)
        self._cache: KvSlots | None = None

    def allocate(self, slots: int) -> None:
        """Make the key-value cache for so many sequences."""
        shape = self.shape
        self._cache = KvSlots(
            shape.layers, slots, shape.kv_heads, self.context_tokens, shape.head_dim
        )

    def forward(self, batch: Batch) -> FloatArray:
        """Run the rows of a batch and return the logits of those that are wanted."""
        cache = self._slots()
        cache.begin(batch)
        x = gguf_weights.rows(self._embedding, batch.tokens)
        turns = self._turns[batch.positions][:, None]
        # The exponential of a very negative gate may overflow: its share is 0 then, as it should.
        with np.errstate(over="ignore"):
            for number, layer in enumerate(self._layers):
                x += self._attention(cache, number, layer, batch, x, turns)
                x += self._feed_forward(layer, x)
        if batch.wanted is not None:
            x = x[batch.wanted]
        return _product(self._normed(x), self._head)

    def copy_slot(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` positions of one slot to another."""
        self._slots().copy(source, target, tokens)

    def load_adapter(self, path: str) -> NoReturn:
        """Refuse: adapters of this architecture are not supported."""
        raise RequestError(f"{self.name!r} takes no adapters; got {path!r}")

    def _slots(self) -> KvSlots:
        if self._cache is None:
            raise InvalidArgument("a model runs after allocate()")
        return self._cache

    def _normed(self, x: FloatArray) -> FloatArray:
        squares = np.einsum("ij,ij->i", x, x)
        squares /= self.shape.width
        squares += self.shape.epsilon
        normed: FloatArray = x / np.sqrt(squares)[:, None]
        return normed

    def _attention(
        self,
        cache: KvSlots,
        number: int,
        layer: _Layer,
        batch: Batch,
        x: FloatArray,
        turns: Any,
    ) -> FloatArray:
        shape = self.shape
        qkv = _product(self._normed(x), layer.attention_in)
        qkv = qkv.reshape(len(x), shape.heads + 2 * shape.kv_heads, shape.head_dim)
        values_at = shape.heads + shape.kv_heads
        pairs = qkv[:, :values_at].view(np.complex64)
        pairs *= turns
        seen = cache.attend(
            number,
            batch,
            qkv[:, : shape.heads],
            qkv[:, shape.heads : values_at],
            qkv[:, values_at:],
        )
        return _product(seen, layer.attention_out)

    def _feed_forward(self, layer: _Layer, x: FloatArray) -> FloatArray:
        both = _product(self._normed(x), layer.hidden_in)
        gate, up = both[:, : self.shape.hidden], both[:, self.shape.hidden :]
        up *= gate
        np.negative(gate, out=gate)
        np.exp(gate, out=gate)
        gate += 1
        return _product(up / gate, layer.hidden_out)


def _product(x: FloatArray, matrix: FloatArray) -> FloatArray:
    """Multiply; two rows go one by one, which is quicker than a product of matrices."""
    if len(x) != 2:
        return x @ matrix
    out = np.empty((2, matrix.shape[1]), np.float32)
    np.matmul(x[0], matrix, out=out[0])
    np.matmul(x[1], matrix, out=out[1])
    return out


def _turns(shape: LlamaShape, positions: int) -> Any:
    """Return the complex factors of [positions, pairs of a head]."""
    pairs = shape.head_dim // 2
    speeds = shape.rotation_base ** (-np.arange(pairs) / pairs)
    return np.exp(1j * np.outer(np.arange(positions), speeds)).astype(np.complex64)


class _Reader:
    """Takes the tensors of a model out of its file, each once."""

    def __init__(self, file: GgufFile, shape: LlamaShape) -> None:
        self._file = file
        self._shape = shape
        self._left = set(file.tensors)

    def embedding(self) -> Tensor:
        """Return the embeddings as they are, in memory of their own."""
        shape = (self._shape.vocab_size, self._shape.width)
        tensor = self._file.tensor("token_embd.weight", shape)
        self._left.discard(tensor.name)
        return tensor._replace(data=np.array(tensor.data))

    def head(self) -> FloatArray:
        """Return the matrix from the last layer to logits; that of the embeddings if no other."""
        own = "output.weight" in self._left
        name = "output.weight" if own else "token_embd.weight"
        return self._joined([name], [self._shape.vocab_size], self._shape.width, "output_norm")

    def layer(self, number: int) -> _Layer:
        """Return one layer."""
        shape, prefix = self._shape, f"blk.{number}"
        attention = [f"{prefix}.attn_{part}.weight" for part in "qkv"]
        sizes = [count * shape.head_dim for count in (shape.heads, shape.kv_heads, shape.kv_heads)]
        hidden = [f"{prefix}.ffn_{part}.weight" for part in ("gate", "up")]
        return _Layer(
            self._joined(attention, sizes, shape.width, f"{prefix}.attn_norm"),
            self._joined([f"{prefix}.attn_output.weight"], [shape.width], shape.width),
            self._joined(hidden, [shape.hidden] * 2, shape.width, f"{prefix}.ffn_norm"),
            self._joined([f"{prefix}.ffn_down.weight"], [shape.width], shape.hidden),
        )

    def expect_no_more(self) -> None:
        """Raise InvalidArgument if tensors are left: the model does more than is done here."""
        if self._left:
            names = ", ".join(sorted(self._left)[:4])
            raise InvalidArgument(
                f"{self._file.path!r} has {len(self._left)} tensors that no plain llama model has:"
                f" {names}"
            )

    def _joined(
        self, names: list[str], sizes: list[int], inputs: int, norm: str = ""
    ) -> FloatArray:
        """Return matrices side by side, [inputs, all outputs], behind the factors of a norm."""
        out = np.empty((inputs, sum(sizes)), np.float32)
        column = 0
        for name, size in zip(names, sizes):
            tensor = self._file.tensor(name, (size, inputs))
            gguf_weights.fill_transposed(tensor, tensor.data, out[:, column : column + size])
            self._left.discard(name)
            column += size
        if norm:
            name = f"{norm}.weight"
            out *= gguf_weights.dense(self._file.tensor(name, (inputs,)))[:, None]
            self._left.discard(name)
        return out
