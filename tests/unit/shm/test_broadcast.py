# SPDX-License-Identifier: Apache-2.0
"""The broadcast ring: one writer, several readers, one order."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator

import pytest

from actorserve.errors import ProtocolError
from actorserve.shm.broadcast import (
    _HEAD,
    _MAGIC,
    _TAILS,
    BroadcastReader,
    BroadcastRing,
    BroadcastWriter,
)
from actorserve.shm.layout import PAD
from actorserve.shm.segment import Segment
from tests.unit.shm.conftest import Child
from tests.unit.shm.ranks import Ranks

Fork = Callable[[Callable[[], object]], Child]


@pytest.fixture
def ring() -> Iterator[BroadcastRing]:
    """Return a small ring with two readers."""
    ring = BroadcastRing.create(2, 4096)
    yield ring
    ring.close()


def test_every_reader_gets_every_frame_in_order(ring: BroadcastRing):
    """Two readers that read at different times see the same."""
    writer = BroadcastWriter(ring)
    readers = [BroadcastReader(ring, 0), BroadcastReader(ring, 1)]
    for number in range(5):
        assert writer.try_put(b"x" * number, number)
    assert not readers[0].has_news()  # nothing is published yet
    writer.flush()
    sent = [(number, b"x" * number) for number in range(5)]
    assert readers[0].drain() == sent
    assert readers[0].drain() == []
    assert readers[1].drain() == sent


def test_room_is_that_of_the_slowest_reader(ring: BroadcastRing):
    """A frame that one reader has not taken is not overwritten; its reading makes room."""
    writer = BroadcastWriter(ring)
    quick, slow = BroadcastReader(ring, 0), BroadcastReader(ring, 1)
    sent = 0
    while writer.try_put(bytes([sent]) * 500):
        writer.flush()
        quick.drain()
        sent += 1
    assert not writer.try_put(b"y" * 500)
    assert [data[0] for _, data in slow.drain()] == list(range(sent))
    assert writer.try_put(b"y" * 500)
    assert writer.stats().full == 2


def test_frames_wrap_around_the_end(ring: BroadcastRing):
    """Frames of odd lengths go round many times; the gap at the end is filled and skipped."""
    writer, random_ = BroadcastWriter(ring), random.Random(5)
    readers = [BroadcastReader(ring, 0), BroadcastReader(ring, 1)]
    for _ in range(300):
        data = random_.randbytes(random_.randrange(0, 2040))
        assert writer.try_put(data, 7)
        writer.flush()
        assert [reader.drain() for reader in readers] == [[(7, data)]] * 2
    assert readers[0].stats().bytes == writer.stats().bytes > 10 * 4096


def test_a_reader_says_that_the_writer_waits(ring: BroadcastRing):
    """The word that asks for a wake-up is seen after the room was given back."""
    writer = BroadcastWriter(ring)
    reader = BroadcastReader(ring, 0)
    assert not reader.wants_room()
    writer.want_room(True)
    assert reader.wants_room()
    writer.want_room(False)
    assert not reader.wants_room()


def test_what_cannot_be_sent_is_refused(ring: BroadcastRing):
    """Too long, and kinds that mean something else."""
    writer = BroadcastWriter(ring)
    with pytest.raises(ValueError, match="at most 2040"):
        writer.try_put(b"x" * 2041)
    with pytest.raises(ValueError, match="kind"):
        writer.try_put(b"", PAD)


def test_a_ring_without_readers_takes_everything():
    """A group of one rank broadcasts to nobody."""
    ring = BroadcastRing.create(0, 4096)
    writer = BroadcastWriter(ring)
    for _ in range(50):
        assert writer.try_put(b"x" * 1000)
        writer.flush()
    ring.close()


def test_a_lying_head_or_header_is_refused(ring: BroadcastRing):
    """Whatever stands in the segment, a reader neither reads outside nor loops for ever."""
    reader = BroadcastReader(ring, 0)
    for head in (3, 8192, 1 << 63):
        ring.words[_HEAD] = head
        with pytest.raises(ProtocolError, match="head"):
            reader.drain()
    ring.words[_HEAD] = 64
    for header in (64, PAD << 32, PAD << 32 | 16, (1 << 63) - 1, (PAD + 1) << 32 | 4):
        ring.words[ring.ring_offset >> 3] = header
        with pytest.raises(ProtocolError, match="header"):
            reader.drain()


def test_a_lying_reader_is_refused(ring: BroadcastRing):
    """A reader cannot say that it has read what was never written."""
    writer = BroadcastWriter(ring)
    ring.words[_TAILS] = 1 << 20
    with pytest.raises(ProtocolError, match="reader 0"):
        while writer.try_put(b"x" * 2000):
            writer.flush()


def test_attach_checks_everything(ring: BroadcastRing):
    """A segment that holds no ring of this version, or lies about its size, is refused."""
    again = BroadcastRing.attach(ring.segment)
    assert (again.ring_bytes, again.readers) == (4096, 2)
    again.words.release()
    segment = Segment.create(8192)
    with pytest.raises(ProtocolError, match="first word"):
        BroadcastRing.attach(segment)
    words = segment.buffer.cast("Q")
    words[0] = _MAGIC
    for ring_bytes, readers in ((4096, 65), (4097, 1), (1 << 20, 1)):
        words[1], words[2] = ring_bytes, readers
        with pytest.raises(ProtocolError, match="cannot lie"):
            BroadcastRing.attach(segment)
    words.release()
    segment.close()
    with pytest.raises(ValueError, match="power of two"):
        BroadcastRing.create(2, 5000)


@pytest.mark.parametrize("readers", [1, 3])
def test_processes_see_one_order_through_a_ring_that_is_often_full(
    fork: Fork, readers: int, tmp_path
):
    """Thousands of frames through 4 KiB, with sleeping on both sides, arrive whole on each."""
    count = 3000
    ranks = Ranks(readers + 1, ring_bytes=4096)

    def frames() -> Iterator[bytes]:
        random_ = random.Random(readers)
        for _ in range(count):
            yield random_.randbytes(random_.randrange(0, 900))

    def read(rank: int) -> None:
        own = ranks.rank(rank)
        reader = BroadcastReader(ranks.ring, rank - 1)
        digest = hashlib.sha256()
        taken = 0
        while taken < count:
            own.wait(reader.has_news)
            for _, data in reader.drain():
                digest.update(data)
                taken += 1
            if reader.wants_room():
                own.parking.wake(0)
        (tmp_path / str(rank)).write_text(digest.hexdigest())

    children = [fork(lambda rank=rank: read(rank)) for rank in range(1, readers + 1)]
    own = ranks.rank(0)
    writer = BroadcastWriter(ranks.ring)
    digest = hashlib.sha256()
    for data in frames():
        digest.update(data)
        if not writer.try_put(data):
            writer.flush()
            own.parking.wake_others(0)
            writer.want_room(True)
            own.wait(lambda data=data: writer.try_put(data))
            writer.want_room(False)
        writer.flush()
        own.parking.wake_others(0)
    assert [child.wait() for child in children] == [0] * readers
    assert {path.read_text() for path in tmp_path.iterdir()} == {digest.hexdigest()}
    assert writer.stats().full > 0
    ranks.close()
