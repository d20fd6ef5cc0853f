# SPDX-License-Identifier: Apache-2.0
"""One request of the scripted engine: where its tokens come from, and when they end."""

from __future__ import annotations

from typing import Any

import numpy as np

from actorserve.wire.generation import GenRequest, Output

LOGPROB = -0.5


class Row:
    """A request and how far it is. A plain one counts up, one token an iteration."""

    __slots__ = (
        "base",
        "chunk",
        "error",
        "error_at",
        "finish",
        "id",
        "is_plain",
        "is_silent",
        "is_stray",
        "limit",
        "made",
        "prefill",
        "request",
        "room",
        "script",
        "vocab_size",
    )

    def __init__(self, request: GenRequest, extra: dict[str, Any], vocab_size: int) -> None:
        sampling = request.sampling
        self.request = request
        self.id = request.id
        self.vocab_size = vocab_size
        self.base = request.prompt[-1] + request.adapter
        self.made = 0
        self.script: list[int] | None = extra.get("tokens")
        self.limit = sampling.max_tokens
        self.finish = "length"
        end = extra.get("end")
        if end is not None and end <= self.limit:
            self.limit, self.finish = end, "stop"
        self.error: str | None = extra.get("error")
        self.error_at = extra.get("error_at", 0)
        self.chunk = extra.get("chunk", 1)
        self.prefill = extra.get("prefill", 0)
        self.is_stray = bool(extra.get("stray"))
        self.is_silent = bool(extra.get("silent"))
        self.room = len(request.prompt) + sampling.max_tokens
        is_special = {"tokens", "error", "chunk", "prefill"} & extra.keys()
        self.is_plain = not (
            is_special
            or sampling.n > 1
            or sampling.beam_width > 1
            or sampling.logprobs is not None
            or sampling.end_id is not None
            or sampling.context_logits
            or sampling.generation_logits
        )

    def token(self, place: int, seq: int) -> int:
        """Return the token at a place of a sequence."""
        if self.script is not None:
            return self.script[(place + seq) % len(self.script)]
        return (self.base + place + 1 + seq) % self.vocab_size


def output_of(row: Row, outputs: list[Output]) -> bool:
    """Make what an iteration brings a request that is not plain; True when that was its last."""
    if row.prefill:
        row.prefill -= 1
        return False
    if row.error is not None and row.made >= row.error_at:
        outputs.append(Output(row.id, finish="error", final=True, error=row.error))
        return True
    sampling = row.request.sampling
    begin, row.made = row.made, min(row.limit, row.made + row.chunk)
    finish = row.finish if row.made >= row.limit else None
    for seq in range(sampling.n):
        tokens = [row.token(place, seq) for place in range(begin, row.made)]
        if sampling.end_id in tokens:
            tokens = tokens[: tokens.index(sampling.end_id)]
            finish, row.made = "stop", begin + len(tokens)
        output = Output(row.id, seq, tokens, finish, finish is not None and seq == sampling.n - 1)
        if sampling.beam_width > 1:
            output.replace = True
            output.tokens = [row.token(each, seq + row.made) for each in range(row.made)]
        _add_numbers(row, output, is_first=begin == 0)
        outputs.append(output)
    return finish is not None


def _add_numbers(row: Row, output: Output, *, is_first: bool) -> None:
    """Add the logarithms and logits that were asked for."""
    sampling = row.request.sampling
    count = len(output.tokens)
    if sampling.logprobs is not None:
        others = [(other, LOGPROB - 1 - other) for other in range(sampling.logprobs)]
        output.logprobs = [[(token, LOGPROB), *others] for token in output.tokens]
        output.cum_logprob = LOGPROB * row.made
    arrays = {}
    if sampling.context_logits and is_first:
        arrays["context_logits"] = np.zeros((len(row.request.prompt), row.vocab_size), np.float32)
    if sampling.generation_logits and count:
        logits = np.zeros((count, row.vocab_size), np.float32)
        logits[np.arange(count), output.tokens] = 1.0
        arrays["generation_logits"] = logits
    if arrays:
        output.arrays = arrays
