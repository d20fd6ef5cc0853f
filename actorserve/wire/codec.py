# SPDX-License-Identifier: Apache-2.0
"""Messages to bytes and back. A decoder yields a message or a ProtocolError, whatever the bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from actorserve.errors import ProtocolError
from actorserve.wire.messages import Message, OnBootSocket, ToStub, ToSupervisor

M = TypeVar("M")

encode: Callable[[Message], bytes] = msgspec.msgpack.Encoder().encode


class Decoder(Generic[M]):
    """Decode one of a closed set of messages."""

    def __init__(self, kind: type[M] | object, what: str) -> None:
        self._decode: Callable[[bytes], M] = msgspec.msgpack.Decoder(kind).decode
        self._what = what

    def __call__(self, data: bytes) -> M:
        """Return the message; raise ProtocolError with the reason for anything else."""
        try:
            return self._decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
            raise ProtocolError(
                f"a frame of {len(data)} bytes is no message {self._what}: {error}"
            ) from None


decode_to_stub: Decoder[ToStub] = Decoder(ToStub, "to a stub")
decode_to_supervisor: Decoder[ToSupervisor] = Decoder(ToSupervisor, "to the supervisor")
decode_on_boot_socket: Decoder[OnBootSocket] = Decoder(OnBootSocket, "of the boot socket")
