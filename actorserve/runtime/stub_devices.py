# SPDX-License-Identifier: Apache-2.0
"""A stub's device memory: references in, references out, and what becomes of the device.

    wire ─ ref ─► borrow ─► DeviceBuffer ─► the model          its death ─► settle ─► DeviceReleased
    the model's memory, a library's, an array ─► lend ─► ref ─► the message ─► sent / unsent

What always holds: from `lend` until the message with the reference is on its way the buffer is
kept alive, so that no release overtakes it. A DeviceError is an error of one request; DeviceLost
is the end of this process, which the supervisor hears of once what is owed has been sent.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from actorserve.device.buffer import DeviceBuffer
from actorserve.device.driver import DeviceError, DeviceLost, NoDevice, OutOfDeviceMemory
from actorserve.device.pool import SlabPool
from actorserve.device.settings import read_device_settings
from actorserve.errors import ProtocolError
from actorserve.wire.device import (
    BlockKey,
    DeviceBroken,
    DevicePlan,
    DeviceReleased,
    SlabAccepted,
    SlabOffer,
    SlabRetired,
)
from actorserve.wire.device_ref import DeviceRef
from actorserve.wire.messages import WireTensor

if TYPE_CHECKING:
    from actorserve.runtime.stub_end import StubEnd

__all__ = ["DeviceBuffer", "DeviceError", "DeviceMemory", "NoDevice", "StubDevices"]


class DeviceMemory(Protocol):
    """Bytes on the device: a buffer of the pool, or what a library has allocated."""

    @property
    def address(self) -> int:
        """Return the device address of the first byte."""

    @property
    def nbytes(self) -> int:
        """Return how many bytes there are."""

    @property
    def stream(self) -> int | None:
        """Return the stream behind whose work the data is complete."""

    def use_on(self, stream: int) -> None:
        """Have a stream's work see the data."""


