# SPDX-License-Identifier: Apache-2.0
"""A lane: one segment that carries frames one way and block releases the other way.

    Producer ══ ring of frames ══════════════════► Consumer
             ◄═ ring of releases (arena, block) ═══

One producer and one consumer for the lane's whole life, each used by one thread at a time. There
is no lock between them, so that a killed process leaves nothing locked and at most a frame that
was never published. layout.py says where everything lies, fence.py why the order of stores holds.
Whatever is read from the segment is checked before it is used: a peer that lies is a
ProtocolError, never a wild read or a loop without end.
"""

from __future__ import annotations

import mmap

from actorserve.errors import ProtocolError
from actorserve.shm import layout
from actorserve.shm.consumer import Consumer, ConsumerStats
from actorserve.shm.producer import Producer, ProducerStats
from actorserve.shm.segment import Segment

__all__ = ["Consumer", "ConsumerStats", "Lane", "Producer", "ProducerStats"]


class Lane:
    """The layout of one segment: the sizes, the words, the place of the ring.

    `words` is the one view through which 8-byte words are read and written (one aligned move
    each); `mapping` gives payload bytes as slices.
    """

    __slots__ = ("mapping", "release_slots", "ring_bytes", "ring_offset", "segment", "words")

    segment: Segment
    mapping: mmap.mmap
    words: memoryview

    def __init__(self, segment: Segment, ring_bytes: int, release_slots: int) -> None:
        """Lay a lane over a segment; use `create` or `attach`, which check it."""
        if segment.mapping is None:
            raise ValueError("a lane needs an open segment")
        self.segment = segment
        self.mapping = segment.mapping
        self.words = segment.buffer.cast("Q")
        self.ring_bytes = ring_bytes
        self.release_slots = release_slots
        self.ring_offset = layout.ring_offset(release_slots)

    @classmethod
    def create(cls, ring_bytes: int = 1 << 20, release_slots: int = 4096) -> Lane:
        """Make a lane in a new segment; both sizes are powers of two.

        ValueError for sizes that cannot be, ResourceExhausted if there is no memory.
        """
        if not layout.are_sizes_right(ring_bytes, release_slots):
            raise ValueError(
                f"a lane cannot have {ring_bytes} ring bytes and {release_slots} release slots: "
                f"both must be powers of two, the ring {layout.SMALLEST_RING_BYTES} to "
                f"{layout.LARGEST_RING_BYTES} bytes, at most {layout.LARGEST_RELEASE_SLOTS} slots"
            )
        segment = Segment.create(layout.ring_offset(release_slots) + ring_bytes)
        lane = cls(segment, ring_bytes, release_slots)
        lane.words[layout.RING_BYTES_WORD] = ring_bytes
        lane.words[layout.RELEASE_SLOTS_WORD] = release_slots
        lane.words[layout.MAGIC_WORD] = layout.MAGIC
        return lane

    @classmethod
    def attach(cls, segment: Segment) -> Lane:
        """Lay a lane over a segment that a peer made.

        ProtocolError if it holds no lane of this version or lies about its sizes; the segment
        then stays open, for the caller to close.
        """
        if segment.nbytes < layout.RELEASES * 8 or segment.nbytes % 8:
            raise ProtocolError(f"a segment of {segment.nbytes} bytes cannot hold a lane")
        words = segment.buffer.cast("Q")
        magic = words[layout.MAGIC_WORD]
        ring_bytes = words[layout.RING_BYTES_WORD]
        release_slots = words[layout.RELEASE_SLOTS_WORD]
        if magic != layout.MAGIC:
            raise ProtocolError(
                f"no lane of this version: its first word is {magic:#018x}, "
                f"expected {layout.MAGIC:#018x}"
            )
        if (
            not layout.are_sizes_right(ring_bytes, release_slots)
            or layout.ring_offset(release_slots) + ring_bytes > segment.nbytes
        ):
            raise ProtocolError(
                f"a lane of {ring_bytes} ring bytes and {release_slots} release slots cannot lie "
                f"in a segment of {segment.nbytes} bytes"
            )
        return cls(segment, ring_bytes, release_slots)

    def close(self) -> None:
        """Unmap and close the segment; idempotent. Its ends raise ValueError from here on."""
        self.words.release()
        try:
            # The ends still refer to the mapping. Unlike an arena's, a lane's is looked at by
            # nobody else, so that it can go now and not only when they do.
            self.segment.buffer.release()
            self.mapping.close()
        except BufferError:
            pass  # somebody took a view of the segment: it goes with that
        self.segment.close()
