# SPDX-License-Identifier: Apache-2.0
"""Text comes whole, and stops where it should, however its tokens are portioned."""

from __future__ import annotations

import random

import pytest

from actorserve.actors.generation.engines.scripted_text import ByteTokenizer
from actorserve.actors.generation.text import Detokenizer, StopWatch
from actorserve.wire.generation import Output


def pieces(data: bytes, dice: random.Random) -> list[list[int]]:
    """Cut into random portions, some of them empty."""
    found, place = [], 0
    while place < len(data):
        size = dice.randrange(4)
        found.append(list(data[place : place + size]))
        place += size
    return found


def test_a_cut_character_waits_for_its_rest():
    """And one that never gets it is replaced at the end."""
    text = Detokenizer(ByteTokenizer())
    assert text.push(list("é".encode()[:1])) == ""
    assert text.push(list("é".encode()[1:])) == "é"
    assert text.push([0xE2, 0x82]) == ""
    assert text.finish() == "\N{REPLACEMENT CHARACTER}"


def test_what_may_begin_a_stop_is_held():
    """It comes when it turns out to be none, or at the end."""
    text = Detokenizer(ByteTokenizer(), ["<end>"])
    assert text.push(list(b"a<e")) == "a"
    assert text.push(list(b"x")) == "<ex"
    assert text.push(list(b"<en")) == ""
    assert text.finish() == "<en"
    assert text.found == ""


@pytest.mark.parametrize("seed", range(30))
def test_portions_change_nothing(seed: int):
    """Text, place and stop are those of one token at a time; and of plain searching."""
    dice = random.Random(seed)
    data = "".join(dice.choice("abcé") for _ in range(60)).encode()
    stops = ["".join(dice.choice("abc") for _ in range(dice.randint(2, 4))) for _ in range(3)]
    found = set()
    for _ in range(5):
        text = Detokenizer(ByteTokenizer(), stops)
        whole = "".join(text.push(tokens) for tokens in pieces(data, dice)) + text.finish()
        found.add((whole, text.found))
    assert len(found) == 1
    whole, stop = found.pop()
    ends = [data.decode().find(each) + len(each) for each in stops if each in data.decode()]
    if ends:
        assert len(whole) + len(stop) == min(ends)
    else:
        assert (whole, stop) == (data.decode(), "")


def test_of_two_stops_that_end_together_the_longer_counts():
    """It begins first."""
    text = Detokenizer(ByteTokenizer(), ["bc", "abc"])
    assert text.push(list(b"xabcd")) == "x"
    assert text.found == "abc"


def test_a_watch_ends_each_sequence_by_itself():
    """The request is over when the last of them is."""
    watch = StopWatch(ByteTokenizer(), ["b"], 2)
    first = watch.look(Output(1, 0, list(b"abc")))
    assert first is not None
    assert (first.tokens, first.finish, first.final) == (list(b"ab"), "stop", False)
    assert watch.look(Output(1, 0, list(b"x"))) is None
    plain = Output(1, 1, list(b"x"))
    assert watch.look(plain) is plain
    last = watch.look(Output(1, 1, list(b"b")))
    assert last is not None and last.final and watch.is_over


def test_a_watch_lets_the_engines_own_final_through():
    """Without what is beyond the stop."""
    watch = StopWatch(ByteTokenizer(), ["b"], 2)
    watch.look(Output(1, 1, list(b"x"), "length"))
    watch.look(Output(1, 0, list(b"b")))
    final = watch.look(Output(1, 0, list(b"yy"), "length", True))
    assert final is not None and final.final and final.tokens == []


def test_a_beam_is_stopped_only_where_it_ends():
    """What it is meanwhile may be replaced by another one."""
    watch = StopWatch(ByteTokenizer(), ["b"], 2)
    passing = Output(1, 0, list(b"abc"), replace=True)
    assert watch.look(passing) is passing
    other = Output(1, 0, list(b"acc"), "length", replace=True)
    assert watch.look(other) is other
    last = watch.look(Output(1, 1, list(b"abc"), "length", True, replace=True))
    assert last is not None
    assert (last.tokens, last.finish, last.final) == (list(b"ab"), "stop", True)
