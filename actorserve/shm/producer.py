# SPDX-License-Identifier: Apache-2.0
"""The sending end of a lane, which also takes the releases that come back.

Nothing here blocks. A caller that finds the ring full calls `want_room`, and if that says False
sleeps on its own doorbell, which the consumer rings.
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
    HEADER_BYTES,
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


class ProducerStats(msgspec.Struct, frozen=True):
    """What a producer has done. Bytes count headers and padding too.

    `queued_bytes` is what the consumer had not taken when the producer last looked.
    """

    sent_bytes: int
    queued_bytes: int
    ring_bytes: int
    full: int
    bells: int
    releases: int


class Producer:
    """The sending end of a lane. One thread at a time sends and waits for room.

    One at a time takes the releases: the same one, or another that knows nothing of the first.

    `max_frame_bytes` is the largest payload, so that a frame fits into an empty ring wherever
    its head stands.
    """

    __slots__ = (
        "_acquire",
        "_base",
        "_bell",
        "_bells",
        "_edge",
        "_full",
        "_head",
        "_mapping",
        "_mask",
        "_release",
        "_release_mask",
        "_release_seen",
        "_release_tail",
        "_ring_bytes",
        "_rung_parked",
        "_rung_wants",
        "_tail",
        "_wants",
        "_words",
        "max_frame_bytes",
    )

    def __init__(self, lane: Lane, consumer_bell: Doorbell) -> None:
        """Take the sending end of a fresh lane; `consumer_bell` wakes the other end."""
        self._words = lane.words
        self._mapping = lane.mapping
        self._base = lane.ring_offset
        self._ring_bytes = lane.ring_bytes
        self._mask = lane.ring_bytes - 1
        self._release_mask = lane.release_slots - 1
        self._bell = consumer_bell
        self._release, self._acquire = new_fence()
        self.max_frame_bytes = lane.ring_bytes // 2 - HEADER_BYTES
        self._head = 0
        self._tail = 0  # as last read: the consumer can only have moved on
        self._edge = lane.ring_bytes  # frames that end up to here need no second look
        self._release_tail = 0
        self._release_seen = 0
        self._wants = 0
        self._rung_parked = 0
        self._rung_wants = 0
        self._full = 0
        self._bells = 0

    def try_send(self, data: bytes | bytearray | memoryview, kind: int = 0) -> bool:
        """Publish one frame and wake the consumer if it sleeps; False if the ring is full.

        `kind` is 0 to 0xFFFE. ValueError for a frame that no empty ring could hold;
        ProtocolError if the consumer's words are wrong.
        """
        nbytes = len(data)
        head = self._head
        end = head + ((nbytes + 15) & -8)
        if end > self._edge or nbytes > self.max_frame_bytes or not 0 <= kind < PAD:
            if not self._find_room(nbytes, kind):
                return False
            head = self._head
            end = head + ((nbytes + 15) & -8)
        words = self._words
        at = self._base + (head & self._mask)
        words[at >> 3] = kind << 32 | nbytes
        at += 8
        self._mapping[at : at + nbytes] = data
        self._head = end
        if WEAKLY_ORDERED:
            self._release()
            self._acquire(False)
        words[HEAD] = end
        # The fence between "there is something" and "does it sleep?": see fence.py.
        self._release()
        self._acquire(False)
        epoch = words[CONSUMER_PARKED]
        if epoch and epoch != self._rung_parked:
            self._rung_parked = epoch
            self._bells += 1
            self._bell.ring()
        return True

    def try_post(self, data: bytes | bytearray | memoryview, kind: int = 0) -> bool:
        """Publish one frame as `try_send` does, but wake nobody: `wake` does, once for many."""
        nbytes = len(data)
        head = self._head
        end = head + ((nbytes + 15) & -8)
        if end > self._edge or nbytes > self.max_frame_bytes or not 0 <= kind < PAD:
            if not self._find_room(nbytes, kind):
                return False
            head = self._head
            end = head + ((nbytes + 15) & -8)
        words = self._words
        at = self._base + (head & self._mask)
        words[at >> 3] = kind << 32 | nbytes
        at += 8
        self._mapping[at : at + nbytes] = data
        self._head = end
        if WEAKLY_ORDERED:
            self._release()
            self._acquire(False)
        words[HEAD] = end
        return True

    def wake(self) -> None:
        """Ring the consumer if it sleeps, after `try_post`."""
        self._release()
        self._acquire(False)
        epoch = self._words[CONSUMER_PARKED]
        if epoch and epoch != self._rung_parked:
            self._rung_parked = epoch
            self._bells += 1
            self._bell.ring()

    def try_put(self, data: bytes | bytearray | memoryview, kind: int = 0) -> bool:
        """Write one frame without publishing it; `flush` publishes all that were put.

        False if the ring is full; then everything put before has been flushed, because nobody
        else can make room. Errors as in `try_send`.
        """
        nbytes = len(data)
        head = self._head
        end = head + ((nbytes + 15) & -8)
        if end > self._edge or nbytes > self.max_frame_bytes or not 0 <= kind < PAD:
            if not self._find_room(nbytes, kind):
                return False
            head = self._head
            end = head + ((nbytes + 15) & -8)
        at = self._base + (head & self._mask)
        self._words[at >> 3] = kind << 32 | nbytes
        at += 8
        self._mapping[at : at + nbytes] = data
        self._head = end
        return True

    def flush(self) -> None:
        """Publish every frame that was put, and wake the consumer once if it sleeps."""
        words = self._words
        if WEAKLY_ORDERED:
            self._release()
            self._acquire(False)
        words[HEAD] = self._head
        self._release()
        self._acquire(False)
        epoch = words[CONSUMER_PARKED]
        if epoch and epoch != self._rung_parked:
            self._rung_parked = epoch
            self._bells += 1
            self._bell.ring()

    def _find_room(self, nbytes: int, kind: int) -> bool:
        """Make the frame fit at `_head`: read how far the consumer is, fill up a lap's end.

        False, after a flush, if the ring is full.
        """
        if nbytes > self.max_frame_bytes:
            raise ValueError(
                f"a frame of {nbytes} bytes is too large for this lane "
                f"(at most {self.max_frame_bytes})"
            )
        if not 0 <= kind < PAD:
            raise ValueError(f"a frame's kind is 0 to {PAD - 1}, not {kind}")
        need = (nbytes + 15) & -8
        head = self._head
        left_in_lap = self._ring_bytes - (head & self._mask)
        skip = left_in_lap if need > left_in_lap else 0
        if head + skip + need - self._tail > self._ring_bytes:
            self._tail = self._read_tail()
            if head + skip + need - self._tail > self._ring_bytes:
                self._full += 1
                self.flush()
                return False
        if skip:
            at = self._base + (head & self._mask)
            self._words[at >> 3] = PAD << 32 | skip
            head += skip
            self._head = head
        self._edge = min(self._tail + self._ring_bytes, (head | self._mask) + 1)
        return True

    def _read_tail(self) -> int:
        tail = self._words[TAIL]
        if tail & 7 or not self._tail <= tail <= self._head:
            raise ProtocolError(
                f"a lane's tail is {tail}, expected a multiple of 8 "
                f"from {self._tail} to {self._head}"
            )
        return tail

    def want_room(self) -> bool:
        """Announce a wait for room or releases; the consumer then rings this end's doorbell.

        True if some came since this producer last looked (by a send that found the ring full,
        `take_releases`, or `want_room` itself): look again, do not sleep. After False, sleep on
        the doorbell; one ring is sure to come for the next change.
        """
        words = self._words
        self._wants += 1
        words[PRODUCER_WANTS] = self._wants
        self._release()
        self._acquire(False)
        tail = self._read_tail()
        # Only compared, never judged: another thread may take releases meanwhile, and then this
        # is behind what has been taken. `take_releases` judges for itself.
        release_head = words[RELEASE_HEAD]
        if tail == self._tail and release_head == self._release_seen:
            return False
        words[PRODUCER_WANTS] = 0
        self._tail = tail
        self._release_seen = release_head
        return True

    def stop_wanting(self) -> None:
        """Take the announcement of `want_room` back."""
        self._words[PRODUCER_WANTS] = 0

    def release_mark(self) -> int:
        """Return how many releases have been published so far, for `take_releases`.

        Read it before draining the other lane of the same peer, and take only what is marked:
        then no release overtakes a message that still names its block.
        """
        mark = self._read_release_head()
        if WEAKLY_ORDERED:
            self._release()
            self._acquire(False)
        return mark

    def take_releases(self, mark: int | None = None) -> list[tuple[int, int]]:
        """Return the (arena, block) pairs released up to `mark` (default: now), oldest first.

        The pairs are what the peer wrote: check them. ProtocolError if its counter is wrong.
        """
        if mark is None:
            mark = self._read_release_head()
        tail = self._release_tail
        count = mark - tail
        if count <= 0:
            return []
        if count > self._release_mask + 1:
            raise ProtocolError(f"{count} releases in a ring of {self._release_mask + 1}")
        if WEAKLY_ORDERED:
            self._release()
            self._acquire(False)
        start = tail & self._release_mask
        first = min(count, self._release_mask + 1 - start)
        numbers = self._read_slots(start, first) + self._read_slots(0, count - first)
        self._release_tail = mark
        self._release_seen = max(self._release_seen, mark)
        self._publish_release_tail(mark)
        return list(zip(numbers[::2], numbers[1::2], strict=True))

    def _read_slots(self, start: int, count: int) -> list[int]:
        at = RELEASES + 2 * start
        return self._words[at : at + 2 * count].tolist()

    def _publish_release_tail(self, tail: int) -> None:
        """Give the slots back, and wake a consumer that waits for some."""
        words = self._words
        if WEAKLY_ORDERED:
            self._release()
            self._acquire(False)
        words[RELEASE_TAIL] = tail
        self._release()
        self._acquire(False)
        epoch = words[CONSUMER_WANTS]
        if epoch and epoch != self._rung_wants:
            self._rung_wants = epoch
            self._bells += 1
            self._bell.ring()

    def _read_release_head(self) -> int:
        head = self._words[RELEASE_HEAD]
        if not 0 <= head - self._release_tail <= self._release_mask + 1:
            raise ProtocolError(
                f"a lane's release counter is {head}, expected {self._release_tail} to "
                f"{self._release_tail + self._release_mask + 1}"
            )
        return head

    def stats(self) -> ProducerStats:
        """Return what this end has done so far."""
        return ProducerStats(
            sent_bytes=self._head,
            queued_bytes=self._head - self._tail,
            ring_bytes=self._ring_bytes,
            full=self._full,
            bells=self._bells,
            releases=self._release_tail,
        )
