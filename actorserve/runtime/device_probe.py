# SPDX-License-Identifier: Apache-2.0
"""Which devices a driver has, found out by a process of its own: the supervisor touches none.

find_devices ─ FindDevices ─► a child: open the driver, ask for ordinals ─ DevicesFound ─►
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING

from actorserve.device.driver import NoDevice
from actorserve.device.plugins import open_driver
from actorserve.errors import ActorserveError
from actorserve.runtime.child import BootSocket, Exit, SpawnSpec
from actorserve.wire.device import DevicesFound, FindDevices

if TYPE_CHECKING:
    from actorserve.runtime.child import Child, Spawner

ENTRY = "actorserve.runtime.device_probe:main"
BUDGET_S = 60.0
MOST_DEVICES = 1024


def main(boot: BootSocket) -> None:
    """Answer one FindDevices and end. The child's entry function."""
    message, _ = boot.recv(None)
    if not isinstance(message, FindDevices):
        raise SystemExit(f"expected FindDevices, got {type(message).__name__}")
    boot.send(devices_of(message.driver))


def devices_of(name: str) -> DevicesFound:
    """Open a driver here and return what it has."""
    uuids: list[str] = []
    try:
        driver = open_driver(name)
        for ordinal in range(MOST_DEVICES):
            uuids.append(driver.uuid(ordinal))
    except NoDevice as error:
        return DevicesFound(uuids, "" if uuids else error.message)
    except ActorserveError as error:
        return DevicesFound([], error.message)
    return DevicesFound(uuids)


async def find_devices(spawner: Spawner, driver: str) -> DevicesFound:
    """Ask a new process for a driver's devices; a problem is part of the answer."""
    probe = _Probe(asyncio.get_running_loop())
    child = probe.child = await spawner.spawn(
        SpawnSpec(ENTRY, "actorserve-devices"), probe.on_exit, probe.on_output
    )
    timer = asyncio.get_running_loop().call_later(BUDGET_S, child.kill_group)
    try:
        with contextlib.suppress(ActorserveError):  # it died already, which is its answer
            child.boot.send(FindDevices(driver))
        return await asyncio.shield(probe.answer)
    finally:
        timer.cancel()
        child.kill_group()
        await probe.answer


class _Probe:
    """What is heard of one probe; `answer` comes with its end."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.child: Child | None = None
        self.answer: asyncio.Future[DevicesFound] = loop.create_future()
        self._lines: deque[str] = deque(maxlen=3)

    def on_output(self, stream: str, line: str) -> None:
        """Keep the last lines, which may say why it failed."""
        self._lines.append(line)

    def on_exit(self, exit_: Exit) -> None:
        """Read its answer, while its socket is still open."""
        found = DevicesFound([], " ".join([f"its probe {exit_.describe()}", *self._lines]))
        with contextlib.suppress(ActorserveError):
            received = self.child.boot.recv_nowait() if self.child is not None else None
            if received is not None and isinstance(received[0], DevicesFound):
                found = received[0]
        if not self.answer.done():
            self.answer.set_result(found)
