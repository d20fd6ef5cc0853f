# SPDX-License-Identifier: Apache-2.0
"""Bytes to messages of a closed set: a message or a ProtocolError, whatever the bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from actorserve.errors import ProtocolError

M = TypeVar("M")


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
