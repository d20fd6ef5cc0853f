# SPDX-License-Identifier: Apache-2.0
"""Arrays among the ranks of a group: all-reduce, all-gather, broadcast, barrier.

    every rank, at its n-th step:  write slot n & 1 ─► arrived = n ─► wait for the others' n
                                   ─► read their slots

Two slots a rank are enough without any word for "I have read it": who has arrived at n + 1 has
read what was written at n, and nobody writes at n + 2 before all have arrived at n + 1. A larger
array goes in several steps. Sums are taken by every rank for itself, in the order of ranks, and so
are equal bit by bit.

    byte     word of 8 bytes
    0x000    magic, size, slot_bytes     creator
    0x080    for each rank, 128 bytes: arrived     that rank
    page     for each rank two slots: a header of 128 bytes (what, dtype, shape), the data

Ranks that do not make the same calls with the same shapes are told so by the headers. A wait looks
a few times, giving its core to whoever needs it, and then sleeps as its owner says (`wait`).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from actorserve.errors import InvalidArgument, ProtocolError
from actorserve.shm.fence import WEAKLY_ORDERED, new_fence
from actorserve.shm.segment import Segment

Array = npt.NDArray[Any]

MOST_RANKS = 64
SLOT_BYTES = 256 << 10
"""What one rank gives in one step."""

_MAGIC = int.from_bytes(b"ascoll\x00\x01", "big")
_SIZE, _SLOT_BYTES = 1, 2
_ARRIVED = 0x080 >> 3
_STRIDE = 0x80 >> 3
_HEADER_BYTES = 0x80
_MOST_DIMS = 12
_HEADER = struct.Struct(f"=2Q8s{_MOST_DIMS + 1}Q")  # what, bytes in all, dtype, dims, shape
_PAGE_BYTES = 4096
_LARGEST_SLOT_BYTES = 1 << 28
_NOTHING: Array = np.empty(0, np.uint8)
_MOST_KNOWN = 1000
_LOOKS = 100
"""About 0.1 ms, where nobody else needs the core: longer than ranks are usually apart."""

_REDUCE, _GATHER, _BROADCAST, _BARRIER = 1, 2, 3, 4
_NAMES = {1: "all_reduce", 2: "all_gather", 3: "broadcast", 4: "barrier"}


class CollectiveStats(msgspec.Struct, frozen=True):
    """What one rank has done: steps, and how often it had to sleep in one."""

    steps: int
    sleeps: int


class CollectiveSpace:
    """The layout of one segment."""

    __slots__ = ("segment", "size", "slot_bytes", "words")

    def __init__(self, segment: Segment, size: int, slot_bytes: int) -> None:
        """Lay the words and slots over a segment; use `create` or `attach`, which check it."""
        self.segment = segment
        self.size = size
        self.slot_bytes = slot_bytes
        self.words = segment.buffer.cast("Q")

    @classmethod
    def create(cls, size: int, slot_bytes: int = SLOT_BYTES) -> CollectiveSpace:
        """Make it in a new segment; ValueError for sizes that cannot be, ResourceExhausted."""
        if not _are_sizes_right(size, slot_bytes):
            raise ValueError(
                f"collectives cannot have {size} ranks and slots of {slot_bytes} bytes: expected "
                f"1 to {MOST_RANKS}, and a multiple of 64 up to {_LARGEST_SLOT_BYTES}"
            )
        space = cls(Segment.create(_space_bytes(size, slot_bytes)), size, slot_bytes)
        space.words[_SIZE] = size
        space.words[_SLOT_BYTES] = slot_bytes
        space.words[0] = _MAGIC
        return space

    @classmethod
    def attach(cls, segment: Segment) -> CollectiveSpace:
        """Lay it over a segment that a peer made; the segment stays the caller's if it fails.

        ProtocolError if it holds nothing of this version or lies about its sizes.
        """
        if segment.nbytes < _ARRIVED * 8 or segment.nbytes % 8:
            raise ProtocolError(f"a segment of {segment.nbytes} bytes cannot hold collectives")
        words = segment.buffer.cast("Q")
        magic, size, slot_bytes = words[0], words[_SIZE], words[_SLOT_BYTES]
        if magic != _MAGIC:
            raise ProtocolError(
                f"no collectives of this version: the first word is {magic:#018x}, "
                f"expected {_MAGIC:#018x}"
            )
        if (
            not _are_sizes_right(size, slot_bytes)
            or _space_bytes(size, slot_bytes) > segment.nbytes
        ):
            raise ProtocolError(
                f"collectives of {size} ranks with slots of {slot_bytes} bytes cannot lie in a "
                f"segment of {segment.nbytes} bytes"
            )
        return cls(segment, size, slot_bytes)

    def slot_offset(self, rank: int, parity: int) -> int:
        """Return the byte at which a slot's header begins; its data follows."""
        return _first_slot(self.size) + (2 * rank + parity) * (_HEADER_BYTES + self.slot_bytes)

    def close(self) -> None:
        """Let the segment go; idempotent. Arrays that lie in it keep the memory."""
        self.words.release()
        self.segment.close()


