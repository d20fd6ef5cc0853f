# SPDX-License-Identifier: Apache-2.0
"""The book of one slab: names that are never used twice, needs that add up, deaths."""

from __future__ import annotations

import random

import pytest

from actorserve.state.device_lease import LAST_GENERATION, Lease, StaleReference


def test_a_range_is_freed_with_its_last_need() -> None:
    """Our own holds and the peers' loans count alike."""
    lease = Lease()
    block = lease.take(512, 1024)
    lease.hold(block.slot, block.generation)
    lease.lend(7, block.slot, block.generation)
    lease.drop(block.slot, block.generation)
    lease.drop(block.slot, block.generation)
    assert lease.take_freed() == [] and not lease.is_idle()
    assert lease.returned(7, block.slot, block.generation)
    assert lease.take_freed() == [(512, 1024)] and lease.is_idle()
    assert lease.take_freed() == []


def test_a_slot_comes_back_under_another_generation() -> None:
    """The old name is stale for every use."""
    lease = Lease()
    old = lease.take(0, 512)
    lease.drop(old.slot, old.generation)
    new = lease.take(0, 512)
    assert (new.slot, new.generation) == (old.slot, old.generation + 1)
    for use in (lease.find, lease.hold, lease.drop):
        with pytest.raises(StaleReference, match="generation 2"):
            use(old.slot, old.generation)
    with pytest.raises(StaleReference):
        lease.lend(1, old.slot, old.generation)
    assert not lease.returned(1, old.slot, old.generation)


def test_a_slot_at_its_last_generation_is_not_used_again() -> None:
    """Its number would begin anew, and an old reference fit."""
    lease = Lease()
    block = lease.take(0, 512)
    block.generation = LAST_GENERATION
    lease.drop(block.slot, LAST_GENERATION)
    assert lease.take(0, 512).slot != block.slot


def test_we_drop_only_what_we_hold() -> None:
    """A peer's loan is not ours to drop."""
    lease = Lease()
    block = lease.take(0, 512)
    lease.lend(1, block.slot, block.generation)
    lease.drop(block.slot, block.generation)
    with pytest.raises(StaleReference):
        lease.drop(block.slot, block.generation)


def test_a_dead_peers_loans_wait_and_its_late_releases_change_nothing() -> None:
    """They come back once, when the quarantine ends."""
    lease = Lease()
    block = lease.take(0, 512)
    lease.lend(1, block.slot, block.generation)
    lease.lend(1, block.slot, block.generation)
    lease.drop(block.slot, block.generation)
    assert lease.forget(1, until_s=5.0) == 2
    assert lease.forget(1, until_s=6.0) == 0
    assert not lease.returned(1, block.slot, block.generation)
    lease.settle(4.9)
    assert lease.take_freed() == [] and lease.next_due_s() == 5.0
    lease.settle(5.0)
    assert lease.take_freed() == [(0, 512)] and lease.next_due_s() is None
    assert lease.stats().refused == 1


def test_the_block_around_a_range_is_found() -> None:
    """Whole, or not at all."""
    lease = Lease()
    first, second = lease.take(0, 512), lease.take(512, 1024)
    assert lease.covering(600, 100) is second
    assert lease.covering(0, 512) is first
    assert lease.covering(500, 100) is None


@pytest.mark.parametrize("seed", range(20))
def test_counts_add_up_whatever_happens(seed: int) -> None:
    """Against a plain list of needs: nothing is freed early, late or twice."""
    chance = random.Random(seed)
    lease = Lease()
    needs: list[tuple[int, tuple[int, int]]] = []  # who (0 is us), (slot, generation)
    quarantine: list[tuple[int, int]] = []
    living: dict[tuple[int, int], int] = {}
    used = 0
    for step in range(300):
        kind = chance.choice(["take", "hold", "lend", "give", "give", "die", "settle"])
        names = list(living)
        if kind == "take" or not names:
            used += 1
            block = lease.take(used * 512, 512)
            living[block.slot, block.generation] = used * 512
            needs.append((0, (block.slot, block.generation)))
        elif kind in ("hold", "lend"):
            name, who = chance.choice(names), chance.randint(1, 3) if kind == "lend" else 0
            lease.lend(who, *name) if who else lease.hold(*name)
            needs.append((who, name))
        elif kind == "give" and needs:
            who, name = needs.pop(chance.randrange(len(needs)))
            if who:
                assert lease.returned(who, *name)
            else:
                lease.drop(*name)
        elif kind == "die":
            gone = chance.randint(1, 3)
            quarantine += [name for who, name in needs if who == gone]
            needs = [need for need in needs if need[0] != gone]
            lease.forget(gone, float(step))
        elif kind == "settle":
            lease.settle(float("inf"))
            quarantine = []
        wanted = {name for _, name in needs} | set(quarantine)
        freed = {offset for offset, _ in lease.take_freed()}
        assert freed == {living[name] for name in set(living) - wanted}
        living = {name: offset for name, offset in living.items() if name in wanted}
        assert lease.stats().used_bytes == 512 * len(living)
