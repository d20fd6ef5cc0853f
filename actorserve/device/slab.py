# SPDX-License-Identifier: Apache-2.0
"""One slab as a process has it: the mapping, and, by role, its book or what is borrowed from it.

own       this process is the tenant: it allocates here, `lease` and `space` say where
borrowed  somebody else is: `borrowed` counts our views and the loans behind them
lent out  we made it for another tenant and keep the mapping
"""

from __future__ import annotations

from actorserve.device.driver import DeviceMemory
from actorserve.errors import ProtocolError
from actorserve.shm.space import Ranges
from actorserve.state.device_lease import Allocation, Lease
from actorserve.wire.device import DeviceRef

ALIGN_BYTES = 512
"""Every allocation starts at a multiple of this, as with CUDA's own allocators."""


class Borrowed:
    """A block of another tenant: how many local views, how many loans they owe, and its extent."""

    __slots__ = ("end", "loans", "start", "views")

    def __init__(self, start: int, end: int) -> None:
        self.start = start
        self.end = end
        self.views = 0
        self.loans = 0


class Slab:
    """`views` counts the buffers that live; a retired slab is unmapped with the last one."""

    __slots__ = (
        "base",
        "borrowed",
        "epoch",
        "is_own",
        "is_retired",
        "lease",
        "memory",
        "nbytes",
        "number",
        "space",
        "views",
    )

    def __init__(
        self, epoch: int, number: int, memory: DeviceMemory, nbytes: int, *, is_own: bool
    ) -> None:
        self.epoch = epoch
        self.number = number
        self.memory = memory
        self.base = memory.base
        self.nbytes = nbytes
        self.is_own = is_own
        self.is_retired = False
        self.views = 0
        self.lease = Lease()
        self.space = Ranges()
        self.borrowed: dict[tuple[int, int], Borrowed] = {}
        if is_own:
            self.space.add(0, nbytes)

    def take(self, nbytes: int) -> Allocation | None:
        """Allocate; None if no range is large enough."""
        size = max(ALIGN_BYTES, (nbytes + ALIGN_BYTES - 1) & -ALIGN_BYTES)
        offset = self.space.take(size)
        return None if offset is None else self.lease.take(offset, size)

    def give_back(self) -> None:
        """Make what nobody needs any more free."""
        for offset, nbytes in self.lease.take_freed():
            self.space.add(offset, offset + nbytes)

    def borrow(self, ref: DeviceRef) -> None:
        """Count one more view, and loan, of a block; StaleReference, ProtocolError if it lies."""
        start, end = ref.offset, ref.offset + ref.nbytes
        if start < 0 or ref.nbytes < 0 or end > self.nbytes:
            raise ProtocolError(
                f"device reference: offset {start} and nbytes {ref.nbytes} lie outside a slab of "
                f"{self.nbytes} bytes"
            )
        if self.is_own:
            block = self.lease.find(ref.slot, ref.generation)
            if start < block.offset or end > block.offset + block.nbytes:
                raise ProtocolError(
                    f"device reference: offset {start} and nbytes {ref.nbytes} lie outside a "
                    f"block of {block.nbytes} bytes at {block.offset}"
                )
            self.lease.hold(ref.slot, ref.generation)
            return
        name = (ref.slot, ref.generation)
        known = self.borrowed.get(name)
        if known is None:
            known = self.borrowed[name] = Borrowed(start, end)
        elif start < known.start or end > known.end:
            known.start = min(known.start, start)
            known.end = max(known.end, end)
        known.views += 1
        known.loans += 1

    def view(self, offset: int, nbytes: int) -> tuple[int, int] | None:
        """Count one more view of the living block that holds a range: (slot, generation)."""
        if self.is_own:
            block = self.lease.covering(offset, nbytes)
            if block is None:
                return None
            self.lease.hold(block.slot, block.generation)
            return block.slot, block.generation
        for name, known in self.borrowed.items():
            if known.start <= offset and offset + nbytes <= known.end:
                known.views += 1
                return name
        return None

    def give_up(self, slot: int, generation: int, is_loan: bool) -> int:
        """Count a view less; return how many loans are to be given back now."""
        if self.is_own:
            self.lease.drop(slot, generation)
            self.give_back()
            return int(is_loan)
        known = self.borrowed[slot, generation]
        known.views -= 1
        if known.views:
            return 0
        del self.borrowed[slot, generation]
        return known.loans

    def is_idle(self) -> bool:
        """Tell whether nobody needs anything of it."""
        return not self.views and self.lease.is_idle()
