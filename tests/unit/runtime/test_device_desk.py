# SPDX-License-Identifier: Apache-2.0
"""The supervisor's desk for device memory: offers before references, holds, and a full socket."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Iterator

import pytest

from actorserve.errors import ProtocolError, ResourceExhausted
from actorserve.runtime.device_desk import DeviceDesk, StaleReference
from actorserve.wire.device import DeviceReleased, SlabAccepted, SlabOffer, SlabRetired
from actorserve.wire.device_ref import DeviceRef

EMULATED = ("emulated", "emulated-0")


class Peer:
    """A stub's channel that keeps what it is to send."""

    def __init__(self, desk: DeviceDesk, number: int) -> None:
        self.arena = number
        self.device: tuple[str, str] | None = EMULATED
        self.offers: list[SlabOffer] = []
        self.told: list[DeviceReleased | SlabRetired] = []
        self.waiting: list[SlabOffer] = []
        self.is_full = False
        self._desk = desk
        desk.join(self)

    def offer_slab(self, offer: SlabOffer, fd: int) -> None:
        if self.is_full:
            raise ResourceExhausted("the boot socket is full")
        os.fstat(fd)
        self.offers.append(offer)

    def tell_of_device(self, message: DeviceReleased | SlabRetired) -> None:
        self.told.append(message)

    def receive_segments(self) -> None:
        while self.waiting:
            fd = os.open(os.devnull, os.O_RDONLY)
            self._desk.offered(self, self.waiting.pop(), fd)


@pytest.fixture
def desk() -> Iterator[DeviceDesk]:
    """Return a desk whose quarantine is over at once."""
    loop = asyncio.new_event_loop()
    desk = DeviceDesk(loop, quarantine_s=0.0)
    yield desk
    desk.close()
    loop.close()


@pytest.fixture
def tenant(desk: DeviceDesk) -> Peer:
    """Return a stub with a slab that it has just announced."""
    peer = Peer(desk, 2)
    peer.waiting.append(SlabOffer(2, 1, *EMULATED, 1 << 20))
    return peer


def ref(slot: int = 0, epoch: int = 2) -> DeviceRef:
    """Return a reference into the tenant's slab."""
    return DeviceRef(epoch, 1, slot, 1, slot * 512, 100)


def test_a_reference_brings_its_slab_to_who_gets_it_first(desk, tenant):
    """The announcement is read when it is needed, sent on once, and followed by all releases."""
    borrower = Peer(desk, 3)
    held = desk.receive(tenant, ref())
    assert desk.can_take(borrower, ref())
    assert desk.can_take(tenant, ref())
    desk.lend(borrower, [held.ref])
    desk.lend(borrower, [held.ref])
    assert [offer.slab for offer in borrower.offers] == [1]
    held.release()
    held.release()
    desk.settle()
    assert tenant.told == []
    desk.released(borrower, DeviceReleased([ref().key] * 2))
    desk.settle()
    assert tenant.told == [DeviceReleased([ref().key])]
    assert desk.stats().blocks == 0


def test_a_hold_ends_with_its_object_unless_it_was_taken(desk, tenant):
    """Whoever takes it has to drop it; a second taking is an error."""
    desk.receive(tenant, ref(0))
    taken = desk.receive(tenant, ref(1))
    assert (taken.nbytes, taken.buffer.nbytes) == (100, 0)
    mine = taken.take()
    with pytest.raises(ProtocolError, match="given up"):
        taken.take()
    del taken
    gc.collect()
    desk.settle()
    assert tenant.told == [DeviceReleased([ref(0).key])]
    assert desk.stats().held == 1
    desk.drop(mine)
    assert desk.stats().held == 0


def test_an_offer_that_could_not_be_sent_is_made_again(desk, tenant):
    """A full boot socket costs that message only, and none of its loans stays."""
    borrower = Peer(desk, 3)
    held = [desk.receive(tenant, ref(0)), desk.receive(tenant, ref(1))]
    borrower.is_full = True
    with pytest.raises(ResourceExhausted):
        desk.lend(borrower, [each.ref for each in held])
    assert desk.stats().lent == 0
    borrower.is_full = False
    desk.lend(borrower, [each.ref for each in held])
    assert len(borrower.offers) == 1
    assert desk.stats().lent == 2


def test_who_cannot_use_a_slab_is_known(desk, tenant):
    """Another device, another driver, none at all, or a slab that could not be mapped."""
    held = desk.receive(tenant, ref())
    others = [("emulated", "emulated-1"), ("cuda", "emulated-0"), None]
    for number, device in enumerate(others, 3):
        peer = Peer(desk, number)
        peer.device = device
        assert not desk.can_take(peer, held.ref)
    failing = Peer(desk, 9)
    desk.lend(failing, [held.ref])
    assert desk.can_take(failing, held.ref)
    desk.accepted(failing, SlabAccepted(2, 1, "no addresses are left"))
    assert not desk.can_take(failing, held.ref)


def test_a_dead_tenants_slab_goes_with_its_last_reference(desk, tenant):
    """What came before its death can still be lent; what comes afterwards is refused."""
    borrower = Peer(desk, 3)
    held = desk.receive(tenant, ref())
    desk.leave(tenant)
    with pytest.raises(StaleReference):
        desk.receive(tenant, ref(1))
    desk.lend(borrower, [held.ref])
    held.release()
    assert desk.stats().slabs == 1
    desk.released(borrower, DeviceReleased([ref().key]))
    assert desk.stats().slabs == 0
    assert borrower.told == [SlabRetired(2, 1)]
    assert tenant.told == []
