# SPDX-License-Identifier: Apache-2.0
"""Tensors between a stub's wire and its user's code: small ones in the frame, large ones by handle.

Whoever makes a message of what `wire_tensor` returned has to say `end.forwarded` once it is sent,
or `end.withdraw` if it is not.
"""

from __future__ import annotations

from actorserve.runtime.stub_devices import StubDevices, checked
from actorserve.runtime.stub_end import StubEnd
from actorserve.triton.tensor import Tensor
from actorserve.wire.device_ref import DeviceRef, Placement
from actorserve.wire.messages import INLINE_BYTES, Handle, WireTensor
from actorserve.wire.tensors import DataType

INLINE_TOTAL_BYTES = 256 << 10
"""Bodies inside one frame altogether; those beyond travel through the arena."""


class Room:
    """The bytes that are left for bodies inside of one frame."""

    __slots__ = ("left_bytes",)

    def __init__(self) -> None:
        self.left_bytes = INLINE_TOTAL_BYTES


class Bodies:
    """Turn tensors of the wire into the user's and back. Any thread."""

    def __init__(self, end: StubEnd, *, shared_inputs: bool) -> None:
        """Views of memory that others use too are read-only with `shared_inputs`, else copies."""
        self._end = end
        self._shared_inputs = shared_inputs

    def tensor(self, wire: WireTensor, *, is_input: bool = False) -> Tensor:
        """Return a tensor over the body; a leased view where it came by handle.

        What lies on a device is brought to the host where that was said of a model's inputs.
        """
        body = wire.data
        if not isinstance(body, Handle):
            if wire.device is not None:
                return self._on_device(wire, wire.device, is_input=is_input)
            return Tensor._received(wire.name, wire.datatype, wire.shape, body)
        view = self._end.view(body, writable=not body.shared)
        copy = body.shared and not self._shared_inputs
        return Tensor._received(wire.name, wire.datatype, wire.shape, view, copy)

    def _on_device(self, wire: WireTensor, ref: DeviceRef, *, is_input: bool) -> Tensor:
        devices = checked(self._end.devices)
        with_buffer = devices.borrow(ref)
        if not (is_input and devices.cpu_inputs):
            return Tensor._on_device(wire.name, wire.datatype, wire.shape, with_buffer)
        with with_buffer as buffer:
            return Tensor._received(wire.name, wire.datatype, wire.shape, buffer.copy_out())

    def _copied(self, devices: StubDevices, tensor: Tensor) -> WireTensor | None:
        """Copy a large body from the device straight into shared memory; None for any other."""
        body = tensor._device_body()
        if body is None or body[2].nbytes <= INLINE_BYTES:
            return None
        number, shape, memory = body
        handle = self._end.place_filled(
            memory.nbytes, lambda target: devices.copy_out(memory, target)
        )
        return WireTensor(tensor._name, number, shape, handle)

    def wire_tensor(
        self, tensor: Tensor, room: Room, placement: Placement | None = None
    ) -> WireTensor:
        """Put a small body into the frame and a large one into shared memory.

        By reference to device memory goes what lies there or is wanted there, where the receiver
        has said so. Raises ResourceExhausted, DeviceError, or InvalidArgument for a tensor that
        cannot travel.
        """
        devices = self._end.devices
        if devices is not None:
            wire = _by_reference(devices, tensor, placement) or self._copied(devices, tensor)
            if wire is not None:
                return wire
        number, shape, body = tensor._body()
        nbytes = body.nbytes
        if nbytes > INLINE_BYTES or nbytes > room.left_bytes:
            return WireTensor(tensor._name, number, shape, self._end.place(body))
        room.left_bytes -= nbytes
        return WireTensor(tensor._name, number, shape, body.tobytes())


def _by_reference(
    devices: StubDevices, tensor: Tensor, placement: Placement | None
) -> WireTensor | None:
    """Return what travels without its bytes; None where they go by host memory."""
    if placement is None or placement.uuid != devices.uuid:
        return None
    body = tensor._device_body()
    if body is not None:
        number, shape, memory = body
        ref = devices.lend(memory)
    elif placement.is_wanted and tensor._number != DataType.BYTES:
        number, shape, array = tensor._body()
        ref = devices.put(array)
    else:
        return None
    return None if ref is None else WireTensor(tensor._name, number, shape, b"", ref)
