# SPDX-License-Identifier: Apache-2.0
"""The device drivers of a server: which devices each has, asked once, and what stubs get of them.

a model's driver ─► devices ─► a probe's process, once ─► instances: KIND_GPU on each
                                                      └─► DevicePlan of each instance
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TypeVar

from actorserve.config import Settings
from actorserve.runtime.child import Spawner
from actorserve.runtime.device_desk import DeviceDesk
from actorserve.runtime.device_probe import find_devices
from actorserve.runtime.exchange import Exchange
from actorserve.triton.instance_group import InstanceSpec
from actorserve.triton.model_parameters import ModelParameters
from actorserve.wire.device import DevicePlan, DevicesFound

VISIBLE = "CUDA_VISIBLE_DEVICES"

T = TypeVar("T")

_log = logging.getLogger("actorserve")
_NONE = DevicesFound([])


class DeviceUse:
    """How one model uses devices: the driver, its devices, and what the settings say."""

    def __init__(self, settings: Settings, parameters: ModelParameters, uuids: list[str]) -> None:
        self._uuids = uuids
        self._parameters = parameters
        self._driver = driver_of(settings, parameters)
        self._settings = {
            name: _first(getattr(parameters, f"device_{name}"), getattr(settings, f"device_{name}"))
            for name in ("slab_bytes", "max_bytes", "foreign", "fence", "full")
        }
        self._is_isolated = _first(parameters.device_isolation, settings.device_isolation)

    @property
    def gpu_count(self) -> int:
        """How many devices there are."""
        return len(self._uuids)

    def plan(self, instance: InstanceSpec) -> DevicePlan | None:
        """Return what an instance works on. One of KIND_CPU has no device unless its model says."""
        if not self._uuids or (instance.kind == "CPU" and not self._parameters.device_driver):
            return None
        return DevicePlan(
            self._driver,
            instance.device_id,
            self._uuids[instance.device_id],
            self._settings,
            self._is_isolated and instance.kind == "GPU",
            self._parameters.force_cpu_only_input_tensors,
        )


def driver_of(settings: Settings, parameters: ModelParameters) -> str:
    """Return the driver of a model, "" for none."""
    return _first(parameters.device_driver, settings.device_driver)


def visible_device(ordinal: int) -> str:
    """Return what CUDA_VISIBLE_DEVICES has to say so that only the server's device is seen."""
    own = [part for part in os.environ.get(VISIBLE, "").split(",") if part]
    return own[ordinal] if ordinal < len(own) else str(ordinal)


class DeviceDrivers:
    """See the module's head. Belongs to the supervisor's loop."""

    def __init__(self, spawner: Spawner, exchange: Exchange, quarantine_s: float) -> None:
        self._spawner = spawner
        self._exchange = exchange
        self._quarantine_s = quarantine_s
        self._asked: dict[str, asyncio.Task[DevicesFound]] = {}

    async def use(self, settings: Settings, parameters: ModelParameters) -> DeviceUse:
        """Return how a model uses devices, after a look at those of its driver."""
        driver = driver_of(settings, parameters)
        found = await self.devices(driver) if driver else _NONE
        return DeviceUse(settings, parameters, found.uuids)

    async def devices(self, driver: str) -> DevicesFound:
        """Return a driver's devices. Where there are none, the log says why, once."""
        if driver not in self._asked:
            self._asked[driver] = asyncio.ensure_future(self._find(driver))
        return await asyncio.shield(self._asked[driver])

    async def _find(self, driver: str) -> DevicesFound:
        try:
            found = await find_devices(self._spawner, driver)
        except Exception as error:  # of spawning: the next model asks again
            self._asked.pop(driver, None)
            found = DevicesFound([], str(error))
        if not found.uuids:
            _log.warning(
                "device driver '%s' has no devices here, tensors go by host memory: %s",
                driver,
                found.problem or "it names none",
            )
        elif self._exchange.devices is None:
            loop = asyncio.get_running_loop()
            self._exchange.devices = DeviceDesk(loop, quarantine_s=self._quarantine_s)
        return found

    async def close(self) -> None:
        """End what is still asked."""
        tasks = list(self._asked.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _first(own: T | None, server: T) -> T:
    return server if own is None else own
