# SPDX-License-Identifier: Apache-2.0
"""Byte-pair encoding: a tokenizer that learns which bytes to join from a text.

Token 0 to 255 is the byte of that value; token 256 + i is the i-th join, of two earlier tokens.
Words are never joined with each other, so that each is encoded once and remembered.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from actorserve.actors.generation.engine import RequestError

__all__ = ["BytePairTokenizer", "learn_joins"]

_WORD = re.compile(rb" ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+")
_BYTES = 256
_REMEMBERED = 20_000  # words

Join = tuple[int, int]


def learn_joins(text: bytes, vocab_size: int) -> list[Join]:
    """Return the joins that make up a vocabulary: again and again the most frequent pair.

    Of equally frequent pairs the one first met is taken; ends early when no pair is left.
    """
    counts = Counter(_WORD.findall(text))
    words = [(list(word), count) for word, count in counts.items()]
    joins: list[Join] = []
    while _BYTES + len(joins) < vocab_size:
        pairs: Counter[Join] = Counter()
        for tokens, count in words:
            for pair in pairwise(tokens):
                pairs[pair] += count
        if not pairs:
            break
        best = pairs.most_common(1)[0][0]
        new = _BYTES + len(joins)
        joins.append(best)
        words = [(_joined(tokens, best, new), count) for tokens, count in words]
    return joins


def _joined(tokens: list[int], pair: Join, new: int) -> list[int]:
    """Return the tokens with `new` in the place of each pair, from the left."""
    if pair[0] not in tokens:
        return tokens
    out: list[int] = []
    index = 0
    while index < len(tokens):
        if tuple(tokens[index : index + 2]) == pair:
            out.append(new)
            index += 2
        else:
            out.append(tokens[index])
            index += 1
    return out


class BytePairTokenizer:
    """Text to tokens and back by a list of joins. Has no special tokens and no chat template."""

    def __init__(self, joins: Sequence[Join]) -> None:
        self._number = {join: _BYTES + index for index, join in enumerate(joins)}
        self._bytes = [bytes([value]) for value in range(_BYTES)]
        for first, second in joins:
            self._bytes.append(self._bytes[first] + self._bytes[second])
        self._known: dict[bytes, list[int]] = {}
        self.end_id: int | None = None
        self.vocab_size = len(self._bytes)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        tokens: list[int] = []
        for word in _WORD.findall(text.encode()):
            known = self._known.get(word)
            if known is None:
                known = self._encode_word(word)
                if len(self._known) < _REMEMBERED:
                    self._known[word] = known
            tokens += known
        return tokens

    def _encode_word(self, word: bytes) -> list[int]:
        """Apply the joins in the order in which they were learnt."""
        tokens = list(word)
        while len(tokens) > 1:
            new, pair = min(
                (self._number.get(pair, self.vocab_size), pair) for pair in pairwise(tokens)
            )
            if new == self.vocab_size:
                break
            tokens = _joined(tokens, pair, new)
        return tokens

    def decode_bytes(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes of tokens; a character may be cut."""
        return b"".join([self._bytes[token] for token in tokens])

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Raise RequestError: there is no chat template."""
        raise RequestError("this model knows no chats: it has no chat template; send a prompt")
