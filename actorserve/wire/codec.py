# SPDX-License-Identifier: Apache-2.0
"""Messages to bytes and back. A decoder yields a message or a ProtocolError, whatever the bytes."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from actorserve.wire.decoder import Decoder
from actorserve.wire.messages import Message, OnBootSocket, ToStub, ToSupervisor

__all__ = [
    "Decoder",
    "decode_on_boot_socket",
    "decode_to_stub",
    "decode_to_supervisor",
    "encode",
]

encode: Callable[[Message], bytes] = msgspec.msgpack.Encoder().encode

decode_to_stub: Decoder[ToStub] = Decoder(ToStub, "to a stub")
decode_to_supervisor: Decoder[ToSupervisor] = Decoder(ToSupervisor, "to the supervisor")
decode_on_boot_socket: Decoder[OnBootSocket] = Decoder(OnBootSocket, "of the boot socket")
