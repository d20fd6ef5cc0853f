# SPDX-License-Identifier: Apache-2.0
"""The newest events, and what a reader missed."""

from __future__ import annotations

from collections.abc import Iterator

from actorserve.state.event_ring import EventRing


def test_a_reader_goes_on_where_it_was():
    """`next` of one look is where the next begins."""
    ring = EventRing(10)
    ring.add(0, "abc")
    first = ring.since(0)
    ring.add(3, "de")
    second = ring.since(first.next)
    assert (first.events, second.events) == (["a", "b", "c"], ["d", "e"])
    assert (second.first, second.next, second.missed) == (3, 5, 0)


def test_what_fell_out_is_counted():
    """A reader that was too slow sees how much it missed."""
    ring = EventRing(3)
    ring.add(0, "abcdef")
    replay = ring.since(1)
    assert (replay.first, replay.events, replay.missed) == (3, ["d", "e", "f"], 2)


def test_a_gap_of_the_source_is_a_gap():
    """Numbers that were skipped are missing for every reader."""
    ring = EventRing(10)
    ring.add(0, "ab")
    ring.add(5, "f")
    replay = ring.since(0)
    assert (replay.first, replay.events, replay.missed) == (5, ["f"], 5)


def test_a_source_that_begins_anew_empties_the_ring():
    """After a restart the numbers begin again; a reader from before gets what there is."""
    ring = EventRing(10)
    ring.add(0, "abc")
    ring.add(0, "x")
    assert ring.since(0).events == ["x"]
    assert ring.since(3).events == []


def test_a_reader_in_the_middle_of_an_addition_numbers_nothing_wrongly():
    """What is there has its own number, whatever is being added at that moment."""
    ring = EventRing(10)
    ring.add(0, ["a", "b"])
    read = []

    def events() -> Iterator[str]:
        yield "c"
        read.append(ring.since(0))
        yield "d"

    ring.add(2, events())
    assert (read[0].first, read[0].events, read[0].next) == (0, ["a", "b", "c"], 3)
    ring.next = 3  # as between an event's arrival and its count
    assert (ring.since(1).first, ring.since(1).events) == (1, ["b", "c", "d"])
