# SPDX-License-Identifier: Apache-2.0
"""The key-value cache of a decoder, in slots, and attention over it.

A slot is the memory of one sequence: [heads, positions, head size] a layer, side by side, so that
a batch of single tokens attends to neighbouring slots without a copy. Query heads may share a key
head (grouped attention). A model calls `begin` once a batch, then `attend` once a layer.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from dataclasses import dataclass

import numpy as np

from actorserve.actors.generation.engines.decoder import Batch, FloatArray, IntArray, Span

__all__ = ["KvSlots", "softmax"]

MASKED = np.float32(-1e30)
DENSE_SHARE = 0.5
"""From which share of used slots on it is cheaper to compute the unused ones than to gather."""


def softmax(scores: FloatArray) -> FloatArray:
    """Turn scores into probabilities along the last axis, in place."""
    scores -= np.maximum.reduce(scores, axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= np.add.reduce(scores, axis=-1, keepdims=True)
    return scores


def _zeros(shape: tuple[int, ...]) -> FloatArray:
    """Return zeros whose pages come as they are written.

    Small pages: numpy asks for huge ones, and a first token would take 2 MB a head and layer.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, math.prod(shape) * np.dtype(np.float32).itemsize, flags=flags)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.float32).reshape(shape)


@dataclass(slots=True)
class _DecodePlan:
    """How the single-token rows of a batch reach their slots; the same for every layer."""

    window: slice | IntArray
    rows: IntArray | None  # of the window, where it has more than the batch
    width: int
    reach: int
    mask: FloatArray


def _plan(slots: IntArray, positions: IntArray) -> _DecodePlan:
    """Choose between a view of neighbouring slots and a gather of scattered ones."""
    first, behind = int(slots[0]), int(slots[-1]) + 1
    count, width = len(slots), behind - first
    reach = int(positions.max()) + 1
    window: slice | IntArray = slice(first, behind)
    rows: IntArray | None = None
    ends = positions
    if count < width * DENSE_SHARE:
        window, width = slots, count
    elif count < width:
        rows = slots - first
        ends = np.zeros(width, np.int64)
        ends[rows] = positions
    mask = np.where(np.arange(reach) > ends[:, None], MASKED, np.float32(0.0))
    return _DecodePlan(window, rows, width, reach, mask[:, None, None, :])


class KvSlots:
    """Keys and values of every layer and slot."""

    def __init__(
        self, layers: int, slots: int, kv_heads: int, context_tokens: int, head_dim: int
    ) -> None:
        shape = (layers, slots, kv_heads, context_tokens, head_dim)
        self.keys = _zeros(shape)
        self.values = _zeros(shape)
        self._scale = np.float32(head_dim**-0.5)
        self._plan: _DecodePlan | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the cache, were all of it in use."""
        return self.keys.nbytes + self.values.nbytes

    def begin(self, batch: Batch) -> None:
        """Prepare for the layers of one batch."""
        count = batch.decode
        self._plan = _plan(batch.slots[:count], batch.positions[:count]) if count else None

    def attend(
        self, layer: int, batch: Batch, q: FloatArray, k: FloatArray, v: FloatArray
    ) -> FloatArray:
        """Store keys and values, return what each row sees of its slot up to itself.

        `q` is [rows, heads, head size], `k` and `v` are [rows, key heads, head size]; returns
        [rows, heads * head size].
        """
        keys, values = self.keys[layer], self.values[layer]
        keys[batch.slots, :, batch.positions] = k
        values[batch.slots, :, batch.positions] = v
        if self._plan is not None and not batch.spans:
            return self._decode(self._plan, keys, values, q)
        seen = np.empty((q.shape[0], q.shape[1] * q.shape[2]), np.float32)
        if self._plan is not None:
            seen[: batch.decode] = self._decode(self._plan, keys, values, q[: batch.decode])
        for span in batch.spans:
            rows = slice(span.row, span.row + span.count)
            seen[rows] = self._prefill(span, keys, values, q[rows])
        return seen

    def _decode(
        self, plan: _DecodePlan, keys: FloatArray, values: FloatArray, q: FloatArray
    ) -> FloatArray:
        heads, head_dim = q.shape[1:]
        kv_heads = keys.shape[1]
        if plan.rows is not None:
            padded = np.zeros((plan.width, heads, head_dim), np.float32)
            padded[plan.rows] = q
            q = padded
        grouped = np.multiply(
            q.reshape(plan.width, kv_heads, heads // kv_heads, head_dim), self._scale
        )
        window_keys = keys[plan.window, :, : plan.reach]
        scores: FloatArray = grouped @ window_keys.swapaxes(-1, -2)
        scores += plan.mask
        seen = softmax(scores) @ values[plan.window, :, : plan.reach]
        seen = seen.reshape(plan.width, heads * head_dim)
        return seen if plan.rows is None else seen[plan.rows]

    def _prefill(
        self, span: Span, keys: FloatArray, values: FloatArray, q: FloatArray
    ) -> FloatArray:
        count, heads, head_dim = q.shape
        kv_heads = keys.shape[1]
        group = heads // kv_heads
        end = span.position + count
        grouped = np.multiply(
            q.reshape(count, kv_heads, group, head_dim).transpose(1, 2, 0, 3), self._scale
        )
        scores: FloatArray = grouped @ keys[span.slot, :, None, :end].swapaxes(-1, -2)
        rows = np.arange(span.position, end)
        scores += np.where(np.arange(end) > rows[:, None], MASKED, np.float32(0.0))
        seen = softmax(scores) @ values[span.slot, :, None, :end]
        return seen.transpose(2, 0, 1, 3).reshape(count, heads * head_dim)

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` positions of a slot to another, in every layer."""
        self.keys[:, target, :, :tokens] = self.keys[:, source, :, :tokens]
        self.values[:, target, :, :tokens] = self.values[:, source, :, :tokens]
