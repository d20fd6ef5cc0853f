# SPDX-License-Identifier: Apache-2.0
"""The supervisor's part of device memory: descriptors of slabs, and who has which block.

    tenant ─ keep(offer, fd) ─► one descriptor a slab ─ lend ─► what to map first, by whom
    ref came ─► receive: our own need ─► lend: a peer's ─► drop / returned / death: less
    nobody left ─► the tenant is told; or, where it is dead, importers are, and the slab ends

No driver, no context, no mapping: what breaks a device in a stub cannot break this process. What
always holds: a peer passes on only what it was given or is the tenant of; a dead one gives back
all it had, after the quarantine; references of a dead tenant that came before its death stay
good, because the descriptor here keeps the memory, and none that comes afterwards is taken.
"""

from __future__ import annotations

import os
from collections import deque

import msgspec

from actorserve.device.driver import StaleReference
from actorserve.errors import AlreadyExists, InternalError, ProtocolError
from actorserve.forking import sever_after_fork
from actorserve.shm.ledger import Key, Ledger
from actorserve.state.device_lease import LAST_GENERATION
from actorserve.wire.device import (
    DeviceRef,
    DeviceReleased,
    SlabAccepted,
    SlabOffer,
    SlabRetired,
)

SlabName = tuple[int, int]
"""(epoch, slab)"""


class BrokerStats(msgspec.Struct, frozen=True):
    """Peers, slabs and their bytes, blocks that somebody needs, what waits in quarantine.

    `refused` counts releases that fitted nothing.
    """

    peers: int
    slabs: int
    slab_bytes: int
    blocks: int
    held: int
    lent: int
    quarantined: int
    refused: int


class _Kept:
    """A slab: its descriptor, and which peers were sent it (False: they could not map it)."""

    __slots__ = ("blocks", "fd", "importers", "is_dead", "offer")

    def __init__(self, offer: SlabOffer, fd: int) -> None:
        self.offer = offer
        self.fd = fd
        self.importers: dict[int, bool] = {}
        self.is_dead = False
        self.blocks: dict[tuple[int, int], tuple[int, int]] = {}  # (slot, generation): extent


