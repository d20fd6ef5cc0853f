# SPDX-License-Identifier: Apache-2.0
"""One piece of device memory, ours or borrowed. Its death is what gives the piece back.

What always holds: a buffer is one need, and gives one release, once, by `release`, at the end of
a `with` or when it is garbage. That may happen in any thread and inside garbage collection, so it
only appends to a deque of the pool. Whatever shows the memory to others keeps the buffer alive.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

from actorserve.device.driver import HostBytes
from actorserve.errors import InvalidArgument

if TYPE_CHECKING:
    from actorserve.device.pool import SlabPool
    from actorserve.device.slab import Slab


class DeviceBuffer:
    """`nbytes` bytes at the device address `address`. Made by a SlabPool only.

    `fence` is 0, or the slab's fence behind which the data is complete.
    """

    __slots__ = (
        "__weakref__",
        "_is_released",
        "fence",
        "generation",
        "is_loan",
        "nbytes",
        "offset",
        "pool",
        "slab",
        "slot",
        "stream",
    )

    def __init__(
        self,
        pool: SlabPool,
        slab: Slab,
        slot: int,
        generation: int,
        offset: int,
        nbytes: int,
        fence: int = 0,
        is_loan: bool = False,
    ) -> None:
        self._is_released = False
        self.pool = pool
        self.slab = slab
        self.slot = slot
        self.generation = generation
        self.offset = offset
        self.nbytes = nbytes
        self.fence = fence
        self.is_loan = is_loan
        self.stream: int | None = None
        slab.views += 1

    @property
    def address(self) -> int:
        """The device address of the first byte; InvalidArgument after `release`."""
        if self._is_released:
            raise InvalidArgument("this device buffer was released already")
        return self.slab.base + self.offset

    @property
    def uuid(self) -> str:
        """The device on which the bytes lie."""
        return self.pool.uuid

    def copy_in(self, source: HostBytes, *, stream: int = 0) -> None:
        """Fill the buffer's beginning from host memory; InvalidArgument if it does not fit."""
        nbytes = memoryview(source).nbytes
        if nbytes > self.nbytes:
            raise InvalidArgument(f"{nbytes} bytes do not fit into a buffer of {self.nbytes}")
        self.use_on(stream)
        self.pool.driver.copy_in(self.address, source, stream)

    def copy_from(self, source: DeviceBuffer, *, stream: int = 0) -> None:
        """Start a copy of all of another buffer; InvalidArgument if it does not fit."""
        if source.nbytes > self.nbytes:
            raise InvalidArgument(f"{source.nbytes} bytes do not fit into {self.nbytes}")
        source.use_on(stream)
        self.use_on(stream)
        self.pool.driver.copy_within(self.address, source.address, source.nbytes, stream)

    def copy_out(self, *, stream: int = 0) -> bytearray:
        """Return the bytes on the host, complete."""
        target = bytearray(self.nbytes)
        address = self.address
        self.use_on(stream)
        self.pool.driver.copy_out(target, address, stream)
        return target

    def use_on(self, stream: int) -> None:
        """Note that a stream uses the memory: it is waited for before others get the memory.

        A fence that came with the data is waited for here, once. At most one stream is noted; one
        more waits for the one before.
        """
        if self.stream is not None and self.stream != stream:
            self.pool.driver.synchronize(self.stream)
        self.stream = stream
        if self.fence and self.is_loan:
            self.pool.driver.wait(self.slab.memory, self.fence, stream)
            self.fence = 0

    def release(self) -> None:
        """Give the memory back; idempotent. Addresses of it must not be used any more."""
        if not self._is_released:
            self._is_released = True
            self.pool.note_death((self.slab, self.slot, self.generation, self.is_loan, self.stream))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """What torch and cupy read; AttributeError where this is no CUDA memory."""
        if not self.pool.driver.is_cuda:
            raise AttributeError(f"memory of the driver {self.pool.driver.name!r} is not CUDA's")
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }

    def __enter__(self) -> DeviceBuffer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()

    def __repr__(self) -> str:
        return (
            f"DeviceBuffer(slab={self.slab.epoch}/{self.slab.number}, slot={self.slot}, "
            f"generation={self.generation}, nbytes={self.nbytes})"
        )
