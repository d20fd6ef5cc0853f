# SPDX-License-Identifier: Apache-2.0
"""The supervisor's side of tensor memory: who holds which block, and who has to be told.

                 lend (Execute sent)                    returned (release ring)
    own arena  ───────────────────────►  peer's count  ─────────────────────────►  zero: freed here
    peer's arena ── received ─► held by views ── last view dies ─► zero: release sent to its owner

Every block that passes through the supervisor is counted in one ledger: its own holds (requests
that wait, views that are alive) and each peer's loans. A peer's death gives all its loans back.
Belongs to one loop's thread; only `Slab.release` and dying views may come from elsewhere.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Executor
from typing import Any, Protocol, cast

import msgspec
import numpy as np

from actorserve.errors import ProtocolError
from actorserve.runtime.device_desk import DeviceDesk, DevicePeer, HeldRef
from actorserve.shm.arena import Arena, ArenaStats
from actorserve.shm.ledger import Ledger
from actorserve.shm.segment import Segment
from actorserve.shm.view import Views
from actorserve.wire.device_ref import DeviceRef
from actorserve.wire.messages import Handle, WireTensor

__all__ = ["ArenaSlab", "BorrowedSlab", "Exchange", "ExchangeStats", "HeldRef", "Key", "Peer"]

_BYTE = np.dtype(np.uint8)
Key = tuple[int, int]


class ExchangeStats(msgspec.Struct, frozen=True):
    """What the supervisor's tensor memory holds (bytes, counts)."""

    arena: ArenaStats
    held_blocks: int
    live_views: int


class Peer(Protocol):
    """The end of a channel, as the exchange needs it."""

    arena: int

    def announce(self, arena: int, index: int, segment: Segment) -> None:
        """Send the descriptor of a segment that the peer does not know yet."""

    def knows(self, arena: int, index: int) -> bool:
        """Whether the peer can map that segment."""

    def return_block(self, arena: int, block: int) -> None:
        """Tell the owner that nobody here holds its block any more."""

    def receive_segments(self) -> None:
        """Map whatever the peer has announced so far."""

    def pump(self) -> None:
        """Read the peer's messages and releases now."""


