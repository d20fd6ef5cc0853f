# SPDX-License-Identifier: Apache-2.0
"""What processes say about device memory: slabs, references into them, releases.

    tenant ── SlabOffer (with the descriptor) ──► supervisor ── the same ──► who gets a reference
    importer ── SlabAccepted ──► supervisor
    DeviceRef: in the place of a tensor's bytes, on any road
    borrower ── DeviceReleased ──► supervisor ── DeviceReleased ──► tenant
    supervisor ── SlabRetired ──► importers        tenant ── SlabRetired ──► supervisor
    stub ── DeviceBroken ──► supervisor            supervisor ── FindDevices ──► probe, its answer

Offers take the boot socket; what else a stub says, the up lane. It hears of releases on the work
lane, unrung, and of retired slabs on the control lane.

An epoch is the number of one process's life and never given again; a slab's number is its
tenant's. So (epoch, slab) names a slab for good, and with slot and generation one allocation.
What always holds: a release travels behind the message whose references it follows, so that
whoever passes a reference on and then drops it never leaves a moment in which nobody has it.
"""

from __future__ import annotations

import msgspec

from actorserve.wire.decoder import Decoder
from actorserve.wire.device_ref import BlockKey, DeviceRef, Placement
from actorserve.wire.message import Message

__all__ = [
    "BlockKey",
    "DeviceBroken",
    "DeviceMessage",
    "DevicePlan",
    "DeviceRef",
    "DeviceReleased",
    "DevicesFound",
    "FindDevices",
    "Placement",
    "SlabAccepted",
    "SlabOffer",
    "SlabRetired",
    "decode_device_message",
]


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


class DeviceBroken(Message, frozen=True, tag=94):
    """The device's context in this stub is lost for good: replace the process."""

    reason: str


class FindDevices(Message, frozen=True, tag=95):
    """Say which devices a driver has; only for runtime/device_probe.py."""

    driver: str


class DevicesFound(Message, frozen=True, tag=96):
    """The devices in the order of their ordinals, or the `problem` why there are none."""

    uuids: list[str]
    problem: str = ""


class DevicePlan(msgspec.Struct, frozen=True, array_like=True):
    """The device that a stub works on, and how; a part of Initialize.

    The `ordinal` is the server's. `settings` are those of device.settings, by name. Where a stub
    `is_isolated`, CUDA shows it only this one device, which is number 0 then. With
    `cpu_inputs`, a model's inputs are brought to host memory first.
    """

    driver: str
    ordinal: int
    uuid: str
    settings: dict[str, int | float | str]
    is_isolated: bool = False
    cpu_inputs: bool = True


DeviceMessage = SlabOffer | SlabAccepted | SlabRetired | DeviceReleased

decode_device_message: Decoder[DeviceMessage] = Decoder(DeviceMessage, "about device memory")
