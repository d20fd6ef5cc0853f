# SPDX-License-Identifier: Apache-2.0
"""The supervisor's books: who may pass what on, what comes back, when a slab ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from actorserve.device.broker import SlabBroker
from actorserve.device.driver import StaleReference
from actorserve.errors import AlreadyExists, InternalError, ProtocolError
from actorserve.wire.device import (
    DeviceRef,
    DeviceReleased,
    SlabAccepted,
    SlabOffer,
    SlabRetired,
)

REF = DeviceRef(1, 1, 0, 1, 512, 100)


def _descriptor() -> int:
    return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


@pytest.fixture
def broker() -> Iterator[SlabBroker]:
    """Return a broker of three peers; the first one has a slab of 4096 bytes."""
    made = SlabBroker()
    for peer in (1, 2, 3):
        made.join(peer)
    made.keep(1, SlabOffer(1, 1, "emulated", "emulated-0", 4096), _descriptor())
    yield made
    made.close()


def test_each_sending_of_the_tenant_is_released_once(broker: SlabBroker) -> None:
    """However many needs there are in between."""
    broker.receive(1, REF)
    broker.receive(1, REF)
    broker.lend(2, REF)
    broker.drop(REF)
    broker.drop(REF)
    assert broker.take_outgoing() == [(1, DeviceReleased([REF.key]))], "the second sending"
    assert broker.returned(2, DeviceReleased([REF.key])) == 0
    assert broker.take_outgoing() == [(1, DeviceReleased([REF.key]))]
    assert broker.stats().blocks == 0


def test_a_peer_maps_a_slab_once_and_the_tenant_never(broker: SlabBroker) -> None:
    """The offer comes with the first reference; its descriptor stays the broker's."""
    broker.receive(1, REF)
    first = broker.lend(2, REF)
    assert first is not None and first[0].slab == 1
    assert broker.lend(2, REF) is None
    assert broker.lend(1, REF) is None
    assert broker.can_reach(2, REF)
    broker.accepted(2, SlabAccepted(1, 1, "no such device"))
    assert not broker.can_reach(2, REF) and broker.can_reach(3, REF)


def test_a_peer_passes_on_only_what_it_has(broker: SlabBroker) -> None:
    """Neither what it never had nor what it gave back, nor more bytes of it."""
    broker.receive(1, REF)
    with pytest.raises(StaleReference, match="does not have"):
        broker.receive(2, REF)
    broker.lend(2, REF)
    broker.receive(2, REF)
    for change in ({"offset": 511}, {"nbytes": 101}):
        with pytest.raises(ProtocolError, match="more"):
            broker.receive(2, msgspec.structs.replace(REF, **change))
    broker.returned(2, DeviceReleased([REF.key]))
    with pytest.raises(StaleReference):
        broker.receive(2, REF)


@pytest.mark.parametrize(
    "change",
    [{"offset": -1}, {"nbytes": 4000}, {"slot": -1}, {"generation": 0}, {"generation": 1 << 32}],
    ids=str,
)
def test_a_tenant_that_lies_is_refused(broker: SlabBroker, change: dict[str, int]) -> None:
    """An error, and nothing is counted."""
    with pytest.raises(ProtocolError):
        broker.receive(1, msgspec.structs.replace(REF, **change))
    assert broker.stats().blocks == 0


def test_an_offer_that_is_not_the_peers_closes_its_descriptor(broker: SlabBroker) -> None:
    """Another's epoch, a number that is known, a stranger."""
    for peer, epoch, slab in ((2, 1, 5), (1, 1, 1), (9, 9, 1), (2, 2, -1)):
        with pytest.raises(ProtocolError):
            broker.keep(peer, SlabOffer(epoch, slab, "emulated", "emulated-0", 10), _descriptor())
    assert broker.stats().slabs == 1
    with pytest.raises(AlreadyExists):
        broker.join(1)


def test_a_repeated_release_is_counted_and_ignored(broker: SlabBroker) -> None:
    """Nothing is freed that somebody needs."""
    broker.receive(1, REF)
    broker.lend(2, REF)
    release = DeviceReleased([REF.key])
    assert broker.returned(2, release) == 0
    assert broker.returned(2, release) == 1
    assert broker.returned(3, DeviceReleased([(1, 1, 0, 1 << 40), (-1, 5, 1, 1)])) == 2
    assert broker.take_outgoing() == []
    broker.drop(REF)
    with pytest.raises(InternalError):
        broker.drop(REF)
    assert broker.stats().refused == 3


def test_a_dead_tenants_slab_lives_as_long_as_somebody_needs_it(broker: SlabBroker) -> None:
    """Then its importers are told; none of its references is taken after the death."""
    broker.receive(1, REF)
    broker.lend(2, REF)
    broker.peer_died(1, 0.0)
    broker.drop(REF)
    assert broker.stats().slabs == 1
    with pytest.raises(StaleReference):
        broker.receive(1, REF)
    broker.returned(2, DeviceReleased([REF.key]))
    assert broker.take_outgoing() == [(2, SlabRetired(1, 1))]
    assert broker.stats().slabs == 0
    with pytest.raises(StaleReference):
        broker.lend(3, REF)


def test_a_dead_borrowers_loans_wait_in_quarantine(broker: SlabBroker) -> None:
    """Both of a block that was lent twice; the tenant hears of it once."""
    broker.receive(1, REF)
    broker.lend(2, REF)
    broker.lend(2, REF)
    broker.drop(REF)
    broker.peer_died(2, 1.0)
    assert broker.stats().quarantined == 2
    assert broker.settle(1.05) == pytest.approx(1.1)
    assert broker.take_outgoing() == []
    assert broker.settle(1.2) is None
    assert broker.take_outgoing() == [(1, DeviceReleased([REF.key]))]


def test_a_slab_that_is_needed_cannot_be_retired(broker: SlabBroker) -> None:
    """Nor by anybody but its tenant; then its importers are told."""
    broker.receive(1, REF)
    broker.lend(2, REF)
    for peer in (1, 2):
        with pytest.raises(ProtocolError):
            broker.retire(peer, SlabRetired(1, 1))
    broker.drop(REF)
    broker.returned(2, DeviceReleased([REF.key]))
    broker.retire(1, SlabRetired(1, 1))
    assert (2, SlabRetired(1, 1)) in broker.take_outgoing()


def test_a_fork_does_not_keep_the_memory_of_dead_stubs(broker: SlabBroker) -> None:
    """A child's copies of the descriptors are closed."""
    broker.sever()
    assert broker.stats().slabs == 0


def test_the_broker_loads_no_driver() -> None:
    """What a driver breaks cannot break the supervisor."""
    program = (
        "import sys, actorserve.device.broker as broker\n"
        "broker.SlabBroker().close()\n"
        "print([name for name in sys.modules if name.split('.')[0] == 'cuda'])\n"
        "print('actorserve.device.cuda' in sys.modules)\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert out.stdout.split("\n")[:2] == ["[]", "False"]
