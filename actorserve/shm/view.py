# SPDX-License-Identifier: Apache-2.0
"""The reader's side of tensor memory: numpy views that say when the last of them is gone.

    view(handle) ─► root array ─► slices, .T, memoryviews, DLPack … of it keep the root alive
    last one dies ─► the root's weak reference calls back ─► a deque ─► take_released()

What always holds: a view is one lease, and one lease gives one release. The callback may run in
any thread and inside garbage collection, so it is the deque's own `append` and nothing else.
Every change of the tables is a single step of a dict, so that threads need no lock, which a
finalizer that runs in the middle could wait for in vain; the worst that a race can do is that
`handle_of` does not recognize an array, which is then copied. Nothing is keyed by an object's id.
"""

from __future__ import annotations

import itertools
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from actorserve.errors import InternalError, ProtocolError
from actorserve.forking import sever_after_fork
from actorserve.shm.segment import Segment
from actorserve.shm.space import ALIGN_BYTES
from actorserve.wire.messages import Handle

Array = np.ndarray[Any, Any]
DType = np.dtype[Any]


_UNALIGNED = ALIGN_BYTES - 1
_CLOSED = memoryview(b"")
_BYTE: DType = np.dtype(np.uint8)


class ViewsStats(msgspec.Struct, frozen=True):
    """What is mapped and leased. `waiting` of the leases ended and were not taken yet."""

    segments: int
    mapped_bytes: int
    leases: int
    waiting: int
    released: int


class _Lease(weakref.ref[Array]):
    """The weak reference to a root array; owned by tables, because its death would be silent."""

    __slots__ = ("handle", "mapping", "serial")

    handle: Handle
    mapping: _Mapping
    serial: int


class _Mapping:
    """One mapped segment and the leases in it.

    A lease is in `first`, by offset, or, where another one is there already, in `more`, by serial
    number (a set of weak references would hash the arrays).
    """

    __slots__ = ("address", "first", "frozen", "more", "segment", "writable")

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.address = segment.address
        self.writable = segment.buffer
        self.frozen = segment.buffer.toreadonly()
        self.first: dict[int, _Lease] = {}
        self.more: dict[int, _Lease] = {}

    def leases_at(self, offset: int) -> Iterator[_Lease]:
        """Yield the leases that begin at an offset, dead ones that were not taken yet included."""
        first = self.first.get(offset)
        if first is not None:
            yield first
        if self.more:  # a dict that was large is slow to walk, even empty
            for lease in tuple(self.more.values()):
                if lease.handle.offset == offset:
                    yield lease

    def end(self, lease: _Lease) -> None:
        """Forget a lease whose array is dead."""
        offset = lease.handle.offset
        if self.first.get(offset) is lease:
            self.first.pop(offset, None)
        else:
            self.more.pop(lease.serial, None)

    def close(self) -> None:
        """Let the memory go but for what live views keep; leases go on."""
        self.writable = self.frozen = _CLOSED
        self.segment.close()

    def is_idle(self) -> bool:
        """Tell whether there is no lease."""
        return not self.first and not self.more


