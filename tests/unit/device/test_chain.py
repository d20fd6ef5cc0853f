# SPDX-License-Identifier: Apache-2.0
"""References through real processes: without a copy, and whoever is killed at whatever moment."""

from __future__ import annotations

import random
from typing import Any

import pytest

from actorserve.device.driver import StaleReference
from actorserve.device.settings import DeviceSettings

MIB = 1 << 20
MOMENTS = (
    "at once",
    "half way",
    "before the answer",
    "after the answer",
    "after the releases",
)


def _make(world: Any, stub: Any, pattern: int, nbytes: int = 4096, die: str = "") -> Any:
    return world.ask(stub, "make", number=nbytes, facts={"pattern": pattern}, die=die)


def _assert_nothing_is_lost(world: Any) -> None:
    """Whoever lives has nothing in use, the broker nothing in its books."""
    for stub in list(world.stubs):
        world.ask(stub, "drop")
    world.settle()
    living = {stub.epoch for stub in world.stubs}
    for stub in list(world.stubs):
        facts = world.facts(stub)
        for name in ("used_bytes", "lent", "views", "owed", "quarantined", "retired_slabs"):
            assert facts[name] == 0, f"stub {stub.epoch}: {name} is {facts[name]}"
    stats = world.broker.stats()
    assert (stats.blocks, stats.held, stats.lent, stats.quarantined) == (0, 0, 0, 0)
    assert {name[0] for name in world.broker._slabs} <= living


@pytest.mark.parametrize("fence", ["sync", "event"])
def test_64_mib_pass_a_chain_of_three_without_a_copy(world: Any, fence: Any) -> None:
    """One copy in where it is made, one copy out where it is read, and nothing in between."""
    settings = DeviceSettings(slab_bytes=64 * MIB, fence=fence)
    first, second, third = (world.start(settings) for _ in range(3))
    made = _make(world, first, 7, 64 * MIB)
    passed = world.ask(second, "pass", made.ref)
    assert passed.ref == made.ref
    assert world.ask(third, "read", passed.ref).number == 7
    for ref in (made.ref, passed.ref):
        world.broker.drop(ref)
    world.settle()
    facts = [world.facts(stub) for stub in (first, second, third)]
    assert [each["bytes_in"] for each in facts] == [64 * MIB, 0, 0]
    assert [each["bytes_out"] for each in facts] == [0, 0, 64 * MIB]
    assert [each["bytes_within"] for each in facts] == [0, 0, 0]
    assert [each["created"] for each in facts] == [1, 0, 0]
    assert [each["imported"] for each in facts] == [0, 1, 1]
    assert facts[1]["synchronized"] == 0, "passing on calls no driver"
    assert [each["used_bytes"] for each in facts] == [0, 0, 0]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("victim", ["maker", "passer", "reader"])
def test_any_of_the_chain_is_killed_at_any_moment(
    world: Any, victim: str, moment: str, delay_s: float
) -> None:
    """The others go on, what was received stays readable, and in the end nothing is in use."""
    maker, passer, reader, heir = (world.start(delay_s=delay_s) for _ in range(4))
    refs = []
    made = _make(world, maker, 11, die=moment if victim == "maker" else "")
    if made is not None:
        refs.append(made.ref)
        if victim == "maker":
            world.bury(maker)
        passed = world.ask(passer, "pass", made.ref, die=moment if victim == "passer" else "")
        if victim == "passer":
            world.bury(passer)
        if passed is not None:
            refs.append(passed.ref)
        read = world.ask(reader, "read", made.ref, die=moment if victim == "reader" else "")
        assert read is None or read.number == 11
        if victim == "reader":
            world.bury(reader)
        assert world.ask(heir, "read", made.ref).number == 11
    for ref in refs:
        world.broker.drop(ref)
    _assert_nothing_is_lost(world)


