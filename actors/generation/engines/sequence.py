# SPDX-License-Identifier: Apache-2.0
"""One answer in the making: its tokens, when it ends, and what of it may be shown already.

Tokens that may still become a stop word are held back; what a stop word or the end id took is
cut, together with its log-probabilities and logits, before anybody sees it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from actorserve.actors.generation.engine import GenRequest, Output
from actorserve.actors.generation.engines.constraints import Constraints
from actorserve.actors.generation.engines.decoder import FloatArray
from actorserve.actors.generation.engines.stop_words import WordAutomaton

__all__ = ["Sequence"]

Pairs = list[tuple[int, float]]


class Sequence:
    """An answer to `request`: number `index` of it, in `slot`, of at most `limit` tokens."""

    __slots__ = (
        "chosen",
        "constraints",
        "cum_logprob",
        "finish",
        "index",
        "is_special",
        "is_tracked",
        "limit",
        "logits",
        "pairs",
        "request",
        "sent",
        "shows_deltas",
        "slot",
        "stop_reason",
        "stop_state",
        "stops",
        "tokens",
    )

    def __init__(
        self,
        request: GenRequest,
        index: int,
        slot: int,
        limit: int,
        stops: WordAutomaton | None,
        constraints: Constraints | None,
    ) -> None:
        sampling = request.sampling
        self.request = request
        self.index = index
        self.slot = slot
        self.limit = limit
        self.stops = stops
        self.stop_state = WordAutomaton.START
        self.constraints = constraints
        self.tokens: list[int] = []
        self.sent = 0
        self.finish: str | None = None
        self.stop_reason: int | None = None
        self.is_tracked = sampling.logprobs is not None or sampling.best_of > sampling.n
        self.chosen: list[float] = []  # log-probabilities, where they are tracked
        self.cum_logprob = 0.0
        self.pairs: list[Pairs] | None = None if sampling.logprobs is None else []
        self.logits: list[FloatArray] | None = [] if sampling.generation_logits else None
        self.is_special = self.is_tracked or sampling.generation_logits or constraints is not None
        self.shows_deltas = request.stream

    def fork(self, slot: int) -> Sequence:
        """Return a copy that goes its own way, in another slot."""
        twin = object.__new__(Sequence)
        for name in Sequence.__slots__:
            setattr(twin, name, getattr(self, name))
        twin.slot = slot
        twin.tokens = self.tokens.copy()
        twin.chosen = self.chosen.copy()
        twin.pairs = None if self.pairs is None else self.pairs.copy()
        twin.logits = None if self.logits is None else self.logits.copy()
        twin.constraints = None if self.constraints is None else self.constraints.fork()
        return twin

    def note(self, logprob: float, pairs: Pairs) -> None:
        """Keep the log-probability of the token that `take` is told next."""
        self.chosen.append(logprob)
        self.cum_logprob += logprob
        if self.pairs is not None:
            self.pairs.append(pairs)

    def take(self, token: int) -> bool:
        """Append a token; say whether the answer is over with it."""
        sampling = self.request.sampling
        self.tokens.append(token)
        if self.constraints is not None:
            self.constraints.take(token)
        if token == sampling.end_id:
            self._stop(token, 1)
        elif self.stops is not None:
            self._look_for_stop(self.stops, token)
        if self.finish is None and len(self.tokens) >= self.limit:
            self.finish = "length"
        return self.finish is not None

    def _look_for_stop(self, stops: WordAutomaton, token: int) -> None:
        self.stop_state = stops.advance(self.stop_state, token)
        for word in stops.ended(self.stop_state):
            length = stops.lengths[word]
            if len(self.tokens) - length >= self.request.sampling.min_tokens:
                self._stop(word, length)
                return

    def _stop(self, reason: int, length: int) -> None:
        self.finish = "stop"
        self.stop_reason = reason
        if self.request.sampling.include_stop:
            return
        kept = len(self.tokens) - length
        for kind in (self.tokens, self.chosen, self.pairs, self.logits):
            if kind is not None:
                del kind[kept:]

    def showable(self) -> int:
        """Return how many tokens may be shown: those that no stop word can take back."""
        if self.stops is None or self.finish is not None or self.request.sampling.include_stop:
            return len(self.tokens)
        return len(self.tokens) - self.stops.pending(self.stop_state)

    def delta(self) -> Output | None:
        """Return what can be shown now and was not yet; None where there is nothing to say."""
        end = self.showable()
        if self.finish is None and end == self.sent:
            return None
        output = Output(self.request.id, self.index, self.tokens[self.sent : end])
        if self.pairs is not None:
            output.logprobs = self.pairs[self.sent : end]
        self.sent = end
        self._describe(output)
        return output

    def whole(self) -> Output:
        """Return all that can be shown, to take the place of what was shown before."""
        end = self.showable()
        output = Output(self.request.id, self.index, self.tokens[:end], replace=True)
        if self.pairs is not None:
            output.logprobs = self.pairs[:end]
        self._describe(output)
        return output

    def _describe(self, output: Output) -> None:
        if self.chosen:
            output.cum_logprob = sum(self.chosen[: self.showable()])
        if self.finish is None:
            return
        output.finish = self.finish
        output.stop_reason = self.stop_reason
        if self.finish == "error":
            output.error = "every token is forbidden"
        if self.logits is not None:
            output.arrays = {"generation_logits": self._stacked()}

    def _stacked(self) -> Any:
        if not self.logits:
            return np.zeros((0, 0), np.float32)
        return np.stack(self.logits)
