# SPDX-License-Identifier: Apache-2.0
"""A stub's end and the supervisor's in one process: who reads, who waits, and when releases go."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from actorserve.process.boot import BootSocket
from actorserve.runtime.exchange import Exchange
from actorserve.runtime.host_end import HostEnd
from actorserve.runtime.stub_end import StubEnd
from actorserve.wire.messages import (
    CallResponded,
    Execute,
    Executed,
    Handle,
    LogRecord,
    WireRequest,
    WireResponse,
    WireTensor,
)
from tests.conftest import wait_until

NBYTES = 10_000


class Ear:
    """The supervisor's listener."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.broken: list[Any] = []
        self.receive: Callable[[Handle], memoryview]
        self.views: list[memoryview] = []

    def on_attached(self, message: Any) -> None:
        pass

    def on_messages(self, messages: list[Any]) -> None:
        self.messages += messages
        for message in messages:
            if isinstance(message, Executed):
                outputs = message.responses[0].outputs
                self.views += [self.receive(each.data) for each in outputs]  # type: ignore[arg-type]

    def on_refused(self, error: Any) -> None:
        raise AssertionError(error)

    def on_hung_up(self) -> None:
        pass

    def on_broken(self, error: Any) -> None:
        self.broken.append(error)


class Pair:
    """Both ends."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.exchange = Exchange(1, first_segment_bytes=1 << 20)
        self.ear = Ear()
        self.host = HostEnd(self.loop, self.exchange, 2, self.ear)
        self.ear.receive = lambda handle: self.exchange.receive(self.host, handle)
        boot, theirs = BootSocket.pair("stub_0")
        boot.admit()
        self.host.open(boot, "stub_0")
        theirs.recv(64)  # the word to start, which a child's start-up takes
        self.boot = BootSocket(theirs)
        self.stub = StubEnd(self.boot)

    def lend(self, fill: int) -> WireTensor:
        """Return an input in the supervisor's memory; the hold is the caller's."""
        slab = self.exchange.allocate_now(NBYTES)
        slab.buffer[:] = bytes([fill]) * NBYTES
        return WireTensor("IN", 2, (NBYTES,), slab.take())

    def execute(self, number: int, *tensors: WireTensor) -> None:
        """Send a batch."""
        requests = [WireRequest(n, "", [each], ["OUT"]) for n, each in enumerate(tensors)]
        self.host.send(Execute(number, requests), tensors)
        for each in tensors:
            if isinstance(each.data, Handle):
                self.exchange.drop(each.data)

    def close(self) -> None:
        """End both, as the end of their processes does."""
        self.ear.views.clear()
        self.host.close()
        self.boot.close()
        self.exchange.close()
        self.loop.close()
        self.stub._arena.close()
        self.stub._parts.close()
        self.stub._lock.close()
        for arena in (1, 2):
            self.stub._views.forget_arena(arena)


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Return both ends, attached."""
    pair = Pair()
    yield pair
    pair.close()
    gc.collect()


def test_releases_wait_until_what_was_handed_on_is_on_its_way(pair):
    """Another thread settles in between: the release stays back until `forwarded`."""
    pair.execute(1, pair.lend(7))
    message = pair.stub.receive()
    handle = message.requests[0].inputs[0].data
    view = pair.stub.view(handle, writable=True)
    placed = pair.stub.place(view)
    assert (placed.arena, placed.block) == (handle.arena, handle.block)
    del view
    settling = threading.Thread(target=pair.stub.settle)
    settling.start()
    settling.join(20)
    pair.host.pump()
    assert pair.exchange.stats().held_blocks == 1
    outputs = [WireTensor("OUT", 2, (NBYTES,), placed)]
    pair.stub.send(Executed(1, [WireResponse(0, outputs)]))
    pair.stub.forwarded(outputs)
    pair.stub.settle()
    pair.host.pump()
    assert bytes(pair.ear.views.pop()[:3]) == b"\7\7\7"
    assert pair.ear.broken == []
    pair.host.pump()
    assert pair.exchange.stats().held_blocks == 0


