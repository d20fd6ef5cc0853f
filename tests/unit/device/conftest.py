# SPDX-License-Identifier: Apache-2.0
"""A small world: a supervisor with a broker, and stubs that are real processes with real pools.

Every test that uses a driver runs on each kind of it; fake_cuda.py says how the cuda one does.
"""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from actorserve.device.broker import SlabBroker
from actorserve.device.buffer import DeviceBuffer
from actorserve.device.emulated import EmulatedDriver
from actorserve.device.pool import SlabPool
from actorserve.device.settings import DeviceSettings
from actorserve.errors import ActorserveError
from actorserve.process.packet import (
    PeerGone,
    close_all,
    packet_pair,
    receive_packet,
    send_packet,
)
from actorserve.wire.device import (
    DeviceRef,
    DeviceReleased,
    SlabAccepted,
    SlabOffer,
    SlabRetired,
    decode_device_message,
)
from tests.unit.device import fake_cuda

PATIENCE_S = 30.0


class Say(msgspec.Struct):
    """What the test and a stub say to each other; `die` names the moment to be killed at."""

    do: str
    ref: DeviceRef | None = None
    number: int = 0
    die: str = ""
    facts: dict[str, int] = {}
    error: str = ""


class Road:
    """One end of a packet socket on which Says and device messages travel in one order."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def send(self, message: Any, fds: tuple[int, ...] = ()) -> None:
        data = (b"S" if isinstance(message, Say) else b"D") + msgspec.msgpack.encode(message)
        poll = select.poll()
        poll.register(self.sock, select.POLLOUT)
        while not send_packet(self.sock, data, fds):
            assert poll.poll(PATIENCE_S * 1000), "the peer does not read"

    def recv(self) -> tuple[Any, list[int]]:
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        while True:
            packet = receive_packet(self.sock)
            if packet is not None:
                body = packet.data[1:]
                if packet.data[:1] == b"S":
                    return msgspec.msgpack.decode(body, type=Say), packet.fds
                return decode_device_message(body), packet.fds
            assert poll.poll(PATIENCE_S * 1000), "nothing came"


def filled(number: int, nbytes: int) -> bytes:
    """Return so many bytes that all say the same number."""
    return (number.to_bytes(8, "little") * (nbytes // 8 + 1))[:nbytes]


MAKERS: dict[str, Callable[..., Any]] = {
    "emulated": EmulatedDriver,
    "cuda": fake_cuda.make_cuda,
}


def poison(driver: Any) -> None:
    """Break the device as an illegal access does."""
    if driver.is_cuda:
        fake_cuda.library().fakecuda_poison(700)
    else:
        driver.poison("an illegal access")


class StubProgram:
    """What runs in a stub's process."""

    def __init__(
        self, kind: str, road: Road, epoch: int, settings: DeviceSettings, delay_s: float
    ) -> None:
        self.road = road
        self.driver = MAKERS[kind](delay_s=delay_s)
        self.pool = SlabPool(
            self.driver, epoch=epoch, settings=settings, on_slab=self._tell_of_slab
        )
        self.kept: list[DeviceBuffer] = []
        self.die = ""

    def _tell_of_slab(self, offer: SlabOffer, fd: int) -> None:
        self.road.send(offer, (fd,))
        os.close(fd)

    def run(self) -> None:
        while True:
            message, fds = self.road.recv()
            if isinstance(message, SlabOffer):
                self.road.send(self.pool.accept(message, fds[0]))
            elif isinstance(message, DeviceReleased):
                self.pool.returned(message)
            elif isinstance(message, SlabRetired):
                self.pool.retire(message)
            elif isinstance(message, Say):
                if message.do == "end":
                    return
                self.die = message.die
                try:
                    answer = self._do(message)
                except ActorserveError as error:
                    answer = Say("failed", error=f"{type(error).__name__}: {error.message}")
                self._moment("before the answer")
                self.road.send(answer)
                self._moment("after the answer")
                self._send_releases()
                self._moment("after the releases")

    def _moment(self, name: str) -> None:
        if self.die == name:
            os.kill(os.getpid(), signal.SIGKILL)

    def _send_releases(self) -> None:
        releases = self.pool.take_releases()
        if releases is not None:
            self.road.send(releases)

    def _do(self, order: Say) -> Say:
        self._moment("at once")
        if order.do == "make":
            buffer = self.pool.allocate(order.number)
            assert buffer is not None
            buffer.copy_in(filled(order.facts["pattern"], order.number), stream=1)
            self._moment("half way")
            return Say("made", ref=self.pool.lend(buffer))
        if order.do == "drop":
            for kept in self.kept:
                kept.release()
            self.kept.clear()
            self.pool.trim()  # lets go of nothing that anybody needs; tells nobody in this test
            return Say("dropped")
        if order.do == "poison":
            poison(self.driver)
            return Say("poisoned")
        if order.do == "facts":
            facts = msgspec.structs.asdict(self.driver.counters())
            return Say("facts", facts=facts | msgspec.structs.asdict(self.pool.stats()))
        assert order.ref is not None
        view = self.pool.borrow(order.ref)
        self._moment("half way")
        if order.do == "pass":
            return Say("passed", ref=self.pool.lend(view))
        if order.do == "hold":
            self.kept.append(view)
            return Say("held")
        if order.do == "copy":  # a model's work: a new tensor out of the old one, on a stream
            copy = self.pool.allocate(view.nbytes)
            assert copy is not None
            copy.copy_from(view, stream=2)
            return Say("copied", ref=self.pool.lend(copy))
        data = bytes(view.copy_out())
        number = int.from_bytes(data[:8], "little")
        return Say("read", number=number if data == filled(number, len(data)) else -1)


