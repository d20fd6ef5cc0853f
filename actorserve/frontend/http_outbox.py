# SPDX-License-Identifier: Apache-2.0
"""The bytes of one reply on their way to the transport, no faster than the peer takes them.

A small reply never comes here. A large one goes in pieces that are views of the caller's memory: no
copy is made here, and a view is let go as soon as the transport has taken it.
"""

from __future__ import annotations

import asyncio
from collections import deque

from uvicorn.protocols.http.flow_control import FlowControl

from actorserve.frontend.v2_values import View

JOIN_BYTES = 64 * 1024
"""What is joined rather than written on its own."""

PIECE_BYTES = 512 * 1024
"""How much of a large reply is handed to the transport at a time."""


class Outbox:
    """What is still to be written. Holds at most one reply."""

    __slots__ = ("_unsent",)

    def __init__(self) -> None:
        self._unsent: deque[View] = deque()

    def put(self, head: bytes, pieces: list[View]) -> None:
        """Take a reply; `pump` sends it. Small pieces are joined, large ones stay views."""
        start: list[View] = [head]
        for piece in pieces:
            if len(piece) <= JOIN_BYTES:
                start.append(piece)
                continue
            if start:
                self._unsent.append(b"".join(start))
                start = []
            self._unsent.append(piece)
        if start:
            self._unsent.append(b"".join(start))

    def pump(self, transport: asyncio.Transport, flow: FlowControl) -> bool:
        """Write until the peer is slower; True when the transport has all and the peer keeps up."""
        unsent = self._unsent
        while unsent and not flow.write_paused:
            piece = unsent.popleft()
            if len(piece) > PIECE_BYTES:
                view = memoryview(piece)
                unsent.appendleft(view[PIECE_BYTES:])
                piece = view[:PIECE_BYTES]
            transport.write(piece)
        return not unsent and not flow.write_paused

    def clear(self) -> None:
        """Let go of everything."""
        self._unsent.clear()
