# SPDX-License-Identifier: Apache-2.0
"""A ring with one writer and several readers, who all see the same frames in the same order.

    writer ══ frames ══╦═► reader 0        a frame's room is free again when the slowest
                       ╠═► reader 1        reader has taken it
                       ╚═► reader 2

    byte     word of 8 bytes      written by
    0x000    magic, ring_bytes, readers    creator
    0x080    head: bytes published         writer
    0x100    wants: it waits for room      writer
    0x180    for each reader, 128 bytes: tail, bytes taken
    page     the ring

Frames are those of a lane (layout.py), never split; a longer message goes as several, told by the
frame's kind. There is no lock: a dead process leaves at most a frame that was never published.
Nothing here blocks or rings: whoever calls wakes the other side (parking.py), the readers after
`flush`, the writer where `wants_room` says so after `drain`. What is read from the segment is
checked before it is used.
"""

from __future__ import annotations

import mmap

import msgspec

from actorserve.errors import ProtocolError
from actorserve.shm.fence import WEAKLY_ORDERED, new_fence
from actorserve.shm.layout import (
    HEADER_BYTES,
    LARGEST_RING_BYTES,
    LENGTH_MASK,
    PAD,
    SMALLEST_RING_BYTES,
    is_power_of_two,
)
from actorserve.shm.segment import Segment

MOST_READERS = 64

_MAGIC = int.from_bytes(b"asbcst\x00\x01", "big")
_RING_BYTES, _READERS = 1, 2
_HEAD = 0x080 >> 3
_WANTS = 0x100 >> 3
_TAILS = 0x180 >> 3
_STRIDE = 0x80 >> 3
_PAGE_BYTES = 4096


class BroadcastStats(msgspec.Struct, frozen=True):
    """What one end has done: frames, bytes with headers and padding, and how often it was full."""

    frames: int
    bytes: int
    full: int


class BroadcastRing:
    """The layout of one segment."""

    __slots__ = ("mapping", "readers", "ring_bytes", "ring_offset", "segment", "words")

    segment: Segment
    mapping: mmap.mmap

    def __init__(self, segment: Segment, ring_bytes: int, readers: int) -> None:
        """Lay a ring over a segment; use `create` or `attach`, which check it."""
        if segment.mapping is None:
            raise ValueError("a ring needs an open segment")
        self.segment = segment
        self.mapping = segment.mapping
        self.words = segment.buffer.cast("Q")
        self.ring_bytes = ring_bytes
        self.readers = readers
        self.ring_offset = _ring_offset(readers)

    @classmethod
    def create(cls, readers: int, ring_bytes: int = 1 << 20) -> BroadcastRing:
        """Make a ring in a new segment; its size is a power of two.

        ValueError for sizes that cannot be, ResourceExhausted if there is no memory.
        """
        if not _are_sizes_right(ring_bytes, readers):
            raise ValueError(
                f"a broadcast ring cannot have {ring_bytes} bytes and {readers} readers: expected "
                f"a power of two from {SMALLEST_RING_BYTES} to {LARGEST_RING_BYTES}, and 0 to "
                f"{MOST_READERS} readers"
            )
        segment = Segment.create(_ring_offset(readers) + ring_bytes)
        ring = cls(segment, ring_bytes, readers)
        ring.words[_RING_BYTES] = ring_bytes
        ring.words[_READERS] = readers
        ring.words[0] = _MAGIC
        return ring

    @classmethod
    def attach(cls, segment: Segment) -> BroadcastRing:
        """Lay a ring over a segment that a peer made; the segment stays the caller's if it fails.

        ProtocolError if it holds no ring of this version or lies about its sizes.
        """
        if segment.nbytes < _TAILS * 8 or segment.nbytes % 8:
            raise ProtocolError(f"a segment of {segment.nbytes} bytes cannot hold a broadcast ring")
        words = segment.buffer.cast("Q")
        magic, ring_bytes, readers = words[0], words[_RING_BYTES], words[_READERS]
        if magic != _MAGIC:
            raise ProtocolError(
                f"no broadcast ring of this version: its first word is {magic:#018x}, "
                f"expected {_MAGIC:#018x}"
            )
        if (
            not _are_sizes_right(ring_bytes, readers)
            or _ring_offset(readers) + ring_bytes > segment.nbytes
        ):
            raise ProtocolError(
                f"a broadcast ring of {ring_bytes} bytes and {readers} readers cannot lie in a "
                f"segment of {segment.nbytes} bytes"
            )
        return cls(segment, ring_bytes, readers)

    def close(self) -> None:
        """Unmap and close the segment; idempotent. Its ends raise ValueError from here on."""
        self.words.release()
        try:
            self.segment.buffer.release()
            self.mapping.close()
        except BufferError:
            pass  # somebody took a view of the segment: it goes with that
        self.segment.close()


