# SPDX-License-Identifier: Apache-2.0
"""The receiving end of a lane, which also sends the releases back.

Nothing here blocks. A caller that wants to sleep calls `park`, and if that says True waits on its
own doorbell (`doorbell.wait_for`, or its event loop), then calls `unpark` and drains.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from actorserve.errors import ProtocolError
from actorserve.shm.fence import WEAKLY_ORDERED, new_fence
from actorserve.shm.layout import (
    CONSUMER_PARKED,
    CONSUMER_WANTS,
    HEAD,
    LENGTH_MASK,
    PAD,
    PRODUCER_WANTS,
    RELEASE_HEAD,
    RELEASE_TAIL,
    RELEASES,
    TAIL,
)

if TYPE_CHECKING:
    from actorserve.shm.doorbell import Doorbell
    from actorserve.shm.lane import Lane

_ALL = 1 << 30  # more frames than any ring holds


class ConsumerStats(msgspec.Struct, frozen=True):
    """What a consumer has done. Bytes count headers and padding too."""

    received_frames: int
    received_bytes: int
    parks: int
    bells: int
    releases: int
    releases_full: int


class Consumer:
    """The receiving end of a lane. One thread at a time."""

    __slots__ = (
        "_acquire",
        "_base",
        "_bell",
        "_bells",
        "_epoch",
        "_frames",
        "_mapping",
        "_mask",
        "_parks",
        "_release",
        "_release_head",
        "_release_mask",
        "_release_tail",
        "_releases_full",
        "_ring_bytes",
        "_rung",
        "_tail",
        "_wants",
        "_words",
    )

    def __init__(self, lane: Lane, producer_bell: Doorbell) -> None:
        """Take the receiving end of a lane; `producer_bell` wakes the other end."""
        self._words = lane.words
        self._mapping = lane.mapping
        self._base = lane.ring_offset
        self._ring_bytes = lane.ring_bytes
        self._mask = lane.ring_bytes - 1
        self._release_mask = lane.release_slots - 1
        self._bell = producer_bell
        self._release, self._acquire = new_fence()
        self._tail = 0
        self._epoch = 0
        self._rung = 0
        self._release_head = 0
        self._release_tail = 0  # as last read: the producer can only have moved on
        self._wants = 0
        self._frames = 0
        self._parks = 0
        self._bells = 0
        self._releases_full = 0

    def drain(self, max_frames: int = _ALL) -> list[tuple[int, bytes]]:
        """Return the frames published so far as (kind, payload), at most `max_frames`.

        Their room goes back to the producer, who is woken if it waits for some. ProtocolError if
        the head or a header cannot be right; good frames before a wrong one are returned first.
        """
        words = self._words
        head = words[HEAD]
        tail = self._tail
        if head == tail:
            return []
        if head & 7 or not 0 < head - tail <= self._ring_bytes:
            raise ProtocolError(
                f"a lane's head is {head}, expected a multiple of 8 "
                f"from {tail} to {tail + self._ring_bytes}"
            )
        if WEAKLY_ORDERED:
            self._release()
            self._acquire(False)
        base = self._base
        mask = self._mask
        mapping = self._mapping
        ring_end = base + self._ring_bytes
        frames: list[tuple[int, bytes]] = []
        for _ in range(max_frames):
            if tail == head:
                break
            at = base + (tail & mask)
            header = words[at >> 3]
            nbytes = header & LENGTH_MASK
            kind = header >> 32
            step = (nbytes + 15) & -8
            if kind >= PAD or step > head - tail or step > ring_end - at:
                if kind == PAD and nbytes == ring_end - at and nbytes <= head - tail:
                    tail += nbytes
                    if tail == head:
                        break
                    at = base
                    header = words[at >> 3]
                    nbytes = header & LENGTH_MASK
                    kind = header >> 32
                    step = (nbytes + 15) & -8
                if kind >= PAD or step > head - tail or step > ring_end - at:
                    if frames:
                        break
                    raise ProtocolError(
                        f"a frame's header is {header:#018x} with {head - tail} bytes published "
                        f"and {ring_end - at} left in the ring"
                    )
            at += 8
            frames.append((kind, mapping[at : at + nbytes]))
            tail += step
        self._tail = tail
        self._frames += len(frames)
        self._publish_tail(tail)
        return frames

    def _publish_tail(self, tail: int) -> None:
        """Give room back, and wake a producer that waits for it."""
        words = self._words
        if WEAKLY_ORDERED:
            self._release()
            self._acquire(False)
        words[TAIL] = tail
        self._release()
        self._acquire(False)
        epoch = words[PRODUCER_WANTS]
        if epoch and epoch != self._rung:
            self._rung = epoch
            self._bells += 1
            self._bell.ring()

    def has_news(self) -> bool:
        """Whether something was published that `drain` has not taken."""
        return self._words[HEAD] != self._tail

    def park(self) -> bool:
        """Announce sleep, so that the next publishing rings this end's doorbell.

        False, and no announcement, if something is there already.
        """
        words = self._words
        self._epoch += 1
        words[CONSUMER_PARKED] = self._epoch
        # The fence between "I sleep" and "is there something?": see fence.py.
        self._release()
        self._acquire(False)
        if words[HEAD] != self._tail:
            words[CONSUMER_PARKED] = 0
            return False
        self._parks += 1
        return True

    def unpark(self) -> None:
        """Take the announcement of `park` back: no ring is needed while this end is awake."""
        self._words[CONSUMER_PARKED] = 0

    def try_release(self, arena: int, block: int) -> bool:
        """Write one release without publishing it; `flush_releases` publishes all.

        False if the producer has not taken enough of those before. They have been flushed then,
        and this end's doorbell rings once slots are free: try again after any wake-up.
        ProtocolError if the producer's counter is wrong.
        """
        head = self._release_head
        if head - self._release_tail > self._release_mask and not self._find_slot():
            return False
        words = self._words
        at = RELEASES + 2 * (head & self._release_mask)
        words[at] = arena
        words[at + 1] = block
        self._release_head = head + 1
        return True

    def _find_slot(self) -> bool:
        """Read how far the producer is; if not far enough, flush and ask to be rung."""
        words = self._words
        self._release_tail = self._read_release_tail()
        if self._release_head - self._release_tail > self._release_mask:
            self.flush_releases()
            self._wants += 1
            words[CONSUMER_WANTS] = self._wants
            self._release()
            self._acquire(False)
            self._release_tail = self._read_release_tail()
            if self._release_head - self._release_tail > self._release_mask:
                self._releases_full += 1
                return False
        words[CONSUMER_WANTS] = 0
        return True

    def _read_release_tail(self) -> int:
        tail = self._words[RELEASE_TAIL]
        if not self._release_tail <= tail <= self._release_head:
            raise ProtocolError(
                f"a lane's count of taken releases is {tail}, expected {self._release_tail} "
                f"to {self._release_head}"
            )
        return tail

    def flush_releases(self) -> None:
        """Publish every release that was written, and wake a producer that waits for some."""
        words = self._words
        if WEAKLY_ORDERED:
            self._release()
            self._acquire(False)
        words[RELEASE_HEAD] = self._release_head
        self._release()
        self._acquire(False)
        epoch = words[PRODUCER_WANTS]
        if epoch and epoch != self._rung:
            self._rung = epoch
            self._bells += 1
            self._bell.ring()

    def stats(self) -> ConsumerStats:
        """Return what this end has done so far."""
        return ConsumerStats(
            received_frames=self._frames,
            received_bytes=self._tail,
            parks=self._parks,
            bells=self._bells,
            releases=self._release_head,
            releases_full=self._releases_full,
        )
