# SPDX-License-Identifier: Apache-2.0
"""Fuzz of a lane: whatever the segment holds, an end returns frames or raises ProtocolError.

Rows 79 to 81 of the fault matrix. Seeds are fixed; a failure names the seed of its round.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator

import pytest

from actorserve.errors import ProtocolError
from actorserve.shm import layout
from actorserve.shm.doorbell import Doorbell
from actorserve.shm.lane import Consumer, Lane, Producer

RING_BYTES = 4096
SLOTS = 8
LIMIT_S = 30.0  # for a test that takes a second; this tells a loop without end
CONTROL_WORDS = [
    layout.HEAD,
    layout.TAIL,
    layout.CONSUMER_PARKED,
    layout.PRODUCER_WANTS,
    layout.RELEASE_HEAD,
    layout.RELEASE_TAIL,
    layout.CONSUMER_WANTS,
]
NASTY = [0, 1, 7, 8, 16, SLOTS, SLOTS + 1, RING_BYTES - 8, RING_BYTES, RING_BYTES + 8]
NASTY += [1 << 31, (1 << 32) - 1, 1 << 32, 1 << 62, 1 << 63, (1 << 64) - 8, (1 << 64) - 1]
HEADERS = [layout.PAD << 32, layout.PAD << 32 | 8, layout.PAD << 32 | RING_BYTES]
HEADERS += [layout.PAD << 32 | 0xFFFFFFFF, 0xFFFFFFFF, RING_BYTES, RING_BYTES // 2, 1 << 48]


class Rig:
    """A lane whose memory the test corrupts, with calls on either end to choose from."""

    def __init__(self) -> None:
        self.lane = Lane.create(RING_BYTES, SLOTS)
        self.bells = Doorbell.create(), Doorbell.create()
        self.producer = Producer(self.lane, self.bells[0])
        self.consumer = Consumer(self.lane, self.bells[1])
        self.ring_words = range(self.lane.ring_offset // 8, self.lane.segment.nbytes // 8)

    def close(self) -> None:
        self.lane.close()
        for bell in self.bells:
            bell.close()

    def call_something(self, rng: random.Random) -> None:
        """Make one random call; it may raise ProtocolError and nothing else."""
        calls: list[Callable[[], object]] = [
            lambda: self.producer.try_send(b"s" * rng.randrange(2000), rng.randrange(9)),
            lambda: self.producer.try_put(b"p" * rng.randrange(2000), rng.randrange(9)),
            self.producer.flush,
            self.producer.want_room,
            self.producer.stop_wanting,
            self.producer.release_mark,
            lambda: self._check_releases(self.producer.take_releases()),
            lambda: self._check_frames(self.consumer.drain()),
            lambda: self._check_frames(self.consumer.drain(rng.randrange(1, 4))),
            self.consumer.park,
            self.consumer.unpark,
            lambda: self.consumer.try_release(1, 2),
            self.consumer.flush_releases,
        ]
        try:
            rng.choice(calls)()
        except ProtocolError as error:
            assert "lane" in str(error) or "frame" in str(error) or "release" in str(error)

    def _check_frames(self, frames: list[tuple[int, bytes]]) -> None:
        assert all(0 <= kind < layout.PAD for kind, _ in frames)
        assert sum(len(data) + layout.HEADER_BYTES for _, data in frames) <= RING_BYTES

    def _check_releases(self, releases: list[tuple[int, int]]) -> None:
        assert len(releases) <= SLOTS


@pytest.fixture(autouse=True)
def _no_endless_loop() -> Iterator[None]:
    def stop(signo: int, frame: object) -> None:
        raise AssertionError(f"still running after {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, stop)
    left_s, _ = signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    yield
    signal.setitimer(signal.ITIMER_REAL, left_s)  # that of every test
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def rig():
    """Make a lane and both of its ends."""
    rig = Rig()
    yield rig
    rig.close()


def _fuzz(seed: int, corrupt: Callable[[Rig, random.Random], None]) -> None:
    """Run one lane through calls and corruptions; the seed is in every failure's locals."""
    rng = random.Random(seed)
    rig = Rig()
    try:
        for _ in range(rng.randrange(20)):
            rig.call_something(rng)
        for _ in range(12):
            corrupt(rig, rng)
            for _ in range(rng.randrange(1, 6)):
                rig.call_something(rng)
    finally:
        rig.close()


def _any_word(rng: random.Random) -> int:
    return rng.choice([rng.choice(NASTY), rng.choice(HEADERS), rng.getrandbits(64)])


