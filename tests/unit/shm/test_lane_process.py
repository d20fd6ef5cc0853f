# SPDX-License-Identifier: Apache-2.0
"""Tests of a lane between two processes: checksums, sleep on both sides, kills at any moment."""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Callable

import pytest

from actorserve.shm import consumer as consumer_module
from actorserve.shm import producer as producer_module
from actorserve.shm.doorbell import Doorbell, wait_for
from actorserve.shm.lane import Consumer, Lane, Producer

PATIENCE_S = 20.0  # for one wake-up that should take a tenth of a millisecond


class Wire:
    """One lane and the bells of its ends; each process makes the end that it uses."""

    def __init__(self, ring_bytes: int = 1 << 16) -> None:
        self.lane = Lane.create(ring_bytes, 64)
        self.consumer_bell = Doorbell.create()
        self.producer_bell = Doorbell.create()

    def producer(self) -> Producer:
        return Producer(self.lane, self.consumer_bell)

    def consumer(self) -> Consumer:
        return Consumer(self.lane, self.producer_bell)

    def send(self, producer: Producer, data: bytes, kind: int = 0) -> None:
        """Send, sleeping while the ring is full."""
        while not producer.try_send(data, kind):
            if not producer.want_room():
                _sleep(self.producer_bell)
            producer.stop_wanting()

    def receive(self, consumer: Consumer) -> list[tuple[int, bytes]]:
        """Return at least one frame, sleeping until there is one."""
        while True:
            frames = consumer.drain()
            if frames:
                return frames
            if consumer.park():
                _sleep(self.consumer_bell)
            consumer.unpark()

    def close(self) -> None:
        self.lane.close()
        self.consumer_bell.close()
        self.producer_bell.close()


def _sleep(bell: Doorbell) -> None:
    assert wait_for([bell.fileno()], [], PATIENCE_S), "lost wake-up"
    bell.clear()


def _frame(rng: random.Random, number: int, largest: int) -> bytes:
    body = number.to_bytes(8, "little") + rng.randbytes(rng.randrange(largest))
    return zlib.crc32(body).to_bytes(4, "little") + body


def _number_of(data: bytes) -> int:
    assert int.from_bytes(data[:4], "little") == zlib.crc32(data[4:])
    return int.from_bytes(data[4:12], "little")


