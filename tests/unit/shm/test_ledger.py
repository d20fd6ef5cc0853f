# SPDX-License-Identifier: Apache-2.0
"""Who holds which block: every hold and loan ends once, and a zero is reported once."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from actorserve.errors import InternalError, ProtocolError
from actorserve.shm.ledger import Key, Ledger

BLOCK = (1, 10)
OTHER = (1, 11)
S, T = 2, 3


def test_block_is_free_when_all_holds_and_loans_are_back() -> None:
    """A request's block that went to a stub is reported after the request and the stub let go."""
    ledger = Ledger()
    assert ledger.hold(BLOCK) == 1
    ledger.lend(S, BLOCK)
    assert ledger.total(BLOCK) == 2
    ledger.drop(BLOCK)
    assert ledger.take_zeros() == []
    ledger.returned(S, BLOCK)
    assert ledger.take_zeros() == [BLOCK]
    assert ledger.take_zeros() == []
    assert ledger.total(BLOCK) == 0


def test_each_sending_is_a_loan() -> None:
    """A block that was sent twice to a peer comes back twice."""
    ledger = Ledger()
    ledger.lend(S, BLOCK)
    ledger.lend(S, BLOCK)
    assert ledger.lent(S, BLOCK) == 2
    ledger.returned(S, BLOCK)
    assert ledger.take_zeros() == []
    ledger.returned(S, BLOCK)
    assert ledger.take_zeros() == [BLOCK]
    assert ledger.lent(S, BLOCK) == 0


@pytest.mark.parametrize(("peer", "key"), [(T, BLOCK), (S, OTHER), (9, OTHER)])
def test_release_of_what_was_not_lent_breaks_that_peer(peer: int, key: Key) -> None:
    """A peer cannot give back a block that it does not have, though others do."""
    ledger = Ledger()
    ledger.lend(S, BLOCK)
    ledger.lend(T, OTHER)
    with pytest.raises(ProtocolError, match=f"peer {peer} gave back block {key[1]}"):
        ledger.returned(peer, key)
    assert (ledger.total(BLOCK), ledger.total(OTHER)) == (1, 1)


def test_double_release_breaks_that_peer() -> None:
    """The second release of one loan is refused, even while another peer has the block."""
    ledger = Ledger()
    ledger.lend(S, BLOCK)
    ledger.lend(T, BLOCK)
    ledger.returned(S, BLOCK)
    with pytest.raises(ProtocolError):
        ledger.returned(S, BLOCK)
    assert ledger.total(BLOCK) == 1
    assert ledger.take_zeros() == []


def test_dead_peer_gives_everything_back_once() -> None:
    """After `forget` the peer has nothing; others' loans and our holds are untouched."""
    ledger = Ledger()
    ledger.hold(BLOCK)
    ledger.lend(S, BLOCK)
    ledger.lend(S, BLOCK)
    ledger.lend(S, OTHER)
    ledger.lend(T, BLOCK)
    assert ledger.forget(S) == {BLOCK: 2, OTHER: 1}
    assert ledger.take_zeros() == [OTHER]
    assert ledger.forget(S) == {}
    assert ledger.total(BLOCK) == 2
    ledger.returned(T, BLOCK)
    ledger.drop(BLOCK)
    assert ledger.take_zeros() == [BLOCK]
    with pytest.raises(ProtocolError):
        ledger.returned(S, BLOCK)


def test_our_own_holds_cannot_be_dropped_twice() -> None:
    """A drop too many is our fault and never ends somebody's loan."""
    ledger = Ledger()
    ledger.hold(BLOCK)
    ledger.lend(S, BLOCK)
    ledger.drop(BLOCK)
    with pytest.raises(InternalError, match="not held here"):
        ledger.drop(BLOCK)
    assert ledger.total(BLOCK) == 1


def test_owner_gets_one_release_for_each_of_its_sendings() -> None:
    """A block that its owner sent three times is given back three times, the last when unused."""
    ledger = Ledger()
    ledger.receive(BLOCK)
    ledger.receive(BLOCK)
    assert ledger.take_zeros() == [BLOCK]
    ledger.lend(T, BLOCK)
    ledger.drop(BLOCK)
    ledger.drop(BLOCK)
    ledger.receive(BLOCK)
    assert ledger.take_zeros() == [BLOCK]
    ledger.drop(BLOCK)
    assert ledger.take_zeros() == []
    ledger.returned(T, BLOCK)
    assert ledger.take_zeros() == [BLOCK]


def test_block_that_comes_back_before_zeros_are_taken() -> None:
    """The owner's release for the first sending is due although it sent the block again."""
    ledger = Ledger()
    ledger.receive(BLOCK)
    ledger.drop(BLOCK)
    ledger.receive(BLOCK)
    assert ledger.take_zeros() == [BLOCK]
    assert ledger.total(BLOCK) == 1
    ledger.drop(BLOCK)
    assert ledger.take_zeros() == [BLOCK]


def give_back(ledger: Ledger, peer: int, key: Key) -> None:
    """End a loan of `peer`, or a hold of ours for peer 0."""
    if peer:
        ledger.returned(peer, key)
    else:
        ledger.drop(key)


@pytest.mark.parametrize("seed", range(5))
def test_ledger_agrees_with_plain_counting(seed: int) -> None:
    """Over random traffic, totals and zeros are what a list of all holders gives."""
    rng = random.Random(seed)
    ledger = Ledger()
    holders: Counter[tuple[int, Key]] = Counter()  # peer 0 is ourselves
    sendings: Counter[Key] = Counter()
    releases: Counter[Key] = Counter()
    keys = [(arena, block) for arena in (1, 2) for block in range(4)]
    for _ in range(4000):
        key, peer = rng.choice(keys), rng.randrange(0, 4)
        action = rng.random()
        if action < 0.2:
            ledger.receive(key)
            holders[0, key] += 1
            sendings[key] += 1
        elif action < 0.6:
            if holders[peer, key]:
                holders[peer, key] -= 1
                give_back(ledger, peer, key)
            else:
                with pytest.raises((InternalError, ProtocolError)):
                    give_back(ledger, peer, key)
        elif action < 0.98:
            if peer and ledger.total(key):
                ledger.lend(peer, key)
                holders[peer, key] += 1
        elif peer:
            lost = {key: holders.pop((peer, key)) for key in keys if holders[peer, key]}
            assert ledger.forget(peer) == lost
        releases.update(ledger.take_zeros())
        for key in keys:
            total = sum(holders[peer, key] for peer in range(4))
            assert ledger.total(key) == total
            # All of the owner's sendings but one are given back while anyone has the block.
            assert releases[key] == sendings[key] - (1 if total else 0)


def test_stats_add_up() -> None:
    """The figures are the sums of what was counted."""
    ledger = Ledger()
    ledger.hold(BLOCK)
    ledger.lend(S, BLOCK)
    ledger.lend(S, OTHER)
    ledger.lend(T, OTHER)
    ledger.receive((5, 1))
    ledger.drop((5, 1))
    stats = ledger.stats()
    assert (stats.blocks, stats.held, stats.lent, stats.peers, stats.zeros) == (2, 1, 3, 2, 1)