@pytest.mark.parametrize("word", CONTROL_WORDS)
def test_corrupted_control_word(word: int) -> None:
    """Each control word in turn, with nasty and random values, between calls on both ends."""

    def corrupt(rig: Rig, rng: random.Random) -> None:
        near = rig.lane.words[word] + rng.randrange(-16, 17)
        rig.lane.words[word] = rng.choice([_any_word(rng), near & (1 << 64) - 1])

    for seed in range(60):
        _fuzz(seed, corrupt)


def test_corrupted_headers() -> None:
    """Any word of the ring, headers among them, may say anything."""

    def corrupt(rig: Rig, rng: random.Random) -> None:
        for _ in range(rng.randrange(1, 100)):
            rig.lane.words[rng.choice(rig.ring_words)] = _any_word(rng)

    for seed in range(200):
        _fuzz(seed, corrupt)


def test_corrupted_everything() -> None:
    """Random bytes and bit flips anywhere in the segment, control words included."""

    def corrupt(rig: Rig, rng: random.Random) -> None:
        buffer = rig.lane.segment.buffer
        if rng.random() < 0.2:
            buffer[:] = rng.randbytes(len(buffer))
        for _ in range(rng.randrange(50)):
            buffer[rng.randrange(len(buffer))] ^= 1 << rng.randrange(8)

    for seed in range(200):
        _fuzz(seed, corrupt)


def test_lying_header_is_refused_every_time(rig: Rig) -> None:
    """Row 80: a header that claims more than was published is refused, and again at each try."""
    assert rig.producer.try_send(b"12345678")
    for header in (*HEADERS, 16, layout.PAD << 32 | 16, 1 << 63, (1 << 64) - 1):
        rig.lane.words[rig.ring_words[0]] = header
        for _ in range(3):
            with pytest.raises(ProtocolError, match="header"):
                rig.consumer.drain()
    rig.lane.words[rig.ring_words[0]] = 8
    assert rig.consumer.drain() == [(0, b"12345678")]


def test_good_frames_before_a_lie_are_delivered(rig: Rig) -> None:
    """The reader gets everything up to the first wrong header, then the error."""
    for number in range(3):
        assert rig.producer.try_send(b"12345678", number)
    rig.lane.words[rig.ring_words[4]] = 1 << 60
    assert rig.consumer.drain() == [(0, b"12345678"), (1, b"12345678")]
    with pytest.raises(ProtocolError, match="header"):
        rig.consumer.drain()


def test_padding_only_at_the_ring_end(rig: Rig) -> None:
    """Padding must fill the ring to its end, and a frame after it must be whole."""
    assert rig.producer.try_send(b"12345678")
    rig.lane.words[rig.ring_words[0]] = layout.PAD << 32 | RING_BYTES
    rig.lane.words[layout.HEAD] = RING_BYTES
    assert rig.consumer.drain() == []
    rig.lane.words[layout.HEAD] = 2 * RING_BYTES
    for header in (layout.PAD << 32 | RING_BYTES - 8, layout.PAD << 32 | 8, RING_BYTES - 7):
        rig.lane.words[rig.ring_words[0]] = header
        with pytest.raises(ProtocolError, match="header"):
            rig.consumer.drain()


def test_frame_beyond_the_ring_end_is_refused(rig: Rig) -> None:
    """No frame is split, so that one which passes the end is a lie, however much is published."""
    for _ in range(2):
        assert rig.producer.try_send(b"x" * 2032)
    assert len(rig.consumer.drain()) == 2
    rig.lane.words[rig.ring_words[-2]] = 9
    rig.lane.words[layout.HEAD] = RING_BYTES + 1024
    with pytest.raises(ProtocolError, match="16 left in the ring"):
        rig.consumer.drain()


def test_impossible_tail_is_refused(rig: Rig) -> None:
    """A consumer cannot have taken more than was sent, nor half a word."""
    while rig.producer.try_send(b"x" * 100):
        pass
    for value in (1, 9, 4097, 8192, 1 << 63, (1 << 64) - 8):
        rig.lane.words[layout.TAIL] = value
        with pytest.raises(ProtocolError, match="tail"):
            rig.producer.try_send(b"x" * 100)
        with pytest.raises(ProtocolError, match="tail"):
            rig.producer.want_room()


@pytest.mark.parametrize("value", [SLOTS + 1, 1 << 40, (1 << 64) - 1])
def test_impossible_release_counts_are_refused(rig: Rig, value: int) -> None:
    """More releases than slots, or more taken than released, are lies."""
    rig.lane.words[layout.RELEASE_HEAD] = value
    for call in (rig.producer.take_releases, rig.producer.release_mark):
        with pytest.raises(ProtocolError, match="release"):
            call()
    for _ in range(SLOTS):
        assert rig.consumer.try_release(1, 2)
    rig.lane.words[layout.RELEASE_TAIL] = value
    with pytest.raises(ProtocolError, match="taken releases"):
        rig.consumer.try_release(1, 2)