class BroadcastWriter:
    """The sending end; one thread at a time, one for the ring's whole life."""

    __slots__ = (
        "_acquire",
        "_frames",
        "_full",
        "_head",
        "_release",
        "_ring",
        "_tail",
        "_tails",
        "_words",
        "max_frame_bytes",
    )

    def __init__(self, ring: BroadcastRing) -> None:
        self._ring = ring
        self._words = ring.words
        self._head = 0
        self._tails = [0] * ring.readers
        self._tail = 0  # the slowest reader's, as last read
        self._frames = 0
        self._full = 0
        self._release, self._acquire = new_fence()
        self.max_frame_bytes = ring.ring_bytes // 2 - HEADER_BYTES

    def try_put(self, data: bytes, kind: int = 0) -> bool:
        """Write one frame without publishing it; False if there is no room.

        ValueError for a frame that no empty ring could hold; ProtocolError if a reader lies.
        """
        nbytes = len(data)
        if nbytes > self.max_frame_bytes or not 0 <= kind < PAD:
            raise ValueError(
                f"a frame of {nbytes} bytes and kind {kind}: at most {self.max_frame_bytes} "
                f"bytes and kinds below {PAD} fit"
            )
        ring = self._ring
        mask = ring.ring_bytes - 1
        need = (nbytes + 15) & -8
        head = self._head
        left_in_lap = ring.ring_bytes - (head & mask)
        skip = left_in_lap if need > left_in_lap else 0
        end = head + skip + need
        if end - self._tail > ring.ring_bytes and end - self._slowest() > ring.ring_bytes:
            self._full += 1
            return False
        words = self._words
        if skip:
            words[(ring.ring_offset + (head & mask)) >> 3] = PAD << 32 | skip
            head += skip
        at = ring.ring_offset + (head & mask)
        words[at >> 3] = kind << 32 | nbytes
        ring.mapping[at + 8 : at + 8 + nbytes] = data
        self._head = end
        self._frames += 1
        return True

    def flush(self) -> None:
        """Publish all that was put. Wake the readers afterwards."""
        if WEAKLY_ORDERED:
            self._fence()
        self._words[_HEAD] = self._head

    def want_room(self, is_wanted: bool) -> None:
        """Say whether this end waits for room; look again with `try_put` before sleeping."""
        self._words[_WANTS] = int(is_wanted)
        self._fence()

    def _slowest(self) -> int:
        """Read how far every reader is; return the least. Without readers, all is taken."""
        words = self._words
        for reader, before in enumerate(self._tails):
            tail = words[_TAILS + reader * _STRIDE]
            if tail & 7 or not before <= tail <= self._head:
                raise ProtocolError(
                    f"reader {reader} of a broadcast ring is at {tail}, expected a multiple of 8 "
                    f"from {before} to {self._head}"
                )
            self._tails[reader] = tail
        self._tail = min(self._tails, default=self._head)
        return self._tail

    def _fence(self) -> None:
        self._release()
        self._acquire(False)

    def stats(self) -> BroadcastStats:
        """Return what this end has done so far."""
        return BroadcastStats(self._frames, self._head, self._full)


class BroadcastReader:
    """One receiving end; one thread at a time."""

    __slots__ = ("_acquire", "_frames", "_release", "_ring", "_tail", "_tail_word", "_words")

    def __init__(self, ring: BroadcastRing, reader: int) -> None:
        if not 0 <= reader < ring.readers:
            raise ValueError(f"reader {reader} of a broadcast ring with {ring.readers}")
        self._ring = ring
        self._words = ring.words
        self._tail_word = _TAILS + reader * _STRIDE
        self._tail = 0
        self._frames = 0
        self._release, self._acquire = new_fence()

    def has_news(self) -> bool:
        """Whether something was published that this end has not taken."""
        return bool(self._words[_HEAD] != self._tail)

    def drain(self) -> list[tuple[int, bytes]]:
        """Return all frames published so far as (kind, payload), and give their room back.

        Ask `wants_room` afterwards. ProtocolError for a head or header that cannot be right.
        """
        ring, words = self._ring, self._words
        head, tail = words[_HEAD], self._tail
        if head == tail:
            return []
        if head & 7 or not 0 < head - tail <= ring.ring_bytes:
            raise ProtocolError(
                f"a broadcast ring's head is {head}, expected a multiple of 8 "
                f"from {tail} to {tail + ring.ring_bytes}"
            )
        if WEAKLY_ORDERED:
            self._fence()
        mask = ring.ring_bytes - 1
        ring_end = ring.ring_offset + ring.ring_bytes
        frames: list[tuple[int, bytes]] = []
        while tail != head:
            at = ring.ring_offset + (tail & mask)
            header = words[at >> 3]
            nbytes, kind = header & LENGTH_MASK, header >> 32
            step = nbytes if kind == PAD else (nbytes + 15) & -8
            room = min(head - tail, ring_end - at)
            if kind > PAD or step > room or (kind == PAD and step != ring_end - at):
                raise ProtocolError(
                    f"a frame's header in a broadcast ring is {header:#018x} "
                    f"with {head - tail} bytes published and {ring_end - at} left"
                )
            if kind != PAD:
                frames.append((kind, ring.mapping[at + 8 : at + 8 + nbytes]))
            tail += step
        self._tail = tail
        self._frames += len(frames)
        if WEAKLY_ORDERED:
            self._fence()
        words[self._tail_word] = tail
        return frames

    def wants_room(self) -> bool:
        """Whether the writer waits for room and has to be woken, after `drain`."""
        self._fence()
        return bool(self._words[_WANTS])

    def _fence(self) -> None:
        self._release()
        self._acquire(False)

    def stats(self) -> BroadcastStats:
        """Return what this end has done so far."""
        return BroadcastStats(self._frames, self._tail, 0)


def _ring_offset(readers: int) -> int:
    return ((_TAILS + readers * _STRIDE) * 8 + _PAGE_BYTES - 1) & -_PAGE_BYTES


def _are_sizes_right(ring_bytes: int, readers: int) -> bool:
    return (
        is_power_of_two(ring_bytes)
        and SMALLEST_RING_BYTES <= ring_bytes <= LARGEST_RING_BYTES
        and 0 <= readers <= MOST_READERS
    )
