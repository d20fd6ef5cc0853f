# SPDX-License-Identifier: Apache-2.0
"""How a server or a model uses device memory."""

from __future__ import annotations

import math
from typing import Literal, get_args

import msgspec

from actorserve.errors import ConfigError

Foreign = Literal["copy", "export"]
FenceKind = Literal["sync", "event"]
WhenFull = Literal["grow", "host", "error"]


class DeviceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Values of `device`. Sizes in bytes; ConfigError for values that make no sense.

    - `driver`: the plug-in's name; "" is none, everything goes by host memory.
    - `slab_bytes`: how much is had from the device at once; `max_bytes`: how much one process may
      have in all (its quota), 0 for no limit.
    - `foreign`: what happens to a tensor that the model made outside our slabs: one `copy` on the
      device, or, where the driver can, an `export` of its own memory.
    - `fence`: the producer waits for its stream before it tells (`sync`), or the reader's stream
      waits for an `event`.
    - `full`: where no slab has room, `grow` by another one within the quota, go by `host` memory,
      or answer that request with an `error`.
    - `quarantine_s`: how long memory that a killed process knew is not used again.
    """

    driver: str = ""
    slab_bytes: int = 256 << 20
    max_bytes: int = 0
    foreign: Foreign = "copy"
    fence: FenceKind = "sync"
    full: WhenFull = "grow"
    quarantine_s: float = 0.1

    def __post_init__(self) -> None:
        if self.slab_bytes <= 0:
            raise ConfigError(f"device: slab_bytes is {self.slab_bytes}, expected bytes, 1 or more")
        if self.max_bytes < 0:
            raise ConfigError(f"device: max_bytes is {self.max_bytes}, expected bytes, 0 for any")
        if not (math.isfinite(self.quarantine_s) and self.quarantine_s >= 0):
            raise ConfigError(
                f"device: quarantine_s is {self.quarantine_s}, expected seconds, 0 or more"
            )
        for field, choices in (("foreign", Foreign), ("fence", FenceKind), ("full", WhenFull)):
            value = getattr(self, field)
            if value not in get_args(choices):
                known = ", ".join(get_args(choices))
                raise ConfigError(f"device: {field} is {value!r}, expected one of {known}")


def read_device_settings(values: object, where: str) -> DeviceSettings:
    """Build settings from a decoded JSON object; ConfigError, naming `where`, for anything else."""
    try:
        return _convert(values)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}") from None


def _convert(values: object) -> DeviceSettings:
    if isinstance(values, dict):
        unknown = sorted(set(map(str, values)) - set(DeviceSettings.__struct_fields__))
        if unknown:
            known = ", ".join(DeviceSettings.__struct_fields__)
            raise ConfigError(f"device: {unknown[0]!r} is unknown, expected one of {known}")
    return msgspec.convert(values, DeviceSettings)
