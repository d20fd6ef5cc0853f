# SPDX-License-Identifier: Apache-2.0
"""Pools for tensors on a device, and a driver that says that it is CUDA's.

Its "device addresses" are the emulated ones, which nobody can read, and what tests hand in as a
library's memory. It writes down which streams were waited for.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator
from typing import Any

from actorserve.device.driver import DeviceMemory, HostBytes
from actorserve.device.emulated import EmulatedDriver
from actorserve.device.pool import SlabPool
from actorserve.device.settings import DeviceSettings
from actorserve.triton.device_tensor import use_pool
from actorserve.wire.device import SlabOffer


class FakeCuda(EmulatedDriver):
    """`waited` has (fence, stream), `synchronized` the streams, in order."""

    name = "fake-cuda"
    is_cuda = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.waited: list[tuple[int, int]] = []
        self.synchronized: list[int | None] = []

    def wait(self, memory: DeviceMemory, fence: int, stream: int) -> None:
        self.waited.append((fence, stream))
        super().wait(memory, fence, stream)

    def synchronize(self, stream: int | None = None) -> None:
        self.synchronized.append(stream)
        super().synchronize(stream)

    def copy_in(self, address: int, source: HostBytes, stream: int = 0) -> None:
        if self.range_of(address) is None:
            data = bytes(source)
            self._work.add(stream, lambda: put(address, data))
        else:
            super().copy_in(address, source, stream)

    def copy_out(self, target: HostBytes, address: int, stream: int = 0) -> None:
        if self.range_of(address) is None:
            self._work.flush(stream)
            view = memoryview(target)
            view[:] = ctypes.string_at(address, view.nbytes)
        else:
            super().copy_out(target, address, stream)

    def copy_within(self, target: int, source: int, nbytes: int, stream: int = 0) -> None:
        if self.range_of(target) is not None and self.range_of(source) is not None:
            super().copy_within(target, source, nbytes, stream)
            return

        def copy() -> None:
            data = bytearray(nbytes)
            FakeCuda.copy_out(self, data, source, -1)  # a stream that has no work
            if self.range_of(target) is None:
                put(target, bytes(data))
            else:
                self._bytes(target, nbytes)[:] = data

        self._work.add(stream, copy)


def put(address: int, data: bytes) -> None:
    """Write host memory that stands for a library's on the device."""
    ctypes.memmove(address, data, len(data))


@contextlib.contextmanager
def pool_in_use(driver: EmulatedDriver, ordinal: int = 0, **settings: Any) -> Iterator[SlabPool]:
    """Give models a pool; nothing of it may live behind the end."""
    pool = SlabPool(
        driver,
        epoch=1,
        ordinal=ordinal,
        settings=DeviceSettings(**{"slab_bytes": 64 << 10} | settings),
    )
    use_pool(pool)
    try:
        yield pool
        if pool.stats().views:
            gc.collect()
        assert pool.stats().views == 0
    finally:
        use_pool(None)
        pool.close()
        driver.shutdown()


def lend_to_another(lender: SlabPool, driver: EmulatedDriver) -> SlabPool:
    """Return a pool of another process, as it were, that maps each slab that the lender has."""
    borrower = SlabPool(driver, epoch=2, ordinal=lender.ordinal)
    for slab in lender._shelf.own:
        fd, extra = lender.driver.export(slab.memory)
        offer = SlabOffer(
            slab.epoch, slab.number, driver.name, lender.uuid, slab.memory.nbytes, extra
        )
        assert borrower.accept(offer, fd).error == ""
    return borrower
