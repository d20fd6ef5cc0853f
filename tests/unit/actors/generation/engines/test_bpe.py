# SPDX-License-Identifier: Apache-2.0
"""The byte-pair tokenizer."""

from __future__ import annotations

import pytest

from actorserve.actors.generation.engine import RequestError, Tokenizer
from actorserve.actors.generation.engines.bpe import BytePairTokenizer, learn_joins

TEXT = b"the cat and the hat and the bat"


def test_it_learns_the_most_frequent_pairs_first() -> None:
    """Pairs of what was joined before count as well."""
    tokenizer = BytePairTokenizer(learn_joins(TEXT, 260))
    learnt = [tokenizer.decode_bytes([token]) for token in range(256, 260)]
    assert learnt == [b"th", b"the", b"at", b" a"]
    split = [tokenizer.decode_bytes([token]) for token in tokenizer.encode("the cat and")]
    assert split == [b"the", b" ", b"c", b"at", b" a", b"n", b"d"]


@pytest.mark.parametrize("text", ["", "the hat", "ä€𝄞 tabs\t\n\n  and 12.5 ++", "\x00\x7f"])
def test_decoding_undoes_encoding(text: str) -> None:
    """Whatever the text is: bytes that were never seen are tokens too."""
    tokenizer = BytePairTokenizer(learn_joins(TEXT, 300))
    assert tokenizer.decode_bytes(tokenizer.encode(text)).decode() == text


def test_learning_ends_when_there_are_no_pairs() -> None:
    """A short text gives a short vocabulary."""
    tokenizer = BytePairTokenizer(learn_joins(b"ab", 1000))
    assert tokenizer.vocab_size == 257
    assert tokenizer.encode("abab") == [256, 256]


def test_it_has_no_chats() -> None:
    """A conversation is refused with what to do instead."""
    tokenizer = BytePairTokenizer([])
    assert isinstance(tokenizer, Tokenizer)
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.chat([{"role": "user", "content": "hello"}])