class Views:
    """Map segments of arenas, one's own included, and lease numpy views of their blocks."""

    def __init__(self) -> None:
        self._mappings: dict[tuple[int, int], _Mapping] = {}
        # Of forgotten arenas, for as long as they have leases.
        self._retired: dict[int, _Mapping] = {}
        # Addresses and mappings in the same order; replaced as one, never changed.
        self._by_address: tuple[list[int], list[_Mapping]] = ([], [])
        self._serials = itertools.count(1)
        self._dead: deque[_Lease] = deque()
        self._on_death = self._dead.append
        self._plain_dtype = _BYTE  # the one that was checked last
        self._released = 0
        self._severed = False
        sever_after_fork(self)

    # --- segments ---------------------------------------------------------------------------------

    def add_segment(self, arena: int, index: int, segment: Segment) -> None:
        """Take over segment number `index` of an arena; ProtocolError if that one is known."""
        if (arena, index) in self._mappings:
            raise ProtocolError(f"arena {arena}: field segment is {index}, which is mapped already")
        if self._severed:
            raise _not_ours()
        self._mappings[arena, index] = _Mapping(segment)
        self._order()

    def has_segment(self, arena: int, index: int) -> bool:
        """Tell whether a view of that segment can be made."""
        return (arena, index) in self._mappings

    def forget_arena(self, arena: int) -> None:
        """Close the segments of an arena, as when its owner is gone. Unknown ones are fine.

        Live views keep their memory and are reported when they die, like all others. Forgetting
        an own arena closes its segments for the owner too.
        """
        gone = [key for key in self._mappings if key[0] == arena]
        for key in gone:
            self._retired[next(self._serials)] = mapping = self._mappings.pop(key)
            mapping.close()
        self._order()

    def _order(self) -> None:
        mappings = sorted(self._mappings.values(), key=lambda mapping: mapping.address)
        self._by_address = ([mapping.address for mapping in mappings], mappings)

    # --- views ------------------------------------------------------------------------------------

    def view(
        self, handle: Handle, dtype: DType, shape: tuple[int, ...], *, writable: bool
    ) -> Array:
        """Return the handle's memory as an array, without a copy and leased.

        When the array and everything made from its memory is gone, `handle` appears in
        `take_released`, once for each call. A read-only array cannot be made writable again.
        ProtocolError, naming the field, for a handle that is not mapped or does not match dtype
        and shape: nothing is leased then.
        """
        mapping = self._mappings.get((handle.arena, handle.segment))
        offset = handle.offset
        nbytes = handle.nbytes
        # numpy would take a negative offset.
        if mapping is None or offset < 0 or offset & _UNALIGNED:
            raise self._refusal(handle, dtype, shape)
        if dtype is not self._plain_dtype:
            # It would take pointers out of shared memory, and divide by an itemsize of 0 (SIGFPE).
            if dtype.hasobject or not dtype.itemsize:
                raise self._refusal(handle, dtype, shape)
            self._plain_dtype = dtype
        try:
            if writable or not nbytes:
                root = view = np.ndarray(shape, dtype, mapping.writable, offset)
            else:
                # Its base is the frozen memoryview, for which numpy refuses to set the flag.
                root = np.frombuffer(mapping.frozen, dtype, nbytes // dtype.itemsize, offset)
                view = root if len(shape) == 1 else root.reshape(shape)
        except (TypeError, ValueError, OverflowError):
            raise self._refusal(handle, dtype, shape) from None
        if view.nbytes != nbytes or view.shape != shape:  # a -1 means "the rest" to numpy
            raise self._refusal(handle, dtype, shape)
        if not (writable or nbytes):
            view.flags.writeable = False
        lease = _Lease(root, self._on_death)
        lease.handle = handle
        lease.mapping = mapping
        lease.serial = 0
        if mapping.first.setdefault(offset, lease) is not lease:
            lease.serial = serial = next(self._serials)
            mapping.more[serial] = lease
        return view

    def handle_of(self, array: Array) -> Handle | None:
        """Return the handle of a leased block that holds `array`, or None.

        The array must be C-contiguous and begin where the block begins. The handle's `nbytes` is
        the array's. None for arrays without bytes, and for memory that nobody leases now.
        """
        flags = array.flags
        if flags.owndata or not flags.c_contiguous:
            return None
        nbytes = array.nbytes
        if not nbytes:
            return None
        address: int = array.__array_interface__["data"][0]
        addresses, mappings = self._by_address
        at = bisect_right(addresses, address) - 1
        if at < 0:
            return None
        offset = address - addresses[at]
        for lease in mappings[at].leases_at(offset):
            handle = lease.handle
            if nbytes <= handle.nbytes and lease() is not None:
                if nbytes == handle.nbytes:
                    return handle
                return Handle(
                    handle.arena, handle.block, handle.segment, offset, nbytes, handle.shared
                )
        return None

    def is_leased(self, handle: Handle) -> bool:
        """Tell whether a view of the handle's block is alive here."""
        mapping = self._mappings.get((handle.arena, handle.segment))
        if mapping is None:
            return False
        return any(
            lease.handle.block == handle.block and lease() is not None
            for lease in mapping.leases_at(handle.offset)
        )

    def peek(self, handle: Handle) -> memoryview:
        """Return the read-only bytes of a block that is leased now, without another lease."""
        mapping = self._mappings[handle.arena, handle.segment]
        return mapping.frozen[handle.offset : handle.offset + handle.nbytes]

    def take_released(self) -> list[Handle]:
        """Return the handles whose views died since the last call, in the order of their deaths."""
        released: list[Handle] = []
        dead = self._dead
        while dead:
            try:
                lease = dead.popleft()
            except IndexError:  # another thread was quicker
                break
            lease.mapping.end(lease)
            released.append(lease.handle)
        if self._retired:
            for serial, mapping in list(self._retired.items()):
                if mapping.is_idle():
                    self._retired.pop(serial, None)
        self._released += len(released)
        return released

    def sever(self) -> None:
        """Forget all leases: no release ever comes again, views stay readable.

        Called by itself in forked children, whose copies of the views are not the reader's.
        """
        self._severed = True
        for mapping in (*self._mappings.values(), *self._retired.values()):
            mapping.first.clear()  # a weak reference that is gone calls nobody
            mapping.more.clear()
        self._dead.clear()
        self._mappings = {}
        self._retired = {}
        self._by_address = ([], [])

    def stats(self) -> ViewsStats:
        """Return sizes and counts as of now."""
        mappings = (*self._mappings.values(), *self._retired.values())
        return ViewsStats(
            segments=len(self._mappings),
            mapped_bytes=sum(mapping.segment.nbytes for mapping in self._mappings.values()),
            leases=sum(len(m.first) + len(m.more) for m in mappings),
            waiting=len(self._dead),
            released=self._released,
        )

    def _refusal(
        self, handle: Handle, dtype: DType, shape: tuple[int, ...]
    ) -> ProtocolError | InternalError:
        if self._severed:
            return _not_ours()
        field: str
        value: int | str
        mapping = self._mappings.get((handle.arena, handle.segment))
        if mapping is None:
            known = any(arena == handle.arena for arena, _ in self._mappings)
            field, value = ("segment", handle.segment) if known else ("arena", handle.arena)
            why = "that is not mapped here"
        elif dtype.hasobject or not dtype.itemsize:
            field, value, why = (
                "dtype",
                str(dtype),
                "expected one of a fixed size without references to objects",
            )
        elif (
            handle.offset < 0
            or handle.offset & _UNALIGNED
            or handle.offset > mapping.segment.nbytes
        ):
            field, value = "offset", handle.offset
            why = f"expected a multiple of {ALIGN_BYTES} within {mapping.segment.nbytes} bytes"
        elif handle.nbytes < 0 or handle.offset + handle.nbytes > mapping.segment.nbytes:
            field, value = "nbytes", handle.nbytes
            why = f"the segment ends {mapping.segment.nbytes - handle.offset} bytes further on"
        else:
            field, value = "nbytes", handle.nbytes
            why = f"expected what shape {shape} of {dtype} takes"
        return ProtocolError(
            f"handle of arena {handle.arena}, block {handle.block}: field {field} is {value}, {why}"
        )


def _not_ours() -> InternalError:
    return InternalError("shared memory is its parent's: a forked child cannot map or view it")
