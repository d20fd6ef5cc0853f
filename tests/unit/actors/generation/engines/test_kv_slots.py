# SPDX-License-Identifier: Apache-2.0
"""Attention over slots, compared with attention written out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from actorserve.actors.generation.engines.decoder import Batch, Span
from actorserve.actors.generation.engines.kv_slots import KvSlots

HEADS, KV_HEADS, SIZE, CONTEXT = 4, 2, 3, 12


class _ByHand:
    """Keys and values as lists, and attention row by row."""

    def __init__(self) -> None:
        self.memory: dict[int, list[tuple[Any, Any]]] = {}

    def attend(self, slot: int, q: Any, k: Any, v: Any) -> Any:
        self.memory.setdefault(slot, []).append((k, v))
        keys = np.stack([key for key, _ in self.memory[slot]])
        values = np.stack([value for _, value in self.memory[slot]])
        seen = []
        for head in range(HEADS):
            shared = head // (HEADS // KV_HEADS)
            scores = keys[:, shared] @ q[head] / np.sqrt(SIZE)
            weights = np.exp(scores - scores.max())
            seen.append(weights / weights.sum() @ values[:, shared])
        return np.concatenate(seen)


def _batch(singles: list[tuple[int, int]], spans: list[tuple[int, int, int]]) -> Batch:
    slots = [slot for slot, _ in singles]
    positions = [position for _, position in singles]
    made = []
    for slot, position, count in spans:
        made.append(Span(slot, len(slots), count, position))
        slots += [slot] * count
        positions += range(position, position + count)
    rows = len(slots)
    return Batch(np.zeros(rows, np.int64), np.array(positions), np.array(slots), len(singles), made)


@pytest.mark.parametrize("slots", [[0, 1, 2], [1, 3, 4], [0, 9], [5]])
def test_rows_see_their_own_slot_up_to_themselves(slots: list[int]) -> None:
    """Prompts in pieces, single rows of neighbouring, near and far slots, all mixed."""
    random = np.random.default_rng(1)
    cache, by_hand = KvSlots(1, 10, KV_HEADS, CONTEXT, SIZE), _ByHand()
    lengths = dict.fromkeys(slots, 0)

    def step(singles: list[int], pieces: list[tuple[int, int]]) -> None:
        batch = _batch(
            [(slot, lengths[slot]) for slot in singles],
            [(slot, lengths[slot], count) for slot, count in pieces],
        )
        rows = len(batch.slots)
        q = random.normal(size=(rows, HEADS, SIZE)).astype(np.float32)
        k, v = random.normal(size=(2, rows, KV_HEADS, SIZE)).astype(np.float32)
        cache.begin(batch)
        seen = cache.attend(0, batch, q, k, v)
        for row, slot in enumerate(batch.slots.tolist()):
            np.testing.assert_allclose(
                seen[row], by_hand.attend(slot, q[row], k[row], v[row]), atol=1e-5
            )
            lengths[slot] += 1

    step([], [(slot, 2 + number) for number, slot in enumerate(slots)])
    step(slots, [])
    step(slots[:-1], [(slots[-1], 3)])
    step(slots, [])


def test_a_copy_has_what_the_source_had() -> None:
    """The first positions, in every layer; what is behind them stays."""
    cache = KvSlots(2, 3, KV_HEADS, CONTEXT, SIZE)
    cache.keys[:, 0] = 1.0
    cache.values[:, 0] = 2.0
    cache.copy(0, 2, 4)
    assert (cache.keys[:, 2, :, :4] == 1).all() and (cache.keys[:, 2, :, 4:] == 0).all()
    assert (cache.values[:, 2, :, :4] == 2).all() and (cache.values[:, 1] == 0).all()
    assert cache.nbytes == 2 * cache.keys.nbytes