class StubDevices:
    """See the module's head. Any thread; `lost` says what the device was lost by, "" for none."""

    def __init__(self, end: StubEnd, plan: DevicePlan) -> None:
        """Open the driver, which touches the device. Raises NoDevice, ConfigError, DeviceError."""
        from actorserve.device.plugins import open_driver  # of no use to stubs without a device

        driver = open_driver(plan.driver)
        self.pool = SlabPool(
            driver,
            epoch=end.arena_id,
            ordinal=0 if plan.is_isolated and driver.is_cuda else plan.ordinal,
            settings=read_device_settings({"driver": plan.driver, **plan.settings}, "the server"),
            on_slab=end.offer_slab,
        )
        self.pool.before_growth = self._look_for_room
        self.uuid = self.pool.uuid
        self.cpu_inputs = plan.cpu_inputs
        self.takes_refs = True  # False once a slab could not be mapped
        self.lost = ""
        self._end = end
        self._sending: dict[int, tuple[DeviceRef, DeviceBuffer]] = {}
        self._returned: list[BlockKey] = []
        self._unmapped: set[tuple[int, int]] = set()
        self._lock = threading.Lock()

    # --- in --------------------------------------------------------------------------------------

    def can_map(self, refs: Iterable[DeviceRef]) -> bool:
        """Tell whether these can be borrowed: their slabs are mapped here by now."""
        return all(self._is_mapped(ref) for ref in refs)

    def borrow(self, ref: DeviceRef) -> DeviceBuffer:
        """Return the memory of a reference that came; its death gives the loan back.

        Raises ProtocolError for a stale or false one, DeviceError where the device fails.
        """
        pool = self.pool
        if not pool.has_slab(ref):
            self._is_mapped(ref)
        return pool.borrow(ref)

    def _is_mapped(self, ref: DeviceRef) -> bool:
        """Map the reference's slab, which was offered before it, unless that has failed."""
        name = (ref.epoch, ref.slab)
        if not self.pool.has_slab(ref) and name not in self._unmapped:
            self._end.receive_offers(lambda: self.pool.has_slab(ref) or name in self._unmapped)
        return name not in self._unmapped

    def accept(self, offer: SlabOffer, fd: int) -> None:
        """Map a slab that was offered, and say whether that went well."""
        try:
            answer = self.pool.accept(offer, fd)
        except DeviceError as error:
            self.note(error)
            answer = SlabAccepted(offer.epoch, offer.slab, error.message)
        if answer.error:
            self._unmapped.add((offer.epoch, offer.slab))
            self.takes_refs = False
        self._end.send(answer)

    def give_back(self, refs: Iterable[DeviceRef]) -> None:
        """Return references that came and that nobody has borrowed, at the next `settle`."""
        with self._lock:
            self._returned += [ref.key for ref in refs]

    # --- out -------------------------------------------------------------------------------------

    def lend(self, memory: DeviceMemory) -> DeviceRef | None:
        """Return a reference to the memory; None where host memory is to carry it.

        What a library allocated is copied on the device, once. Has to be followed by `sent` or
        `unsent`. Raises OutOfDeviceMemory, DeviceError.
        """
        if isinstance(memory, DeviceBuffer) and memory.pool is self.pool:
            return self._lend(memory)
        pool = self.pool
        stream = memory.stream or 0
        buffer = pool.adopt(memory.address, memory.nbytes, stream=stream)
        if buffer is None:
            return None
        if pool.settings.fence == "event":
            pool.driver.synchronize(stream)  # the library frees its memory when it likes
        return self._lend(buffer)

    def put(self, array: npt.NDArray[np.generic]) -> DeviceRef | None:
        """Copy a C-contiguous array to the device; see `lend`."""
        buffer = self.pool.allocate(array.nbytes)
        if buffer is None:
            return None
        if array.nbytes:
            buffer.copy_in(array.reshape(-1).view(np.uint8).data)
        return self._lend(buffer)

    def copy_out(self, memory: DeviceMemory, target: memoryview) -> None:
        """Fill host memory from the device, for whoever cannot use that. Raises DeviceError."""
        memory.use_on(0)
        self.pool.driver.copy_out(target, memory.address, 0)

    def _lend(self, buffer: DeviceBuffer) -> DeviceRef:
        ref = self.pool.lend(buffer)
        self._sending[id(ref)] = (ref, buffer)  # which keeps the number the reference's own
        return ref

    def sent(self, tensors: Iterable[WireTensor]) -> None:
        """Hear that a message with these tensors is on its way."""
        sending = self._sending
        if sending:
            for tensor in tensors:
                if tensor.device is not None:
                    sending.pop(id(tensor.device), None)

    def unsent(self, tensors: Iterable[WireTensor]) -> None:
        """Hear that these tensors are not sent after all."""
        for tensor in tensors:
            ref = tensor.device
            if ref is None or self._sending.pop(id(ref), None) is None:
                continue
            if ref.epoch == self.pool.epoch:
                self.pool.returned(DeviceReleased([ref.key]))

    # --- the supervisor's word -------------------------------------------------------------------

    def returned(self, message: DeviceReleased) -> None:
        """Take back what others have released."""
        self.pool.returned(message)

    def retire(self, message: SlabRetired) -> None:
        """Unmap a slab, with its last view. Its offer was sent before: it may be unread still."""
        self._end.read_offers()
        self._unmapped.discard((message.epoch, message.slab))
        self.pool.retire(message)

    def settle(self, *, rings: bool = True) -> None:
        """Send what is to be released; without a ring where a message follows. Any thread."""
        if not (self.pool.has_releases or self._returned):
            return
        try:
            released = self.pool.take_releases()
        except DeviceLost as error:
            self.note(error)
            return
        blocks = [] if released is None else released.blocks
        if self._returned:
            with self._lock:
                returned, self._returned = self._returned, []
            blocks = [*blocks, *returned]
        if blocks and rings:
            self._end.send(DeviceReleased(blocks))
        elif blocks:
            self._end.post(DeviceReleased(blocks))

    def _look_for_room(self) -> None:
        """Give back, and hear of what others have given back, before more is taken."""
        self.settle()
        self._end.try_take_in()

    def trim(self) -> None:
        """Give idle slabs back to the device."""
        try:
            retired = self.pool.trim()
        except DeviceError as error:
            self.note(error)
            return
        for message in retired:
            self._end.send(message)

    # --- a device that is lost -------------------------------------------------------------------

    def note(self, error: BaseException) -> None:
        """Take note of an error: one that says that the device is lost ends this process soon."""
        if isinstance(error, DeviceLost) and not self.lost:
            self.lost = error.message
            self._end.wake_control()

    def judge(self, error: BaseException) -> None:
        """Look after an error of the model's own whether the device survived it."""
        if self.lost or isinstance(error, (DeviceLost, OutOfDeviceMemory)):
            self.note(error)
            return
        try:
            self.pool.driver.synchronize(None)
        except DeviceError as problem:
            self.note(problem)

    def end_process(self) -> NoReturn:
        """Say what happened to the device and end this process; another one takes its place."""
        self._end.send(DeviceBroken(self.lost))
        os._exit(1)


def checked(devices: StubDevices | None) -> StubDevices:
    """Return the stub's device memory. ProtocolError for a reference where there is none."""
    if devices is None:
        raise ProtocolError("a reference to device memory came to a process that has none")
    return devices
