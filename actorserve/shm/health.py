# SPDX-License-Identifier: Apache-2.0
"""The health page: words that a stub and its supervisor read without asking each other.

    stub ───────► beats, phase, batch in execution, who waits for credit
    supervisor ─► cancel words, credit

Every word has one writer, so there is no lock. The numbers are evidence, never a verdict: a stub
in C code that holds the interpreter shows no beats and is not hung.

    byte    word of 8 bytes            written by
    0x000   magic, cancel_slots        creator
    0x100   beats, time of the last    the stub's control thread
    0x180   phase                      the stub's main thread
    0x200   batch, time of its start,  the stub's main thread
            the last batch begun
    0x400   cancel words               supervisor
    then    two words a slot: how many responses may be sent in all (supervisor), and the
            request whose sender waits for more (stub)

A slot belongs to one request at a time. The two words of its credit are a handshake like that of
parking (fence.py): each side stores its own and then loads the other's.
"""

from __future__ import annotations

import msgspec

from actorserve.errors import ProtocolError
from actorserve.shm.fence import new_fence
from actorserve.shm.segment import Segment

_MAGIC = int.from_bytes(b"asbeat\x00\x01", "big")
_CANCEL_SLOTS = 1
_BEATS = 0x100 >> 3
_BEAT_NS = _BEATS + 1
_PHASE = 0x180 >> 3
_BATCH = 0x200 >> 3
_BATCH_NS = _BATCH + 1
_BEGUN = _BATCH + 2
_CANCELS = 0x400 >> 3
_WORDS_PER_SLOT = 3  # one to cancel, two for credits
_MOST_SLOTS = 1 << 20
_READ_TRIES = 8


class HealthStats(msgspec.Struct, frozen=True):
    """One look at the page; times are monotonic nanoseconds, 0 where nothing was written yet."""

    beats: int
    beat_ns: int
    phase: int
    batch: int
    batch_start_ns: int


