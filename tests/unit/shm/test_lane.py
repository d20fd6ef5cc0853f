# SPDX-License-Identifier: Apache-2.0
"""Tests of a lane's two ends in one process: order, limits, wrap-around, bells, stats."""

from __future__ import annotations

import itertools
import os
import random

import pytest

from actorserve.errors import ProtocolError
from actorserve.shm import consumer as consumer_module
from actorserve.shm import layout
from actorserve.shm import producer as producer_module
from actorserve.shm.doorbell import Doorbell, wait_for
from actorserve.shm.lane import Consumer, Lane, Producer
from actorserve.shm.segment import Segment


class Ends:
    """A lane with both of its ends and their bells; the other side attached by descriptor."""

    def __init__(self, ring_bytes: int, release_slots: int) -> None:
        self.lane = Lane.create(ring_bytes, release_slots)
        fd = os.dup(self.lane.segment.fd)
        self.peer = Lane.attach(Segment.attach(fd, self.lane.segment.nbytes))
        self.consumer_bell = Doorbell.create()
        self.producer_bell = Doorbell.create()
        self.producer = Producer(self.lane, self.consumer_bell)
        self.consumer = Consumer(self.peer, self.producer_bell)

    def close(self) -> None:
        self.peer.close()
        self.lane.close()
        self.consumer_bell.close()
        self.producer_bell.close()


