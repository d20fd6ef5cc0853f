# SPDX-License-Identifier: Apache-2.0
"""The part of a batch that is prompts: so many tokens an iteration, first come, first served."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from actorserve.actors.generation.engines.decoder import Batch, Span
from actorserve.actors.generation.engines.job import Job

__all__ = ["Piece", "add_prompts"]


@dataclass(slots=True, frozen=True)
class Piece:
    """Tokens of one prompt in a batch; its logits are the rows `first` to `behind`, if any."""

    job: Job
    span: Span
    first: int
    behind: int


def add_prompts(batch: Batch, jobs: Iterable[Job], budget: int) -> list[Piece]:
    """Add up to `budget` tokens of prompts to a batch that has its single rows already.

    Asked for are the logits of the single rows, of the last token of each prompt that ends here,
    and of every token where a request wants its context's logits.
    """
    row = batch.decode
    wanted = list(range(row))
    tokens, positions, slots = [batch.tokens], [batch.positions], [batch.slots]
    adapters = list(batch.adapters)
    pieces = []
    for job in jobs:
        if budget <= 0:
            break
        prompt, start = job.request.prompt, job.done
        count = min(budget, len(prompt) - start)
        end = start + count
        span = Span(job.slots[0], row, count, start)
        rows = range(row, row + count)
        first = len(wanted)
        if job.context is not None:
            wanted += rows
        elif end == len(prompt):
            wanted.append(rows[-1])
        pieces.append(Piece(job, span, first, len(wanted)))
        tokens.append(np.array(prompt[start:end], np.int64))
        positions.append(np.arange(start, end))
        slots.append(np.full(count, span.slot))
        if job.adapter is not None:
            adapters.append((job.adapter, np.arange(row, row + count)))
        row += count
        budget -= count
    batch.tokens = np.concatenate(tokens)
    batch.positions = np.concatenate(positions)
    batch.slots = np.concatenate(slots)
    batch.spans = [piece.span for piece in pieces]
    batch.wanted = np.array(wanted, np.int64)
    batch.adapters = adapters
    return pieces
