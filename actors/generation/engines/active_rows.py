# SPDX-License-Identifier: Apache-2.0
"""Which rows of a batch belong to whom; made anew only when answers begin or end."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np

from actorserve.actors.generation.engines.decoder import IntArray
from actorserve.actors.generation.engines.job import Job
from actorserve.actors.generation.engines.sequence import Sequence

__all__ = ["ActiveRows"]


class ActiveRows:
    """The answers that go on, a row each, in the order of their slots.

    `slots` are those of all rows. `answers` leave beam searches out; `answer_rows` says which rows
    of logits are theirs, None for all. `searches` are (request, rows of its beams, in order).
    """

    def __init__(self, jobs: Iterable[Job]) -> None:
        live = [(each.slot, each, job) for job in jobs for each in job.live()]
        live.sort(key=lambda entry: entry[0])
        self.slots: IntArray = np.array([slot for slot, _, _ in live], np.int64)
        self.answers: list[Sequence] = []
        self.answer_slots: IntArray = self.slots
        self.answer_rows: list[int] | None = None
        self.searches: list[tuple[Job, list[int]]] = []
        self.adapters: list[tuple[Any, IntArray]] = []
        row_of = {slot: row for row, (slot, _, _) in enumerate(live)}
        self.answers = [answer for _, answer, job in live if job.beams is None]
        for job in {job.id: job for _, _, job in live if job.beams is not None}.values():
            assert job.beams is not None
            self.searches.append((job, [row_of[beam.slot] for beam in job.beams.beams]))
        if self.searches:
            self.answer_slots = np.array([answer.slot for answer in self.answers], np.int64)
            self.answer_rows = [row_of[answer.slot] for answer in self.answers]
        self._note_adapters([job for _, _, job in live])

    def _note_adapters(self, jobs: SequenceOf[Job]) -> None:
        rows_of: dict[int, tuple[Any, list[int]]] = {}
        for row, job in enumerate(jobs):
            if job.adapter is not None:
                rows_of.setdefault(id(job.adapter), (job.adapter, []))[1].append(row)
        self.adapters = [(adapter, np.array(rows, np.int64)) for adapter, rows in rows_of.values()]

    def joined_by(self, beginning: SequenceOf[tuple[Job, int]]) -> ActiveRows:
        """Return these rows and those of requests whose prompts have ended, for this batch only.

        All answers of a request begin with the same row of logits.
        """
        joined = object.__new__(ActiveRows)
        joined.slots, joined.adapters = self.slots, self.adapters
        joined.answers = self.answers.copy()
        rows = range(len(self.slots)) if self.answer_rows is None else self.answer_rows
        joined.answer_rows = list(rows)
        joined.searches = self.searches.copy()
        for job, row in beginning:
            if job.beams is not None:
                joined.searches.append((job, [row]))
            else:
                joined.answers += job.sequences
                joined.answer_rows += [row] * len(job.sequences)
        joined.answer_slots = np.array([answer.slot for answer in joined.answers], np.int64)
        return joined