class SlabBroker:
    """Peers are numbered by their epochs. One thread at a time; callers lock."""

    def __init__(self, *, quarantine_s: float = 0.1) -> None:
        self._quarantine_s = quarantine_s
        self._peers: set[int] = set()
        self._slabs: dict[SlabName, _Kept] = {}
        self._ledger = Ledger()
        self._quarantine: deque[tuple[float, Key, int]] = deque()
        self._owed: dict[int, list[tuple[int, int, int, int]]] = {}
        self._retired: list[tuple[int, SlabRetired]] = []
        self._refused = 0
        sever_after_fork(self)

    # --- peers and slabs --------------------------------------------------------------------------

    def join(self, peer: int) -> None:
        """Let a process take part; AlreadyExists for a number that lives."""
        if peer in self._peers:
            raise AlreadyExists(f"peer {peer} takes part already")
        self._peers.add(peer)

    def keep(self, peer: int, offer: SlabOffer, fd: int) -> None:
        """Take a slab's descriptor over, also on failure. ProtocolError if it is not the peer's."""
        name = (offer.epoch, offer.slab)
        if (
            peer not in self._peers
            or offer.epoch != peer
            or name in self._slabs
            or not _fits(offer.slab)
        ):
            os.close(fd)
            raise ProtocolError(
                f"peer {peer} offered slab {offer.slab} of epoch {offer.epoch}, which is not its "
                "own or known already"
            )
        self._slabs[name] = _Kept(offer, fd)

    def accepted(self, peer: int, message: SlabAccepted) -> None:
        """Take a peer's word on whether it could map a slab."""
        kept = self._slabs.get((message.epoch, message.slab))
        if kept is not None and peer in kept.importers:
            kept.importers[peer] = not message.error

    def offer(self, epoch: int, slab: int) -> SlabOffer | None:
        """Return how a slab was offered; None for one that is gone."""
        kept = self._slabs.get((epoch, slab))
        return None if kept is None else kept.offer

    def withdraw_offer(self, peer: int, ref: DeviceRef) -> None:
        """Hear that the offer which `lend` returned did not reach the peer: it needs another."""
        kept = self._slabs.get((ref.epoch, ref.slab))
        if kept is not None:
            kept.importers.pop(peer, None)

    def can_reach(self, peer: int, ref: DeviceRef) -> bool:
        """Tell whether a peer can use a reference, as far as is known: else go by host memory."""
        kept = self._slabs.get((ref.epoch, ref.slab))
        return kept is not None and kept.importers.get(peer, True)

    def retire(self, peer: int, message: SlabRetired) -> None:
        """Forget a slab that its tenant gave up; ProtocolError if somebody needs it."""
        name = (message.epoch, message.slab)
        kept = self._slabs.get(name)
        if kept is None or message.epoch != peer or kept.blocks:
            raise ProtocolError(
                f"peer {peer} retired slab {message.slab} of epoch {message.epoch}, which is not "
                "its own or in use"
            )
        self._end(name, kept)

    # --- references -------------------------------------------------------------------------------

    def receive(self, peer: int, ref: DeviceRef) -> None:
        """Take a reference that came from a peer: we need it until `drop`.

        StaleReference where its slab, tenant or block is gone; ProtocolError where it lies or the
        peer does not have it.
        """
        kept = self._slabs.get((ref.epoch, ref.slab))
        if kept is None or peer not in self._peers:
            raise StaleReference(
                f"reference into slab {ref.slab} of epoch {ref.epoch}, which is gone"
            )
        end = ref.offset + ref.nbytes
        if ref.offset < 0 or ref.nbytes < 0 or end > kept.offer.nbytes:
            raise ProtocolError(
                f"device reference from peer {peer}: offset {ref.offset} and nbytes {ref.nbytes} "
                f"lie outside a slab of {kept.offer.nbytes} bytes"
            )
        if ref.slot < 0 or not 0 < ref.generation <= LAST_GENERATION:
            raise ProtocolError(
                f"device reference from peer {peer}: slot {ref.slot}, generation {ref.generation}"
            )
        key = _key(ref)
        block = (ref.slot, ref.generation)
        if peer == ref.epoch:
            start, stop = kept.blocks.get(block, (ref.offset, end))
            kept.blocks[block] = min(start, ref.offset), max(stop, end)
            self._ledger.receive(key)
            self._give_zeros()
            return
        if not self._ledger.lent(peer, key):
            raise StaleReference(
                f"peer {peer} passed on slot {ref.slot}, generation {ref.generation} of slab "
                f"{ref.slab} of epoch {ref.epoch}, which it does not have"
            )
        start, stop = kept.blocks[block]
        if ref.offset < start or end > stop:
            raise ProtocolError(f"peer {peer} passed on more of a device block than it was given")
        self._ledger.hold(key)

    def drop(self, ref: DeviceRef) -> None:
        """Need a reference no longer: once for each `receive`. InternalError otherwise."""
        self._ledger.drop(_key(ref))
        self._give_zeros()

    def lend(self, peer: int, ref: DeviceRef) -> tuple[SlabOffer, int] | None:
        """Count a reference that is being sent to a peer; we must need it ourselves meanwhile.

        Return the slab's offer and its descriptor (which stays ours) where the peer has to map it
        first. StaleReference if nobody needs the block any more, or the peer is gone.
        """
        key = _key(ref)
        kept = self._slabs.get((ref.epoch, ref.slab))
        if kept is None or peer not in self._peers or not self._ledger.total(key):
            raise StaleReference(
                f"reference to slot {ref.slot} of slab {ref.slab} of epoch {ref.epoch}, which is "
                f"gone, or peer {peer} is"
            )
        self._ledger.lend(peer, key)
        if peer == ref.epoch or peer in kept.importers:
            return None
        kept.importers[peer] = True
        return kept.offer, kept.fd

    def returned(self, peer: int, message: DeviceReleased) -> int:
        """Take a peer's releases; return how many fitted nothing, which changes nothing."""
        refused = 0
        for epoch, slab, slot, generation in message.blocks:
            try:
                self._ledger.returned(peer, _pack(epoch, slab, slot, generation))
            except (ProtocolError, ValueError):
                refused += 1
        self._refused += refused
        self._give_zeros()
        return refused

    # --- deaths -----------------------------------------------------------------------------------

    def peer_died(self, peer: int, now_s: float) -> None:
        """Take note of a death, after the exit was collected. `settle` later ends it."""
        self._peers.discard(peer)
        for key, count in self._ledger_loans(peer).items():
            self._quarantine.append((now_s + self._quarantine_s, key, count))
        self._owed.pop(peer, None)
        self._retired = [each for each in self._retired if each[0] != peer]
        for name, kept in list(self._slabs.items()):
            kept.importers.pop(peer, None)
            if name[0] == peer:
                kept.is_dead = True
                if not kept.blocks:
                    self._end(name, kept)

    def settle(self, now_s: float) -> float | None:
        """End the quarantines that are due; return when the next one is, or None."""
        while self._quarantine and self._quarantine[0][0] <= now_s:
            _, key, count = self._quarantine.popleft()
            for _ in range(count):
                self._ledger.drop(key)
        self._give_zeros()
        return self._quarantine[0][0] if self._quarantine else None

    # --- the whole --------------------------------------------------------------------------------

    def take_outgoing(self) -> list[tuple[int, DeviceReleased | SlabRetired]]:
        """Return what is to be told to whom since the last call, in order."""
        outgoing: list[tuple[int, DeviceReleased | SlabRetired]] = []
        if self._owed:
            outgoing += [(peer, DeviceReleased(blocks)) for peer, blocks in self._owed.items()]
            self._owed = {}
        if self._retired:
            outgoing += self._retired
            self._retired = []
        return outgoing

    def stats(self) -> BrokerStats:
        """Return sizes and counts as of now."""
        ledger = self._ledger.stats()
        return BrokerStats(
            peers=len(self._peers),
            slabs=len(self._slabs),
            slab_bytes=sum(kept.offer.nbytes for kept in self._slabs.values()),
            blocks=ledger.blocks,
            held=ledger.held,
            lent=ledger.lent,
            quarantined=sum(count for _, _, count in self._quarantine),
            refused=self._refused,
        )

    def close(self) -> None:
        """Close every descriptor and forget everything; idempotent."""
        for kept in self._slabs.values():
            os.close(kept.fd)
        self._slabs = {}
        self._ledger = Ledger()
        self._quarantine.clear()
        self._owed = {}
        self._retired = []

    def sever(self) -> None:
        """Close what a forked child was born with: it would keep the memory of dead stubs."""
        self.close()

    # --- inside -----------------------------------------------------------------------------------

    def _ledger_loans(self, peer: int) -> dict[Key, int]:
        """Turn a dead peer's loans into needs of our own; return them."""
        ledger = self._ledger
        loans = ledger.forget(peer)
        for key, count in loans.items():
            for _ in range(count):
                ledger.hold(key)
        # What `forget` brought to zero is needed again, before anybody was told.
        zeros = [key for key in ledger.take_zeros() if key not in loans]
        if zeros:
            raise InternalError(f"the ledger had {len(zeros)} releases that nobody had taken")
        return loans

    def _give_zeros(self) -> None:
        for key in self._ledger.take_zeros():
            epoch, slab, slot, generation = _unpack(key)
            kept = self._slabs.get((epoch, slab))
            if kept is None:
                continue
            if not self._ledger.total(key):
                kept.blocks.pop((slot, generation), None)
            if not kept.is_dead:
                self._owed.setdefault(epoch, []).append((epoch, slab, slot, generation))
            elif not kept.blocks:
                self._end((epoch, slab), kept)

    def _end(self, name: SlabName, kept: _Kept) -> None:
        del self._slabs[name]
        os.close(kept.fd)
        self._retired += [(peer, SlabRetired(*name)) for peer in kept.importers]


def _fits(number: int) -> bool:
    return 0 <= number < 1 << 32


def _key(ref: DeviceRef) -> Key:
    return ref.epoch << 32 | ref.slab, ref.slot << 32 | ref.generation


def _pack(epoch: int, slab: int, slot: int, generation: int) -> Key:
    if not (_fits(slab) and _fits(generation)):
        raise ValueError("a slab or generation beyond 32 bits")
    return epoch << 32 | slab, slot << 32 | generation


def _unpack(key: Key) -> tuple[int, int, int, int]:
    low = (1 << 32) - 1
    return key[0] >> 32, key[0] & low, key[1] >> 32, key[1] & low
