# SPDX-License-Identifier: Apache-2.0
"""A device that is none: the whole protocol of device memory on a machine without a GPU.

    slab = a segment of shared memory, mapped where only this module looks
           + as many addresses without any access: they are the slab's "device addresses"

What always holds: reading or writing a device address from Python, numpy or C is a SIGSEGV, as
with real device memory that the host cannot see; only the copies here reach the bytes. Work on a
stream can be deferred, so that a read which nobody waited for finds old bytes. A fence is a word
behind the slab that says "done", and a lock on a byte of its descriptor until then, which the
kernel gives back when the recorder dies: so a wait ends in either case.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
import threading
from bisect import bisect_right

import numpy as np

from actorserve.device.deferred import DeferredWork
from actorserve.device.driver import (
    AddressRange,
    DeviceError,
    DeviceLost,
    DeviceMemory,
    DriverCounters,
    HostBytes,
    NoDevice,
    OutOfDeviceMemory,
)
from actorserve.errors import ResourceExhausted
from actorserve.shm.segment import PAGE_BYTES, Segment

UUID_PREFIX = "emulated-"
DEVICES = "ACTORSERVE_EMULATED_DEVICES"
FENCES = PAGE_BYTES // 8
"""So many fences of a slab may be under way; the page of their words lies behind the slab."""

_LOCK_BASE = 1 << 40  # byte locks far beyond any slab; nothing need be there
_FLOCK = struct.Struct("hhqqi4x")  # type, whence, start, length, pid


class EmulatedMemory:
    """One slab: its segment, the addresses that stand for it, its fences."""

    __slots__ = ("base", "fences", "is_open", "lock_fd", "nbytes", "number", "reserved", "segment")

    def __init__(self, segment: Segment, number: int) -> None:
        self.segment = segment
        self.nbytes = segment.nbytes - PAGE_BYTES
        self.number = number
        # Python's mmap module passes protections on as they are: 0 is PROT_NONE.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self.reserved = mmap.mmap(-1, self.nbytes, flags=flags, prot=0)
        self.base = int(np.frombuffer(self.reserved, np.uint8).__array_interface__["data"][0])
        # A file description of our own: a lock belongs to it, and an exported one is shared.
        self.lock_fd = os.open(f"/proc/self/fd/{segment.fd}", os.O_RDWR | os.O_CLOEXEC)
        self.fences = 0
        self.is_open = True

    def bytes_at(self, address: int, nbytes: int) -> memoryview:
        """Return the bytes behind device addresses."""
        offset = address - self.base
        return self.segment.buffer[offset : offset + nbytes]

    def word(self, fence: int) -> memoryview:
        """Return the word of a fence, as one unsigned number."""
        start = self.nbytes + fence % FENCES * 8
        return self.segment.buffer[start : start + 8].cast("Q")

    def lock(self, command: int, kind: int, fence: int) -> None:
        """Lock or unlock a fence's byte."""
        request = _FLOCK.pack(kind, os.SEEK_SET, _LOCK_BASE + fence, 1, 0)
        fcntl.fcntl(self.lock_fd, command, request)

    def finish(self, fence: int) -> None:
        """Say that all work before a fence is done."""
        self.word(fence)[0] = fence
        self.lock(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, fence)

    def close(self) -> None:
        """Give everything up."""
        self.is_open = False
        os.close(self.lock_fd)
        self.segment.close()


