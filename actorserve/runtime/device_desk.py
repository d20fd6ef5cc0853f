# SPDX-License-Identifier: Apache-2.0
"""The supervisor's part of device memory, for all channels: slabs forwarded, references counted.

    stub's boot socket ─ SlabOffer ─► offered ─► SlabBroker ◄─ receive ─ a reference in a message
    lend: the offer first, then the message ─► the receiver        HeldRef: while we have it
    settle ─► DeviceReleased, SlabRetired to whom they concern

Belongs to the supervisor's loop; only HeldRefs may die elsewhere. What always holds: a reference
that came is held before anything else is done with it, and what it was lent as is counted before
its message can be read. There is no driver here, so that no device can break the supervisor.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from actorserve.clock import monotonic_s
from actorserve.device.broker import BrokerStats, SlabBroker
from actorserve.device.driver import StaleReference
from actorserve.errors import ProtocolError
from actorserve.wire.device import DeviceReleased, SlabAccepted, SlabOffer, SlabRetired
from actorserve.wire.device_ref import DeviceRef

__all__ = ["BrokerStats", "DeviceDesk", "DevicePeer", "HeldRef", "StaleReference"]

_log = logging.getLogger("actorserve")


class DevicePeer(Protocol):
    """The end of a channel, as the desk needs it; `arena` is the stub's number and its epoch.

    `device` is the driver and the UUID that the stub works on, None for no device.
    """

    arena: int
    device: tuple[str, str] | None

    def offer_slab(self, offer: SlabOffer, fd: int) -> None:
        """Send a slab's descriptor; a peer that is gone needs none."""

    def tell_of_device(self, message: DeviceReleased | SlabRetired) -> None:
        """Send what there is to hear."""

    def receive_segments(self) -> None:
        """Take whatever the peer has announced so far."""


class HeldRef:
    """A reference that we need: until `release`, or its death; `take` passes the need on."""

    __slots__ = ("_desk", "ref")

    def __init__(self, desk: DeviceDesk, ref: DeviceRef) -> None:
        self._desk: DeviceDesk | None = desk
        self.ref = ref

    @property
    def buffer(self) -> memoryview:
        """No bytes: they lie where this process does not see them."""
        return memoryview(b"")

    @property
    def nbytes(self) -> int:
        """How many bytes the reference names."""
        return self.ref.nbytes

    def take(self) -> DeviceRef:
        """Pass the need on to the caller, who has to `drop` it."""
        if self._desk is None:
            raise ProtocolError("a device reference was used after it had been given up")
        self._desk = None
        return self.ref

    def release(self) -> None:
        """Need it no longer; idempotent, harmless after `take`."""
        desk, self._desk = self._desk, None
        if desk is not None:
            desk.drop(self.ref)

    def __del__(self) -> None:
        self.release()


class DeviceDesk:
    """See the module's head."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, quarantine_s: float) -> None:
        self._loop = loop
        self._broker = SlabBroker(quarantine_s=quarantine_s)
        self._peers: dict[int, DevicePeer] = {}
        self._dropped: deque[DeviceRef] = deque()
        self._timer: asyncio.TimerHandle | None = None

    # --- peers and slabs --------------------------------------------------------------------------

    def join(self, peer: DevicePeer) -> None:
        """Let a channel take part."""
        self._broker.join(peer.arena)
        self._peers[peer.arena] = peer

    def leave(self, peer: DevicePeer) -> None:
        """Take note of a stub's death: its lanes were read to their end, its exit collected."""
        if self._peers.pop(peer.arena, None) is None:
            return
        self._broker.peer_died(peer.arena, monotonic_s())
        self.settle()
        self._end_quarantine()

    def offered(self, peer: DevicePeer, offer: SlabOffer, fd: int) -> None:
        """Take a slab's descriptor over. ProtocolError if it is not the peer's."""
        self._broker.keep(peer.arena, offer, fd)

    def accepted(self, peer: DevicePeer, message: SlabAccepted) -> None:
        """Hear whether a peer could map a slab."""
        self._broker.accepted(peer.arena, message)
        if message.error:
            _log.warning(
                "a stub cannot use the device memory of another one, which goes by the host's "
                "from now on: %s",
                message.error,
            )

    def retired(self, peer: DevicePeer, message: SlabRetired) -> None:
        """Hear that a tenant has given a slab back. ProtocolError if somebody needs it."""
        self._broker.retire(peer.arena, message)

    def can_take(self, peer: DevicePeer, ref: DeviceRef) -> bool:
        """Tell whether a stub can use a reference as it is."""
        if ref.epoch == peer.arena:
            return True
        return (
            peer.device is not None
            and self.device_of(ref) == peer.device
            and self._broker.can_reach(peer.arena, ref)
        )

    def device_of(self, ref: DeviceRef) -> tuple[str, str] | None:
        """Return the driver and the UUID of the memory that a reference names."""
        offer = self._broker.offer(ref.epoch, ref.slab)
        return None if offer is None else (offer.driver, offer.uuid)

    # --- references -------------------------------------------------------------------------------

    def receive(self, peer: DevicePeer, ref: DeviceRef) -> HeldRef:
        """Take a reference that came from a peer. ProtocolError where it is stale or lies."""
        if ref.epoch == peer.arena and self._broker.offer(ref.epoch, ref.slab) is None:
            peer.receive_segments()  # its offer was sent before
        self._broker.receive(peer.arena, ref)
        return HeldRef(self, ref)

    def drop(self, ref: DeviceRef) -> None:
        """Give up one need of ours; safe from any thread, settled by the loop's."""
        self._dropped.append(ref)

    def lend(self, peer: DevicePeer, refs: Iterable[DeviceRef]) -> None:
        """Count every reference of a message that is sent next, and let the peer map them.

        ProtocolError where one cannot be lent; `take_back` undoes it.
        """
        lent = []
        try:
            for ref in refs:
                unmapped = self._broker.lend(peer.arena, ref)
                lent.append(ref)
                if unmapped is not None:
                    try:
                        peer.offer_slab(*unmapped)
                    except BaseException:
                        self._broker.withdraw_offer(peer.arena, ref)
                        raise
        except BaseException:
            self.take_back(peer, lent)
            raise

    def take_back(self, peer: DevicePeer, refs: Sequence[DeviceRef]) -> None:
        """Count references out again whose message could not be sent."""
        if refs:
            self._broker.returned(peer.arena, DeviceReleased([ref.key for ref in refs]))

    def released(self, peer: DevicePeer, message: DeviceReleased) -> None:
        """Apply a peer's releases."""
        self._broker.returned(peer.arena, message)

    def settle(self) -> None:
        """Apply what was dropped, and tell tenants and importers what concerns them."""
        broker, dropped = self._broker, self._dropped
        while dropped:
            broker.drop(dropped.popleft())
        for number, message in broker.take_outgoing():
            peer = self._peers.get(number)
            if peer is not None:
                peer.tell_of_device(message)

    def _end_quarantine(self) -> None:
        """End the quarantines that are due, and come again for the next."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_s = self._broker.settle(monotonic_s())
        self.settle()
        if due_s is not None:
            delay_s = max(0.001, due_s - monotonic_s())
            self._timer = self._loop.call_later(delay_s, self._end_quarantine)

    # --- the whole --------------------------------------------------------------------------------

    def stats(self) -> BrokerStats:
        """Return sizes and counts, after settling."""
        self.settle()
        return self._broker.stats()

    def close(self) -> None:
        """Close every descriptor; idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._peers.clear()
        self._dropped.clear()
        self._broker.close()
