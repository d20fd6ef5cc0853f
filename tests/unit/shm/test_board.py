# SPDX-License-Identifier: Apache-2.0
"""The board and the parking of a group's ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from actorserve.errors import ProtocolError
from actorserve.shm.board import _MAGIC, PAGE_BYTES, Board, Status
from actorserve.shm.doorbell import Doorbell
from actorserve.shm.segment import Segment
from tests.unit.shm.conftest import Child
from tests.unit.shm.ranks import Ranks

Fork = Callable[[Callable[[], object]], Child]


@pytest.fixture
def board() -> Iterator[Board]:
    """Return a board of three ranks."""
    board = Board.create(3, 7)
    yield board
    board.close()


def _is_rung(bell: Doorbell) -> bool:
    try:
        return bool(os.read(bell.fileno(), 8))
    except BlockingIOError:
        return False


def test_notes_are_each_rank_s_own(board: Board):
    """What a rank notes is read with the time of its writing, and touches no other's."""
    board.note(1, 12, Status.BUSY)
    notes = board.stats().ranks
    assert (notes[1].step, notes[1].status) == (12, Status.BUSY)
    assert notes[1].since_s > 0
    assert [note.status for note in (notes[0], notes[2])] == [Status.LOADING] * 2
    assert board.stats().epoch == 7


def test_dead_is_seen_through_another_mapping(board: Board):
    """The parent's word reaches whoever attached the same segment."""
    other = Board.attach(Segment.attach(os.dup(board.segment.fd)))
    assert not other.is_dead
    board.mark_dead()
    assert other.is_dead
    assert other.stats().is_dead
    other.close()


def test_the_page_holds_the_latest(board: Board):
    """A reader gets the last page as a whole, nothing before the first, and none too long."""
    assert board.read_page() is None
    for text in (b"one", b"two" * 100, b""):
        assert board.write_page(text)
        assert board.read_page() == text
    assert not board.write_page(b"x" * (PAGE_BYTES + 1))
    assert board.read_page() == b""


def test_the_page_is_never_torn(board: Board, fork: Fork):
    """While another process writes pages of one letter each, no page of two is read."""
    ready_r, ready_w = os.pipe()

    def write() -> None:
        for number in range(4000):
            assert board.write_page(bytes([97 + number % 26]) * (PAGE_BYTES - number % 100))
            if number == 10:
                os.write(ready_w, b"x")

    child = fork(write)
    assert os.read(ready_r, 1) == b"x"
    seen = set()
    for _ in range(2000):
        page = board.read_page()
        if page is not None:
            assert len(set(page)) == 1
            seen.add(page[0])
    assert seen
    assert child.wait() == 0
    os.close(ready_r)
    os.close(ready_w)


def test_attach_checks_everything(board: Board):
    """A segment that holds no board, or lies about its size, is refused."""
    segment = Segment.create(16384)
    with pytest.raises(ProtocolError, match="first word"):
        Board.attach(segment)
    words = segment.buffer.cast("Q")
    words[0], words[1], words[3] = _MAGIC, 31, PAGE_BYTES
    with pytest.raises(ProtocolError, match="31 ranks"):
        Board.attach(segment)
    words.release()
    segment.close()
    board._words[(0x100 >> 3) + 1] = 99
    with pytest.raises(ProtocolError, match="status 99"):
        board.stats()
    with pytest.raises(ValueError, match="1 to 30"):
        Board.create(31, 0)


def test_only_sleepers_are_rung_and_once_a_nap(board: Board):
    """A waker rings whoever has parked, not twice for one nap, and nobody who is awake."""
    bells = [Doorbell.create() for _ in range(3)]
    sleeper, waker = board.parking(bells), board.parking(bells)
    waker.wake_others(0)
    assert not any(map(_is_rung, bells))
    sleeper.park(1)
    waker.wake_others(0)
    assert [_is_rung(bell) for bell in bells] == [False, True, False]
    waker.wake(1)
    assert not _is_rung(bells[1])
    sleeper.unpark(1)
    sleeper.park(1)
    waker.wake(1)
    assert _is_rung(bells[1])
    for bell in bells:
        bell.close()


def test_no_wake_up_is_lost(fork: Fork):
    """Two processes that pass a step to and fro, always sleeping, never wait in vain."""
    ranks = Ranks(2)
    turns = 3000

    def play(rank: int) -> None:
        own = ranks.rank(rank)
        for turn in range(turns):
            if turn % 2 == rank:
                ranks.board.note(rank, turn + 1, Status.BUSY)
                own.parking.wake(1 - rank)
            else:
                own.wait(lambda turn=turn: ranks.board.read_note(1 - rank).step > turn)

    children = [fork(lambda rank=rank: play(rank)) for rank in (0, 1)]
    assert [child.wait() for child in children] == [0, 0]
    ranks.close()
