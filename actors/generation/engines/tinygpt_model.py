# SPDX-License-Identifier: Apache-2.0
"""A small GPT in numpy, whole or as one of several ranks that share its matrices.

    x ─ norm ─ qkv ─ attend ─ out ─(sum of ranks)─(+)─ norm ─ up ─ gelu ─ down ─(sum of ranks)─(+)
    └─────────────────────────────────────────────┘ └──────────────────────────────────────────┘
                                       … layers … norm ─ head ─(side by side)─► logits

A rank has some of the heads, some of the columns between up and down, and some of the tokens of
the head. Each layer costs two sums over ranks, the head one gathering; sums are equal on all
ranks bit by bit, and so are logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actorserve.actors.generation.engine import World
from actorserve.actors.generation.engines.decoder import Batch, FloatArray
from actorserve.actors.generation.engines.kv_slots import KvSlots
from actorserve.actors.generation.engines.lora import Lora, add_adapters, read_lora
from actorserve.errors import InternalError, InvalidArgument

__all__ = ["TinyGptModel", "TinyGptShape"]

Weights = Mapping[str, npt.NDArray[np.floating]]
_EPSILON = np.float32(1e-5)


@dataclass(frozen=True, slots=True)
class TinyGptShape:
    """The sizes of a model, in the order in which its file has them."""

    width: int
    layers: int
    heads: int
    context_tokens: int
    vocab_size: int


@dataclass(slots=True)
class _Layer:
    """The matrices of a layer, [inputs, outputs], as far as they are this rank's."""

    prefix: str
    norm1: tuple[FloatArray, FloatArray]
    qkv: FloatArray
    out: FloatArray
    norm2: tuple[FloatArray, FloatArray]
    up: FloatArray
    up_bias: FloatArray
    down: FloatArray
    down_bias: FloatArray


class _Share:
    """What one of `size` ranks has of a matrix."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size

    def rows(self, matrix: FloatArray) -> FloatArray:
        """Return this rank's inputs: the results of all ranks are to be added."""
        return np.ascontiguousarray(np.split(matrix, self._size)[self._rank])

    def columns(self, matrix: FloatArray, blocks: int = 1) -> FloatArray:
        """Return this rank's outputs, of each of the equal blocks that lie side by side."""
        pieces = [np.split(block, self._size, -1) for block in np.split(matrix, blocks, -1)]
        return np.concatenate([piece[self._rank] for piece in pieces], -1)

    def adapter(self, lora: Lora) -> Lora:
        """Return this rank's part of an adapter."""
        shared: Lora = {}
        for name, (a, b) in lora.items():
            if name.endswith((".out", ".down")):
                shared[name] = (self.rows(a), b)
            else:
                shared[name] = (a, self.columns(b, 3 if name.endswith(".qkv") else 1))
        return shared


def _normalised(x: FloatArray, norm: tuple[FloatArray, FloatArray]) -> FloatArray:
    size = np.float32(1.0 / x.shape[1])
    centred: FloatArray = np.subtract(x, np.add.reduce(x, 1, keepdims=True) * size)
    spread = np.add.reduce(centred * centred, 1, keepdims=True) * size
    centred /= np.sqrt(spread + _EPSILON)
    centred *= norm[0]
    centred += norm[1]
    return centred


def _gelu(x: FloatArray) -> FloatArray:
    """Apply the unit by its approximation with tanh, in place."""
    inner = x * x
    inner *= np.float32(0.044715 * 0.7978845608)
    inner += np.float32(0.7978845608)
    inner *= x
    np.tanh(inner, out=inner)
    inner += np.float32(1.0)
    x *= np.float32(0.5)
    x *= inner
    return x


