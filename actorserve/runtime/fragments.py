# SPDX-License-Identifier: Apache-2.0
"""Messages that are longer than a frame of their lane may be: in pieces, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from actorserve.errors import ProtocolError, TooLarge
from actorserve.wire.codec import encode
from actorserve.wire.generation import Fragment

LARGEST_BYTES = 1 << 30
"""No message is longer than this, in pieces or not."""
_OVERHEAD_BYTES = 16

M = TypeVar("M")


def fragments_of(data: bytes, max_frame_bytes: int) -> Iterator[bytes]:
    """Cut an encoded message into encoded Fragments. Raises TooLarge beyond LARGEST_BYTES."""
    if len(data) > LARGEST_BYTES:
        raise TooLarge(f"a message of {len(data)} bytes; at most {LARGEST_BYTES} can be sent")
    step = max_frame_bytes - _OVERHEAD_BYTES
    for start in range(0, len(data), step):
        yield encode(Fragment(data[start : start + step], start + step >= len(data)))


class Assembler(Generic[M]):
    """Put the Fragments of one lane together."""

    def __init__(self, decode: Callable[[bytes], M]) -> None:
        self._decode = decode
        self._pieces: list[bytes] = []
        self._nbytes = 0

    def add(self, fragment: Fragment) -> M | None:
        """Take the next piece; return the message that it completes, or None.

        Raises ProtocolError where the whole is too long, no message, or itself a piece.
        """
        self._pieces.append(fragment.data)
        self._nbytes += len(fragment.data)
        if self._nbytes > LARGEST_BYTES:
            raise ProtocolError(f"a message in pieces of more than {LARGEST_BYTES} bytes")
        if not fragment.is_last:
            return None
        data = b"".join(self._pieces)
        self._pieces.clear()
        self._nbytes = 0
        message = self._decode(data)
        if isinstance(message, Fragment):
            raise ProtocolError("a piece of a message is itself one")
        return message
