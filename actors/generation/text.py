# SPDX-License-Identifier: Apache-2.0
"""Tokens to text as they come: characters are not cut, and what stops a text never shows.

What always holds: however the tokens are portioned, the text and the place where it stops are
the same. A stop text counts from the token that completes it; of two that one token completes,
the one that begins first.
"""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Sequence
from typing import Any

from actorserve.actors.generation.engine import Tokenizer
from actorserve.actors.generation.merge import GROWING
from actorserve.wire.generation import Output


class StopText:
    """Look for the texts that stop a sequence, in pieces of it that follow each other."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._tail = ""  # of what was given out or is held: as much as a stop may reach back
        self.found = ""

    def find(self, held: str, piece: str) -> int | None:
        """Return where in `held + piece` the first stop begins; None if there is none.

        `held` is what was not given out of earlier pieces; no stop lies in it wholly.
        """
        text = held + piece
        begin = max(0, len(held) - self._longest + 1)
        places = [(text.find(each, begin), each) for each in self._stops]
        first = min(((place, each) for place, each in places if place >= 0), default=None)
        if first is None:
            return None
        self.found = first[1]
        return first[0]

    def held(self, text: str) -> int:
        """Return how many characters at the end of the text may be the begin of a stop."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(each.startswith(end) for each in self._stops):
                return length
        return 0


class Detokenizer:
    """The text of one sequence."""

    __slots__ = ("_decoder", "_held", "_stop", "_tokenizer", "found")

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self.found = ""  # the text that stopped it
        self._tokenizer = tokenizer
        self._stop = StopText(stops) if stops else None
        self._held = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, tokens: Sequence[int]) -> str:
        """Return what more of the text is certain after these tokens."""
        if self._stop is None:
            return self._decoder.decode(self._tokenizer.decode_bytes(tokens))
        certain = ""
        for token in tokens:
            if self.found:
                break
            certain += self._push_one(token, self._stop)
        return certain

    def finish(self) -> str:
        """Return what was kept back, at the end of the sequence."""
        if self.found:
            return ""
        piece = self._decoder.decode(b"", True)
        rest, self._held = self._held + piece, ""
        return rest

    def _push_one(self, token: int, stop: StopText) -> str:
        piece = self._decoder.decode(self._tokenizer.decode_bytes((token,)))
        if not piece:
            return ""
        place = stop.find(self._held, piece)
        text = self._held + piece
        if place is not None:
            self.found = stop.found
            self._held = ""
            return text[:place]
        kept = stop.held(text)
        self._held = text[len(text) - kept :] if kept else ""
        return text[: len(text) - kept]


class StopWatch:
    """Watch the outputs of one request for the texts that stop it, where outputs arrive.

    With `awaits_logits` a sequence that is stopped ends only when the engine has ended it, too:
    most engines give the logits of its tokens then.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        sequences: int,
        *,
        awaits_logits: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._by_seq: dict[int, Detokenizer] = {}
        self._open = sequences
        self._ended: set[int] = set()
        self._awaits_logits = awaits_logits
        self._counts: Counter[int] = Counter()  # tokens of each sequence
        self._waiting: set[int] = set()  # stopped, without their logits

    def wants_abort(self) -> bool:
        """Whether the engine has to be told that nothing goes on, so that it gives the rest."""
        return self.is_over and bool(self._waiting)

    @property
    def is_over(self) -> bool:
        """Whether every sequence has ended."""
        return self._open <= 0

    def look(self, output: Output) -> Output | None:
        """Return the output as far as it counts; None for nothing.

        The one that stops a sequence ends with the token that does, says "stop", and is the
        request's final one if no other sequence goes on. A beam may be replaced by another until
        it ends, so that nothing stops it before.
        """
        seq = output.seq
        if seq in self._waiting and (output.final or output.finish is not None):
            return self._with_logits(output)
        if seq in self._ended:
            return Output(output.id, seq, final=True) if output.final else None
        if output.replace or seq not in self._by_seq:
            self._by_seq[seq] = Detokenizer(self._tokenizer, self._stops)
        text = self._by_seq[seq]
        if output.replace and output.finish is None:
            text.push(output.tokens)
            return output
        for place, token in enumerate(output.tokens):
            text.push((token,))
            if text.found:
                return self._stopped(output, place + 1)
        self._counts[seq] += len(output.tokens)
        if output.finish is not None:
            self._end(seq)
        return output

    def _stopped(self, output: Output, count: int) -> Output:
        seq = output.seq
        self._end(seq)
        self._counts[seq] += count
        if self._awaits_logits and output.finish is None and GROWING not in (output.arrays or ()):
            self._waiting.add(seq)
        is_over = self.is_over and not self._waiting
        return Output(
            output.id,
            seq,
            output.tokens[:count],
            None if seq in self._waiting else "stop",
            output.final or is_over,
            None,
            None if output.logprobs is None else output.logprobs[:count],
            output.cum_logprob,
            replace=output.replace,
            arrays=_cut(output.arrays, len(output.tokens) - count),
            extra=output.extra,
        )

    def _with_logits(self, output: Output) -> Output:
        """Return the end of a stopped sequence, whose logits the engine's own end has."""
        self._waiting.discard(output.seq)
        logits = (output.arrays or {}).get(GROWING, ())
        arrays = _cut(output.arrays, max(0, len(logits) - self._counts[output.seq]))
        return Output(output.id, output.seq, [], "stop", output.final, arrays=arrays)

    def _end(self, seq: int) -> None:
        self._ended.add(seq)
        self._open -= 1


def _cut(arrays: dict[str, Any] | None, tokens: int) -> dict[str, Any] | None:
    """Return arrays without the logits of so many last tokens."""
    if not tokens or arrays is None or GROWING not in arrays:
        return arrays
    return {**arrays, GROWING: arrays[GROWING][:-tokens]}
