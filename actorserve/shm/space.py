# SPDX-License-Identifier: Apache-2.0
"""The free memory of one segment: which ranges, and which of their pages the system has back.

What always holds: free ranges are disjoint and those that touch are one; holes are whole pages
and lie inside free ranges, so that memory in use is never without its pages.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from actorserve.shm.segment import PAGE_BYTES, Segment

ALIGN_BYTES = 64
"""Every block starts at a multiple of this, as SIMD code and DLPack consumers like it."""


class Space:
    """Free ranges of one segment. Offsets and sizes in bytes."""

    __slots__ = ("_free", "_holes", "segment")

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self._free = Ranges()
        self._free.add(0, segment.nbytes)
        self._holes = Ranges()

    def take(self, nbytes: int) -> int | None:
        """Cut `nbytes` off the first free range that has them; return the offset, or None.

        ResourceExhausted if there are holes in it that the system cannot fill now; the range is
        free again then.
        """
        offset = self._free.take(nbytes)
        if offset is not None and self._holes:
            try:
                self._refill(offset, offset + nbytes)
            except BaseException:
                self._free.add(offset, offset + nbytes)
                raise
        return offset

    def give(self, offset: int, nbytes: int) -> None:
        """Take back a range that came from `take`, or a part of one."""
        self._free.add(offset, offset + nbytes)

    def punch(self, keep_bytes: int) -> tuple[int, int]:
        """Give the free pages beyond the first `keep_bytes` back to the system.

        Return how many bytes were given back and how many of `keep_bytes` were used up. Nothing
        happens where the segment's descriptor is closed: pages cannot be had again without it.
        """
        given_bytes = kept_bytes = 0
        if self.segment.fd < 0:
            return 0, 0
        for start, end in list(self._backed()):
            kept = min(keep_bytes - kept_bytes, end - start)
            kept_bytes += kept
            first = (start + kept + PAGE_BYTES - 1) & -PAGE_BYTES
            last = end & -PAGE_BYTES
            if first < last:
                # Noted first: should punching fail, refilling what is there does no harm.
                self._holes.add(first, last)
                self.segment.punch(first, last - first)
                given_bytes += last - first
        return given_bytes, kept_bytes

    def punched_bytes(self) -> int:
        """Return how much of the free memory has no pages."""
        return self._holes.total()

    def _backed(self) -> Iterator[tuple[int, int]]:
        """Yield the parts of the free ranges that have their pages."""
        for start, end in self._free:
            for hole_start, hole_end in self._holes.overlap(start, end):
                if start < hole_start:
                    yield start, hole_start
                start = hole_end
            if start < end:
                yield start, end

    def _refill(self, start: int, end: int) -> None:
        """Give every page that the range touches its memory again."""
        for hole_start, hole_end in self._holes.overlap(start, end):
            first = hole_start & -PAGE_BYTES
            last = (hole_end + PAGE_BYTES - 1) & -PAGE_BYTES
            self.segment.refill(first, last - first)
            self._holes.remove(first, last)


class Ranges:
    """Half-open ranges in order, disjoint; two that touch become one."""

    __slots__ = ("_ends", "_largest", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._largest = 0  # no range is larger; the largest may be smaller

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._ends, strict=True)

    def __bool__(self) -> bool:
        return bool(self._starts)

    def total(self) -> int:
        """Return the length of all ranges together."""
        return sum(self._ends) - sum(self._starts)

    def add(self, start: int, end: int) -> None:
        """Add a range that overlaps none of the others."""
        starts, ends = self._starts, self._ends
        at = bisect_left(starts, start)
        if at < len(starts) and starts[at] == end:
            end = ends[at]
            del starts[at], ends[at]
        if at and ends[at - 1] == start:
            start = starts[at - 1]
            ends[at - 1] = end
        else:
            starts.insert(at, start)
            ends.insert(at, end)
        self._largest = max(self._largest, end - start)

    def take(self, size: int) -> int | None:
        """Cut `size` off the first range that has it; return where, or None."""
        if size > self._largest:
            return None
        starts, ends = self._starts, self._ends
        largest = 0
        for at, start in enumerate(starts):
            room = ends[at] - start
            if room >= size:
                if room == size:
                    del starts[at], ends[at]
                else:
                    starts[at] = start + size
                return start
            largest = max(largest, room)
        self._largest = largest
        return None

    def overlap(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the parts of the ranges that lie within [start, end)."""
        starts, ends = self._starts, self._ends
        parts = []
        at = max(0, bisect_right(starts, start) - 1)
        while at < len(starts) and starts[at] < end:
            if ends[at] > start:
                parts.append((max(start, starts[at]), min(end, ends[at])))
            at += 1
        return parts

    def remove(self, start: int, end: int) -> None:
        """Cut [start, end) out of the one range that contains it."""
        starts, ends = self._starts, self._ends
        at = bisect_right(starts, start) - 1
        left, right = starts[at], ends[at]
        del starts[at], ends[at]
        for low, high in ((end, right), (left, start)):
            if low < high:
                starts.insert(at, low)
                ends.insert(at, high)
