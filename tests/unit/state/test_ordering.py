# SPDX-License-Identifier: Apache-2.0
"""Responses in the order of the requests: the machine alone, and against a slow model."""

from __future__ import annotations

import random

import pytest

from actorserve.state.ordering import Ordering


def _ordering(*keys: int, most_held: int = 100, most_bytes: int = 100) -> Ordering[str]:
    """Return an order of these requests."""
    ordering = Ordering[str](most_held, most_bytes)
    for key in keys:
        ordering.enqueue(key)
    return ordering


def _all(ordering: Ordering[str]) -> list[str]:
    """Take whatever may leave now."""
    taken = []
    while (response := ordering.take()) is not None:
        taken.append(response)
    return taken


def test_later_responses_are_held_until_the_earlier_ones_are_done() -> None:
    """The last comes first: all of them leave when the first is there."""
    ordering = _ordering(1, 2, 3)
    for key in (3, 2):
        ordering.put(key, f"r{key}", is_final=True)
        assert _all(ordering) == []
        assert ordering.is_done(key) and key in ordering
    assert ordering.stats().held == 2
    ordering.put(1, "r1", is_final=True)
    assert _all(ordering) == ["r1", "r2", "r3"]
    assert len(ordering) == 0 and ordering.first is None
    assert not any(ordering.is_done(key) or key in ordering for key in (1, 2, 3))


def test_the_first_request_streams_while_the_others_wait() -> None:
    """Several responses, then a final one: those of the next follow, in their own order."""
    ordering = _ordering(1, 2)
    ordering.put(2, "2a", is_final=False)
    ordering.put(1, "1a", is_final=False)
    assert _all(ordering) == ["1a"]
    ordering.put(2, "2b", is_final=False)
    ordering.put(1, "1b", is_final=False)
    ordering.put(1, "1c", is_final=True)
    assert _all(ordering) == ["1b", "1c", "2a", "2b"]
    assert ordering.first == 2
    ordering.put(2, "2c", is_final=True)
    assert _all(ordering) == ["2c"]


def test_who_leaves_holds_nobody_back() -> None:
    """Cancelled, rejected, late: the next has its turn, and what was held comes back."""
    ordering = _ordering(1, 2, 3)
    ordering.put(3, "3", is_final=True)
    ordering.put(2, "2", is_final=False)
    assert ordering.leave(2) == ["2"]
    assert ordering.leave(2) == ordering.leave(9) == []
    assert _all(ordering) == []
    assert ordering.leave(1) == []
    assert _all(ordering) == ["3"]
    assert ordering.stats().held == ordering.stats().held_bytes == 0


def test_others_may_leave_between_two_responses() -> None:
    """`take` gives one at a time, so that what leaves meanwhile is not given any more."""
    ordering = _ordering(1, 2, 3)
    for key in (3, 2, 1):
        ordering.put(key, f"r{key}", is_final=True)
    assert ordering.take() == "r1"
    ordering.leave(2)
    assert _all(ordering) == ["r3"]


@pytest.mark.parametrize("nbytes", [0, 60])
def test_it_says_when_enough_is_held(nbytes: int) -> None:
    """By number or by size; what has left does not count."""
    ordering = _ordering(1, 2, 3, 4, most_held=2 if nbytes == 0 else 100)
    ordering.put(2, "2", is_final=True, nbytes=nbytes)
    assert not ordering.is_full
    ordering.put(3, "3", is_final=True, nbytes=nbytes)
    assert ordering.is_full
    ordering.leave(2)
    assert not ordering.is_full
    ordering.put(4, "4", is_final=True, nbytes=nbytes)
    assert ordering.is_full
    ordering.leave(1)
    assert _all(ordering) == ["3", "4"]
    assert not ordering.is_full
    assert ordering.stats().most_held == 2


def test_memory_follows_what_waits_and_not_what_came() -> None:
    """A hundred thousand requests leave nothing behind."""
    ordering = _ordering()
    for key in range(100_000):
        ordering.enqueue(key)
        if key % 3 == 0:
            ordering.leave(key)
        else:
            ordering.put(key, "r", is_final=True)
            assert ordering.take() == "r"
    assert len(ordering) == 0
    assert ordering.stats().held == 0


def test_misuse_is_noticed() -> None:
    """A request is enqueued once, and has one final response."""
    ordering = _ordering(1)
    with pytest.raises(AssertionError):
        ordering.enqueue(1)
    ordering.put(1, "r", is_final=True)
    with pytest.raises(AssertionError):
        ordering.put(1, "again", is_final=True)
    with pytest.raises(KeyError):
        ordering.put(2, "r", is_final=True)


class _Model:
    """All that happened, and what may have left by now, computed from the start each time."""

    def __init__(self) -> None:
        self.arrived: list[int] = []
        self.responses: dict[int, list[str]] = {}
        self.done: set[int] = set()
        self.gone: dict[int, int] = {}  # how many of its responses had left when it did

    def released(self) -> list[str]:
        """All responses that may have left, in order."""
        out: list[str] = []
        for key in self.arrived:
            if key in self.gone:
                out += self.responses[key][: self.gone[key]]
                continue
            out += self.responses[key]
            if key not in self.done:
                break
        return out


@pytest.mark.parametrize("part", range(4))
def test_any_story_follows_the_rule(part: int) -> None:
    """Requests come, answer, stream and leave in any order; nothing overtakes, nothing is lost."""
    for seed in range(part * 1000, (part + 1) * 1000):
        dice = random.Random(seed)
        ordering, model = Ordering[str](4, 50), _Model()
        out: dict[int, int] = {}
        left: list[str] = []
        sizes: dict[str, int] = {}
        for number in range(dice.choice((10, 20, 40))):
            open_ = [k for k in model.arrived if k not in model.done and k not in model.gone]
            waiting = [k for k in model.arrived if k in ordering]
            action = dice.random()
            if action < 0.35 or not waiting:
                model.arrived.append(number)
                model.responses[number] = []
                ordering.enqueue(number)
            elif action < 0.85 and open_:
                key, is_final = dice.choice(open_), dice.random() < 0.6
                text = f"{key}.{len(model.responses[key])}"
                sizes[text] = dice.choice((0, 10, 30))
                model.responses[key].append(text)
                if is_final:
                    model.done.add(key)
                ordering.put(key, text, is_final=is_final, nbytes=sizes[text])
            elif waiting:
                key = dice.choice(waiting)
                held = model.responses[key][out.get(key, 0) :]
                model.gone[key] = out.get(key, 0)
                assert ordering.leave(key) == held, f"seed {seed}"
            if dice.random() < 0.8:
                for text in _all(ordering):
                    left.append(text)
                    owner = int(text.split(".")[0])
                    out[owner] = out.get(owner, 0) + 1
                # What left before its neighbours in the list did has left for good.
                assert sorted(left) == sorted(model.released()), f"seed {seed}"
                assert [t for t in left if t in model.released()] == left, f"seed {seed}"
                assert _is_in_order(left), f"seed {seed}: {left}"
            everything = {
                t for k in model.arrived if k not in model.gone for t in model.responses[k]
            }
            held_now = everything - set(left)
            stats = ordering.stats()
            assert stats.held == len(held_now), f"seed {seed}"
            assert stats.held_bytes == sum(sizes[text] for text in held_now)
            assert ordering.is_full == (stats.held >= 4 or stats.held_bytes >= 50)


def _is_in_order(left: list[str]) -> bool:
    """Whether keys and numbers in them never go back."""
    pairs = [tuple(map(int, text.split("."))) for text in left]
    return pairs == sorted(pairs)