class HealthPage:
    """The words of one stub. Methods say whose they are; each side keeps to its own.

    The supervisor calls `create`, `cancel`, `grant` and reads `stats`; the stub calls `attach`,
    `beat`, `enter_phase`, `begin_batch`, `end_batch`, `want_credit` and reads `is_cancelled` and
    `granted`.
    """

    __slots__ = ("_acquire", "_beats", "_credits", "_release", "_words", "cancel_slots", "segment")

    segment: Segment

    def __init__(self, segment: Segment, cancel_slots: int) -> None:
        """Lay a page over a segment; use `create` or `attach`, which check it."""
        self.segment = segment
        self.cancel_slots = cancel_slots
        self._beats = 0
        self._words = segment.buffer.cast("Q")
        self._credits = _CANCELS + cancel_slots
        self._release, self._acquire = new_fence()

    @classmethod
    def create(cls, cancel_slots: int = 1024) -> HealthPage:
        """Make a page in a new segment (supervisor); ResourceExhausted if there is no memory."""
        if not 0 < cancel_slots <= _MOST_SLOTS:
            raise ValueError(f"a health page has 1 to {_MOST_SLOTS} slots, not {cancel_slots}")
        page = cls(Segment.create(_page_bytes(cancel_slots)), cancel_slots)
        page._words[_CANCEL_SLOTS] = cancel_slots
        page._words[0] = _MAGIC
        return page

    @classmethod
    def attach(cls, segment: Segment) -> HealthPage:
        """Lay a page over the segment that the supervisor made (stub).

        ProtocolError if it holds no page of this version or lies about its size; the segment
        then stays open, for the caller to close.
        """
        if segment.nbytes < _page_bytes(1) or segment.nbytes % 8:
            raise ProtocolError(f"a segment of {segment.nbytes} bytes cannot hold a health page")
        words = segment.buffer.cast("Q")
        magic, cancel_slots = words[0], words[_CANCEL_SLOTS]
        if magic != _MAGIC:
            raise ProtocolError(
                f"no health page of this version: its first word is {magic:#018x}, "
                f"expected {_MAGIC:#018x}"
            )
        if not 0 < cancel_slots <= _MOST_SLOTS or _page_bytes(cancel_slots) > segment.nbytes:
            raise ProtocolError(
                f"a health page of {cancel_slots} slots cannot lie in a segment of "
                f"{segment.nbytes} bytes"
            )
        return cls(segment, cancel_slots)

    def cancel(self, slot: int, request_id: int) -> None:
        """Mark a request as cancelled (supervisor).

        A slot holds the id of the last request cancelled there. Ids are never used again, so the
        slot's next request needs no reset. ValueError for a slot that is not on the page.
        """
        self._check_slot(slot)
        self._words[_CANCELS + slot] = request_id

    def beat(self, now_ns: int) -> None:
        """Count one beat at this monotonic time (stub, one thread)."""
        words = self._words
        words[_BEAT_NS] = now_ns
        self._beats += 1
        words[_BEATS] = self._beats

    def enter_phase(self, phase: int) -> None:
        """Write the number of the phase that begins (stub, main thread)."""
        self._words[_PHASE] = phase

    def begin_batch(self, batch: int, now_ns: int) -> None:
        """Write which batch, counted from 1, is in execution since when (stub, main thread)."""
        words = self._words
        words[_BEGUN] = batch
        words[_BATCH] = 0
        words[_BATCH_NS] = now_ns
        words[_BATCH] = batch

    def resume_batch(self, batch: int, start_ns: int) -> None:
        """Write that a batch which began at `start_ns` is still in execution (stub, main thread).

        For stubs that execute several at a time: the page shows the oldest.
        """
        words = self._words
        words[_BATCH] = 0
        words[_BATCH_NS] = start_ns
        words[_BATCH] = batch

    def end_batch(self) -> None:
        """Say that nothing is in execution (stub, main thread)."""
        self._words[_BATCH] = 0

    def is_cancelled(self, slot: int, request_id: int) -> bool:
        """Say whether the supervisor has cancelled this request (stub, any thread)."""
        self._check_slot(slot)
        return bool(self._words[_CANCELS + slot] == request_id) and request_id != 0

    # --- credit -----------------------------------------------------------------------------------

    def grant(self, slot: int, request_id: int, total: int) -> bool:
        """Let a request's sender send `total` responses in all (supervisor).

        True where the sender waits: it has to be told, by a message.
        """
        self._check_slot(slot)
        at = self._credits + 2 * slot
        self._words[at] = total
        self._release()
        self._acquire(False)
        return self._words[at + 1] == request_id

    def granted(self, slot: int) -> int:
        """Return how many responses may be sent in all (stub, any thread)."""
        return self._words[self._credits + 2 * slot]

    def want_credit(self, slot: int, request_id: int) -> int:
        """Announce that a request's sender waits, and return what is granted now (stub).

        One thread at a time on the whole page: the fence belongs to the page.
        """
        self._check_slot(slot)
        at = self._credits + 2 * slot
        self._words[at + 1] = request_id
        self._release()
        self._acquire(False)
        return self._words[at]

    def stop_wanting_credit(self, slot: int) -> None:
        """Take the announcement of `want_credit` back (stub)."""
        self._words[self._credits + 2 * slot + 1] = 0

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.cancel_slots:
            raise ValueError(f"a cancel slot is 0 to {self.cancel_slots - 1}, not {slot}")

    def batch(self) -> tuple[int, int]:
        """Return (batch, start in monotonic ns), or (0, 0) if nothing is in execution.

        The two words are read until they belong together, a few times at most.
        """
        words = self._words
        batch = 0
        for _ in range(_READ_TRIES):
            batch = words[_BATCH]
            start_ns = words[_BATCH_NS]
            if batch and batch == words[_BATCH]:
                return batch, start_ns
            if not batch:
                break
        return 0, 0

    def last_begun(self) -> int:
        """Return the number of the last batch that was begun, 0 for none (supervisor).

        It is written before any user code sees the batch, so that a batch beyond it is known to
        be untouched when the stub is dead.
        """
        return self._words[_BEGUN]

    def stats(self) -> HealthStats:
        """Return one look at all words (supervisor)."""
        words = self._words
        batch, batch_start_ns = self.batch()
        return HealthStats(
            beats=words[_BEATS],
            beat_ns=words[_BEAT_NS],
            phase=words[_PHASE],
            batch=batch,
            batch_start_ns=batch_start_ns,
        )

    def close(self) -> None:
        """Let the segment go; idempotent. The page's words raise ValueError from here on."""
        self._words.release()
        self.segment.close()


def _page_bytes(cancel_slots: int) -> int:
    return (_CANCELS + _WORDS_PER_SLOT * cancel_slots) * 8