class EmulatedDriver:
    """Devices that are host memory. `capacity_bytes` is what one process may create in all.

    There are as many as `devices` says, or the variable ACTORSERVE_EMULATED_DEVICES, or one.
    `delay_s` defers work on streams; see DeferredWork. `poison` makes it a device that broke.
    """

    name = "emulated"
    is_cuda = False
    can_export_foreign = False

    def __init__(
        self, *, devices: int | None = None, capacity_bytes: int = 1 << 40, delay_s: float = 0.0
    ) -> None:
        self._devices = int(os.environ.get(DEVICES, "1")) if devices is None else devices
        self._capacity_bytes = capacity_bytes
        self._work = DeferredWork(delay_s)
        self._lock = threading.Lock()
        self._bases: list[int] = []
        self._memories: list[EmulatedMemory] = []
        self._numbers = 0
        self._own: dict[int, int] = {}
        self._poison = ""
        self._count = dict.fromkeys(DriverCounters.__struct_fields__, 0)

    def poison(self, reason: str) -> None:
        """Have every call fail with DeviceLost from now on, as after an illegal access."""
        self._poison = reason

    def uuid(self, ordinal: int) -> str:
        """Return "emulated-<ordinal>"; NoDevice beyond the last one."""
        if not 0 <= ordinal < self._devices:
            raise NoDevice(f"there is no emulated device {ordinal}; there are {self._devices}")
        return f"{UUID_PREFIX}{ordinal}"

    def create(self, ordinal: int, nbytes: int) -> EmulatedMemory:
        """Make a slab in whole pages; OutOfDeviceMemory beyond the capacity or the machine's."""
        self._check()
        uuid = self.uuid(ordinal)
        nbytes = (nbytes + PAGE_BYTES - 1) & -PAGE_BYTES
        used_bytes = sum(self._own.values())
        if used_bytes + nbytes > self._capacity_bytes:
            raise OutOfDeviceMemory(
                f"device {uuid} has no room for {nbytes} bytes: {used_bytes} of "
                f"{self._capacity_bytes} bytes are in use"
            )
        try:
            segment = Segment.create(nbytes + PAGE_BYTES)
        except ResourceExhausted as error:
            raise OutOfDeviceMemory(f"device {uuid}: {error.message}") from error
        memory = self._add(segment)
        self._own[memory.number] = nbytes
        self._count["created"] += 1
        return memory

    def export(self, memory: DeviceMemory) -> tuple[int, bytes]:
        """Return a new descriptor of the segment; nothing goes with it."""
        self._check()
        return os.dup(_open(memory).segment.fd), b""

    def import_(self, uuid: str, fd: int, nbytes: int, extra: bytes) -> EmulatedMemory:
        """Map a segment; ProtocolError if the descriptor is not what was said."""
        known = {f"{UUID_PREFIX}{ordinal}" for ordinal in range(self._devices)}
        if self._poison or uuid not in known:
            os.close(fd)
            self._check()
            raise NoDevice(f"device {uuid} cannot be seen from this process")
        memory = self._add(Segment.attach(fd, nbytes + PAGE_BYTES))
        self._count["imported"] += 1
        return memory

    def close(self, memory: DeviceMemory) -> None:
        """Unmap a slab, behind all work; DeviceError if it is closed already."""
        slab = _open(memory)
        self._work.flush()
        with self._lock:
            at = self._memories.index(slab)
            del self._memories[at], self._bases[at]
            self._own.pop(slab.number, None)
        slab.close()
        self._count["closed"] += 1

    def copy_in(self, address: int, source: HostBytes, stream: int = 0) -> None:
        """Copy host bytes to the device, behind the stream's work."""
        staged = memoryview(source).cast("B")
        target = self._bytes(address, staged.nbytes)
        data = bytes(staged) if self._work.is_deferred else staged

        def copy() -> None:
            target[:] = data

        self._work.add(stream, copy)
        self._count["copies_in"] += 1
        self._count["bytes_in"] += staged.nbytes

    def copy_out(self, target: HostBytes, address: int, stream: int = 0) -> None:
        """Fill host memory from the device."""
        view = memoryview(target).cast("B")
        source = self._bytes(address, view.nbytes)
        self._work.flush(stream)
        view[:] = source
        self._count["copies_out"] += 1
        self._count["bytes_out"] += view.nbytes

    def copy_within(self, target: int, source: int, nbytes: int, stream: int = 0) -> None:
        """Copy on the device, behind the stream's work."""
        into, out_of = self._bytes(target, nbytes), self._bytes(source, nbytes)

        def copy() -> None:
            into[:] = out_of

        self._work.add(stream, copy)
        self._count["copies_within"] += 1
        self._count["bytes_within"] += nbytes

    def synchronize(self, stream: int | None = None) -> None:
        """Do the stream's work now."""
        self._check()
        self._work.flush(stream)
        self._count["synchronized"] += 1

    def record(self, memory: DeviceMemory, stream: int) -> int:
        """Make a fence of a slab; the word of an older one is used again, that one waited for."""
        self._check()
        slab = _open(memory)
        with self._lock:
            slab.fences = fence = slab.fences + 1
        if fence > FENCES and slab.word(fence)[0] < fence - FENCES:
            self._work.flush()
        slab.lock(fcntl.F_OFD_SETLK, fcntl.F_WRLCK, fence)
        self._work.add(stream, lambda: slab.finish(fence))
        self._count["fences_recorded"] += 1
        return fence

    def wait(self, memory: DeviceMemory, fence: int, stream: int) -> None:
        """Wait for a fence; here it is the calling thread that waits, and not the stream."""
        self._check()
        slab = _open(memory)
        self._count["fences_waited"] += 1
        if slab.word(fence)[0] >= fence:
            return
        if slab.number in self._own:
            self._work.flush()  # we are its recorder, and may be all that it waits for
        # A second description, also in the recorder's own process: its lock must not let us in.
        waiter = os.open(f"/proc/self/fd/{slab.segment.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            request = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, _LOCK_BASE + fence, 1, 0)
            fcntl.fcntl(waiter, fcntl.F_OFD_SETLKW, request)
        finally:
            os.close(waiter)
        if slab.word(fence)[0] < fence:
            raise DeviceError(f"fence {fence} will never be reached: its process died before")

    def range_of(self, address: int) -> AddressRange | None:
        """Return the slab around an address, or None."""
        slab = self._find(address)
        return None if slab is None else AddressRange(slab.base, slab.nbytes, slab.number)

    def counters(self) -> DriverCounters:
        """Return what was done so far."""
        self._count["open"] = len(self._memories)
        self._count["open_bytes"] = sum(slab.nbytes for slab in self._memories)
        return DriverCounters(**self._count)

    def shutdown(self) -> None:
        """Do what is left of the work and close every slab."""
        self._work.stop()
        for slab in list(self._memories):
            self.close(slab)

    # --- inside -----------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._poison:
            raise DeviceLost(f"the emulated device is lost: {self._poison}")

    def _add(self, segment: Segment) -> EmulatedMemory:
        with self._lock:
            self._numbers += 1
            try:
                slab = EmulatedMemory(segment, self._numbers)
            except OSError as error:
                segment.close()
                if error.errno in (errno.ENOMEM, errno.EMFILE, errno.ENFILE):
                    raise OutOfDeviceMemory(f"a slab cannot be mapped: {error}") from error
                raise DeviceError(f"a slab cannot be mapped: {error}") from error
            at = bisect_right(self._bases, slab.base)
            self._bases.insert(at, slab.base)
            self._memories.insert(at, slab)
        return slab

    def _find(self, address: int) -> EmulatedMemory | None:
        with self._lock:
            at = bisect_right(self._bases, address) - 1
            if at >= 0 and address < self._bases[at] + self._memories[at].nbytes:
                return self._memories[at]
        return None

    def _bytes(self, address: int, nbytes: int) -> memoryview:
        self._check()
        slab = self._find(address)
        if slab is None or address + nbytes > slab.base + slab.nbytes:
            raise DeviceError(f"no device memory at {address:#x} to {address + nbytes:#x}")
        return slab.bytes_at(address, nbytes)


def _open(memory: DeviceMemory) -> EmulatedMemory:
    if not isinstance(memory, EmulatedMemory) or not memory.is_open:
        raise DeviceError("this slab is closed, or another driver's")
    return memory
