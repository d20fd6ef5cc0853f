# SPDX-License-Identifier: Apache-2.0
"""Calls that can never be served: stories, and small random worlds against a search of them all."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from actorserve.state.deadlock import CallNode, InstanceNode, dead_calls


def dead_by_search(
    instances: list[InstanceNode], calls: list[CallNode], *, is_certain: bool
) -> set[object]:
    """Return the dead calls by the definition: the largest set whose members hold each other up.

    A set is dead when every instance that could serve one of its queued calls, and every instance
    that runs one of its others, is busy and waits for calls of the set only.
    """

    def awaited(key: object) -> list[CallNode]:
        made = [call for call in calls if call.caller == key]
        waiting = [call for call in made if call.waits]
        return waiting if waiting or is_certain else made

    def is_stuck(instance: InstanceNode, dead: set[object]) -> bool:
        waits_for = awaited(instance.key)
        return (
            not instance.is_free and bool(waits_for) and all(call.key in dead for call in waits_for)
        )

    def servers(call: CallNode) -> list[InstanceNode]:
        if call.runs_at is None:
            return [each for each in instances if each.model == call.model]
        return [each for each in instances if each.key == call.runs_at]

    for size in range(len(calls), 0, -1):
        for chosen in combinations(calls, size):
            dead = {call.key for call in chosen}
            if all(
                servers(call) and all(is_stuck(each, dead) for each in servers(call))
                for call in chosen
            ):
                return {call.key for call in chosen if call.runs_at is None}
    return set()


def world(chance: random.Random) -> tuple[list[InstanceNode], list[CallNode]]:
    """Return a few instances of a few models that have made a few calls."""
    models = "ABC"[: chance.randint(1, 3)]
    instances = [
        InstanceNode(f"{model}{n}", model, chance.random() < 0.15)
        for model in models
        for n in range(chance.randint(0, 2))
    ]
    keys: list[str] = [str(each.key) for each in instances] or ["nobody"]
    calls = []
    for number in range(chance.randint(0, 6)):
        model = chance.choice(models + "X")
        places = [str(each.key) for each in instances if each.model == model] + ["elsewhere"]
        runs_at = chance.choice(places) if chance.random() < 0.4 else None
        waits = chance.random() < 0.6
        calls.append(CallNode(number, chance.choice(keys), model, runs_at, waits))
    return instances, calls


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("is_certain", [True, False])
def test_a_search_of_all_sets_finds_the_same(seed, is_certain):
    """Two hundred worlds for each seed."""
    chance = random.Random(seed)
    for _ in range(200):
        instances, calls = world(chance)
        found = dead_calls(instances, calls, is_certain=is_certain)
        expected = dead_by_search(instances, calls, is_certain=is_certain)
        assert set(found) == expected, (instances, calls)
        assert found == [call.key for call in calls if call.key in expected]


def busy(*keys: str) -> list[InstanceNode]:
    """Return instances without room; the first letter is their model."""
    return [InstanceNode(key, key[0], False) for key in keys]


def call(number: int, caller: str, model: str, at: str | None = None, *, waits: bool = True):
    """Return a call."""
    return CallNode(number, caller, model, at, waits)


def test_a_model_that_calls_itself():
    """Its one instance waits for itself; another one that is free serves it."""
    assert dead_calls(busy("A0"), [call(1, "A0", "A")], is_certain=True) == [1]
    others = [*busy("A0"), InstanceNode("A1", "A", True)]
    assert dead_calls(others, [call(1, "A0", "A")], is_certain=True) == []


def test_a_circle_of_three():
    """Two run, the third waits in the queue of the first."""
    calls = [call(1, "A0", "B", "B0"), call(2, "B0", "C", "C0"), call(3, "C0", "A")]
    assert dead_calls(busy("A0", "B0", "C0"), calls, is_certain=True) == [3]
    assert dead_calls(busy("A0", "B0", "C0"), calls[:2], is_certain=True) == []


def test_a_long_chain_is_no_circle():
    """It ends at an instance that waits for nobody."""
    calls = [call(n, f"{a}0", b, f"{b}0") for n, (a, b) in enumerate(zip("ABCD", "BCDE"))]
    queue = [call(10, "A0", "E"), call(11, "B0", "E")]
    assert dead_calls(busy("A0", "B0", "C0", "D0", "E0"), calls + queue, is_certain=True) == []


def test_an_instance_that_does_not_say_that_it_waits_is_only_probably_stuck():
    """It may compute something meanwhile."""
    calls = [call(1, "A0", "A", waits=False)]
    assert dead_calls(busy("A0"), calls, is_certain=True) == []
    assert dead_calls(busy("A0"), calls, is_certain=False) == [1]


def test_one_answer_that_can_come_is_enough():
    """An instance that has made two calls, of which one is served."""
    calls = [call(1, "A0", "A", waits=False), call(2, "A0", "B", "B0", waits=False)]
    assert dead_calls(busy("A0", "B0"), calls, is_certain=False) == []


def test_places_that_nobody_knows_can_move():
    """A version that is gone from the list is not taken for one that hangs."""
    calls = [call(1, "A0", "Z"), call(2, "B0", "A")]
    assert dead_calls(busy("A0", "B0"), calls, is_certain=True) == []
    calls = [call(1, "A0", "Z", "Z0"), call(2, "B0", "A")]
    assert dead_calls(busy("A0", "B0"), calls, is_certain=True) == []
