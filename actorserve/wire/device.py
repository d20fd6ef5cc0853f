# SPDX-License-Identifier: Apache-2.0
"""What processes say about device memory: slabs, references into them, releases.

    tenant ── SlabOffer (with the descriptor) ──► supervisor ── the same ──► who gets a reference
    importer ── SlabAccepted ──► supervisor
    DeviceRef: in the place of a tensor's bytes, on any road
    borrower ── DeviceReleased ──► supervisor ── DeviceReleased ──► tenant
    supervisor ── SlabRetired ──► importers        tenant ── SlabRetired ──► supervisor
    stub ── LeaseWanted ──► lender ── SlabOffer or LeaseRefused ──► stub

An epoch is the number of one process's life and never given again; a slab's number is its
tenant's. So (epoch, slab) names a slab for good, and with slot and generation one allocation.
What always holds: a release travels behind the message whose references it follows, so that
whoever passes a reference on and then drops it never leaves a moment in which nobody has it.
"""

from __future__ import annotations

import msgspec

from actorserve.wire.codec import Decoder
from actorserve.wire.messages import Message

BlockKey = tuple[int, int, int, int]
"""(epoch, slab, slot, generation): one allocation, never another one."""


class DeviceRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a tensor's bytes lie on a device: some 20 bytes on the wire.

    `offset` and `nbytes` are in bytes, within the slab. `fence` is 0 where the data is complete,
    else the number of the slab's fence that a reader's stream has to wait for.
    """

    epoch: int
    slab: int
    slot: int
    generation: int
    offset: int
    nbytes: int
    fence: int = 0

    @property
    def key(self) -> BlockKey:
        """The allocation in which the bytes lie."""
        return self.epoch, self.slab, self.slot, self.generation


class SlabOffer(Message, frozen=True, tag=90):
    """Map this slab; its descriptor comes along. `epoch` is its tenant, who alone allocates in it.

    `uuid` names the device, since ordinals differ between processes; `extra` is the driver's own.
    """

    epoch: int
    slab: int
    driver: str
    uuid: str
    nbytes: int
    extra: bytes = b""


class SlabAccepted(Message, frozen=True, tag=91):
    """The slab is mapped, or cannot be for this reason."""

    epoch: int
    slab: int
    error: str = ""


class SlabRetired(Message, frozen=True, tag=92):
    """No reference into this slab will come any more: unmap it once your last view is gone."""

    epoch: int
    slab: int


class DeviceReleased(Message, frozen=True, tag=93):
    """The sender has done with these; one entry for each time that it was given the block."""

    blocks: list[BlockKey]


class LeaseWanted(Message, frozen=True, tag=94):
    """My slabs are full and I make none myself: lease me one on this device."""

    uuid: str
    nbytes: int


class LeaseRefused(Message, frozen=True, tag=95):
    """You get no slab, for this reason."""

    uuid: str
    nbytes: int
    reason: str


DeviceMessage = SlabOffer | SlabAccepted | SlabRetired | DeviceReleased | LeaseWanted | LeaseRefused

decode_device_message: Decoder[DeviceMessage] = Decoder(DeviceMessage, "about device memory")
