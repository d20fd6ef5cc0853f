# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a channel's end with a real arena behind it, in this process."""

from __future__ import annotations

import os

from actorserve.runtime.exchange import Exchange
from actorserve.shm.arena import Arena
from actorserve.shm.segment import Segment
from actorserve.wire.messages import Handle

NBYTES = 10_000


class FakePeer:
    """A peer that notes what it is told; it may have an arena of its own, as a stub has."""

    def __init__(self, exchange: Exchange, arena: int) -> None:
        self.arena = arena
        self.announced: list[tuple[int, int]] = []
        self.returned: list[tuple[int, int]] = []
        self.pumps = 0
        self.own = Arena(arena, first_segment_bytes=1 << 20, on_segment=self._on_segment)
        self.unseen: list[tuple[int, int, Segment]] = []
        self.is_quick = True
        self._exchange = exchange
        exchange.add_peer(self)

    def _on_segment(self, arena: int, index: int, segment: Segment) -> None:
        self.unseen.append((arena, index, Segment.attach(os.dup(segment.fd), segment.nbytes)))
        if self.is_quick:
            self.receive_segments()

    def announce(self, arena: int, index: int, segment: Segment) -> None:
        self.announced.append((arena, index))

    def knows(self, arena: int, index: int) -> bool:
        return (arena, index) in self.announced

    def return_block(self, arena: int, block: int) -> None:
        self.returned.append((arena, block))
        self.own.drop_number(block)

    def receive_segments(self) -> None:
        unseen, self.unseen = self.unseen, []
        for arena, index, segment in unseen:
            self._exchange.add_segment(arena, index, segment)

    def pump(self) -> None:
        self.pumps += 1

    def make(self, fill: int, nbytes: int = NBYTES) -> Handle:
        """Put a body into the peer's arena, as a stub does with an output."""
        block = self.own.allocate(nbytes)
        self.own.buffer(block, nbytes)[:] = bytes([fill]) * nbytes
        return self.own.handle(block, nbytes)

    def send_again(self, handle: Handle) -> Handle:
        """Send the same block once more: the owner counts each sending."""
        self.own.hold(self.own.block_of(handle))
        return handle