class Collective:
    """One rank's end; one thread at a time. See actors' World for what the calls mean.

    `wait(is_there)` sleeps until the condition holds, or raises; `wake()` wakes the other ranks.
    Whatever is raised in the middle of a call ends this end's use.
    """

    def __init__(
        self,
        space: CollectiveSpace,
        rank: int,
        *,
        wait: Callable[[Callable[[], bool]], None],
        wake: Callable[[], None],
    ) -> None:
        if not 0 <= rank < space.size:
            raise ValueError(f"rank {rank} of {space.size}")
        self.rank = rank
        self.size = space.size
        self._words = space.words
        self._slot_bytes = space.slot_bytes
        self._wait = wait
        self._wake = wake
        self._step = 0
        self._sleeps = 0
        self._places = [_ARRIVED + peer * _STRIDE for peer in range(space.size)]
        memory = np.frombuffer(space.segment.buffer, np.uint8)
        self._headers: list[list[memoryview]] = []
        self._slots: list[list[Array]] = []
        for peer in range(space.size):
            ats = [space.slot_offset(peer, parity) for parity in (0, 1)]
            self._headers.append([space.segment.buffer[at : at + _HEADER_BYTES] for at in ats])
            begins = [at + _HEADER_BYTES for at in ats]
            self._slots.append([memory[begin : begin + space.slot_bytes] for begin in begins])
        self._known: dict[tuple[int, np.dtype[Any], tuple[int, ...]], bytes] = {}
        self._release, self._acquire = new_fence()

    # --- the four calls ---------------------------------------------------------------------------

    def all_reduce(self, array: Array) -> Array:
        """Return the sum over all ranks, the same bits on each."""
        array, header = self._checked(_REDUCE, array)
        if array.nbytes <= self._slot_bytes:
            total = np.empty_like(array)
            self._sum(header, array, total)
            return total
        total = np.empty(array.size, array.dtype)
        flat = array.reshape(-1)
        at_once = self._slot_bytes // array.itemsize
        for start in range(0, array.size, at_once):
            end = start + at_once
            self._sum(header, flat[start:end], total[start:end])
        return total.reshape(array.shape)

    def _sum(self, header: bytes, piece: Array, total: Array) -> None:
        self._give(header, piece)
        self._await(self._places)
        self._check_all(header)
        if not piece.size:
            return
        parity = self._step & 1
        np.copyto(total, _as(self._slots[0][parity], piece))
        for slots in self._slots[1:]:
            total += _as(slots[parity], piece)

    def all_gather(self, array: Array) -> list[Array]:
        """Return every rank's array; shapes and dtypes may differ."""
        array, header = self._checked(_GATHER, array)
        flat = array.reshape(-1).view(np.uint8)
        bodies: list[Array] = []
        infos: list[tuple[int, np.dtype[Any], tuple[int, ...]]] = []
        start = 0
        while not infos or start < max(nbytes for nbytes, _, _ in infos):
            self._give(header, flat[start : start + self._slot_bytes])
            self._await(self._places)
            parity = self._step & 1
            if not infos:
                infos = [self._info(_GATHER, peer, parity) for peer in range(self.size)]
                bodies = [np.empty(nbytes, np.uint8) for nbytes, _, _ in infos]
            for body, slots in zip(bodies, self._slots):
                piece = body[start : start + self._slot_bytes]
                np.copyto(piece, slots[parity][: piece.size])
            start += self._slot_bytes
        return [body.view(dtype).reshape(shape) for body, (_, dtype, shape) in zip(bodies, infos)]

    def broadcast(self, array: Array, root: int = 0) -> Array:
        """Return the array of `root`; the others' says what shape and dtype are expected."""
        if not 0 <= root < self.size:
            raise InvalidArgument(f"broadcast: root is {root}, expected a rank of {self.size}")
        array, header = self._checked(_BROADCAST, array)
        flat = array.reshape(-1).view(np.uint8)
        result = flat if self.rank == root else np.empty(flat.size, np.uint8)
        for start in range(0, max(1, flat.size), self._slot_bytes):
            if self.rank == root:
                self._give(header, flat[start : start + self._slot_bytes])
                continue
            self._give(header, flat[:0])
            self._await(self._places[root : root + 1])
            parity = self._step & 1
            self._check(header, root, parity)
            piece = result[start : start + self._slot_bytes]
            np.copyto(piece, self._slots[root][parity][: piece.size])
        return result.view(array.dtype).reshape(array.shape)

    def barrier(self) -> None:
        """Return when every rank has come here."""
        array, header = self._checked(_BARRIER, _NOTHING)
        self._give(header, array)
        self._await(self._places)
        self._check_all(header)

    def _checked(self, what: int, array: Array) -> tuple[Array, bytes]:
        """Return the array, contiguous, and the header that describes it."""
        if not (isinstance(array, np.ndarray) and array.flags.c_contiguous):
            array = np.asarray(array, order="C")
        key = what, array.dtype, array.shape
        header = self._known.get(key)
        if header is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            header = self._known[key] = _header(what, array)
        return array, header

    # --- one step ---------------------------------------------------------------------------------

    def _give(self, header: bytes, piece: Array) -> None:
        """Write this rank's slot and arrive."""
        step = self._step + 1
        # Whoever has not arrived at the last step may still read what lies in this slot.
        self._await(self._places)
        self._step = step
        parity = step & 1
        self._headers[self.rank][parity][:] = header
        if piece.size:
            np.copyto(_as(self._slots[self.rank][parity], piece), piece)
        if WEAKLY_ORDERED:
            self._fence()
        self._words[self._places[self.rank]] = step
        self._wake()

    def _await(self, places: list[int]) -> None:
        """Wait until those ranks have arrived at this step, which is the last that was given."""
        for _ in range(_LOOKS):
            if self._have_arrived(places):
                break
            os.sched_yield()
        else:
            self._sleeps += 1
            self._wait(lambda: self._have_arrived(places))
        if WEAKLY_ORDERED:
            self._fence()

    def _have_arrived(self, places: list[int]) -> bool:
        words, step = self._words, self._step
        for place in places:
            ahead = words[place] - step
            if ahead < 0:
                return False
            if ahead > 1:
                peer = (place - _ARRIVED) // _STRIDE
                raise ProtocolError(f"rank {peer} is at step {words[place]} of {step}")
        return True

    def _fence(self) -> None:
        self._release()
        self._acquire(False)

    # --- do all mean the same? --------------------------------------------------------------------

    def _check_all(self, header: bytes) -> None:
        parity = self._step & 1
        for peer in range(self.size):
            if peer != self.rank:
                self._check(header, peer, parity)

    def _check(self, header: bytes, peer: int, parity: int) -> None:
        theirs = self._headers[peer][parity]
        if theirs != header:
            raise ProtocolError(
                f"the ranks do not do the same: rank {self.rank} {_in_words(header)}, "
                f"rank {peer} {_in_words(theirs.tobytes())}"
            )

    def _info(
        self, what: int, peer: int, parity: int
    ) -> tuple[int, np.dtype[Any], tuple[int, ...]]:
        """Return bytes, dtype and shape of what a rank gives; ProtocolError where it lies."""
        header = self._headers[peer][parity].tobytes()
        theirs, nbytes, code, dims, *shape = _HEADER.unpack(header)
        try:
            dtype = np.dtype(code.rstrip(b"\0").decode())
            if theirs != what or dims > _MOST_DIMS or dtype.hasobject:
                raise ValueError
            lengths = tuple(shape[:dims])
            if int(np.prod(lengths, dtype=object)) * dtype.itemsize != nbytes:
                raise ValueError
        except (ValueError, TypeError, UnicodeDecodeError):
            raise ProtocolError(
                f"the ranks do not do the same: rank {self.rank} is in {_NAMES[what]}, "
                f"rank {peer} {_in_words(header)}"
            ) from None
        return nbytes, dtype, lengths

    def stats(self) -> CollectiveStats:
        """Return what this rank has done so far."""
        return CollectiveStats(self._step, self._sleeps)