@pytest.fixture(params=[False, True], ids=["x86", "weakly-ordered"])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Return a maker of lanes, with the fences of either kind of machine."""
    monkeypatch.setattr(producer_module, "WEAKLY_ORDERED", request.param)
    monkeypatch.setattr(consumer_module, "WEAKLY_ORDERED", request.param)
    made = []

    def make_ends(ring_bytes: int = 4096, release_slots: int = 8) -> Ends:
        made.append(Ends(ring_bytes, release_slots))
        return made[-1]

    yield make_ends
    for ends in made:
        ends.close()


def _is_rung(bell: Doorbell) -> bool:
    rung = bool(wait_for([bell.fileno()], [], 0.0))
    bell.clear()
    return rung


def _advance(ends: Ends, position: int) -> None:
    """Move both ends until the next frame begins at this place of a ring of 4096 bytes."""
    while now := (position - (at := ends.producer.stats().sent_bytes)) % 4096:
        payload = b"x" * (min(now, 2048, 4096 - at % 4096) - 8)
        assert ends.producer.try_send(payload)
        assert ends.consumer.drain() == [(0, payload)]


def test_frames_arrive_whole_and_in_order(make) -> None:
    """What is sent is drained, with its kind, once."""
    ends = make()
    sent = [(0, b""), (1, b"a"), (0xFFFE, b"1234567"), (7, b"12345678"), (8, b"123456789")]
    for kind, data in sent:
        assert ends.producer.try_send(data, kind)
    assert ends.consumer.drain() == sent
    assert ends.consumer.drain() == []


def test_wrap_around_at_every_alignment(make) -> None:
    """A frame that begins anywhere in the ring, its very end included, arrives whole."""
    ends = make()
    sizes = [0, 1, 7, 8, 9, 63, 64, 1000, 2033, 2039, 2040]
    positions = range(4096 - 2048, 4096 + 8, 8)
    for nbytes, position in itertools.product(sizes, positions):
        data = random.Random(nbytes).randbytes(nbytes)
        _advance(ends, position % 4096)
        assert ends.producer.try_send(data, 3)
        if nbytes > 1000:  # with the padding before it, it may fill the ring
            assert ends.consumer.drain() == [(3, data)]
        assert ends.producer.try_send(b"next", 4)
        assert ends.consumer.drain()[-2:] == [(3, data), (4, b"next")][nbytes > 1000 :]


def test_buffers_other_than_bytes_are_sent(make) -> None:
    """Bytearrays and memoryviews of bytes go without a copy by the caller."""
    ends = make()
    for data in (bytearray(b"one"), memoryview(b"-two-")[1:4]):
        assert ends.producer.try_send(data)
    assert ends.consumer.drain() == [(0, b"one"), (0, b"two")]


def test_largest_frame_fits_at_every_place(make) -> None:
    """The limit holds wherever the head stands: half a ring, with its header."""
    ends = make()
    assert ends.producer.max_frame_bytes == 2040
    for position in range(0, 4096, 8):
        _advance(ends, position)
        assert ends.producer.try_send(b"x" * 2040)
        assert ends.consumer.drain() == [(0, b"x" * 2040)]


@pytest.mark.parametrize("method", ["try_send", "try_put"])
def test_impossible_frames_are_the_callers_mistake(make, method: str) -> None:
    """A frame over half a ring, or a kind that is none, is refused even by an empty ring."""
    ends = make()
    send = getattr(ends.producer, method)
    for nbytes in (2041, 4096, 1 << 20):
        with pytest.raises(ValueError, match=f"{nbytes} bytes is too large"):
            send(b"x" * nbytes)
    for kind in (-1, layout.PAD, 1 << 16, 1 << 40):
        with pytest.raises(ValueError, match="kind is 0 to 65534"):
            send(b"x", kind)
    assert ends.producer.try_send(b"fine")
    assert ends.consumer.drain() == [(0, b"fine")]


def test_full_ring_takes_nothing_until_drained(make) -> None:
    """The ring holds exactly its bytes; a full one says False and loses nothing."""
    ends = make()
    for start in (*range(0, 64, 8), *range(4096 - 64, 4096, 8)):
        _advance(ends, start)
        sent = []
        while ends.producer.try_send(len(sent).to_bytes(8, "little")):
            sent.append((0, len(sent).to_bytes(8, "little")))
        while ends.producer.try_send(b""):  # into gaps of 8 bytes, before and after the ring's end
            sent.append((0, b""))
        assert len(sent) in (256, 257)
        assert ends.producer.stats().queued_bytes == 4096
        assert not ends.producer.try_send(b"")
        assert ends.consumer.drain() == sent
        assert ends.producer.try_send(b"again")
        assert ends.consumer.drain() == [(0, b"again")]


def test_put_is_invisible_until_flushed(make) -> None:
    """Several puts are published by one flush, which rings once."""
    ends = make()
    assert ends.consumer.park()
    for number in range(5):
        assert ends.producer.try_put(b"x", number)
    assert ends.consumer.drain() == []
    assert not _is_rung(ends.consumer_bell)
    ends.producer.flush()
    assert _is_rung(ends.consumer_bell)
    assert [kind for kind, _ in ends.consumer.drain()] == [0, 1, 2, 3, 4]
    assert ends.producer.stats().bells == 1


def test_put_into_a_full_ring_publishes_what_was_put(make) -> None:
    """Nobody could make room otherwise."""
    ends = make()
    assert ends.consumer.park()
    count = 0
    while ends.producer.try_put(b"12345678"):
        count += 1
    assert _is_rung(ends.consumer_bell)
    assert len(ends.consumer.drain()) == count == 256


def test_send_after_put_publishes_both_in_order(make) -> None:
    """Mixing the two keeps the order."""
    ends = make()
    assert ends.producer.try_put(b"first")
    assert ends.producer.try_send(b"second")
    assert ends.consumer.drain() == [(0, b"first"), (0, b"second")]


def test_drain_stops_at_its_limit(make) -> None:
    """A limited drain takes the oldest frames, also when padding lies between them."""
    ends = make()
    for position in (0, 4096 - 16, 4096 - 8):
        _advance(ends, position)
        for number in range(5):
            assert ends.producer.try_send(b"x" * 100, number)
        taken = []
        for _ in range(5):
            frames = ends.consumer.drain(1)
            assert len(frames) == 1
            taken += frames
        assert [kind for kind, _ in taken] == [0, 1, 2, 3, 4]
        assert ends.consumer.drain(1) == []


def test_parked_consumer_is_rung_once_a_nap(make) -> None:
    """However many frames arrive during a nap, the bell rings once; awake, never."""
    ends = make()
    ends.producer.try_send(b"awake")
    assert not _is_rung(ends.consumer_bell)
    ends.consumer.drain()
    for nap in range(1, 4):
        assert ends.consumer.park()
        for _ in range(10):
            ends.producer.try_send(b"x")
        assert _is_rung(ends.consumer_bell)
        assert ends.producer.stats().bells == nap
        ends.consumer.unpark()
        assert len(ends.consumer.drain()) == 10
    ends.producer.try_send(b"awake")
    assert not _is_rung(ends.consumer_bell)


def test_park_is_refused_while_something_is_there(make) -> None:
    """Who has mail does not sleep, and the producer does not ring."""
    ends = make()
    ends.producer.try_send(b"x")
    assert not ends.consumer.park()
    ends.producer.try_send(b"y")
    assert not _is_rung(ends.consumer_bell)
    assert ends.consumer.stats().parks == 0
    assert len(ends.consumer.drain()) == 2
    assert ends.consumer.park()


def test_producer_that_wants_room_is_rung_when_it_comes(make) -> None:
    """A full ring, an announcement, a drain, a ring of the bell; none without it."""
    ends = make()
    for _ in range(3):
        while ends.producer.try_send(b"x" * 100):
            pass
        assert not ends.producer.want_room()
        assert not _is_rung(ends.producer_bell)
        ends.consumer.drain()
        assert _is_rung(ends.producer_bell)
        ends.producer.stop_wanting()
        assert ends.producer.try_send(b"x")
        ends.consumer.drain()
        assert not _is_rung(ends.producer_bell)


def test_room_that_came_meanwhile_is_said_at_once(make) -> None:
    """Between the full ring and the announcement the consumer may have drained."""
    ends = make()
    while ends.producer.try_send(b"x" * 100):
        pass
    ends.consumer.drain(5)
    assert ends.producer.want_room()
    assert not ends.producer.want_room(), "nothing new since"
    ends.consumer.drain(1)
    assert _is_rung(ends.producer_bell)


def test_wanting_again_rings_again(make) -> None:
    """Each announcement is good for one ring, and a new one for another."""
    ends = make()
    while ends.producer.try_send(b"x" * 100):
        pass
    for _ in range(3):
        while ends.producer.want_room():
            pass
        ends.consumer.drain(1)
        ends.consumer.drain(1)
        assert _is_rung(ends.producer_bell)
    assert ends.consumer.stats().bells == 3


def test_stats_count_what_happened(make) -> None:
    """Both ends say what they did."""
    ends = make()
    ends.producer.try_send(b"x" * 9)
    assert ends.producer.stats() == producer_module.ProducerStats(
        sent_bytes=24, queued_bytes=24, ring_bytes=4096, full=0, bells=0, releases=0
    )
    ends.consumer.drain()
    ends.consumer.try_release(1, 2)
    assert ends.consumer.stats() == consumer_module.ConsumerStats(
        received_frames=1, received_bytes=24, parks=0, bells=0, releases=1, releases_full=0
    )


def test_closed_lane_raises_and_never_crashes(make) -> None:
    """An end that outlives its lane gets a ValueError, and stats still answer."""
    ends = make()
    ends.lane.close()
    ends.lane.close()
    with pytest.raises(ValueError, match="released"):
        ends.producer.try_send(b"x")
    assert ends.producer.stats().bells == 0


@pytest.mark.parametrize(
    ("ring_bytes", "release_slots"),
    [(0, 8), (2048, 8), (5000, 8), (1 << 31, 8), (-4096, 8), (4096, 0), (4096, 3), (4096, 1 << 21)],
)
def test_sizes_that_cannot_be_are_refused(ring_bytes: int, release_slots: int) -> None:
    """Sizes are powers of two within limits."""
    with pytest.raises(ValueError, match="powers of two"):
        Lane.create(ring_bytes, release_slots)


def test_attach_refuses_lies() -> None:
    """Row 81: a wrong magic, version or size is refused before anything else is read."""
    lane = Lane.create(4096, 8)
    segment = Segment.attach(os.dup(lane.segment.fd))
    lies = {
        layout.MAGIC_WORD: [0, layout.MAGIC + 1],
        layout.RING_BYTES_WORD: [0, 4095, 8192, 1 << 63],
        layout.RELEASE_SLOTS_WORD: [0, 9, 4096, 1 << 60],
    }
    for word, values in lies.items():
        truth = lane.words[word]
        for value in values:
            lane.words[word] = value
            with pytest.raises(ProtocolError, match="lane"):
                Lane.attach(segment)
        lane.words[word] = truth
    Lane.attach(segment).close()
    lane.close()


@pytest.mark.parametrize("nbytes", [8, 1023, 1024, 4096 + 7])
def test_attach_refuses_a_segment_that_is_too_small(nbytes: int) -> None:
    """A short or crooked file holds no lane."""
    fd = os.memfd_create("small")
    os.ftruncate(fd, nbytes)
    segment = Segment.attach(fd)
    with pytest.raises(ProtocolError, match="lane"):
        Lane.attach(segment)
    segment.close()
