# SPDX-License-Identifier: Apache-2.0
"""Messages in pieces."""

from __future__ import annotations

import pytest

from actorserve.errors import ProtocolError, TooLarge
from actorserve.runtime import fragments
from actorserve.runtime.fragments import Assembler, fragments_of
from actorserve.wire.codec import encode
from actorserve.wire.generation import Abort, Fragment, decode_to_rank


def pieces_of(data: bytes, most: int) -> list[Fragment]:
    """Return the decoded pieces; none is longer than a frame may be."""
    encoded = list(fragments_of(data, most))
    assert all(len(each) <= most for each in encoded)
    pieces = [decode_to_rank(each) for each in encoded]
    assert all(isinstance(each, Fragment) for each in pieces)
    return pieces  # type: ignore[return-value]


@pytest.mark.parametrize("most", [100, 1000, 70_000])
def test_pieces_make_the_message_again(most: int):
    """Whatever the frame's size; the last piece completes it, and the next message can follow."""
    message = Abort(list(range(30_000)))
    assembler = Assembler(decode_to_rank)
    for _ in range(2):
        *first, last = pieces_of(encode(message), most)
        assert [assembler.add(piece) for piece in first] == [None] * len(first)
        assert assembler.add(last) == message


def test_what_is_too_long_is_refused_on_both_sides(monkeypatch: pytest.MonkeyPatch):
    """A sender gets an error, and a peer that goes on and on is a broken one."""
    monkeypatch.setattr(fragments, "LARGEST_BYTES", 1000)
    with pytest.raises(TooLarge, match="1001 bytes"):
        next(fragments_of(b"x" * 1001, 100))
    assembler = Assembler(decode_to_rank)
    assembler.add(Fragment(b"x" * 600, False))
    with pytest.raises(ProtocolError, match="in pieces"):
        assembler.add(Fragment(b"x" * 600, False))


def test_pieces_of_nonsense_are_refused():
    """What they make has to be a message, and no piece."""
    with pytest.raises(ProtocolError, match="no message"):
        Assembler(decode_to_rank).add(Fragment(b"\xc1", True))
    with pytest.raises(ProtocolError, match="itself one"):
        Assembler(decode_to_rank).add(Fragment(encode(Fragment(b"", True)), True))
