# SPDX-License-Identifier: Apache-2.0
r"""The byte-level BPE tokenizer that a GGUF file describes.

    text ─ special tokens ─ digits ─ words ─ bytes as letters ─ merges, the earliest first ─ ids

Words are cut by character class. The classes of Unicode that `re` does not have come by writing
each character that is not ASCII as one of its kind (letter, number, space, other) before the
pattern runs: places in that text are places in the real one.
"""

from __future__ import annotations

import heapq
import re
import unicodedata
from collections.abc import Iterator, Sequence
from functools import lru_cache

from actorserve.actors.generation.engines.chat_template import ChatTemplate
from actorserve.actors.generation.engines.gguf_file import GgufFile
from actorserve.errors import InvalidArgument

__all__ = ["GgufTokenizer", "bytes_of_letters"]

NORMAL = 1
CONTROL = 3
USER_DEFINED = 4
CACHED_WORDS = 16384
CACHED_WORD_CHARS = 64

# How each known kind of file cuts text first: does every digit stand alone?
SINGLE_DIGITS = {"smollm": True, "gpt-2": False, "gpt2": False, "default": False}

_WORD = re.compile(
    r"'(?:s|t|re|ve|m|ll|d)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+", re.ASCII
)
_DIGIT = re.compile(r"([0-9])", re.ASCII)


class _Kinds(dict[int, str]):
    """For str.translate: ASCII as it is, any other character as one of its kind."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        kind = unicodedata.category(character)[0]
        if code < 128:
            written = character
        elif kind == "L":
            written = "x"
        elif kind == "N":
            written = "0"
        else:
            written = "\t" if kind == "Z" or code == 0x85 else "!"
        self[code] = written
        return written


_KINDS = _Kinds()


def _byte_letters() -> dict[int, str]:
    """Return the letter that stands for each byte in vocabularies of this kind."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + number) for number, byte in enumerate(hidden)}
    return letters


_LETTER_OF_BYTE = _byte_letters()
_BYTE_OF_LETTER = {ord(letter): byte for byte, letter in _LETTER_OF_BYTE.items()}


def _as_letters(text: str) -> str:
    # Bytes go through Latin-1, where a byte is the character of the same number.
    return text.encode("utf-8", "replace").decode("latin-1").translate(_LETTER_OF_BYTE)


def bytes_of_letters(letters: str) -> bytes:
    """Return the bytes that letters of such a vocabulary stand for."""
    return letters.translate(_BYTE_OF_LETTER).encode("latin-1", "replace")


class GgufTokenizer:
    """Text to tokens and back, for vocabularies of the kind "gpt2"."""

    def __init__(self, file: GgufFile) -> None:
        """Take the vocabulary of a file. Raises InvalidArgument for a kind that is not known."""
        model = file.get("tokenizer.ggml.model", str)
        before = str(file.metadata.get("tokenizer.ggml.pre", "default"))
        if model != "gpt2" or before not in SINGLE_DIGITS:
            raise InvalidArgument(
                f"the vocabulary of {file.path!r} is of the kind {model!r} ({before!r}); known is"
                f" 'gpt2' ({', '.join(SINGLE_DIGITS)})"
            )
        texts: list[str] = file.get("tokenizer.ggml.tokens", list)
        kinds: list[int] = file.metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(texts))
        merges: list[str] = file.get("tokenizer.ggml.merges", list)
        if len(kinds) != len(texts):
            raise InvalidArgument(f"{file.path!r} has {len(kinds)} types for {len(texts)} tokens")
        self.vocab_size = len(texts)
        self.end_id: int | None = file.metadata.get("tokenizer.ggml.eos_token_id")
        self._single_digits = SINGLE_DIGITS[before]
        self._begin = self._begin_ids(file)
        self._ids = {text: number for number, text in enumerate(texts)}
        self._ranks = {merge: rank for rank, merge in enumerate(merges)}
        self._letters = texts  # of each token; specials get theirs below
        self._special = self._take_specials(kinds)
        self._template_source: str | None = file.metadata.get("tokenizer.chat_template")
        self._cached = lru_cache(CACHED_WORDS)(self._merged)

    @staticmethod
    def _begin_ids(file: GgufFile) -> list[int]:
        wanted = file.metadata.get("tokenizer.ggml.add_bos_token", False)
        return [file.get("tokenizer.ggml.bos_token_id", int)] if wanted else []

    def _take_specials(self, kinds: list[int]) -> re.Pattern[str] | None:
        words = []
        for number, kind in enumerate(kinds):
            if kind not in (CONTROL, USER_DEFINED):
                continue
            text = self._letters[number]
            words.append(text)
            self._letters[number] = "" if kind == CONTROL else _as_letters(text)
        longest_first = sorted(filter(None, words), key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if words else None

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text; special ones written in it are taken as such."""
        out = list(self._begin)
        pieces = self._special.split(text) if self._special else [text]
        for number, piece in enumerate(pieces):
            out += [self._ids[piece]] if number % 2 else self.encode_plain(piece)
        return out

    def encode_plain(self, text: str) -> list[int]:
        """Return the tokens of a text in which nothing is special."""
        out: list[int] = []
        for word in self._words(text):
            out += self._cached(word) if len(word) <= CACHED_WORD_CHARS else self._merged(word)
        return out

    def decode_bytes(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes of tokens; special ones give none. A character may be cut.

        Raises InvalidArgument for a number that is no token.
        """
        if len(tokens) and not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            raise InvalidArgument(f"tokens are 0 to {self.vocab_size - 1}, got {list(tokens)[:8]}")
        return bytes_of_letters("".join([self._letters[token] for token in tokens]))

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return the prompt of a conversation: dicts of role and content.

        Special tokens written in a content are plain text. Raises InvalidArgument for a role
        that is not known, RequestError without a chat template of a known form.
        """
        out = list(self._begin)
        for text, is_mark in ChatTemplate.parse(self._template_source).pieces(messages):
            if is_mark and text not in self._ids:
                raise InvalidArgument(f"the vocabulary has no token {text!r} of its chat template")
            out += [self._ids[text]] if is_mark else self.encode_plain(text)
        return out

    def _words(self, text: str) -> Iterator[str]:
        kinds = text.translate(_KINDS)
        at = 0
        for piece in _DIGIT.split(kinds) if self._single_digits else [kinds]:
            for found in _WORD.finditer(piece):
                yield text[at + found.start() : at + found.end()]
            at += len(piece)

    def _merged(self, word: str) -> list[int]:
        """Join the letters of a word, the earliest merge first, the leftmost of equals."""
        parts = list(_as_letters(word))
        after = [*range(1, len(parts)), -1]
        before = list(range(-1, len(parts) - 1))
        heap: list[tuple[int, int, str]] = []

        def consider(left: int) -> None:
            if left >= 0 and after[left] >= 0:
                pair = f"{parts[left]} {parts[after[left]]}"
                rank = self._ranks.get(pair)
                if rank is not None:
                    heapq.heappush(heap, (rank, left, pair))

        for place in range(len(parts)):
            consider(place)
        while heap:
            _, left, pair = heapq.heappop(heap)
            right = after[left]
            # An entry is out of date once either side was merged with another neighbour.
            if not parts[left] or right < 0 or f"{parts[left]} {parts[right]}" != pair:
                continue
            parts[left] += parts[right]
            parts[right] = ""
            after[left] = after[right]
            if after[left] >= 0:
                before[after[left]] = left
            consider(before[left])
            consider(left)
        # Rare bytes that no text has are in no vocabulary: they are left out.
        return [self._ids[part] for part in parts if part in self._ids]
