# SPDX-License-Identifier: Apache-2.0
"""NVIDIA devices: slabs of CUDA's virtual memory management, shared by descriptor.

    create:  cuMemCreate ─► cuMemAddressReserve, cuMemMap, cuMemSetAccess ─► a device address
    export:  cuMemExportToShareableHandle ─► a descriptor for any unix socket
    import_: cuMemImportFromShareableHandle ─► the same mapping, in another process

Importing this module touches neither CUDA nor cuda-bindings; making a CudaDriver does. What always
holds: a device is known by its UUID, whatever CUDA_VISIBLE_DEVICES makes of ordinals; each call
runs in the primary context of the device that it is about, in whichever thread; a slab is unmapped
after all work of its device. A stream is a CUstream's value; 0 is the legacy default stream.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from typing import Any

import msgspec
import numpy as np

from actorserve.device.cuda_calls import CallRefused, CudaCalls
from actorserve.device.cuda_fences import Fences, OwnFences, fences_of
from actorserve.device.driver import (
    AddressRange,
    DeviceError,
    DeviceMemory,
    DriverCounters,
    HostBytes,
    NoDevice,
)
from actorserve.errors import ActorserveError, ProtocolError

NOT_A_SLAB = ("INVALID_VALUE", "INVALID_HANDLE")
"""What CUDA says of a descriptor that is none of its own, or is smaller than was said."""

_SHARED_STREAMS = (0, 1, 2)
"""Each device has its own default streams under these values; other streams belong to one."""


class CudaMemory:
    """One mapped slab: CUDA's handle of the memory, the device, the fences."""

    __slots__ = ("base", "fences", "handle", "is_open", "nbytes", "ordinal")

    def __init__(
        self, base: int, nbytes: int, ordinal: int, handle: Any, fences: Fences | None
    ) -> None:
        self.base = base
        self.nbytes = nbytes
        self.ordinal = ordinal
        self.handle = handle
        self.fences = fences
        self.is_open = True


