# SPDX-License-Identifier: Apache-2.0
"""One stub's channel, seen from the supervisor: the model server's messages, and device memory.

What a channel is stands in host_channel.py. A reference to device memory goes as part of a
message: before it, its slab is offered on the boot socket, and the loan is counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from actorserve.errors import ProtocolError
from actorserve.process.boot import PeerGone
from actorserve.process.packet import close_all
from actorserve.runtime.child import BootSocket
from actorserve.runtime.exchange import Exchange
from actorserve.runtime.host_channel import BACKLOG_MESSAGES, HostChannel, Listener
from actorserve.wire.codec import decode_to_supervisor, encode
from actorserve.wire.device import DeviceReleased, SlabOffer, SlabRetired
from actorserve.wire.device_ref import DeviceRef
from actorserve.wire.messages import (
    CancelTold,
    Granted,
    Handle,
    OnBootSocket,
    ToSupervisor,
    WireTensor,
)

__all__ = ["BACKLOG_MESSAGES", "HostEnd", "Listener"]


class HostEnd(HostChannel[ToSupervisor]):
    """See the module's head. `device` is the driver and the UUID that the stub says it works on."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        exchange: Exchange,
        arena: int,
        listener: Listener[ToSupervisor],
        *,
        first_segment_bytes: int = 4 << 20,
        growth_bytes: int = 0,
    ) -> None:
        super().__init__(
            loop,
            exchange,
            arena,
            listener,
            decode=decode_to_supervisor,
            first_segment_bytes=first_segment_bytes,
            growth_bytes=growth_bytes,
        )
        self.device: tuple[str, str] | None = None
        self._credited: list[int] = []
        self._cancelled: list[int] = []

    def open(self, boot: BootSocket, instance: str) -> None:
        """Send Hello and start to listen; see HostChannel."""
        super().open(boot, instance)
        if self._exchange.devices is not None:
            self._exchange.devices.join(self)

    def close(self) -> None:
        """Read what is left and give everything back; see HostChannel."""
        if self._closed:
            return
        super().close()
        if self._exchange.devices is not None:
            self._exchange.devices.leave(self)

    # --- device memory ---------------------------------------------------------------------------

    def send_encoded(
        self, data: bytes, tensors: Sequence[WireTensor] = (), *, wakes: bool = True
    ) -> None:
        """Send an encoded message on the work lane; see HostChannel."""
        if self._exchange.devices is None:
            super().send_encoded(data, tensors, wakes=wakes)
            return
        refs = self._lend(tensors)
        try:
            super().send_encoded(data, tensors, wakes=wakes)
        except BaseException:
            self._exchange.devices.take_back(self, refs)
            raise

    def send_tensors(self, data: bytes, tensors: Sequence[WireTensor], *, on_control: bool) -> None:
        """Send an encoded message whose number is bounded by something else, on either lane."""
        handles = [tensor.data for tensor in tensors if isinstance(tensor.data, Handle)]
        if self._exchange.devices is not None:
            self._lend(tensors)
        self.send_with_handles(data, handles, on_control=on_control, is_bounded=False)

    def _lend(self, tensors: Sequence[WireTensor]) -> list[DeviceRef]:
        """Count the references of a message that is sent next; returns them."""
        devices = self._exchange.devices
        refs = [tensor.device for tensor in tensors if tensor.device is not None]
        if not refs or self._closed or devices is None:
            return []
        devices.lend(self, refs)
        return refs

    def can_take(self, tensors: Sequence[WireTensor]) -> bool:
        """Tell whether the stub can use all of these that lie on a device."""
        devices = self._exchange.devices
        return all(
            tensor.device is None or (devices is not None and devices.can_take(self, tensor.device))
            for tensor in tensors
        )

    def offer_slab(self, offer: SlabOffer, fd: int) -> None:
        """Send the descriptor of a slab that the stub does not know yet."""
        if self._boot is None:
            return
        try:
            self._boot.send(offer, [fd])
        except PeerGone:
            return  # Its exit is on the way.

    def tell_of_device(self, message: DeviceReleased | SlabRetired) -> None:
        """Say what was released, without waking anybody for it, or which slab is gone."""
        if isinstance(message, DeviceReleased):
            self._push(self._work, encode(message), is_bounded=False, wakes=False)
        else:
            self.send_control(message)

    def _on_boot_message(self, message: OnBootSocket, fds: list[int]) -> None:
        if not isinstance(message, SlabOffer):
            super()._on_boot_message(message, fds)
            return
        devices = self._exchange.devices
        if devices is None or len(fds) != 1:
            close_all(fds)
            raise ProtocolError("a stub offered device memory, and has none")
        devices.offered(self, message, fds[0])

    # --- what senders hear -----------------------------------------------------------------------

    def tell_of_credit(self, request: int) -> None:
        """Wake a request's sender, which waits for credit: with all others of this loop's turn.

        A client often takes several responses in one turn, and each ring is a system call here
        and a switch of threads there.
        """
        if not self._credited:
            self._loop.call_soon(self._tell_of_credit)
        self._credited.append(request)

    def _tell_of_credit(self) -> None:
        requests, self._credited = self._credited, []
        self.send_control(Granted(list(dict.fromkeys(requests))))

    def tell_of_cancel(self, request: int) -> None:
        """Say that a request's cancel word is set: with all others of this loop's turn."""
        if not self._cancelled:
            self._loop.call_soon(self._tell_of_cancel)
        self._cancelled.append(request)

    def _tell_of_cancel(self) -> None:
        requests, self._cancelled = self._cancelled, []
        self.send_control(CancelTold(requests))