def test_what_is_not_sent_after_all_is_released(pair):
    """Taken back, it is like any other view that has died; a copy leaves nothing either."""
    pair.execute(1, pair.lend(7))
    view = pair.stub.view(pair.stub.receive().requests[0].inputs[0].data, writable=True)
    placed = [WireTensor("OUT", 2, (NBYTES,), pair.stub.place(view)) for _ in range(2)]
    placed.append(WireTensor("OUT", 2, (NBYTES,), pair.stub.place(view.copy())))
    del view
    for number, each in enumerate(placed):
        pair.stub.settle()
        pair.host.pump()
        assert pair.exchange.stats().held_blocks == (number < 2)
        pair.stub.withdraw([each])
    pair.stub.settle()
    pair.host.pump()
    assert pair.exchange.stats().held_blocks == 0
    assert pair.stub._used_bytes() == 0


def test_what_others_wait_for_is_taken_out_of_the_lane(pair):
    """`take_work` has the first look; the rest is the main thread's, in order."""
    taken: list[Any] = []

    def take(message: Any) -> bool:
        if isinstance(message, CallResponded):
            taken.append(message.responses[0].id)
            return True
        return False

    pair.stub.take_work = take
    for number in range(3):
        pair.host.send(CallResponded([WireResponse(number)]))
        pair.execute(number + 1, WireTensor("IN", 2, (1,), b"x"))
    assert [pair.stub.receive().batch for _ in range(3)] == [1, 2, 3]
    assert taken == [0, 1, 2]
    assert pair.stub.receive_nowait() is None


def test_another_thread_may_read_for_the_main_one(pair):
    """Which is woken, and finds its message."""
    found: list[int] = []
    waiting = threading.Thread(target=lambda: found.append(pair.stub.receive().batch))
    waiting.start()
    wait_until(lambda: pair.stub._work.stats() is not None)
    pair.execute(1, WireTensor("IN", 2, (1,), b"x"))
    pair.stub.take_in()
    pair.stub.wake_main()
    waiting.join(20)
    assert found == [1]


def test_a_wait_ends_with_what_is_awaited(pair):
    """At once where it is there already, else with the next message."""
    pair.stub.wait(lambda: True)
    there: list[Any] = []

    def take(message: Any) -> bool:
        there.append(message)
        return True

    pair.stub.take_work = take

    def wait() -> None:
        while not there:
            pair.stub.take_in()
            if not there:
                pair.stub.wait(lambda: bool(there))

    waiting = threading.Thread(target=wait)
    waiting.start()
    pair.host.send(CallResponded([WireResponse(1)]))
    waiting.join(20)
    assert not waiting.is_alive()
    assert len(there) == 1


def test_readers_share_the_lane(pair):
    """Two threads read at once: each message is taken once, and in order."""
    taken: list[int] = []

    def take(message: Any) -> bool:
        taken.append(message.responses[0].id)
        return True

    pair.stub.take_work = take
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            pair.stub.take_in()

    readers = [threading.Thread(target=read) for _ in range(2)]
    for each in readers:
        each.start()
    for number in range(2000):
        pair.host.send(CallResponded([WireResponse(number)]))
    wait_until(lambda: len(taken) == 2000)
    is_over.set()
    for each in readers:
        each.join(20)
    assert taken == list(range(2000))


def test_a_sending_within_a_sending_comes_after_it(pair):
    """As a finalizer does that runs while its own thread writes: no deadlock, both arrive."""
    producer = pair.stub._up
    inner = iter(["second", "third"])

    class Interrupted:
        def try_send(self, data: bytes) -> bool:
            text = next(inner, None)
            if text is not None:
                pair.stub.send(LogRecord(0, "f", 1, text))
            return producer.try_send(data)

    pair.stub._up = Interrupted()
    pair.stub.send(LogRecord(0, "f", 1, "first"))
    pair.stub._up = producer
    pair.host.pump()
    assert [each.message for each in pair.ear.messages] == ["first", "second", "third"]


def test_the_same_block_may_be_sent_twice_in_one_message(pair):
    """Each sending is counted, and so is each release."""
    body = np.full(NBYTES, 3, np.uint8)
    own = pair.stub.place(body)
    view = pair.stub.view(own, writable=True)
    again = pair.stub.place(view)
    assert again.block == own.block
    outputs = [WireTensor("OUT", 2, (NBYTES,), each) for each in (own, again)]
    pair.stub.send(Executed(1, [WireResponse(0, outputs)]))
    pair.stub.forwarded(outputs)
    pair.host.pump()
    assert pair.exchange.stats().held_blocks == 1
    pair.ear.views.clear()
    del view
    pair.stub.settle()
    pair.host.pump()
    pair.stub.settle()
    assert pair.exchange.stats().held_blocks == 0
