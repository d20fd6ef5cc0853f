# SPDX-License-Identifier: Apache-2.0
"""Tensors between a stub's wire and its user's code: small ones in the frame, large ones by handle.

Whoever makes a message of what `wire_tensor` returned has to say `end.forwarded` once it is sent,
or `end.withdraw` if it is not.
"""

from __future__ import annotations

from actorserve.runtime.stub_end import StubEnd
from actorserve.triton.tensor import Tensor
from actorserve.wire.messages import INLINE_BYTES, Handle, WireTensor

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

    def tensor(self, wire: WireTensor) -> Tensor:
        """Return a tensor over the body; a leased view where it came by handle."""
        body = wire.data
        if not isinstance(body, Handle):
            return Tensor._received(wire.name, wire.datatype, wire.shape, body)
        view = self._end.view(body, writable=not body.shared)
        copy = body.shared and not self._shared_inputs
        return Tensor._received(wire.name, wire.datatype, wire.shape, view, copy)

    def wire_tensor(self, tensor: Tensor, room: Room) -> WireTensor:
        """Put a small body into the frame and a large one into shared memory.

        Raises ResourceExhausted, or InvalidArgument for a tensor that cannot travel.
        """
        number, shape, body = tensor._body()
        nbytes = body.nbytes
        if nbytes > INLINE_BYTES or nbytes > room.left_bytes:
            return WireTensor(tensor._name, number, shape, self._end.place(body))
        room.left_bytes -= nbytes
        return WireTensor(tensor._name, number, shape, body.tobytes())
