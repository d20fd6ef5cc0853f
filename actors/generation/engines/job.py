# SPDX-License-Identifier: Apache-2.0
"""One request while an engine has it: its slots, its answers, and what is said of them when.

Of `best_of` answers the best `n` are chosen when all have ended, so that nothing can be shown
before. A request that does not stream is answered when an answer ends. The last output of a
request is final, and no other.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from actorserve.actors.generation.engine import GenRequest, Output
from actorserve.actors.generation.engines.beam import BeamSearch
from actorserve.actors.generation.engines.constraints import Constraints
from actorserve.actors.generation.engines.decoder import FloatArray
from actorserve.actors.generation.engines.sequence import Sequence
from actorserve.actors.generation.engines.stop_words import WordAutomaton
from actorserve.actors.generation.output import DISCARDED

__all__ = ["Job"]


class Job:
    """A request, from when it waits for slots until its final output."""

    def __init__(self, request: GenRequest, adapter: Any, limit: int, vocabulary: int) -> None:
        sampling = request.sampling
        self.request = request
        self.adapter = adapter
        self.width = max(sampling.n, sampling.best_of, sampling.beam_width)
        self.slots: list[int] = []
        self.done = 0  # tokens of the prompt that are in memory
        self.sequences: list[Sequence] = []
        self.beams: BeamSearch | None = None
        self.context: list[FloatArray] | None = [] if sampling.context_logits else None
        self.shows_deltas = request.stream and (sampling.beam_width > 1 or self.width == sampling.n)
        self._limit = limit
        self._vocabulary = vocabulary

    @property
    def id(self) -> int:
        """The request's id."""
        return self.request.id

    def begin(self) -> list[Sequence]:
        """Make the answers, one in each slot; of a beam search the first, to which others join."""
        sampling = self.request.sampling
        constraints = None
        if Constraints.needed(sampling):
            constraints = Constraints(sampling, self.request.prompt, self._vocabulary)
        stops = WordAutomaton(sampling.stop_words) if sampling.stop_words else None
        first = Sequence(self.request, 0, self.slots[0], self._limit, stops, constraints)
        first.shows_deltas = self.shows_deltas
        if sampling.beam_width > 1:
            self.beams = BeamSearch(first, self.slots)
            return [first]
        self.sequences = [first]
        for index, slot in enumerate(self.slots[1:], 1):
            twin = first.fork(slot)
            twin.index = index
            self.sequences.append(twin)
        return self.sequences

    def ended(self, sequence: Sequence) -> list[Output]:
        """Return what is to be said when an answer of this request has ended."""
        is_last = all(each.finish is not None for each in self.sequences)
        if self.width > self.request.sampling.n:
            return self._best() if is_last else []
        output = sequence.delta()
        assert output is not None
        output.final = is_last
        return [output]

    def _best(self) -> list[Output]:
        sampling = self.request.sampling

        def rank(sequence: Sequence) -> tuple[bool, float]:
            weight = max(len(sequence.tokens), 1) ** sampling.length_penalty
            return sequence.finish != "error", sequence.cum_logprob / weight

        outputs, discarded = [], 0
        for index, sequence in enumerate(sorted(self.sequences, key=rank, reverse=True)):
            if index >= sampling.n:
                discarded += len(sequence.tokens)
                continue
            sequence.index = index
            output = sequence.delta()
            assert output is not None
            outputs.append(output)
        outputs[-1].extra = {DISCARDED: discarded}
        return self._final(outputs)

    def end_beams(self) -> list[Output]:
        """Return the results of a beam search that is over."""
        assert self.beams is not None
        outputs = self.beams.end()
        if self.beams.is_stuck:
            for output in outputs:
                output.finish, output.error = "error", "every token is forbidden"
        return self._final(outputs)

    def cancel(self) -> list[Output]:
        """End what has not ended; what was held back is given out."""
        if self.beams is not None:
            return self._final(self.beams.end("cancelled"))
        if not self.sequences:  # it waited, or its prompt ran
            sequences = range(self.request.sampling.n)
            return self._final([Output(self.id, seq, finish="cancelled") for seq in sequences])
        outputs = []
        for sequence in self.sequences:
            if sequence.finish is None:
                sequence.finish = "cancelled"
                outputs += self.ended(sequence)
        return outputs

    def _final(self, outputs: list[Output]) -> list[Output]:
        outputs[-1].final = True
        return outputs

    def context_outputs(self) -> list[Output]:
        """Return the logits of the prompt, where they were asked for: before any token."""
        if not self.context:
            return []
        arrays = {"context_logits": np.concatenate(self.context)}
        return [Output(self.id, arrays=arrays)]

    def live(self) -> list[Sequence]:
        """Return the answers that go on."""
        answers = self.sequences if self.beams is None else self.beams.beams
        return [each for each in answers if each.finish is None]