class ArenaSlab:
    """A block of the supervisor's arena that is being filled; see triton.inference.Slab."""

    __slots__ = ("_exchange", "buffer", "handle")

    def __init__(self, exchange: Exchange, handle: Handle, buffer: memoryview) -> None:
        self._exchange: Exchange | None = exchange
        self.handle = handle
        self.buffer = buffer

    @property
    def nbytes(self) -> int:
        """How many bytes were asked for."""
        return self.buffer.nbytes

    def take(self) -> Handle:
        """Pass the block's hold on to the caller, who has to drop it."""
        if self._exchange is None:
            raise ProtocolError("a slab was used after it had been released or taken")
        self._exchange = None
        return self.handle

    def release(self) -> None:
        """Give the memory back; idempotent, harmless after `take`."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.drop(self.handle)


class BorrowedSlab(ArenaSlab):
    """A body in a peer's arena that another one is to have: the same as a slab of our own.

    The memory stays while `buffer` does; `take` turns that into a hold of the caller's.
    """

    __slots__ = ()

    def take(self) -> Handle:
        """Pass a hold on to the caller; the handle says whether others use the block too."""
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            raise ProtocolError("a slab was used after it had been released or taken")
        handle = self.handle
        exchange.hold(handle)
        # Two holds are ours by now: this view's, and the one that is passed on.
        if exchange.holders(handle) > 2:
            handle = msgspec.structs.replace(handle, shared=True)
        self.buffer = _NOTHING
        return handle

    def release(self) -> None:
        """Let the memory go; idempotent, harmless after `take`."""
        self._exchange = None
        self.buffer = _NOTHING


_NOTHING = memoryview(b"")


class Exchange:
    """Count, map and forward tensor memory for all channels of one supervisor."""

    def __init__(
        self, arena: int, *, first_segment_bytes: int = 4 << 20, growth_bytes: int = 0
    ) -> None:
        self._arena = Arena(
            arena,
            first_segment_bytes=first_segment_bytes,
            growth_bytes=growth_bytes,
            on_segment=self._on_own_segment,
        )
        self._views = Views()
        self._ledger = Ledger()
        self._segments: dict[Key, Segment] = {}
        self._peers: dict[int, Peer] = {}
        self._orphans: set[int] = set()  # arenas of dead peers that somebody still needs
        self._dropped: deque[Key] = deque()
        self._growing: asyncio.Future[None] | None = None
        self.devices: DeviceDesk | None = None  # where stubs have device memory

    @property
    def arena(self) -> int:
        """The number of the supervisor's own arena."""
        return self._arena.arena_id

    def _on_own_segment(self, arena: int, index: int, segment: Segment) -> None:
        self._segments[arena, index] = segment
        self._views.add_segment(arena, index, segment)

    # --- peers -----------------------------------------------------------------------------------

    def add_peer(self, peer: Peer) -> None:
        """Let a channel take part."""
        self._peers[peer.arena] = peer

    def remove_peer(self, peer: Peer) -> None:
        """Take back all that a dead peer held; views of its memory stay valid."""
        if self._peers.pop(peer.arena, None) is None:
            return
        self._ledger.forget(peer.arena)
        self.settle()
        if self._ledger.knows_arena(peer.arena):
            # Another peer has not mapped it yet, perhaps: its segments are sent on first use.
            self._orphans.add(peer.arena)
        else:
            self._forget_arena(peer.arena)

    def _forget_arena(self, arena: int) -> None:
        """Let the segments of a dead peer go; views that are alive keep their memory."""
        self._orphans.discard(arena)
        self._views.forget_arena(arena)
        for key in [key for key in self._segments if key[0] == arena]:
            del self._segments[key]

    def add_segment(self, arena: int, index: int, segment: Segment) -> None:
        """Map a segment that a peer announced of its own arena."""
        self._segments[arena, index] = segment
        self._views.add_segment(arena, index, segment)

    # --- memory of our own -----------------------------------------------------------------------

    def allocate(self, nbytes: int) -> ArenaSlab | None:
        """Return a slab of `nbytes`, held once; None where the arena has to grow first."""
        block = self._arena.try_allocate(nbytes)
        if block is None:
            self.settle()
            block = self._arena.try_allocate(nbytes)
            if block is None:
                return None
        handle = self._arena.handle(block, nbytes)
        self._ledger.hold((handle.arena, handle.block))
        return ArenaSlab(self, handle, self._arena.buffer(block, nbytes))

    def allocate_now(self, nbytes: int) -> ArenaSlab:
        """Return a slab, growing the arena inline where it must: for small bodies only."""
        slab = self.allocate(nbytes)
        while slab is None:
            self._arena.adopt(self._arena.prepare(nbytes))
            slab = self.allocate(nbytes)
        return slab

    async def grow(self, nbytes: int, executor: Executor | None = None) -> None:
        """Make room for `nbytes` off the loop. Raises ResourceExhausted.

        One growth runs at a time: whoever waited looks again, so that a burst of large requests
        grows the arena by what it needs and not once for each.
        """
        if self._growing is not None:
            await asyncio.shield(self._growing)
            return
        for peer in list(self._peers.values()):
            peer.pump()
        slab = self.allocate(nbytes)
        if slab is not None:
            slab.release()
            return
        loop = asyncio.get_running_loop()
        self._growing = loop.create_future()
        try:
            segment = await loop.run_in_executor(executor, self._arena.prepare, nbytes)
            self._arena.adopt(segment)
        finally:
            self._growing.set_result(None)
            self._growing = None

    def drop(self, handle: Handle) -> None:
        """Give up one hold of our own; safe from any thread, settled by the loop's thread."""
        self._dropped.append((handle.arena, handle.block))

    def hold(self, handle: Handle) -> None:
        """Take one hold of our own."""
        self._ledger.hold((handle.arena, handle.block))

    # --- sending and receiving -------------------------------------------------------------------

    def announce(self, peer: Peer, handles: Iterable[Handle]) -> None:
        """Let `peer` map what these handles name, before the message with them is sent."""
        for handle in handles:
            if handle.arena != peer.arena and not peer.knows(handle.arena, handle.segment):
                segment = self._segments[handle.arena, handle.segment]
                peer.announce(handle.arena, handle.segment, segment)

    def lend(self, peer: Peer, handles: Iterable[Handle]) -> None:
        """Count every handle in a message that has just been sent to `peer`.

        Afterwards, so that a message that could not be sent counts nothing; no release can have
        been read before, because both happen on the loop's thread.
        """
        for handle in handles:
            self._ledger.lend(peer.arena, (handle.arena, handle.block))

    def returned(self, peer: Peer, keys: Iterable[Key]) -> None:
        """Apply what a peer put on its release ring. An unknown loan is a ProtocolError."""
        for key in keys:
            self._ledger.returned(peer.arena, key)

    def receive(self, peer: Peer, handle: Handle) -> memoryview:
        """Return a read-only view of a body that `peer` sent by handle; it holds the block.

        Raises ProtocolError where the handle names nothing that the peer may send.
        """
        self._count_in(peer, handle)
        try:
            if not self._views.has_segment(handle.arena, handle.segment):
                self._expect_segment(peer, handle)
            array = self._views.view(handle, _BYTE, (handle.nbytes,), writable=False)
        except ProtocolError:
            self._dropped.append((handle.arena, handle.block))
            raise
        return memoryview(array)  # type: ignore[arg-type]  # numpy's stubs lack the buffer

    def borrow(self, peer: Peer, handle: Handle) -> BorrowedSlab:
        """Return a body that `peer` sent by handle, to be sent on. Raises as `receive`."""
        return BorrowedSlab(self, handle, self.receive(peer, handle))

    def holders(self, handle: Handle) -> int:
        """Return how many holds and loans there are on a block."""
        return self._ledger.total((handle.arena, handle.block))

    def is_shared(self, handle: Handle, sender: int) -> bool:
        """Whether others than whoever holds this one view of ours use a block that was sent to us.

        The `sender` (an arena's number) has let go of what is not its own, see StubEnd.own; its
        releases may only not have come yet.
        """
        key = (handle.arena, handle.block)
        others = self._ledger.total(key) - 1
        if handle.arena != sender:
            others -= self._ledger.lent(sender, key)
        return others > 0

    def _expect_segment(self, peer: Peer, handle: Handle) -> None:
        """Map a segment that the peer has announced by now, or it is a ProtocolError."""
        peer.receive_segments()
        if not self._views.has_segment(handle.arena, handle.segment):
            raise ProtocolError(
                f"a handle names segment {handle.segment} of arena {handle.arena}, "
                "which nobody announced"
            )

    def hand_on(self, array: np.ndarray[Any, Any]) -> Handle | None:
        """Return the handle of the block in which this array was received, if it is in one.

        It can be sent on without a copy, for as long as the array lives.
        """
        return self._views.handle_of(array)

    def discard(self, peer: Peer, tensors: Iterable[WireTensor]) -> None:
        """Receive and drop: bodies of a response that nobody waits for."""
        for tensor in tensors:
            handle = tensor.data
            if isinstance(handle, Handle):
                self._count_in(peer, handle)
                self._dropped.append((handle.arena, handle.block))
            elif tensor.device is not None:
                self.receive_ref(peer, tensor.device)  # and nobody keeps what that returns

    def receive_ref(self, peer: Peer, ref: DeviceRef) -> HeldRef:
        """Take a reference to device memory that `peer` sent. ProtocolError for a false one."""
        if self.devices is None:
            raise ProtocolError("a stub sent a reference to device memory, and has none")
        return self.devices.receive(cast(DevicePeer, peer), ref)

    def drop_tensor(self, tensor: WireTensor) -> None:
        """Give up what we hold of a tensor that came or was to be sent."""
        if isinstance(tensor.data, Handle):
            self.drop(tensor.data)
        elif tensor.device is not None and self.devices is not None:
            self.devices.drop(tensor.device)

    def _count_in(self, peer: Peer, handle: Handle) -> None:
        """Take a hold on a block that came in a message. Raises ProtocolError for a false handle.

        A peer sends blocks of its own arena, or such as were lent to it.
        """
        key = (handle.arena, handle.block)
        if handle.arena == peer.arena:
            self._ledger.receive(key)
            return
        if not self._ledger.lent(peer.arena, key):
            raise ProtocolError(
                f"a stub sent block {handle.block} of arena {handle.arena}, which it does not have"
            )
        if handle.arena == self._arena.arena_id:
            self._arena.block_of(handle)
        self._ledger.hold(key)

    def settle(self) -> None:
        """Apply dropped holds and dead views; free our blocks, return the peers' own."""
        ledger = self._ledger
        for handle in self._views.take_released():
            ledger.drop((handle.arena, handle.block))
        while self._dropped:
            ledger.drop(self._dropped.popleft())
        own = self._arena.arena_id
        for arena, block in ledger.take_zeros():
            if arena == own:
                self._arena.drop_number(block)
            else:
                owner = self._peers.get(arena)
                if owner is not None:
                    owner.return_block(arena, block)
                elif arena in self._orphans and not ledger.knows_arena(arena):
                    self._forget_arena(arena)
        if self.devices is not None:
            self.devices.settle()

    def trim(self, keep_bytes: int) -> int:
        """Give idle pages back to the system; returns how many bytes went."""
        return self._arena.trim(keep_bytes)

    def stats(self) -> ExchangeStats:
        """Return what is held now, after settling."""
        self.settle()
        views = self._views.stats()
        return ExchangeStats(self._arena.stats(), self._ledger.stats().blocks, views.leases)

    def close(self) -> None:
        """Let go of everything; views that are alive keep their memory. Idempotent."""
        self._peers.clear()
        for arena in {arena for arena, _ in self._segments}:
            self._views.forget_arena(arena)
        self._segments.clear()
        self._arena.close()
        if self.devices is not None:
            self.devices.close()