@pytest.fixture(params=[False, True], ids=["x86", "weakly-ordered"])
def wire(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Return a maker of wires, with the fences of either kind of machine."""
    monkeypatch.setattr(producer_module, "WEAKLY_ORDERED", request.param)
    monkeypatch.setattr(consumer_module, "WEAKLY_ORDERED", request.param)
    made = []

    def make(ring_bytes: int = 1 << 16) -> Wire:
        made.append(Wire(ring_bytes))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize(
    ("ring_bytes", "largest", "count"), [(4096, 1900, 10_000), (1 << 20, 300, 40_000)]
)
def test_every_frame_arrives_once_whole_and_in_order(
    wire: Callable[..., Wire], fork, ring_bytes: int, largest: int, count: int
) -> None:
    """Random sizes with checksums, through a ring always full and through one never full."""
    one = wire(ring_bytes)

    def sender() -> None:
        producer, rng = one.producer(), random.Random(1)
        for number in range(count):
            one.send(producer, _frame(rng, number, largest), number & 0x7FFF)

    child = fork(sender)
    consumer = one.consumer()
    expected = 0
    while expected < count:
        for kind, data in one.receive(consumer):
            assert (_number_of(data), kind) == (expected, expected & 0x7FFF)
            expected += 1
    assert child.wait() == 0
    assert consumer.drain() == []


def test_corked_sender_and_slow_reader(wire: Callable[..., Wire], fork) -> None:
    """Batches published by one flush each, read a few frames at a time, lose nothing."""
    one = wire(4096)
    count = 20_000

    def sender() -> None:
        producer, rng = one.producer(), random.Random(2)
        for number in range(count):
            data = _frame(rng, number, 100)
            while not producer.try_put(data):
                if not producer.want_room():
                    _sleep(one.producer_bell)
                producer.stop_wanting()
            if rng.random() < 0.1:
                producer.flush()
        producer.flush()

    child = fork(sender)
    consumer, rng = one.consumer(), random.Random(3)
    expected = 0
    while expected < count:
        frames = consumer.drain(rng.randrange(1, 20))
        if not frames:
            if consumer.park():
                _sleep(one.consumer_bell)
            consumer.unpark()
        for _, data in frames:
            assert _number_of(data) == expected
            expected += 1
    assert child.wait() == 0


def test_no_wake_up_is_lost_in_a_ping_pong(wire: Callable[..., Wire], fork) -> None:
    """Both ends park before every message, so that each round may lose two wake-ups."""
    there, back = wire(4096), wire(4096)
    rounds = 3_000

    def echo() -> None:
        consumer, producer = there.consumer(), back.producer()
        for _ in range(rounds):
            for kind, data in there.receive(consumer):
                back.send(producer, data, kind)

    child = fork(echo)
    producer, consumer = there.producer(), back.consumer()
    for number in range(rounds):
        there.send(producer, number.to_bytes(8, "little"))
        assert back.receive(consumer) == [(0, number.to_bytes(8, "little"))]
    assert child.wait() == 0


def test_no_wake_up_is_lost_when_parking_races_with_sending(
    wire: Callable[..., Wire], fork
) -> None:
    """One frame at a time after pauses of random length, so that sends hit every step of a park."""
    one = wire(4096)
    count = 30_000

    def sender() -> None:
        producer, rng = one.producer(), random.Random(4)
        for _ in range(count):
            for _ in range(rng.randrange(60)):
                pass
            one.send(producer, b"x")

    child = fork(sender)
    consumer = one.consumer()
    received = 0
    while received < count:
        received += len(one.receive(consumer))
    assert child.wait() == 0
    assert consumer.stats().received_frames == count


def test_killed_producer_leaves_whole_frames_only(wire: Callable[..., Wire], fork) -> None:
    """Rows 7 and 8: whenever a writer is killed, its reader has a prefix of whole frames."""
    rng = random.Random(5)
    started_reader, started_writer = os.pipe()
    for number_of_kill in range(20):
        one = Wire(1 << 14)

        def sender(one: Wire = one, seed: int = number_of_kill) -> None:
            producer, rng = one.producer(), random.Random(seed)
            # Made before, so that a kill hits the copying more often than the making.
            frames = [_frame(rng, number, 8000) for number in range(64)]
            os.write(started_writer, b"x")
            while True:
                for data in frames:
                    one.send(producer, data)

        child = fork(sender)
        os.read(started_reader, 1)
        consumer = one.consumer()
        received: list[bytes] = []
        until = rng.randrange(200)
        while len(received) < until:
            received += [data for _, data in one.receive(consumer)]
        for _ in range(rng.randrange(3000)):
            pass
        child.kill()
        received += [data for _, data in consumer.drain()]
        assert [_number_of(data) for data in received] == [i % 64 for i in range(len(received))]
        assert consumer.drain() == []
        one.close()
    os.close(started_reader)
    os.close(started_writer)


def test_killed_consumer_leaves_a_full_ring_and_no_lock(wire: Callable[..., Wire], fork) -> None:
    """A reader that dies stops its writer with False, not with a wait."""
    one = wire(4096)

    def reader() -> None:
        consumer = one.consumer()
        while True:
            one.receive(consumer)

    child = fork(reader)
    producer = one.producer()
    for _ in range(1000):
        one.send(producer, b"x" * 100)
    child.kill()
    sent = 0
    while producer.try_send(b"x" * 100):
        sent += 1
    assert sent <= 4096 // 112
    assert not producer.try_send(b"x" * 100)
