# SPDX-License-Identifier: Apache-2.0
"""A process's slabs on one device: allocate, lend, borrow, release; the same for every driver.

    allocate ─► DeviceBuffer ─ lend ─► DeviceRef ──(any road)──► borrow ─► DeviceBuffer
    last view dies ─► ours: free ◄── returned ◄── DeviceReleased ◄── take_releases: borrowed

What always holds: a slab has one tenant, who alone allocates in it; no count lies in shared
memory. A reference is checked before its memory can be seen: against our own book, or against
what is mapped here. Handing over a finished tensor calls no driver. Before a borrowed block is
given back or an own one is used again, the stream that used it has been waited for. Every method
may be called from any thread; the lock is never taken by a finalizer.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import msgspec

from actorserve.device.buffer import DeviceBuffer
from actorserve.device.driver import (
    DeviceDriver,
    DeviceError,
    OutOfDeviceMemory,
    StaleReference,
)
from actorserve.device.settings import DeviceSettings
from actorserve.device.shelf import OnSlab, SlabShelf
from actorserve.device.slab import Slab
from actorserve.errors import ConfigError, InternalError, InvalidArgument
from actorserve.forking import sever_after_fork
from actorserve.state.device_lease import Allocation
from actorserve.wire.device import (
    BlockKey,
    DeviceRef,
    DeviceReleased,
    SlabAccepted,
    SlabOffer,
    SlabRetired,
)

SUPERVISOR = 0
"""The peer that a stub knows; its broker counts who else has what."""

Death = tuple[Slab, int, int, bool, int | None]
"""Of a buffer: slab, slot, generation, whether a loan stands behind it, the stream that used it."""


class SlabPoolStats(msgspec.Struct, frozen=True):
    """Sizes in bytes. `used_bytes` is what somebody needs of our own slabs, here or elsewhere.

    `owed` counts releases that wait to be sent, `refused` those that came and fitted nothing.
    """

    own_slabs: int
    own_bytes: int
    used_bytes: int
    mapped_slabs: int
    retired_slabs: int
    views: int
    lent: int
    quarantined: int
    owed: int
    refused: int


class SlabPool:
    """The slabs of this process on the device `ordinal`. `epoch` is this process's, never reused.

    `on_slab(offer, fd)` is told of each slab of our own, before anything in it can be lent, and
    owns the descriptor; it must not call the pool. Without `can_create` all slabs are leased.
    ConfigError for settings that the driver cannot do.
    `before_growth` is called where no slab has room: it may bring releases that nobody has read.
    """

    def __init__(
        self,
        driver: DeviceDriver,
        *,
        epoch: int,
        ordinal: int = 0,
        settings: DeviceSettings | None = None,
        can_create: bool = True,
        on_slab: OnSlab | None = None,
    ) -> None:
        self.driver = driver
        self.epoch = epoch
        self.ordinal = ordinal
        self.uuid = driver.uuid(ordinal)
        self.settings = settings or DeviceSettings()
        if self.settings.foreign == "export" and not driver.can_export_foreign:
            raise ConfigError(
                f"device: foreign is 'export', which driver {driver.name!r} cannot; expected 'copy'"
            )
        self.before_growth: Callable[[], None] | None = None
        self._can_create = can_create
        self._shelf = SlabShelf(driver, epoch, ordinal, self.settings, on_slab)
        self._dead: deque[Death] = deque()
        self._owed: list[BlockKey] = []
        self._refused = 0
        self._lock = threading.Lock()
        self._severed = False
        sever_after_fork(self)

    # --- allocate ---------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> DeviceBuffer | None:
        """Return a new buffer. None: it is full, and host memory is to carry the bytes.

        OutOfDeviceMemory where it is full and `full` says so, the quota is reached, or the device
        has no room: an error of this request only. Growing takes milliseconds.
        """
        if nbytes < 0:
            raise InvalidArgument(f"a device buffer of {nbytes} bytes; expected 0 or more")
        buffer = self._allocate_here(nbytes)
        if buffer is None and self.before_growth is not None:
            self.before_growth()  # without the lock, which releases need
            buffer = self._allocate_here(nbytes)
        if buffer is not None:
            return buffer
        with self._lock:
            return self._allocate_anew(nbytes)

    def adopt(self, address: int, nbytes: int, *, stream: int = 0) -> DeviceBuffer | None:
        """Return a buffer with the bytes that a library has at `address`, ready to be lent.

        One more view where they lie in a block that is alive here, else a copy on the device, for
        which the same holds as for `allocate`; what is copied must live until the stream is done
        with it, as it is after `lend` where fences are `sync`.
        """
        with self._lock:
            self._reap()
            found = self._view_at(address, nbytes)
        if found is not None:
            found.use_on(stream)
            return found
        copy = self.allocate(nbytes)
        if copy is not None and nbytes:
            copy.use_on(stream)
            self.driver.copy_within(copy.address, address, nbytes, stream)
        return copy

    # --- references -------------------------------------------------------------------------------

    def lend(self, buffer: DeviceBuffer, *, peer: int = SUPERVISOR) -> DeviceRef:
        """Return a reference for a peer, whose loan it is until its release or its death.

        Where a stream has used the buffer, waits for it or records a fence, as set. A borrowed
        buffer may be passed on: send the reference before the releases.
        """
        slab = buffer.slab
        if buffer.pool is not self:
            raise InvalidArgument("a device buffer can be lent by its own pool only")
        buffer.address  # noqa: B018 (refuses a released one)
        if buffer.stream is not None:
            self._finish(buffer)
        with self._lock:
            if slab.is_own:
                slab.lease.lend(peer, buffer.slot, buffer.generation)
        return DeviceRef(
            slab.epoch,
            slab.number,
            buffer.slot,
            buffer.generation,
            buffer.offset,
            buffer.nbytes,
            buffer.fence,
        )

    def borrow(self, ref: DeviceRef) -> DeviceBuffer:
        """Return the memory of a reference that came: one loan, one release.

        StaleReference where its slab or block is gone; ProtocolError where it lies.
        """
        with self._lock:
            if self._dead:
                self._reap()
            slab = self._shelf.slabs.get((ref.epoch, ref.slab))
            if slab is None or slab.is_retired:
                raise StaleReference(
                    f"reference into slab {ref.slab} of epoch {ref.epoch}, which is not mapped here"
                )
            slab.borrow(ref)
            return DeviceBuffer(
                self, slab, ref.slot, ref.generation, ref.offset, ref.nbytes, ref.fence, True
            )

    @property
    def has_releases(self) -> bool:
        """Whether there may be something to give back; without the lock, so that it is quick."""
        return bool(self._dead or self._owed)

    def take_releases(self) -> DeviceReleased | None:
        """Return what is to be given back since the last call, or None.

        Waits for the streams that used it. Send it behind every reference that was lent before.
        """
        with self._lock:
            self._reap()
            owed = self._owed
            if not owed:
                return None
            self._owed = []
        return DeviceReleased(owed)

    def returned(self, message: DeviceReleased, *, peer: int = SUPERVISOR) -> int:
        """Take a peer's releases; return how many fitted nothing, which changes nothing."""
        with self._lock:
            refused = 0
            for epoch, number, slot, generation in message.blocks:
                slab = self._shelf.slabs.get((epoch, number))
                if (
                    slab is None
                    or not slab.is_own
                    or not slab.lease.returned(peer, slot, generation)
                ):
                    refused += 1
            self._refused += refused
            for slab in self._shelf.own:
                slab.give_back()
            return refused

    # --- slabs that travel ------------------------------------------------------------------------

    def has_slab(self, ref: DeviceRef) -> bool:
        """Tell whether a reference's slab is mapped here."""
        return (ref.epoch, ref.slab) in self._shelf.slabs

    def accept(self, offer: SlabOffer, fd: int) -> SlabAccepted:
        """Map a slab and take its descriptor over; the answer says why where that fails.

        A slab of our own epoch is a lease: we are its tenant. DeviceLost is raised.
        """
        with self._lock:
            return self._shelf.accept(offer, fd)

    def lease(self, epoch: int, number: int, nbytes: int) -> tuple[SlabOffer, int]:
        """Make a slab for another process to allocate in; what it lends from there we can borrow.

        Return the offer and the descriptor, which is the caller's. OutOfDeviceMemory.
        """
        if epoch == self.epoch:
            raise InvalidArgument("a process leases no slab to itself")
        with self._lock:
            return self._shelf.make(epoch, number, nbytes)

    def retire(self, message: SlabRetired) -> None:
        """Take no more references into a slab and unmap it with its last view; idempotent."""
        with self._lock:
            self._reap()
            self._shelf.retire((message.epoch, message.slab))

    def trim(self) -> list[SlabRetired]:
        """Give idle slabs of our own back to the device; return what to tell the others."""
        with self._lock:
            self._reap()
            idle = [slab for slab in self._shelf.own if slab.is_idle()]
            for slab in idle:
                self._shelf.retire((slab.epoch, slab.number))
            return [SlabRetired(slab.epoch, slab.number) for slab in idle]

    # --- deaths -----------------------------------------------------------------------------------

    def peer_died(self, peer: int, now_s: float) -> None:
        """Take a dead peer's loans back, after its exit was collected; usable after quarantine.

        Slabs that it was the tenant of are retired: views of them stay good.
        """
        with self._lock:
            self._reap()
            for slab in self._shelf.own:
                slab.lease.forget(peer, now_s + self.settings.quarantine_s)
            for name in [name for name in self._shelf.slabs if name[0] == peer]:
                self._shelf.retire(name)
            self._owed = [key for key in self._owed if key[0] != peer]

    def settle(self, now_s: float) -> float | None:
        """End the quarantines that are due; return when the next one is, or None."""
        with self._lock:
            dues = []
            for slab in self._shelf.own:
                slab.lease.settle(now_s)
                slab.give_back()
                due_s = slab.lease.next_due_s()
                if due_s is not None:
                    dues.append(due_s)
            return min(dues, default=None)

    # --- the whole --------------------------------------------------------------------------------

    def note_death(self, death: Death) -> None:
        """Take note that a buffer died; from any thread, inside garbage collection too."""
        if not self._severed:
            self._dead.append(death)

    def stats(self) -> SlabPoolStats:
        """Return sizes and counts as of now."""
        with self._lock:
            if not self._severed:
                self._reap()
            books = [slab.lease.stats() for slab in self._shelf.own]
            return SlabPoolStats(
                own_slabs=len(self._shelf.own),
                own_bytes=sum(slab.nbytes for slab in self._shelf.own),
                used_bytes=sum(book.used_bytes for book in books),
                mapped_slabs=len(self._shelf.slabs),
                retired_slabs=len(self._shelf.retired),
                views=self._shelf.views(),
                lent=sum(book.lent for book in books),
                quarantined=sum(book.quarantined for book in books),
                owed=len(self._owed),
                refused=self._refused,
            )

    def close(self) -> None:
        """Unmap everything; idempotent. Buffers that live must not be used any more."""
        with self._lock:
            for slab in self._forget():
                self.driver.close(slab.memory)

    def sever(self) -> None:
        """Forget everything and release nothing: this is a forked child and not the owner."""
        self._lock = threading.Lock()  # another thread of the parent may have held it
        self._forget()

    # --- inside -----------------------------------------------------------------------------------

    def _allocate_here(self, nbytes: int) -> DeviceBuffer | None:
        """Allocate in the slabs that there are."""
        with self._lock:
            self._reap()
            for slab in self._shelf.own:
                found = slab.take(nbytes)
                if found is not None:
                    return self._buffer(slab, found, nbytes)
        return None

    def _forget(self) -> list[Slab]:
        self._severed = True
        self._owed = []
        self._dead = deque()
        return self._shelf.forget()

    def _allocate_anew(self, nbytes: int) -> DeviceBuffer | None:
        """Do what is to be done where no slab has room."""
        settings = self.settings
        try:
            if not self._can_create or (self._shelf.own and settings.full != "grow"):
                raise OutOfDeviceMemory(f"{nbytes} bytes do not fit into the slabs on {self.uuid}")
            slab = self._shelf.grow(nbytes)
        except OutOfDeviceMemory:
            if settings.full == "host":
                return None
            raise
        found = slab.take(nbytes)
        if found is None:
            raise InternalError(f"a new slab has no room for {nbytes} bytes")
        return self._buffer(slab, found, nbytes)

    def _buffer(self, slab: Slab, block: Allocation, nbytes: int) -> DeviceBuffer:
        return DeviceBuffer(self, slab, block.slot, block.generation, block.offset, nbytes)

    def _finish(self, buffer: DeviceBuffer) -> None:
        """Make sure that who gets a reference finds the data complete, or a fence behind it."""
        stream = buffer.stream
        if stream is not None:
            if self.settings.fence == "event" and buffer.slab.is_own:
                buffer.fence = self.driver.record(buffer.slab.memory, stream)
                if buffer.fence:
                    return
            else:
                self.driver.synchronize(stream)
                buffer.fence = 0
            buffer.stream = None

    def _view_at(self, address: int, nbytes: int) -> DeviceBuffer | None:
        for slab in self._shelf.slabs.values():
            offset = address - slab.base
            if not 0 <= offset <= offset + nbytes <= slab.nbytes:
                continue
            block = slab.view(offset, nbytes)
            return None if block is None else DeviceBuffer(self, slab, *block, offset, nbytes)
        return None

    def _reap(self) -> None:
        """Settle the deaths of buffers. The lock is held."""
        dead = self._dead
        waited: set[int] = set()
        while dead:
            slab, slot, generation, is_loan, stream = dead.popleft()
            if stream is not None and stream not in waited:
                # Its work may still read or write what others get next.
                try:
                    self.driver.synchronize(stream)
                except DeviceError:
                    pass  # whatever the stream did, it does no more
                waited.add(stream)
            slab.views -= 1
            owed = slab.give_up(slot, generation, is_loan)
            if owed and not slab.is_retired:  # else nobody keeps count of it any more
                self._owed.extend([(slab.epoch, slab.number, slot, generation)] * owed)
            if slab.is_retired and not slab.views:
                self._shelf.unmap(slab)
