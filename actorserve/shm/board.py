# SPDX-License-Identifier: Apache-2.0
"""The board of a group of ranks: words that all of them and their parent read.

    parent ─► epoch, dead          every wait of a rank looks at `dead`
    rank k ─► step, status, time, told   what it does: evidence for whoever judges a stall
    rank k ─► parked               see parking.py
    rank 0 ─► a page of statistics, the latest only

    byte       word of 8 bytes
    0x000      magic, size, epoch, capacity of the page in bytes
    0x080      dead
    0x100      for each rank, 256 bytes: step, status, time (monotonic ns), told … 0x80: parked
    then       the page: sequence, length, bytes

Every word has one writer, so there is no lock. The page's sequence is odd while it is written.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from actorserve.clock import monotonic_ns
from actorserve.errors import ProtocolError, Unavailable
from actorserve.shm.doorbell import Doorbell
from actorserve.shm.fence import new_fence
from actorserve.shm.parking import Parking
from actorserve.shm.segment import Segment

MOST_RANKS = 30
"""As many bells, of two descriptors each, travel in one packet with the group's segments."""
PAGE_BYTES = 8 << 10

_MAGIC = int.from_bytes(b"asbord\x00\x01", "big")
_SIZE, _EPOCH, _CAPACITY = 1, 2, 3
_DEAD = 0x080 >> 3
_RANKS = 0x100 >> 3
_WORDS_PER_RANK = 0x100 >> 3
_PARKED = 0x80 >> 3
_READ_TRIES = 16


class GroupDead(Unavailable):
    """The group is marked as dead: whoever waits for its ranks waits in vain."""


class Status(enum.IntEnum):
    """What a rank does."""

    LOADING = 0
    """Or in a call, which may take as long."""
    IDLE = 1
    BUSY = 2
    WAITING = 3
    """In the middle of a step, for other ranks."""
    CLOSED = 4


class RankNote(msgspec.Struct, frozen=True):
    """What the board says of one rank: since `since_s` (monotonic) it does this, in this step.

    `told` counts what rank 0 has told the others, and on those what they have begun of it.
    """

    step: int
    status: Status
    since_s: float
    told: int


class BoardStats(msgspec.Struct, frozen=True):
    """One look at all words."""

    epoch: int
    is_dead: bool
    ranks: list[RankNote]


class Board:
    """The words of one group. Methods say whose they are; each side keeps to its own."""

    __slots__ = ("_acquire", "_page", "_release", "_words", "epoch", "segment", "size")

    def __init__(self, segment: Segment, size: int, epoch: int) -> None:
        """Lay a board over a segment; use `create` or `attach`, which check it."""
        self.segment = segment
        self.size = size
        self.epoch = epoch
        self._words = segment.buffer.cast("Q")
        self._page = _RANKS + size * _WORDS_PER_RANK
        self._release, self._acquire = new_fence()

    @classmethod
    def create(cls, size: int, epoch: int) -> Board:
        """Make a board for `size` ranks (parent); ResourceExhausted if there is no memory."""
        if not 1 <= size <= MOST_RANKS:
            raise ValueError(f"a group has 1 to {MOST_RANKS} ranks, not {size}")
        board = cls(Segment.create(_board_bytes(size)), size, epoch)
        board._words[_SIZE] = size
        board._words[_EPOCH] = epoch
        board._words[_CAPACITY] = PAGE_BYTES
        board._words[0] = _MAGIC
        return board

    @classmethod
    def attach(cls, segment: Segment) -> Board:
        """Lay a board over the segment that the parent made (rank).

        ProtocolError if it holds no board of this version or lies about its size; the segment
        then stays open, for the caller to close.
        """
        if segment.nbytes < _RANKS * 8 or segment.nbytes % 8:
            raise ProtocolError(f"a segment of {segment.nbytes} bytes cannot hold a board")
        words = segment.buffer.cast("Q")
        magic, size, epoch = words[0], words[_SIZE], words[_EPOCH]
        if magic != _MAGIC:
            raise ProtocolError(
                f"no board of this version: its first word is {magic:#018x}, "
                f"expected {_MAGIC:#018x}"
            )
        if (
            not 1 <= size <= MOST_RANKS
            or words[_CAPACITY] != PAGE_BYTES
            or _board_bytes(size) > segment.nbytes
        ):
            raise ProtocolError(
                f"a board of {size} ranks cannot lie in a segment of {segment.nbytes} bytes"
            )
        return cls(segment, size, epoch)

    # --- the group's end --------------------------------------------------------------------------

    def mark_dead(self) -> None:
        """Say that the group is over (parent). Wake everybody afterwards."""
        self._words[_DEAD] = 1

    @property
    def is_dead(self) -> bool:
        """Whether the group is over."""
        return bool(self._words[_DEAD])

    # --- what ranks do ----------------------------------------------------------------------------

    def parking(self, bells: Sequence[Doorbell]) -> Parking:
        """Return a hold on the ranks' sleep, for one thread; `bells` are theirs, in order."""
        places = [_RANKS + rank * _WORDS_PER_RANK + _PARKED for rank in range(self.size)]
        return Parking(self._words, places, bells)

    def note(self, rank: int, step: int, status: Status, told: int = 0) -> None:
        """Write what a rank does from now on (that rank)."""
        words = self._words
        at = _RANKS + rank * _WORDS_PER_RANK
        words[at + 2] = monotonic_ns()
        words[at + 3] = told
        words[at] = step
        words[at + 1] = status

    def read_note(self, rank: int) -> RankNote:
        """Return what a rank does; ProtocolError for a status that does not exist."""
        words = self._words
        at = _RANKS + rank * _WORDS_PER_RANK
        step, status, time_ns = words[at], words[at + 1], words[at + 2]
        if status > Status.CLOSED:
            raise ProtocolError(f"rank {rank} has the status {status}")
        return RankNote(step, Status(status), time_ns / 1e9, words[at + 3])

    # --- the page ---------------------------------------------------------------------------------

    def write_page(self, data: bytes) -> bool:
        """Replace the page (rank 0); False, and nothing is done, where it is too long."""
        if len(data) > PAGE_BYTES:
            return False
        words, at = self._words, self._page
        sequence = words[at]
        words[at] = sequence + 1
        self._fence()
        words[at + 1] = len(data)
        start = (at + 2) * 8
        self.segment.buffer[start : start + len(data)] = data
        self._fence()
        words[at] = sequence + 2
        return True

    def read_page(self) -> bytes | None:
        """Return the page as it was written last; None where nothing is, or it changes too fast."""
        words, at = self._words, self._page
        start = (at + 2) * 8
        for _ in range(_READ_TRIES):
            sequence = words[at]
            if sequence == 0:
                return None
            self._fence()
            nbytes = words[at + 1]
            if sequence & 1 or nbytes > PAGE_BYTES:
                continue
            data = bytes(self.segment.buffer[start : start + nbytes])
            self._fence()
            if words[at] == sequence:
                return data
        return None

    def _fence(self) -> None:
        self._release()
        self._acquire(False)

    def stats(self) -> BoardStats:
        """Return one look at all words."""
        notes = [self.read_note(rank) for rank in range(self.size)]
        return BoardStats(self.epoch, self.is_dead, notes)

    def close(self) -> None:
        """Let the segment go; idempotent. The board's words raise ValueError from here on."""
        self._words.release()
        self.segment.close()


def _board_bytes(size: int) -> int:
    return (_RANKS + size * _WORDS_PER_RANK + 2) * 8 + PAGE_BYTES
