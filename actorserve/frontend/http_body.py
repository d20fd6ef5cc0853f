# SPDX-License-Identifier: Apache-2.0
"""Leading the bytes of a body to their places: as chunks, or straight from the socket.

A Scatter knows the places; a BodySink is the transport's protocol while a large body is under
way, so that the kernel writes into shared memory without a copy in between. Imports nothing of
the protocol: whoever owns the connection is told by calls.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from actorserve.frontend.v2_values import View

_BOUNCE_BYTES = 64 * 1024


class Scatter:
    """Fill a row of buffers, one after the other. `remaining` counts the bytes still to come."""

    __slots__ = ("_index", "_offset", "_targets", "remaining")

    def __init__(self, targets: list[memoryview]) -> None:
        self._targets = [target for target in targets if len(target)]
        self._index = 0
        self._offset = 0
        self.remaining = sum(map(len, self._targets))

    def feed(self, chunk: View) -> int:
        """Copy a chunk to its places; return how many of its bytes found one."""
        taken = 0
        size = len(chunk)
        view = memoryview(chunk)
        while taken < size and self.remaining:
            window = self.window()
            count = min(len(window), size - taken)
            window[:count] = view[taken : taken + count]
            taken += count
            self.advance(count)
        return taken

    def window(self) -> memoryview:
        """Return what is still unfilled of the current buffer (only while bytes remain)."""
        return self._targets[self._index][self._offset :]

    def advance(self, count: int) -> None:
        """Say that the first `count` bytes of the window have been filled."""
        self.remaining -= count
        self._offset += count
        if self._offset == len(self._targets[self._index]):
            self._index += 1
            self._offset = 0

    def forget(self) -> None:
        """Let go of the buffers."""
        self._targets = []
        self.remaining = 0


class SinkOwner(Protocol):
    """The connection behind a sink: the transport's usual protocol."""

    def on_direct_bytes(self, count: int) -> None:
        """`count` bytes of the body have been put into their places."""

    def on_direct_end(self) -> None:
        """The body is complete; the owner becomes the transport's protocol again."""

    def pause_writing(self) -> None:
        """As asyncio's."""

    def resume_writing(self) -> None:
        """As asyncio's."""

    def eof_received(self) -> bool | None:
        """As asyncio's."""

    def connection_lost(self, exc: Exception | None) -> None:
        """As asyncio's."""


class BodySink(asyncio.BufferedProtocol):
    """Receive the rest of one body; never asks the socket for a byte behind its end."""

    def __init__(self, owner: SinkOwner, scatter: Scatter) -> None:
        self._owner = owner
        self._scatter = scatter
        self._bounce: bytearray | None = None
        self._is_bouncing = False

    def get_buffer(self, sizehint: int) -> memoryview:
        """Hand out the place of the next bytes. Small places share a detour: fewer reads."""
        window = self._scatter.window()
        remaining = self._scatter.remaining
        self._is_bouncing = len(window) < min(_BOUNCE_BYTES, remaining)
        if not self._is_bouncing:
            return window
        if self._bounce is None:
            self._bounce = bytearray(_BOUNCE_BYTES)
        return memoryview(self._bounce)[: min(_BOUNCE_BYTES, remaining)]

    def buffer_updated(self, nbytes: int) -> None:
        """Count what the kernel has written."""
        if self._is_bouncing:
            assert self._bounce is not None
            self._scatter.feed(memoryview(self._bounce)[:nbytes])
        else:
            self._scatter.advance(nbytes)
        self._owner.on_direct_bytes(nbytes)
        if not self._scatter.remaining:
            self._owner.on_direct_end()

    def eof_received(self) -> bool | None:
        """Pass it on."""
        return self._owner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Pass it on."""
        self._owner.connection_lost(exc)

    def pause_writing(self) -> None:
        """Pass it on."""
        self._owner.pause_writing()

    def resume_writing(self) -> None:
        """Pass it on."""
        self._owner.resume_writing()