@pytest.mark.parametrize("seed", range(6))
def test_no_stale_byte_and_no_lost_byte_in_random_traffic_with_kills(
    world: Any, seed: int, delay_s: float
) -> None:
    """Whatever order of making, passing, holding, copying and killing: each read is right."""
    chance = random.Random(seed)
    for _ in range(3):
        world.start(delay_s=delay_s)
    refs: list[tuple[Any, int]] = []
    for pattern in range(1, 120):
        stub = chance.choice(world.stubs)
        die = chance.choice(MOMENTS) if chance.random() < 0.06 else ""
        do = chance.choice(
            ["make", "make", "read", "pass", "hold", "copy", "drop", "forget", "tell"]
        )
        if do == "make" or (do in ("read", "pass", "hold", "copy", "forget") and not refs):
            answer = _make(world, stub, pattern, chance.choice([64, 4096, 9000]), die)
            expected = pattern
        elif do in ("read", "pass", "hold", "copy"):
            ref, expected = chance.choice(refs)
            answer = world.ask(stub, do, ref, die=die)
        elif do == "drop":
            die = "" if die == "half way" else die  # there is no half of it
            answer = world.ask(stub, "drop", die=die)
        elif do == "forget":
            world.broker.drop(refs.pop(chance.randrange(len(refs)))[0])
            continue
        else:  # tell
            world.now_s += 0.05
            world.broker.settle(world.now_s)
            world.tell()
            continue
        if answer is not None:
            assert answer.do != "failed", answer.error
            if answer.do == "read":
                assert answer.number == expected
            if answer.ref is not None:
                refs.append((answer.ref, expected))
        if die:
            world.bury(stub)
            world.start(delay_s=delay_s)
    reader = world.start(delay_s=delay_s)
    for ref, expected in refs:
        assert world.ask(reader, "read", ref).number == expected
        world.broker.drop(ref)
    _assert_nothing_is_lost(world)


def test_a_reference_of_an_earlier_life_is_refused(world: Any) -> None:
    """After the restart a new epoch counts; what was not received before the death is stale."""
    first, reader = world.start(), world.start()
    old = _make(world, first, 1).ref
    world.kill(first)
    again = world.start()
    assert _make(world, again, 2).ref.epoch != old.epoch
    with pytest.raises(StaleReference):
        world.broker.receive(first.epoch, old)
    assert world.ask(reader, "read", old).number == 1, "received before: the memory is kept"
    world.broker.drop(old)
    world.facts(reader)  # the reader's release comes before this answer
    with pytest.raises(StaleReference):
        world.broker.lend(reader.epoch, old)
    world.settle()
    assert world.facts(reader)["mapped_slabs"] == 0, "unmapped with the last need"


def test_memory_that_a_killed_reader_held_waits_in_quarantine(world: Any) -> None:
    """What the reader had started on the device may run on for a moment after its death."""
    maker, reader = world.start(), world.start()
    made = _make(world, maker, 1)
    world.ask(reader, "hold", made.ref)
    world.broker.drop(made.ref)
    world.kill(reader)
    world.tell()
    assert world.broker.stats().quarantined == 1
    assert world.facts(maker)["used_bytes"] == 4096
    due_s = world.broker.settle(world.now_s)
    assert due_s == pytest.approx(world.now_s + 0.1)
    world.broker.settle(due_s)
    world.tell()
    assert world.facts(maker)["used_bytes"] == 0


def test_a_reference_that_comes_home_is_checked_against_the_book(world: Any) -> None:
    """The tenant reads its own block again by reference, and the loan is given back."""
    maker, passer = world.start(), world.start()
    made = _make(world, maker, 5)
    passed = world.ask(passer, "pass", made.ref)
    assert world.ask(maker, "read", passed.ref).number == 5
    world.broker.drop(made.ref)
    world.broker.drop(passed.ref)
    _assert_nothing_is_lost(world)


def test_a_device_that_is_lost_to_one_stub_is_no_loss_to_others(world: Any) -> None:
    """That one fails every call, its peers go on reading what it made, before and after its end."""
    maker, reader = world.start(), world.start()
    made = _make(world, maker, 3)
    assert world.ask(maker, "poison").do == "poisoned"
    assert "DeviceLost" in _make(world, maker, 4, 1 << 20).error
    assert world.ask(reader, "read", made.ref).number == 3
    world.kill(maker)
    assert world.ask(reader, "read", made.ref).number == 3
    world.broker.drop(made.ref)
    _assert_nothing_is_lost(world)
