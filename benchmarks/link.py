# SPDX-License-Identifier: Apache-2.0
"""Two lanes between two processes, used as a stub uses its own: always parked, never spinning."""

from __future__ import annotations

import time

from actorserve.shm.doorbell import Doorbell, wait_for
from actorserve.shm.lane import Consumer, Lane, Producer
from benchmarks.sampling import CannotRun

WAIT_S = 20.0


class End:
    """One process's end: it sends on one lane, receives on the other and sleeps on its bell."""

    def __init__(self, out: Lane, back: Lane, own_bell: Doorbell, peer_bell: Doorbell) -> None:
        self.producer = Producer(out, peer_bell)
        self.consumer = Consumer(back, peer_bell)
        self._bell = own_bell

    def send(self, data: bytes) -> None:
        """Publish one frame, sleeping while the ring is full."""
        while not self.producer.try_send(data):
            self.wait_for_room()

    def wait_for_room(self) -> None:
        """Sleep until the ring has room or releases came."""
        if not self.producer.want_room():
            self._sleep()
        self.producer.stop_wanting()

    def receive(self) -> list[tuple[int, bytes]]:
        """Return what is there, sleeping until there is something."""
        consumer = self.consumer
        while not (frames := consumer.drain()):
            if consumer.park():
                self._sleep()
                consumer.unpark()
        return frames

    def _sleep(self) -> None:
        if not wait_for([self._bell.fileno()], [], WAIT_S):
            raise CannotRun(f"the other process said nothing for {WAIT_S:g} s")
        self._bell.clear()


class Link:
    """What both ends are made of; make it before the fork, an end after it."""

    def __init__(self) -> None:
        self._there, self._back = Lane.create(), Lane.create()
        self._near, self._far = Doorbell.create(), Doorbell.create()

    def near(self) -> End:
        """Return the parent's end."""
        return End(self._there, self._back, self._near, self._far)

    def far(self) -> End:
        """Return the partner's end."""
        return End(self._back, self._there, self._far, self._near)

    def close(self) -> None:
        """Unmap and close everything; the partner is gone."""
        for part in (self._there, self._back, self._near, self._far):
            part.close()


def echo(link: Link) -> None:
    """Send every frame back: the partner of a round trip."""
    end = link.far()
    while True:
        for _, data in end.receive():
            end.send(data)


def round_trips_us(end: End, payload: bytes, seconds: float) -> list[float]:
    """Return the time of each round trip, one after the other."""
    trips_us: list[float] = []
    end_ns = time.monotonic_ns() + int(seconds * 1e9)
    while (start_ns := time.monotonic_ns()) < end_ns:
        end.send(payload)
        end.receive()
        trips_us.append((time.monotonic_ns() - start_ns) / 1000)
    return trips_us
