# SPDX-License-Identifier: Apache-2.0
"""The owner's side of tensor memory: blocks within segments that grow on demand.

    try_allocate ─► bin of warm blocks of that size ─► first free range that fits ─► None: grow
    drop to zero ─► bin (last in, first out)
    grow = prepare (slow, any thread) ─► adopt (quick, the owner's thread)
    trim = punch free pages ─► refilled before they are part of a block again

What always holds: one process owns an arena and it alone allocates there, with one thread at a
time (callers lock), so that no lock is shared with anyone who may be killed. Blocks do not
overlap and start at multiples of 64 bytes. A block's number is used once; a block that is free
has left the table, so that whatever names it afterwards is refused. Segments stay where they are
until `close`: a handle, once right, never points at other memory.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from actorserve.errors import InternalError, ProtocolError
from actorserve.forking import sever_after_fork
from actorserve.shm.segment import PAGE_BYTES, Segment
from actorserve.shm.space import ALIGN_BYTES, Space
from actorserve.wire.messages import Handle

_SMALL_BYTES = 4 * ALIGN_BYTES


class Block:
    """One allocation. `nbytes` is its capacity; `holds` counts who still needs it, 0 is free."""

    __slots__ = ("holds", "nbytes", "number", "offset", "segment")

    def __init__(self, number: int, segment: int, offset: int, nbytes: int) -> None:
        self.number = number
        self.segment = segment
        self.offset = offset
        self.nbytes = nbytes
        self.holds = 1

    def __repr__(self) -> str:
        return (
            f"Block({self.number}, segment={self.segment}, offset={self.offset}, "
            f"nbytes={self.nbytes}, holds={self.holds})"
        )


class ArenaStats(msgspec.Struct, frozen=True):
    """What an arena owns and uses; all but the counts in bytes.

    `free_bytes` is what no block uses: warm blocks in bins (`binned_bytes`), ranges that were
    given back (`punched_bytes`) and the rest. `allocations` counts blocks ever made.
    """

    arena: int
    segments: int
    segment_bytes: int
    used_bytes: int
    free_bytes: int
    binned_bytes: int
    punched_bytes: int
    peak_used_bytes: int
    blocks: int
    allocations: int


class Arena:
    """Allocate the tensor memory of this process.

    The first segment comes with the first allocation (an idle arena owns nothing). Each later one
    is twice the one before, up to `max_segment_bytes`, or `growth_bytes` if that is set; a request
    that exceeds the step gets a segment of its own size. `on_segment(arena_id, index, segment)`
    is called on the owner's thread for each new one. `trim` passes over a segment whose descriptor
    is closed.
    """

    def __init__(
        self,
        arena_id: int,
        *,
        first_segment_bytes: int = 4 << 20,
        growth_bytes: int = 0,
        max_segment_bytes: int = 256 << 20,
        on_segment: Callable[[int, int, Segment], None] | None = None,
    ) -> None:
        if first_segment_bytes <= 0 or growth_bytes < 0 or max_segment_bytes <= 0:
            raise ValueError(
                "an arena needs first_segment_bytes > 0, growth_bytes >= 0 and "
                f"max_segment_bytes > 0, not {first_segment_bytes}, {growth_bytes} and "
                f"{max_segment_bytes}"
            )
        self.arena_id = arena_id
        self._first_bytes = first_segment_bytes
        self._growth_bytes = growth_bytes
        self._max_bytes = max(first_segment_bytes, max_segment_bytes)
        self._on_segment = on_segment
        self._number = 0
        self._spaces: list[Space] = []
        self._next_bytes = first_segment_bytes
        self._blocks: dict[int, Block] = {}
        # Free blocks by capacity; only their place is of use, the objects are dead.
        self._bins: dict[int, list[Block]] = {}
        self._segment_bytes = 0
        self._used_bytes = 0
        self._peak_bytes = 0
        self._closed = False
        sever_after_fork(self)

    # --- allocate ---------------------------------------------------------------------------------

    def try_allocate(self, nbytes: int) -> Block | None:
        """Return a block of at least `nbytes` with one hold, or None: the arena must grow.

        Never creates a segment. ResourceExhausted if the only fitting range was given back by
        `trim` and the system has no memory for it now; nothing has changed then.
        """
        # Four sizes per octave; written out here, this is the hottest line of the module.
        if nbytes > _SMALL_BYTES:
            if nbytes > self._max_bytes:
                size = (nbytes + PAGE_BYTES - 1) & -PAGE_BYTES
            else:
                step = 1 << ((nbytes - 1).bit_length() - 3)
                size = (nbytes + step - 1) & -step
        else:
            size = _small(nbytes)
        warm = self._bins.get(size)
        if warm:
            place = warm.pop()
            index = place.segment
            offset = place.offset
        else:
            found = self._carve(size)
            if found is None:
                return None
            index, offset = found
        self._number = number = self._number + 1
        block = self._blocks[number] = Block(number, index, offset, size)
        self._used_bytes = used_bytes = self._used_bytes + size
        if used_bytes > self._peak_bytes:
            self._peak_bytes = used_bytes
        return block

    def allocate(self, nbytes: int) -> Block:
        """Return a block of at least `nbytes` with one hold, growing inline where needed.

        Growing takes milliseconds per 16 MiB: where a loop turns, `try_allocate` and then
        `prepare` in a thread. ResourceExhausted if the system has no memory.
        """
        block = self.try_allocate(nbytes)
        if block is None:
            self.adopt(self.prepare(nbytes))
            block = self.try_allocate(nbytes)
            if block is None:
                raise InternalError(
                    f"arena {self.arena_id} has no room for {nbytes} bytes after growing for them"
                )
        return block

    def prepare(self, nbytes: int) -> Segment:
        """Create a segment in which `nbytes` fit: the slow half of growing, for any thread.

        The arena does not know it before `adopt`; close it if you do not need it any more.
        ResourceExhausted if the system has no memory.
        """
        self._check_open()
        return Segment.create(self._growth_for(nbytes))

    def adopt(self, segment: Segment) -> None:
        """Take over a segment from `prepare`: the quick half, on the owner's thread."""
        self._check_open()
        self._spaces.append(Space(segment))
        self._segment_bytes += segment.nbytes
        if segment.nbytes <= self._max_bytes:
            doubled_bytes = min(self._max_bytes, 2 * segment.nbytes)
            self._next_bytes = max(self._next_bytes, doubled_bytes)
        if self._on_segment is not None:
            self._on_segment(self.arena_id, len(self._spaces) - 1, segment)

    # --- look at a block --------------------------------------------------------------------------

    def buffer(self, block: Block, nbytes: int) -> memoryview:
        """Return the first `nbytes` of a block, writable; not to be used after its last drop."""
        self._check_live(block)
        self._check_fits(block, nbytes)
        return self._spaces[block.segment].segment.buffer[block.offset : block.offset + nbytes]

    def handle(self, block: Block, nbytes: int, *, shared: bool = False) -> Handle:
        """Return what to tell others about the first `nbytes` of a block."""
        self._check_live(block)
        self._check_fits(block, nbytes)
        return Handle(self.arena_id, block.number, block.segment, block.offset, nbytes, shared)

    def block_of(self, handle: Handle) -> Block:
        """Return the live block that a handle names.

        ProtocolError, naming the field, if the handle is foreign, stale or lies in any of them.
        """
        block = self._blocks.get(handle.block)
        if (
            handle.arena != self.arena_id
            or block is None
            or handle.segment != block.segment
            or handle.offset != block.offset
            or not 0 <= handle.nbytes <= block.nbytes
        ):
            raise self._refusal(handle, block)
        return block

    # --- holds ------------------------------------------------------------------------------------

    def hold(self, block: Block) -> None:
        """Count one more user of a block; ProtocolError if it is free already."""
        self._check_live(block)
        block.holds += 1

    def drop(self, block: Block) -> None:
        """Count one user less; the last one frees the block. ProtocolError if it is free already.

        After `close` this does nothing: late users may still let go.
        """
        number = block.number
        if self._blocks.get(number) is not block:
            if self._closed:
                return
            self._check_live(block)
        block.holds = holds = block.holds - 1
        if not holds:
            del self._blocks[number]
            size = block.nbytes
            self._used_bytes -= size
            warm = self._bins.get(size)
            if warm is None:
                self._bins[size] = [block]
            else:
                warm.append(block)

    def drop_number(self, number: int) -> bool:
        """Drop by number, as releases arrive; False if no such block lives (stale or foreign)."""
        block = self._blocks.get(number)
        if block is None:
            return False
        self.drop(block)
        return True

    # --- idle memory ------------------------------------------------------------------------------

    def trim(self, keep_bytes: int) -> int:
        """Give free pages beyond `keep_bytes` back to the system; return how many bytes.

        What is kept lies at the low end, where allocation looks first. Handles stay valid.
        """
        if keep_bytes < 0:
            raise ValueError(f"keep_bytes is {keep_bytes}; expected 0 or more")
        if self._segment_bytes - self._used_bytes - self._punched_bytes() <= keep_bytes:
            return 0
        self._empty_bins()
        given_bytes = 0
        for space in self._spaces:
            given, kept = space.punch(keep_bytes)
            given_bytes += given
            keep_bytes -= kept
        return given_bytes

    def close(self) -> None:
        """Give everything up; idempotent. Views that are alive keep their memory."""
        spaces = self._spaces
        self.sever()
        for space in spaces:
            space.segment.close()

    def sever(self) -> None:
        """Forget everything without touching it: this is a forked child and not the owner.

        Called by itself in forked children: an allocation or a punch there would destroy what
        the parent keeps in the same memory.
        """
        self._closed = True
        self._spaces = []
        self._blocks = {}
        self._bins = {}
        self._segment_bytes = self._used_bytes = 0

    def stats(self) -> ArenaStats:
        """Return sizes and counts as of now."""
        return ArenaStats(
            arena=self.arena_id,
            segments=len(self._spaces),
            segment_bytes=self._segment_bytes,
            used_bytes=self._used_bytes,
            free_bytes=self._segment_bytes - self._used_bytes,
            binned_bytes=sum(size * len(warm) for size, warm in self._bins.items()),
            punched_bytes=self._punched_bytes(),
            peak_used_bytes=self._peak_bytes,
            blocks=len(self._blocks),
            allocations=self._number,
        )

    # --- inside -----------------------------------------------------------------------------------

    def _carve(self, size: int) -> tuple[int, int] | None:
        """Cut `size` bytes out of the free ranges: (segment, offset), or None."""
        if size > self._segment_bytes - self._used_bytes:
            return None
        found = self._first_fit(size)
        if found is None and self._empty_bins():
            found = self._first_fit(size)
        return found

    def _first_fit(self, size: int) -> tuple[int, int] | None:
        for index, space in enumerate(self._spaces):
            offset = space.take(size)
            if offset is not None:
                return index, offset
        return None

    def _empty_bins(self) -> bool:
        """Turn warm blocks back into free ranges, which coalesce; False if there were none."""
        moved = False
        for warm in self._bins.values():
            moved = moved or bool(warm)
            for block in warm:
                self._spaces[block.segment].give(block.offset, block.nbytes)
            warm.clear()
        return moved

    def _growth_for(self, nbytes: int) -> int:
        size = self._size_of(nbytes)
        if not self._spaces:
            step_bytes = self._first_bytes
        elif self._growth_bytes:
            step_bytes = self._growth_bytes * -(-size // self._growth_bytes)
        else:
            step_bytes = self._next_bytes
        return max(step_bytes, size)

    def _size_of(self, nbytes: int) -> int:
        """Return the capacity that a request gets; the same rule as in `try_allocate`."""
        if nbytes <= _SMALL_BYTES:
            return _small(nbytes)
        if nbytes > self._max_bytes:
            return (nbytes + PAGE_BYTES - 1) & -PAGE_BYTES
        step = 1 << ((nbytes - 1).bit_length() - 3)
        return (nbytes + step - 1) & -step

    def _punched_bytes(self) -> int:
        return sum(space.punched_bytes() for space in self._spaces)

    def _check_open(self) -> None:
        if self._closed:
            raise InternalError(f"arena {self.arena_id} is closed, or this is a forked child")

    def _check_live(self, block: Block) -> None:
        if self._blocks.get(block.number) is not block:
            raise ProtocolError(
                f"arena {self.arena_id}: field block is {block.number}, which is free already or "
                "another arena's"
            )

    def _check_fits(self, block: Block, nbytes: int) -> None:
        if not 0 <= nbytes <= block.nbytes:
            raise ValueError(
                f"{nbytes} bytes do not fit into block {block.number} of {block.nbytes} bytes"
            )

    def _refusal(self, handle: Handle, block: Block | None) -> ProtocolError:
        if handle.arena != self.arena_id:
            field, value, why = "arena", handle.arena, f"expected {self.arena_id}"
        elif block is None:
            field, value, why = "block", handle.block, "no such block lives"
        elif handle.segment != block.segment:
            field, value, why = "segment", handle.segment, f"the block lies in {block.segment}"
        elif handle.offset != block.offset:
            field, value, why = "offset", handle.offset, f"the block starts at {block.offset}"
        else:
            field, value, why = "nbytes", handle.nbytes, f"the block holds {block.nbytes}"
        return ProtocolError(
            f"handle refused by arena {self.arena_id}: field {field} is {value}, {why}"
        )


def _small(nbytes: int) -> int:
    if nbytes < 0:
        raise ValueError(f"cannot allocate {nbytes} bytes")
    return (nbytes + ALIGN_BYTES - 1) & -ALIGN_BYTES or ALIGN_BYTES
