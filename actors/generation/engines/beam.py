# SPDX-License-Identifier: Apache-2.0
"""Beam search over one request: which continuations live on, which are results, when it is over.

Deterministic: temperature and what else belongs to sampling has no say, constraints have. Beams
are ranked by the sum of their log-probabilities, divided by their length to the power of
`length_penalty`. A beam that ends becomes a result; the search is over when there are as many
results as beams and no living beam can still become better than the worst of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from actorserve.actors.generation.engine import Output
from actorserve.actors.generation.engines.decoder import FloatArray
from actorserve.actors.generation.engines.sampler import logprob_pairs
from actorserve.actors.generation.engines.sequence import Sequence

__all__ = ["BeamSearch", "SlotCopy"]

SlotCopy = tuple[int, int]
"""Copy the memory of the first slot to the second."""


class BeamSearch:
    """The beams of one request, in the slots that were given to it."""

    def __init__(self, root: Sequence, slots: list[int]) -> None:
        self._id = root.request.id
        self._sampling = root.request.sampling
        self._limit = root.limit
        self._width = self._sampling.beam_width
        self._slots = slots
        self.beams = [root]
        self._results: list[tuple[float, Sequence]] = []  # best first

    def step(self, logits: FloatArray) -> list[SlotCopy]:
        """Continue by the logits of each beam's next token, constraints applied.

        Returns the copies of memory to make, in any order, before the beams run again.
        """
        logprobs = _log_softmax(logits)
        living: list[tuple[Sequence, int]] = []
        for number, token in self._candidates(logprobs):
            parent = self.beams[number]
            child = parent.fork(parent.slot)
            if child.logits is not None:
                child.logits.append(logits[number].copy())
            most = self._sampling.logprobs or 0
            pairs = logprob_pairs(logprobs[number : number + 1], [token], [most])[0]
            child.note(pairs[0][1], pairs)
            if child.take(token) and child.finish == "stop":
                self._add_result(child, len(parent.tokens) + 1)
            else:
                living.append((child, number))
            if len(living) == self._width:
                break
        copies = self._seat(living)
        self.beams = [child for child, _ in living]
        return copies

    def _candidates(self, logprobs: FloatArray) -> Iterator[tuple[int, int]]:
        """Yield (beam, token) from the best on; enough of them even if many end."""
        scores = logprobs + np.array([[beam.cum_logprob] for beam in self.beams], np.float32)
        flat = scores.ravel()
        endings = 1 + len(self._sampling.stop_words)
        count = min(flat.size, self._width * (1 + endings))
        best = np.argpartition(-flat, count - 1)[:count]
        best.sort()
        best = best[np.argsort(-flat[best], kind="stable")]
        for index in best[flat[best] > -np.inf].tolist():
            yield divmod(index, logprobs.shape[1])

    def _seat(self, living: list[tuple[Sequence, int]]) -> list[SlotCopy]:
        """Give each beam a slot: the first child stays in its parent's, the others move."""
        taken: set[int] = set()
        moving = []
        for child, _ in living:
            if child.slot in taken:
                moving.append(child)
            else:
                taken.add(child.slot)
        free = [slot for slot in self._slots if slot not in taken]
        copies = []
        for child, target in zip(moving, free):
            copies.append((child.slot, target))
            child.slot = target
        return copies

    def _score(self, beam: Sequence, length: int) -> float:
        return float(beam.cum_logprob / max(length, 1) ** self._sampling.length_penalty)

    def _add_result(self, beam: Sequence, length: int) -> None:
        self._results.append((self._score(beam, length), beam))
        self._results.sort(key=lambda result: -result[0])
        del self._results[self._width :]

    @property
    def is_stuck(self) -> bool:
        """Whether no token was possible before anything ended."""
        return not self.beams and not self._results

    def is_over(self) -> bool:
        """Say whether nothing can change the results any more; living beams join at the limit."""
        if not self.beams:
            return True
        if self.beams[0].finish is not None:
            return True  # all are of the same length
        if len(self._results) < self._width:
            return False
        length = len(self.beams[0].tokens)
        if self._sampling.length_penalty > 0:
            length = self._limit  # the longer, the better: the most that can become of it
        best = max(beam.cum_logprob for beam in self.beams)
        attainable = best / max(length, 1) ** self._sampling.length_penalty
        return bool(attainable <= self._results[-1][0])

    def _ranked(self) -> list[Sequence]:
        living = [(self._score(beam, len(beam.tokens)), beam) for beam in self.beams]
        ranked = sorted(self._results + living, key=lambda result: -result[0])
        return [beam for _, beam in ranked[: self._sampling.n]]

    def show(self) -> list[Output]:
        """Return the best of now, each to take the place of what was shown before."""
        outputs = []
        for index, beam in enumerate(self._ranked()):
            output = beam.whole()
            output.seq = index
            output.finish = output.stop_reason = output.arrays = None  # it may yet be overtaken
            outputs.append(output)
        return outputs

    def end(self, reason: str | None = None) -> list[Output]:
        """Return the results, every one with its finish; `reason` is that of unfinished beams."""
        outputs = []
        for index, beam in enumerate(self._ranked()):
            beam.index = index
            beam.finish = beam.finish or reason or "length"
            outputs.append(beam.whole())
        for index in range(len(outputs), self._sampling.n):  # fewer ways than beams
            outputs.append(Output(self._id, index, finish=reason or "stop", replace=True))
        return outputs


def _log_softmax(logits: FloatArray) -> FloatArray:
    """Return the logarithms of probabilities; all minus infinity where no token is possible."""
    peak = np.maximum.reduce(logits, axis=1, keepdims=True)
    shifted = logits - np.where(peak == -np.inf, np.float32(0.0), peak)
    total = np.add.reduce(np.exp(shifted), axis=1, keepdims=True)
    total[total == 0] = 1.0
    logprobs: FloatArray = shifted - np.log(total)
    return logprobs