class Stub:
    """A stub as the supervisor sees it."""

    def __init__(self, epoch: int, pid: int, road: Road) -> None:
        self.epoch = epoch
        self.pid = pid
        self.road = road
        self.is_dead = False


class World:
    """The supervisor: routes everything through a broker. `now_s` is the test's own clock."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.broker = SlabBroker()
        self.stubs: list[Stub] = []
        self.now_s = 0.0
        self._epoch = 0

    def start(self, settings: DeviceSettings | None = None, delay_s: float = 0.0) -> Stub:
        self._epoch += 1
        epoch = self._epoch
        ours, theirs = packet_pair()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            try:
                for other in self.stubs:
                    other.road.sock.close()
                ours.close()
                plan = settings or DeviceSettings(slab_bytes=64 << 10)
                StubProgram(self.kind, Road(theirs), epoch, plan, delay_s).run()
            except PeerGone:
                pass
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        theirs.close()
        stub = Stub(epoch, pid, Road(ours))
        self.stubs.append(stub)
        self.broker.join(epoch)
        return stub

    def ask(self, stub: Stub, do: str, ref: DeviceRef | None = None, **more: Any) -> Say | None:
        """Send an order, lending its reference; return the answer, None if the stub died of it.

        A reference in the answer is received: to be dropped by the test.
        """
        if ref is not None:
            offer = self.broker.lend(stub.epoch, ref)
            if offer is not None:
                stub.road.send(offer[0], (offer[1],))
        try:
            stub.road.send(Say(do, ref=ref, **more))
            while True:
                message = self._hear(stub)
                if isinstance(message, Say):
                    if message.ref is not None:
                        self.broker.receive(stub.epoch, message.ref)
                    return message
        except PeerGone:
            self.bury(stub)
            return None

    def _hear(self, stub: Stub) -> Any:
        message, fds = stub.road.recv()
        if isinstance(message, SlabOffer):
            self.broker.keep(stub.epoch, message, fds[0])
        elif isinstance(message, SlabAccepted):
            self.broker.accepted(stub.epoch, message)
        elif isinstance(message, DeviceReleased):
            self.broker.returned(stub.epoch, message)
        else:
            close_all(fds)
        return message

    def tell(self) -> None:
        """Send what the broker has to say."""
        peers = {stub.epoch: stub for stub in self.stubs if not stub.is_dead}
        for peer, message in self.broker.take_outgoing():
            try:
                if peer in peers:
                    peers[peer].road.send(message)
            except PeerGone:
                self.bury(peers[peer])

    def kill(self, stub: Stub) -> None:
        os.kill(stub.pid, signal.SIGKILL)
        self.bury(stub)

    def bury(self, stub: Stub) -> None:
        """Collect a stub's exit; what it had sent before is still heard, as in a lane."""
        if stub.is_dead:
            return
        stub.is_dead = True
        os.waitpid(stub.pid, 0)
        try:
            while True:
                message = self._hear(stub)
                if isinstance(message, Say) and message.ref is not None:
                    self.broker.receive(stub.epoch, message.ref)
                    self.broker.drop(message.ref)
        except PeerGone:
            pass
        stub.road.sock.close()
        self.stubs.remove(stub)
        self.broker.peer_died(stub.epoch, self.now_s)

    def settle(self) -> None:
        """Let the quarantines pass and every release arrive."""
        self.now_s += 1.0
        self.broker.settle(self.now_s)
        for _ in range(3):
            self.tell()
            for stub in list(self.stubs):
                self.facts(stub)  # an answer comes behind the releases of the order before
            for stub in list(self.stubs):
                self.facts(stub)

    def facts(self, stub: Stub) -> dict[str, int]:
        answer = self.ask(stub, "facts")
        return {} if answer is None else answer.facts

    def close(self) -> None:
        for stub in list(self.stubs):
            self.kill(stub)
        self.broker.close()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run what uses CUDA in a fork of its own."""
    return fake_cuda.run_in_fork(item, nextitem) if fake_cuda.wants_fork(item) else None


@pytest.fixture(params=list(MAKERS))
def driver_kind(request: pytest.FixtureRequest) -> str:
    """Run the test once with each kind of driver."""
    kind = str(request.param)
    if kind == "cuda" and fake_cuda.what_is_missing():
        pytest.skip(fake_cuda.what_is_missing())
    return kind


@pytest.fixture
def world(driver_kind: str) -> Iterator[World]:
    """Return a supervisor whose stubs are gone after the test."""
    made = World(driver_kind)
    yield made
    made.close()


@pytest.fixture
def make_driver(driver_kind: str) -> Iterator[Callable[..., Any]]:
    """Return what makes drivers that are shut down after the test."""
    drivers: list[Any] = []

    def make(**options: Any) -> Any:
        drivers.append(MAKERS[driver_kind](**options))
        return drivers[-1]

    yield make
    for driver in drivers:
        is_lost = driver.is_cuda and driver._calls.lost
        driver.shutdown()
        if is_lost:
            fake_cuda.forget_what_is_lost()


@pytest.fixture(params=[0.0, math.inf], ids=["at once", "deferred"])
def delay_s(request: pytest.FixtureRequest) -> float:
    """Run the test once with work that is done at once, once only when somebody waits for it."""
    return float(request.param)
