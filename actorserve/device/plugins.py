# SPDX-License-Identifier: Apache-2.0
"""Find a driver by name: ours, or what a package offers as `actorserve.device_drivers`.

An entry point names a callable without arguments that returns a DeviceDriver. Looking for names
imports nothing; loading imports the module of that one driver; only the call touches a device.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

from actorserve.device.driver import DeviceDriver, NoDevice
from actorserve.errors import ConfigError

GROUP = "actorserve.device_drivers"
OWN = {
    "cuda": "actorserve.device.cuda:CudaDriver",
    "emulated": "actorserve.device.emulated:EmulatedDriver",
}
"""Ours need no installed metadata, and no package can take their names."""


def driver_names() -> list[str]:
    """Return the names of all drivers that could be loaded, in order."""
    return sorted({*OWN, *(entry.name for entry in entry_points(group=GROUP))})


def find_driver(name: str) -> Callable[[], DeviceDriver]:
    """Import a driver's module and return what makes the driver.

    ConfigError for an unknown name; NoDevice where its module cannot be imported.
    """
    entry = _entry(name)
    try:
        factory = entry.load()
    except (ImportError, AttributeError) as error:
        raise NoDevice(
            f"device driver {name!r} ({entry.value}) cannot be loaded: {error}"
        ) from error
    if not callable(factory):
        raise ConfigError(f"device driver {name!r} ({entry.value}) is no callable")
    return factory  # type: ignore[no-any-return]


def open_driver(name: str) -> DeviceDriver:
    """Make a driver, which touches its devices. NoDevice, with the reason, where that fails."""
    factory = find_driver(name)
    try:
        driver = factory()
    except NoDevice:
        raise
    except Exception as error:  # a driver library says so in its own ways
        raise NoDevice(f"device driver {name!r} does not work here: {error}") from error
    if not isinstance(driver, DeviceDriver):
        raise ConfigError(f"device driver {name!r} lacks parts of the DeviceDriver protocol")
    return driver


def _entry(name: str) -> EntryPoint:
    if name in OWN:
        return EntryPoint(name, OWN[name], GROUP)
    found = list(entry_points(group=GROUP, name=name))
    if not found:
        raise ConfigError(
            f"device driver {name!r} is unknown; known are {', '.join(driver_names())}"
        )
    return found[0]