class CudaDriver:
    """The devices that CUDA shows to this process. NoDevice, saying why, if there is none."""

    name = "cuda"
    is_cuda = True
    can_export_foreign = False

    def __init__(self) -> None:
        self._calls = CudaCalls()
        api = self._calls.api
        kinds = api.CUmemAllocationHandleType
        self._by_descriptor = kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._lock = threading.Lock()
        self._bases: list[int] = []
        self._memories: list[CudaMemory] = []
        self._count = dict.fromkeys(DriverCounters.__struct_fields__, 0)

    # --- slabs ------------------------------------------------------------------------------------

    def uuid(self, ordinal: int) -> str:
        """Return "GPU-…" as nvidia-smi shows it; NoDevice beyond the last one."""
        uuids = self._calls.uuids
        if not 0 <= ordinal < len(uuids):
            raise NoDevice(f"there is no CUDA device {ordinal}; {len(uuids)} are visible")
        return uuids[ordinal]

    def create(self, ordinal: int, nbytes: int) -> CudaMemory:
        """Make a slab in units of the device's granularity (2 MiB as a rule); OutOfDeviceMemory."""
        self._calls.check()
        self.uuid(ordinal)
        with self._calls.current(ordinal):
            properties = self._properties(ordinal)
            options = self._calls.api.CUmemAllocationGranularity_flags
            unit = self._calls(
                "cuMemGetAllocationGranularity",
                properties,
                options.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
            )
            nbytes = max(1, -(-nbytes // unit)) * unit
            handle = self._calls("cuMemCreate", nbytes, properties, 0)
            memory = self._map(handle, nbytes, ordinal)
            try:
                memory.fences = OwnFences(self._calls, ordinal)
            except BaseException:
                self._unmap(memory)
                raise
        self._add(memory)
        self._count["created"] += 1
        return memory

    def export(self, memory: DeviceMemory) -> tuple[int, bytes]:
        """Return a descriptor of the memory; with it go the handles of its fences."""
        slab = _open(memory)
        with self._calls.current(slab.ordinal):
            fd = int(
                self._calls("cuMemExportToShareableHandle", slab.handle, self._by_descriptor, 0)
            )
        os.set_inheritable(fd, False)
        extra = slab.fences.extra if isinstance(slab.fences, OwnFences) else None
        return fd, msgspec.msgpack.encode(extra) if extra is not None else b""

    def import_(self, uuid: str, fd: int, nbytes: int, extra: bytes) -> CudaMemory:
        """Map a slab; ProtocolError if the descriptor or the extra is not what was said."""
        try:
            self._calls.check()
            ordinal = self._calls.ordinal_of(uuid)
            with self._calls.current(ordinal):
                memory = self._import(ordinal, fd, nbytes, extra)
        finally:
            os.close(fd)
        self._add(memory)
        self._count["imported"] += 1
        return memory

    def close(self, memory: DeviceMemory) -> None:
        """Unmap a slab, behind all work of its device; DeviceError if it is closed already."""
        slab = _open(memory)
        with self._lock:
            slab.is_open = False
            at = self._memories.index(slab)
            del self._memories[at], self._bases[at]
        self._count["closed"] += 1
        with self._calls.current(slab.ordinal):
            self._calls("cuCtxSynchronize")
            if slab.fences is not None:
                slab.fences.close()
            self._unmap(slab)

    # --- copies -----------------------------------------------------------------------------------

    def copy_in(self, address: int, source: HostBytes, stream: int = 0) -> None:
        """Copy host bytes behind the stream's work, and wait.

        Whether CUDA has read host memory when the call returns depends on where that lies.
        """
        view = memoryview(source).cast("B")
        self._copy("cuMemcpyHtoDAsync", address, view.nbytes, address, view, stream)
        self._count["copies_in"] += 1
        self._count["bytes_in"] += view.nbytes

    def copy_out(self, target: HostBytes, address: int, stream: int = 0) -> None:
        """Fill host memory behind the stream's work, and wait; TypeError if it is read-only."""
        view = memoryview(target).cast("B")
        if view.readonly:
            raise TypeError("device memory cannot be copied into read-only memory")
        self._copy("cuMemcpyDtoHAsync", address, view.nbytes, view, address, stream)
        self._count["copies_out"] += 1
        self._count["bytes_out"] += view.nbytes

    def copy_within(self, target: int, source: int, nbytes: int, stream: int = 0) -> None:
        """Start a copy behind the stream's work."""
        self._device_at(source, nbytes)
        self._copy("cuMemcpyDtoDAsync", target, nbytes, target, source, stream)
        self._count["copies_within"] += 1
        self._count["bytes_within"] += nbytes

    def synchronize(self, stream: int | None = None) -> None:
        """Wait for a stream; for None, and for default streams, on every device in use."""
        self._calls.check()
        used = self._calls.used()
        for ordinal in used if stream is None or stream in _SHARED_STREAMS else used[:1]:
            self._synchronize(ordinal, stream)
        self._count["synchronized"] += 1

    # --- fences, addresses ------------------------------------------------------------------------

    def record(self, memory: DeviceMemory, stream: int) -> int:
        """Record an event of the slab; 0 where this process did not make it: see the protocol."""
        self._calls.check()
        fences = _open(memory).fences
        assert fences is not None
        fence = fences.record(stream)
        self._count["fences_recorded"] += bool(fence)
        return fence

    def wait(self, memory: DeviceMemory, fence: int, stream: int) -> None:
        """Have the stream wait for an event; the caller goes on."""
        self._calls.check()
        fences = _open(memory).fences
        assert fences is not None
        self._count["fences_waited"] += 1
        fences.wait(fence, stream)

    def range_of(self, address: int) -> AddressRange | None:
        """Return the allocation around an address, whichever library made it."""
        which = self._calls.api.CUpointer_attribute
        wanted = [
            which.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
            which.CU_POINTER_ATTRIBUTE_RANGE_SIZE,
            which.CU_POINTER_ATTRIBUTE_BUFFER_ID,
        ]
        with self._calls.current(self._any_device()):
            values = self._calls("cuPointerGetAttributes", len(wanted), wanted, address)
        base, nbytes, number = (int(value) for value in values)
        return AddressRange(base, nbytes, number) if nbytes else None

    # --- the whole --------------------------------------------------------------------------------

    def counters(self) -> DriverCounters:
        """Return what was done so far."""
        with self._lock:
            self._count["open"] = len(self._memories)
            self._count["open_bytes"] = sum(slab.nbytes for slab in self._memories)
        return DriverCounters(**self._count)

    def shutdown(self) -> None:
        """Close every slab and give the contexts up, also of a device that is lost."""
        for slab in list(self._memories):
            try:
                self.close(slab)
            except ActorserveError:
                pass  # a lost context has nothing mapped
        self._calls.forget_contexts()

    # --- inside -----------------------------------------------------------------------------------

    def _properties(self, ordinal: int) -> Any:
        api = self._calls.api
        made = api.CUmemAllocationProp()
        made.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        made.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        made.location.id = ordinal
        made.requestedHandleTypes = self._by_descriptor
        return made

    def _import(self, ordinal: int, fd: int, nbytes: int, extra: bytes) -> CudaMemory:
        fences = fences_of(self._calls, ordinal, extra)
        try:
            handle = self._calls("cuMemImportFromShareableHandle", fd, self._by_descriptor)
            memory = self._map(handle, nbytes, ordinal)
        except BaseException as error:
            fences.close()
            if isinstance(error, CallRefused) and error.reason in NOT_A_SLAB:
                raise ProtocolError(
                    f"the descriptor is no CUDA slab of {nbytes} bytes: {error.message}"
                ) from error
            raise
        memory.fences = fences
        return memory

    def _map(self, handle: Any, nbytes: int, ordinal: int) -> CudaMemory:
        """Map memory, whose handle is taken over, also on failure."""
        calls = self._calls
        access = calls.api.CUmemAccessDesc()
        access.location.type = calls.api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = ordinal
        access.flags = calls.api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        base = 0
        is_mapped = False
        try:
            base = int(calls("cuMemAddressReserve", nbytes, 0, 0, 0))
            calls("cuMemMap", base, nbytes, 0, handle, 0)
            is_mapped = True
            calls("cuMemSetAccess", base, nbytes, [access], 1)
        except BaseException:
            if is_mapped:
                calls.api.cuMemUnmap(base, nbytes)
            if base:
                calls.api.cuMemAddressFree(base, nbytes)
            calls.api.cuMemRelease(handle)
            raise
        return CudaMemory(base, nbytes, ordinal, handle, None)

    def _unmap(self, slab: CudaMemory) -> None:
        self._calls("cuMemUnmap", slab.base, slab.nbytes)
        self._calls("cuMemAddressFree", slab.base, slab.nbytes)
        self._calls("cuMemRelease", slab.handle)

    def _add(self, slab: CudaMemory) -> None:
        with self._lock:
            at = bisect_right(self._bases, slab.base)
            self._bases.insert(at, slab.base)
            self._memories.insert(at, slab)

    def _any_device(self) -> int:
        """Return a device to ask about an address that may be on another one."""
        return next(iter(self._calls.used()), 0)

    def _device_at(self, address: int, nbytes: int) -> int:
        """Return the device of an address range, ours or a library's; DeviceError if there is none.

        A range that leaves its slab is refused here: what comes behind may be mapped as well.
        """
        self._calls.check()
        with self._lock:
            at = bisect_right(self._bases, address) - 1
            slab = self._memories[at] if at >= 0 else None
        if slab is not None and address < slab.base + slab.nbytes:
            if address + nbytes <= slab.base + slab.nbytes:
                return slab.ordinal
        else:
            which = self._calls.api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
            try:
                with self._calls.current(self._any_device()):
                    return int(self._calls("cuPointerGetAttribute", which, address))
            except CallRefused:
                pass
        raise DeviceError(f"no device memory at {address:#x} to {address + nbytes:#x}")

    def _copy(
        self,
        call: str,
        address: int,
        nbytes: int,
        to: int | memoryview,
        out_of: int | memoryview,
        stream: int,
    ) -> None:
        """Start a copy in the context of an address; wait for it where one side is host memory."""
        ordinal = self._device_at(address, nbytes)
        if not nbytes:
            return
        sides = [side if isinstance(side, int) else _address_of(side) for side in (to, out_of)]
        with self._calls.current(ordinal):
            self._calls(call, *sides, nbytes, stream)
            if call != "cuMemcpyDtoDAsync":
                self._calls("cuStreamSynchronize", stream)

    def _synchronize(self, ordinal: int, stream: int | None) -> None:
        with self._calls.current(ordinal):
            if stream is None:
                self._calls("cuCtxSynchronize")
            else:
                self._calls("cuStreamSynchronize", stream)


def _open(memory: DeviceMemory) -> CudaMemory:
    if not isinstance(memory, CudaMemory) or not memory.is_open:
        raise DeviceError("this slab is closed, or another driver's")
    return memory


def _address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