class TinyGptModel:
    """A DecoderModel. Weights are named as examples/llm/train_tinygpt.py writes them."""

    name = "tinygpt"
    end_id: int | None = None

    def __init__(
        self, shape: TinyGptShape, weights: Weights, rank: int = 0, world: World | None = None
    ) -> None:
        size = 1 if world is None else world.size
        for what, count in (("heads", shape.heads), ("tokens", shape.vocab_size)):
            if count % size:
                raise InvalidArgument(f"tinygpt: {size} ranks cannot share {count} {what} evenly")
        self.vocab_size = shape.vocab_size
        self.context_tokens = shape.context_tokens
        self._shape = shape
        self._world = None if size == 1 else world
        self._heads = shape.heads // size
        self._share = _Share(rank, size)
        self._kv: KvSlots | None = None

        def array(name: str) -> FloatArray:
            if name not in weights:
                raise InvalidArgument(f"tinygpt: the weights lack {name!r}")
            return np.asarray(weights[name], np.float32)

        self._tokens = array("tokens")
        self._positions = array("positions")
        self._head = self._share.columns(self._tokens.T)
        self._norm = (array("norm.gain"), array("norm.bias"))
        self._layers = [self._layer(f"layer{i}.", array) for i in range(shape.layers)]

    def _layer(self, prefix: str, array: Callable[[str], FloatArray]) -> _Layer:
        share = self._share
        return _Layer(
            prefix,
            (array(f"{prefix}norm1.gain"), array(f"{prefix}norm1.bias")),
            share.columns(array(f"{prefix}qkv"), 3),
            share.rows(array(f"{prefix}out")),
            (array(f"{prefix}norm2.gain"), array(f"{prefix}norm2.bias")),
            share.columns(array(f"{prefix}up")),
            share.columns(array(f"{prefix}up.bias")),
            share.rows(array(f"{prefix}down")),
            array(f"{prefix}down.bias"),
        )

    def allocate(self, slots: int) -> None:
        """Make the key-value cache of this rank's heads."""
        shape = self._shape
        head_dim = shape.width // shape.heads
        self._kv = KvSlots(shape.layers, slots, self._heads, shape.context_tokens, head_dim)

    def _memory(self) -> KvSlots:
        if self._kv is None:
            raise InternalError("allocate the cache of a model before it is used")
        return self._kv

    def copy_slot(self, source: int, target: int, tokens: int) -> None:
        """Copy the first positions of one slot to another."""
        self._memory().copy(source, target, tokens)

    def load_adapter(self, path: str) -> Lora:
        """Read this rank's part of a LoRA adapter."""
        return self._share.adapter(read_lora(path, self.matrices()))

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Return the shapes of the matrices that an adapter may change, over all ranks."""
        width = self._shape.width
        hidden = self._layers[0].up.shape[1] * (1 if self._world is None else self._world.size)
        shapes = {}
        for layer in self._layers:
            shapes[f"{layer.prefix}qkv"] = (width, 3 * width)
            shapes[f"{layer.prefix}out"] = (width, width)
            shapes[f"{layer.prefix}up"] = (width, hidden)
            shapes[f"{layer.prefix}down"] = (hidden, width)
        return shapes

    def forward(self, batch: Batch) -> FloatArray:
        """Run the rows of a batch; returns the logits of those that are wanted."""
        memory = self._memory()
        memory.begin(batch)
        x: FloatArray = self._tokens[batch.tokens]
        x += self._positions[batch.positions]
        for number, layer in enumerate(self._layers):
            self._attend(memory, number, layer, batch, x)
            hidden = self._times(batch, _normalised(x, layer.norm2), layer.up, layer, "up")
            hidden += layer.up_bias
            x += self._sum(self._times(batch, _gelu(hidden), layer.down, layer, "down"))
            x += layer.down_bias
        if batch.wanted is not None:
            x = x[batch.wanted]
        logits: FloatArray = _normalised(x, self._norm) @ self._head
        if self._world is None:
            return logits
        return np.concatenate(self._world.all_gather(logits), 1)

    def _attend(
        self, memory: KvSlots, number: int, layer: _Layer, batch: Batch, x: FloatArray
    ) -> None:
        qkv = self._times(batch, _normalised(x, layer.norm1), layer.qkv, layer, "qkv")
        split = qkv.reshape(len(x), 3, self._heads, -1)
        seen = memory.attend(number, batch, split[:, 0], split[:, 1], split[:, 2])
        x += self._sum(self._times(batch, seen, layer.out, layer, "out"))

    def _times(
        self, batch: Batch, x: FloatArray, matrix: FloatArray, layer: _Layer, name: str
    ) -> FloatArray:
        """Multiply rows with a matrix and what adapters make of it."""
        y: FloatArray = x @ matrix
        if batch.adapters:
            add_adapters(batch, layer.prefix + name, x, y)
        return y

    def _sum(self, partial: FloatArray) -> FloatArray:
        return partial if self._world is None else self._world.all_reduce(partial)
