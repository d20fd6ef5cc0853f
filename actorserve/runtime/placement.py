# SPDX-License-Identifier: Apache-2.0
"""Where an actor lives, and how it is kept alive there."""

from __future__ import annotations

import math

import msgspec

from actorserve.errors import ConfigError
from actorserve.state.lifecycle import Budgets
from actorserve.state.restart import Restart

DEFAULT_RESTART = Restart(kind="transient")
"""Started again after a crash, not after an end of its own."""


class Placement(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What all places have in common. Raises ConfigError for times that make no sense.

    `restart` is the policy for an actor that dies, `start_timeout_s` what its first hook may take
    (and, in a process, the import of its module), `stop_timeout_s` what `stopping` may take.
    """

    restart: Restart = DEFAULT_RESTART
    start_timeout_s: float = 600.0
    stop_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("start_timeout_s", "stop_timeout_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} is {value}, expected seconds, more than 0")

    def budgets(self) -> Budgets:
        """Return the time limits in the words of supervision."""
        return Budgets(initialize_s=self.start_timeout_s, finalize_s=self.stop_timeout_s)


class Loop(Placement, frozen=True):
    """In the system's event loop: the cheapest; `receive` must not block."""


class Thread(Placement, frozen=True):
    """In a thread of its own, of the system's process; it may block."""


class Process(Placement, frozen=True):
    """In a process of its own: a core of its own, and a life of its own.

    `python` is the path of another interpreter (with numpy and msgspec installed), None this one.
    `env` goes over this process's environment, `cwd` "" is this process's directory.
    """

    python: str | None = None
    env: dict[str, str] = {}
    cwd: str = ""


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Placement] = msgspec.msgpack.Decoder(Loop | Thread | Process)


def encode_placement(where: Placement) -> bytes:
    """Encode a placement for another process."""
    return _encoder.encode(where)


def decode_placement(data: bytes) -> Placement:
    """Decode it; msgspec.MsgspecError for what is none."""
    return _decoder.decode(data)
