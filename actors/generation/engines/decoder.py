# SPDX-License-Identifier: Apache-2.0
"""What a model is to the batching engine: rows of tokens in, logits out, memory by slot.

The engine decides which tokens run and what becomes of the logits; the model only computes. A
row is one token at one position of one slot. One batch mixes sequences of any length:

    rows      0 1 2 … decode-1 │ prefill span │ prefill span …
    slots     ascending, one   │ one slot, consecutive positions
              row each         │

Whatever a row's neighbours are, its logits are the same but for rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["Batch", "DecoderModel", "FloatArray", "IntArray", "Span"]

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


@dataclass(slots=True, frozen=True)
class Span:
    """A piece of a prompt: rows `row` to `row + count`, at `position` and on of `slot`."""

    slot: int
    row: int
    count: int
    position: int


@dataclass(slots=True)
class Batch:
    """The rows of one iteration.

    The first `decode` rows have a slot each, in ascending order; the spans follow, and cover the
    rest. `wanted` are the rows whose logits are asked for, None for all of them. `adapters` says
    which rows an adapter applies to, as (adapter, rows); the other rows are of the base model.
    """

    tokens: IntArray
    positions: IntArray
    slots: IntArray
    decode: int
    spans: list[Span] = field(default_factory=list)
    wanted: IntArray | None = None
    adapters: list[tuple[Any, IntArray]] = field(default_factory=list)


class DecoderModel(Protocol):
    """A decoder-only model with its key-value cache.

    `context_tokens` is the most positions that a slot can have. What `load_adapter` returns
    comes back in `Batch.adapters` and nowhere else; a model without adapters raises RequestError.
    """

    name: str
    vocab_size: int
    context_tokens: int
    end_id: int | None

    def allocate(self, slots: int) -> None:
        """Make the key-value cache for so many slots; called once, before the first batch."""

    def forward(self, batch: Batch) -> FloatArray:
        """Run the rows, store their keys and values, return logits [wanted rows, vocabulary].

        The caller may write into what it gets, until the next call.
        """

    def copy_slot(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` positions of one slot to another."""

    def load_adapter(self, path: str) -> Any:
        """Read a LoRA adapter. Raises RequestError for one that cannot be read or does not fit."""
