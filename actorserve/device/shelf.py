# SPDX-License-Identifier: Apache-2.0
"""The slabs that a process has mapped: making them within the quota, taking others', retiring.

What always holds: a slab is in `slabs` for as long as references into it may come; a retired one
is mapped until its last view is gone, and then closed once. Not locked: the pool's lock is held.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from actorserve.device.driver import DeviceDriver, DeviceLost, OutOfDeviceMemory
from actorserve.device.settings import DeviceSettings
from actorserve.device.slab import Slab
from actorserve.errors import ActorserveError, AlreadyExists, InternalError
from actorserve.wire.device import SlabAccepted, SlabOffer

OnSlab = Callable[[SlabOffer, int], None]
"""Told of each slab that a process made for itself; owns the descriptor."""


class SlabShelf:
    """`slabs` is by (epoch, number), `own` those in which this process allocates."""

    def __init__(
        self,
        driver: DeviceDriver,
        epoch: int,
        ordinal: int,
        settings: DeviceSettings,
        on_slab: OnSlab | None,
    ) -> None:
        self.slabs: dict[tuple[int, int], Slab] = {}
        self.own: list[Slab] = []
        self.retired: list[Slab] = []
        self._driver = driver
        self._epoch = epoch
        self._ordinal = ordinal
        self._uuid = driver.uuid(ordinal)
        self._settings = settings
        self._on_slab = on_slab
        self._last_number = 0
        self._closed = False

    def grow(self, nbytes: int) -> Slab:
        """Make a slab of our own in which `nbytes` fit, and tell of it; OutOfDeviceMemory."""
        size = max(self._settings.slab_bytes, nbytes)
        limit_bytes = self._settings.max_bytes
        used_bytes = sum(slab.nbytes for slab in self.own)
        if limit_bytes and used_bytes + size > limit_bytes:
            size = limit_bytes - used_bytes  # the last slab is what the quota leaves
            if size < max(nbytes, 1):
                raise OutOfDeviceMemory(
                    f"{nbytes} bytes on {self._uuid} exceed this process's quota: {used_bytes} of "
                    f"max_bytes={limit_bytes} are in slabs"
                )
        number = self._last_number + 1
        offer, fd = self.make(self._epoch, number, size)
        self._last_number = number
        slab = self.slabs[self._epoch, number]
        if self._on_slab is None:
            os.close(fd)
        else:
            try:
                self._on_slab(offer, fd)
            except BaseException:
                del self.slabs[self._epoch, number]
                self._driver.close(slab.memory)
                raise
        self.own.append(slab)
        return slab

    def make(self, epoch: int, number: int, nbytes: int) -> tuple[SlabOffer, int]:
        """Make a slab for a tenant; AlreadyExists, OutOfDeviceMemory."""
        self._check_open()
        if (epoch, number) in self.slabs:
            raise AlreadyExists(f"slab {number} of epoch {epoch} is mapped already")
        memory = self._driver.create(self._ordinal, nbytes)
        try:
            fd, extra = self._driver.export(memory)
        except BaseException:
            self._driver.close(memory)
            raise
        is_own = epoch == self._epoch
        self.slabs[epoch, number] = Slab(epoch, number, memory, memory.nbytes, is_own=is_own)
        return SlabOffer(epoch, number, self._driver.name, self._uuid, memory.nbytes, extra), fd

    def accept(self, offer: SlabOffer, fd: int) -> SlabAccepted:
        """Map a slab that somebody else made; see SlabPool.accept."""
        name = (offer.epoch, offer.slab)
        problem = self._objection(offer)
        if problem:
            os.close(fd)
            return SlabAccepted(*name, problem)
        try:
            memory = self._driver.import_(offer.uuid, fd, offer.nbytes, offer.extra)
        except DeviceLost:
            raise
        except ActorserveError as error:  # host memory carries the bytes then
            return SlabAccepted(*name, error.message)
        is_own = offer.epoch == self._epoch
        slab = self.slabs[name] = Slab(*name, memory, offer.nbytes, is_own=is_own)
        if is_own:
            self.own.append(slab)
            self._last_number = max(self._last_number, offer.slab)
        return SlabAccepted(*name)

    def retire(self, name: tuple[int, int]) -> None:
        """Unmap a slab, at once or with its last view; an unknown one is fine."""
        slab = self.slabs.pop(name, None)
        if slab is None:
            return
        if slab in self.own:
            self.own.remove(slab)
        slab.is_retired = True
        self.retired.append(slab)
        if not slab.views:
            self.unmap(slab)

    def unmap(self, slab: Slab) -> None:
        """Close a retired slab."""
        self.retired.remove(slab)
        try:
            self._driver.close(slab.memory)
        except ActorserveError:
            pass  # a lost context has nothing mapped

    def views(self) -> int:
        """Return how many buffers live."""
        return sum(slab.views for slab in (*self.slabs.values(), *self.retired))

    def forget(self) -> list[Slab]:
        """Have nothing any more; return what there was, still mapped."""
        slabs = [*self.slabs.values(), *self.retired]
        self.slabs = {}
        self.own = []
        self.retired = []
        self._closed = True
        return slabs

    def _check_open(self) -> None:
        if self._closed:
            raise InternalError("device memory is closed, or this is a forked child")

    def _objection(self, offer: SlabOffer) -> str:
        if self._closed:
            return "device memory is closed here"
        if offer.driver != self._driver.name:
            return f"driver {offer.driver!r} offered, {self._driver.name!r} in use here"
        if offer.uuid != self._uuid:
            return f"device {offer.uuid} offered, {self._uuid} in use here"
        if (offer.epoch, offer.slab) in self.slabs:
            return f"slab {offer.slab} of epoch {offer.epoch} is mapped already"
        return ""
