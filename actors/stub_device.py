# SPDX-License-Identifier: Apache-2.0
"""The device that a stub's model works on: opened before the model is imported, and its end."""

from __future__ import annotations

from actorserve.clock import monotonic_s
from actorserve.errors import ActorserveError
from actorserve.runtime.stub_devices import StubDevices
from actorserve.runtime.stub_end import StubEnd
from actorserve.triton.device_tensor import use_pool
from actorserve.triton.logger import Logger
from actorserve.wire.device import DevicePlan

LOST_AFTER_S = 1.0
"""So long the main thread has to bring the answers of what it runs when the device is lost."""


def open_device(end: StubEnd, plan: DevicePlan) -> None:
    """Open the device; without it the model works on host memory, after one warning."""
    try:
        end.devices = StubDevices(end, plan)
    except ActorserveError as error:
        Logger.log_warn(
            f"device driver '{plan.driver}' cannot be used, tensors go by host memory: "
            f"{error.message}"
        )
        return
    use_pool(end.devices.pool)


class LostWatch:
    """Ends a process whose device is lost and whose main thread does not come to do that."""

    def __init__(self) -> None:
        self._since_s = 0.0

    def look(self, devices: StubDevices | None) -> None:
        """Look whether it is time. Control thread, several times a second."""
        if devices is None or not devices.lost:
            return
        now_s = monotonic_s()
        self._since_s = self._since_s or now_s
        if now_s - self._since_s >= LOST_AFTER_S:
            devices.end_process()
