# SPDX-License-Identifier: Apache-2.0
"""What the supervisor and its zygote say to each other, and what may stand on a boot socket.

    Spawner ── link ──► zygote    SpawnChild (boot socket, stdout, stderr), KillChild
    zygote  ── link ──► Spawner   ZygoteUp, ChildSpawned (pidfd), SpawnFailed, ChildExited

The link is an AF_UNIX SOCK_SEQPACKET pair. A message over `PACKET_BYTES` travels in an anonymous
file instead, announced by `Spilled`, because the socket refuses what its buffer cannot hold.
Paths and environments are bytes: Linux promises no encoding for them.
"""

from __future__ import annotations

from actorserve.wire.codec import Decoder
from actorserve.wire.messages import BootFailed, Message, OnBootSocket

PACKET_BYTES = 64 << 10
"""The largest packet on a link or a boot socket."""


class SpawnChild(Message, frozen=True, tag=50):
    """Start one child. `number` is the Spawner's and names the child in every answer.

    With `python`, the child executes that interpreter, else it is a fork of the zygote.
    `sys_path` goes in front of the child's own import path.
    """

    number: int
    name: str
    entry: str
    python: bytes | None
    environment: dict[bytes, bytes]
    cwd: bytes
    sys_path: list[bytes]


class KillChild(Message, frozen=True, tag=51):
    """Kill the child `number` and its group, if it still lives."""

    number: int


class ZygoteUp(Message, frozen=True, tag=52):
    """The zygote serves from now on; `failures` tells which modules it could not import."""

    pid: int
    failures: list[str]


class ChildSpawned(Message, frozen=True, tag=53):
    """The child `number` exists; its pidfd comes with this message."""

    number: int
    pid: int


class SpawnFailed(Message, frozen=True, tag=54):
    """The child `number` could not be made; `errno` is 0 where no system call failed."""

    number: int
    errno: int
    reason: str


class ChildExited(Message, frozen=True, tag=55):
    """The child `number` is dead and reaped; `status` is what waitpid returned."""

    number: int
    status: int


class Spilled(Message, frozen=True, tag=56):
    """The message itself is in the first descriptor, `nbytes` long."""

    nbytes: int


ToZygote = SpawnChild | KillChild | Spilled
FromZygote = ZygoteUp | ChildSpawned | SpawnFailed | ChildExited
FromBootSocket = OnBootSocket | BootFailed

decode_to_zygote: Decoder[ToZygote] = Decoder(ToZygote, "to a zygote")
decode_from_zygote: Decoder[FromZygote] = Decoder(FromZygote, "from a zygote")
decode_from_boot_socket: Decoder[FromBootSocket] = Decoder(FromBootSocket, "of the boot socket")
