# SPDX-License-Identifier: Apache-2.0
"""One generated sequence, as a client sees it. It changes only in a step of its result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from actorserve.actors.generation.merge import GROWING
from actorserve.wire.generation import Output

DISCARDED = "discarded_tokens"
"""In the `extra` of a request's last output: tokens of sequences that were not chosen."""


@dataclass(slots=True)
class CompletionOutput:
    """The sequence `index` of a request.

    `logprobs` are the natural logarithms of the probabilities of the tokens, as far as they were
    asked for; `top_logprobs` has for each token the pairs (token, logarithm), its own first.
    `generation_logits` are float32, [tokens, vocabulary]. `finish_reason` is None while it goes
    on, then "stop", "length", "cancelled", "timeout" or "error"; `stop_reason` is the token or
    the text that stopped it, or the index of the stop word. `text` stays empty without tokenizer.
    With `best_of`, the last sequence has as `discarded_tokens` those of the ones not chosen.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[float] = field(default_factory=list)
    generation_logits: npt.NDArray[np.float32] | None = field(default=None, repr=False)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list, repr=False)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    discarded_tokens: int = field(default=0, repr=False)
    _seen_text: int = field(default=0, init=False, repr=False)
    _seen_tokens: int = field(default=0, init=False, repr=False)

    @property
    def length(self) -> int:
        """How many tokens there are."""
        return len(self.token_ids)

    @property
    def text_diff(self) -> str:
        """What the last step added to the text. Reading it changes nothing."""
        return self.text[self._seen_text :]

    @property
    def token_ids_diff(self) -> list[int]:
        """What the last step added to the tokens; all of them after a beam was replaced."""
        return self.token_ids[self._seen_tokens :]

    @property
    def logprobs_diff(self) -> list[float]:
        """What the last step added to the logarithms of the probabilities."""
        return self.logprobs[self._seen_tokens :]

    # --- for the result that owns it -------------------------------------------------------------

    def begin_step(self) -> None:
        """Count what is here as seen."""
        self._seen_text = len(self.text)
        self._seen_tokens = len(self.token_ids)

    def apply(self, output: Output) -> None:
        """Take what came, text excepted."""
        if output.replace:
            self._replace(output)
        elif output.tokens:
            self.token_ids += output.tokens
        if output.logprobs is not None:
            self.top_logprobs += output.logprobs
            self.logprobs += [each[0][1] for each in output.logprobs]
        if output.cum_logprob is not None:
            self.cumulative_logprob = output.cum_logprob
        if output.finish is not None:
            self.finish_reason = output.finish
            self.stop_reason = output.stop_reason
            if output.extra is not None:
                self.discarded_tokens = output.extra.get(DISCARDED, 0)
        if output.arrays is not None:
            self._take_logits(output.arrays)

    def set_text(self, text: str) -> None:
        """Put a whole new text in place of the old one, all of it unseen."""
        self.text = text
        self._seen_text = 0

    def _replace(self, output: Output) -> None:
        """Take a whole sequence: what of it was there before is not new."""
        tokens = list(output.tokens)
        if tokens[: self._seen_tokens] != self.token_ids[: self._seen_tokens]:
            self._seen_tokens = 0
        self.token_ids = tokens
        self.top_logprobs, self.logprobs = [], []
        self.generation_logits = None

    def _take_logits(self, arrays: dict[str, Any]) -> None:
        more = arrays.get(GROWING)
        if more is not None and self.generation_logits is not None:
            more = np.concatenate((self.generation_logits, more))
        if more is not None:
            self.generation_logits = more
