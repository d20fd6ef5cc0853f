# SPDX-License-Identifier: Apache-2.0
"""A reference to device memory, in the place of a tensor's bytes, and where answers may lie."""

from __future__ import annotations

import msgspec

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


class Placement(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where the tensors of an answer may lie: on the device `uuid`, by reference.

    What `is_wanted` there is put there; otherwise only what lies there anyhow stays. No placement
    at all means host memory: its receiver cannot use a device, or does not want to.
    """

    uuid: str
    is_wanted: bool = False
