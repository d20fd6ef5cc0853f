# SPDX-License-Identifier: Apache-2.0
"""What a kind of device must offer: whole slabs that travel by descriptor, copies and fences.

All else (allocation, references, lifetimes) is the same for every driver and lies in pool.py.
A driver is used by any thread of its process; one with a current context per thread sets it in
every call. Addresses are integers that mean something to the device only, and so are streams; 0
is the default stream.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import msgspec

from actorserve.errors import InternalError, ResourceExhausted, Unavailable
from actorserve.state.device_lease import StaleReference

__all__ = [
    "AddressRange",
    "DeviceDriver",
    "DeviceError",
    "DeviceLost",
    "DeviceMemory",
    "DriverCounters",
    "NoDevice",
    "OutOfDeviceMemory",
    "StaleReference",
]

HostBytes = bytes | bytearray | memoryview
"""What copies read from and write to on the host: anything contiguous works as a memoryview."""


class NoDevice(Unavailable):
    """There is no such device or driver here; everything goes by host memory then."""


class OutOfDeviceMemory(ResourceExhausted):
    """The device or the quota has no room: an error of this request and of no other."""


class DeviceError(InternalError):
    """The driver refused a call; the next one may work."""


class DeviceLost(DeviceError):
    """The device's context in this process is unusable for good: only a new process helps."""


class DeviceMemory(Protocol):
    """One mapped slab as a driver knows it. `base` is its address, `nbytes` its size."""

    @property
    def base(self) -> int:
        """Return the device address of the first byte."""

    @property
    def nbytes(self) -> int:
        """Return how many bytes are mapped."""


class AddressRange(msgspec.Struct, frozen=True):
    """The memory around an address. `number` differs for each allocation, also at one address."""

    base: int
    nbytes: int
    number: int


class DriverCounters(msgspec.Struct, frozen=True):
    """What a driver has done in this process; `open` slabs and their bytes are as of now."""

    created: int
    imported: int
    closed: int
    open: int
    open_bytes: int
    copies_in: int
    copies_out: int
    copies_within: int
    bytes_in: int
    bytes_out: int
    bytes_within: int
    synchronized: int
    fences_recorded: int
    fences_waited: int


@runtime_checkable
class DeviceDriver(Protocol):
    """A kind of device. Each call raises DeviceError or DeviceLost where it says nothing else.

    `name` is the plug-in's. `is_cuda` says that addresses are CUDA's, so that torch and cupy can
    use them. `can_export_foreign` says that memory which others allocated can be shared as it is.
    """

    name: str
    is_cuda: bool
    can_export_foreign: bool

    def uuid(self, ordinal: int) -> str:
        """Return the device's name for other processes; NoDevice if there is no such ordinal."""

    def create(self, ordinal: int, nbytes: int) -> DeviceMemory:
        """Make and map a slab of at least `nbytes`; OutOfDeviceMemory if there is no room."""

    def export(self, memory: DeviceMemory) -> tuple[int, bytes]:
        """Return a new descriptor of a slab, for the caller to close, and what goes with it."""

    def import_(self, uuid: str, fd: int, nbytes: int, extra: bytes) -> DeviceMemory:
        """Map another process's slab; takes the descriptor over, also on failure.

        NoDevice if the device cannot be seen from here.
        """

    def close(self, memory: DeviceMemory) -> None:
        """Unmap a slab; the memory itself lives as long as any mapping or descriptor of it."""

    def copy_in(self, address: int, source: HostBytes, stream: int = 0) -> None:
        """Copy host bytes to the device; the source may be changed as soon as this returns."""

    def copy_out(self, target: HostBytes, address: int, stream: int = 0) -> None:
        """Fill host memory from the device, after the stream's earlier work, and wait for it."""

    def copy_within(self, target: int, source: int, nbytes: int, stream: int = 0) -> None:
        """Start a copy on the device; it is done when the stream is."""

    def synchronize(self, stream: int | None = None) -> None:
        """Wait until the stream's work (None: all streams') is done."""

    def record(self, memory: DeviceMemory, stream: int) -> int:
        """Make a fence of a slab behind the stream's work so far; return its number, from 1.

        0 where the slab can have none; the stream was waited for instead.
        """

    def wait(self, memory: DeviceMemory, fence: int, stream: int) -> None:
        """Have the stream wait for a fence; DeviceError if the process that made it died.

        Of a process that dies while the stream waits, and of a fence that was reached before its
        process died, some drivers tell less than others.
        """

    def range_of(self, address: int) -> AddressRange | None:
        """Return the device memory around an address, whoever made it; None if there is none."""

    def counters(self) -> DriverCounters:
        """Return what was done so far."""

    def shutdown(self) -> None:
        """Close every slab and give the device up; idempotent."""