def _as(slot: Array, like: Array) -> Array:
    """Return the beginning of a slot as an array of the same dtype and shape."""
    return slot[: like.nbytes].view(like.dtype).reshape(like.shape)


def _header(what: int, array: Array) -> bytes:
    """Return what describes an array. Raises InvalidArgument for one that cannot be given."""
    shape = array.shape
    if array.dtype.kind not in "biufc" or len(shape) > _MOST_DIMS:
        raise InvalidArgument(
            f"{_NAMES[what]}: an array of dtype {array.dtype} with {len(shape)} dimensions; "
            f"expected numbers, and at most {_MOST_DIMS}"
        )
    dims = (*shape, *[0] * (_MOST_DIMS - len(shape)))
    code = array.dtype.str.encode()
    return _HEADER.pack(what, array.nbytes, code, len(shape), *dims)


def _in_words(header: bytes) -> str:
    what, nbytes, code, dims, *shape = _HEADER.unpack(header)
    name = _NAMES.get(what, f"call {what}")
    dtype = code.rstrip(b"\0").decode("ascii", "replace")
    return f"is in {name} of {dtype} {shape[: min(dims, _MOST_DIMS)]} ({nbytes} bytes)"


def _first_slot(size: int) -> int:
    return ((_ARRIVED + size * _STRIDE) * 8 + _PAGE_BYTES - 1) & -_PAGE_BYTES


def _space_bytes(size: int, slot_bytes: int) -> int:
    return _first_slot(size) + 2 * size * (_HEADER_BYTES + slot_bytes)


def _are_sizes_right(size: int, slot_bytes: int) -> bool:
    return (
        1 <= size <= MOST_RANKS and 64 <= slot_bytes <= _LARGEST_SLOT_BYTES and slot_bytes % 64 == 0
    )
