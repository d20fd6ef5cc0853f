# SPDX-License-Identifier: Apache-2.0
"""A process with a CUDA driver for device.py: it does what it is told, one order at a time.

An order and its answer are one packet each, in the order of the messages about device memory.
Tensors are torch's or cupy's in their own memory, or in a slab of ours that they write to; with
neither library, bytes of numpy that are copied. A second socket leads to the other peer, with
which the ways of a handoff are timed: it drives, the other one answers.
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from actorserve.device.buffer import DeviceBuffer
from actorserve.device.driver import DeviceError
from actorserve.device.plugins import open_driver
from actorserve.device.pool import SlabPool
from actorserve.device.settings import DeviceSettings
from actorserve.errors import ActorserveError
from actorserve.process.packet import PeerGone, receive_packet, send_packet
from actorserve.shm.segment import Segment
from actorserve.wire.device import (
    DeviceRef,
    DeviceReleased,
    SlabOffer,
    SlabRetired,
    decode_device_message,
)

PATIENCE_S = 60.0


class Order(msgspec.Struct):
    """What to do, or what came of it. `library`: torch, cupy or numpy; `pattern` fills bytes."""

    do: str
    library: str = "numpy"
    nbytes: int = 0
    pattern: int = 0
    rounds: int = 0
    ref: DeviceRef | None = None
    facts: dict[str, Any] = {}
    error: str = ""


class Road:
    """One end of a packet socket; None from `recv` is the end of the other one."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def send(self, message: Any, fds: tuple[int, ...] = ()) -> None:
        """Send an order or a message about device memory."""
        data = (b"O" if isinstance(message, Order) else b"D") + msgspec.msgpack.encode(message)
        while not send_packet(self.sock, data, fds):
            self._wait(select.POLLOUT)

    def recv(self) -> tuple[Any, list[int]]:
        """Return the next one with its descriptors; PeerGone, TimeoutError."""
        while True:
            packet = receive_packet(self.sock)
            if packet is not None:
                body = packet.data[1:]
                if packet.data[:1] == b"O":
                    return msgspec.msgpack.decode(body, type=Order), packet.fds
                return decode_device_message(body), packet.fds
            self._wait(select.POLLIN)

    def _wait(self, events: int) -> None:
        poll = select.poll()
        poll.register(self.sock, events)
        if not poll.poll(PATIENCE_S * 1000):
            raise TimeoutError(f"nothing for {PATIENCE_S:g} s")


class Library:
    """What differs between torch, cupy and having neither; the tensors hold bytes."""

    def __init__(self, name: str, peer: Peer) -> None:
        self.name = name
        self.peer = peer

    def make(self, nbytes: int, pattern: int) -> tuple[Any, int, int]:
        """Return a tensor in the library's own memory, its address, its stream."""
        if self.name == "torch":
            import torch

            tensor = torch.full((nbytes,), pattern, dtype=torch.uint8, device="cuda")
            return tensor, tensor.data_ptr(), torch.cuda.current_stream().cuda_stream
        if self.name == "cupy":
            import cupy

            array = cupy.full(nbytes, pattern, dtype=cupy.uint8)
            return array, array.data.ptr, cupy.cuda.get_current_stream().ptr
        address = self.peer.own_memory(nbytes)
        self.peer.driver.copy_in(address, np.full(nbytes, pattern, np.uint8).data)
        return None, address, 0

    def fill(self, buffer: DeviceBuffer, pattern: int) -> None:
        """Write into a buffer of ours as into a tensor."""
        if self.name == "torch":
            import torch

            torch.as_tensor(buffer, device="cuda").fill_(pattern)
            buffer.use_on(torch.cuda.current_stream().cuda_stream)
        elif self.name == "cupy":
            import cupy

            cupy.asarray(buffer).fill(pattern)
            buffer.use_on(cupy.cuda.get_current_stream().ptr)
        else:
            buffer.copy_in(np.full(buffer.nbytes, pattern, np.uint8).data)

    def holds(self, buffer: DeviceBuffer, pattern: int) -> bool:
        """Tell whether each byte of a buffer is the pattern."""
        if self.name == "torch":
            import torch

            buffer.use_on(torch.cuda.current_stream().cuda_stream)
            return bool((torch.as_tensor(buffer, device="cuda") == pattern).all().item())
        if self.name == "cupy":
            import cupy

            buffer.use_on(cupy.cuda.get_current_stream().ptr)
            return bool((cupy.asarray(buffer) == pattern).all())
        return bool((np.frombuffer(buffer.copy_out(), np.uint8) == pattern).all())


class Peer:
    """The process's pool and its roads, to the supervisor and to the other peer."""

    def __init__(self, epoch: int, road: Road, other: Road, settings: DeviceSettings) -> None:
        self.road = road
        self.other = other
        self.driver: Any = open_driver("cuda")
        self.epoch = epoch
        self.pool = SlabPool(self.driver, epoch=epoch, settings=settings, on_slab=self._tell)
        self.kept: list[DeviceBuffer] = []
        self._foreign: dict[int, int] = {}

    def _tell(self, offer: SlabOffer, fd: int) -> None:
        self.road.send(offer, (fd,))
        os.close(fd)

    def own_memory(self, nbytes: int) -> int:
        """Return memory that the pool does not know, as a library would have it."""
        from cuda.bindings import driver as cuda

        found = self._foreign.get(nbytes)
        if found is None:
            with self.driver._calls.current(0):
                code, address = cuda.cuMemAlloc(nbytes)
            if code:
                raise RuntimeError(f"cuMemAlloc of {nbytes} bytes: {code}")
            found = self._foreign[nbytes] = int(address)
        return found

    def run(self) -> None:
        """Serve until the supervisor is gone or says so."""
        while True:
            message, fds = self.road.recv()
            if isinstance(message, SlabOffer):
                self.road.send(self.pool.accept(message, fds[0]))
            elif isinstance(message, DeviceReleased):
                self.pool.returned(message)
            elif isinstance(message, SlabRetired):
                self.pool.retire(message)
            elif message.do == "end":
                return
            else:
                try:
                    answer = getattr(self, message.do)(message)
                except (ActorserveError, RuntimeError, ImportError) as error:
                    answer = Order("failed", error=f"{type(error).__name__}: {error}")
                self.road.send(answer)
                releases = self.pool.take_releases()
                if releases is not None:
                    self.road.send(releases)

    # --- orders -----------------------------------------------------------------------------------

    def facts(self, order: Order) -> Order:
        """Return the card, the driver and the pool's sizes."""
        from cuda.bindings import driver as cuda

        name = cuda.cuDeviceGetName(128, 0)[1]
        facts = {"card": name.partition(b"\0")[0].decode(), "driver": cuda.cuDriverGetVersion()[1]}
        return Order("facts", facts=facts | msgspec.structs.asdict(self.pool.stats()))

    def make(self, order: Order) -> Order:
        """Adopt a tensor that the library made: one copy on the device."""
        tensor, address, stream = Library(order.library, self).make(order.nbytes, order.pattern)
        buffer = self.pool.adopt(address, order.nbytes, stream=stream)
        assert buffer is not None
        ref = self.pool.lend(buffer)
        del tensor
        return Order("made", ref=ref)

    def write(self, order: Order) -> Order:
        """Have the library write into a buffer of ours: no copy."""
        buffer = self.pool.allocate(order.nbytes)
        assert buffer is not None
        Library(order.library, self).fill(buffer, order.pattern)
        return Order("written", ref=self.pool.lend(buffer))

    def read(self, order: Order) -> Order:
        """Read every byte where it lies."""
        assert order.ref is not None
        buffer = self.pool.borrow(order.ref)
        is_right = Library(order.library, self).holds(buffer, order.pattern)
        return Order("read", facts={"is_right": is_right})

    def hold(self, order: Order) -> Order:
        """Borrow and keep."""
        assert order.ref is not None
        self.kept.append(self.pool.borrow(order.ref))
        return Order("held")

    def wait_kept(self, order: Order) -> Order:
        """Have the library's stream wait for the fences of what is kept."""
        for each in self.kept:
            each.use_on(0)
        return Order("waited")

    def read_kept(self, order: Order) -> Order:
        """Read what is kept, and give it back."""
        library = Library(order.library, self)
        is_right = all(library.holds(each, order.pattern) for each in self.kept)
        self.kept.clear()
        return Order("read", facts={"is_right": is_right})

    # --- timing -----------------------------------------------------------------------------------

    def answer(self, order: Order) -> Order:
        """Do the borrower's half of a timed handoff until the other peer says that it is over."""
        target = self.pool.allocate(order.nbytes)
        assert target is not None
        segment: Segment | None = None
        while True:
            message, fds = self.other.recv()
            if isinstance(message, SlabOffer):
                self.pool.accept(message, fds[0])
                continue
            if message.do == "over":
                if segment is not None:
                    segment.close()
                return Order("answered")
            if message.do == "segment":
                segment = Segment.attach(fds[0])
            elif message.do == "host":
                assert segment is not None
                target.copy_in(segment.buffer[: order.nbytes])
            elif message.do == "handle":
                self.other.send(Order("done", error=self._open_and_close(message.facts["handle"])))
                continue
            elif message.ref is not None:
                self.pool.borrow(message.ref).release()
                releases = self.pool.take_releases()
                assert releases is not None
                self.other.send(releases)
                continue
            self.other.send(Order("done"))

    def _open_and_close(self, data: bytes) -> str:
        """Return why that failed, or nothing."""
        calls = self.driver._calls
        handle = calls.api.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), data, 64)
        try:
            with calls.current(0):
                address = calls("cuIpcOpenMemHandle", handle, 1)
                calls("cuIpcCloseMemHandle", address)
        except ActorserveError as error:
            return error.message
        return ""

    def time(self, order: Order) -> Order:
        """Hand 64 MiB (or `nbytes`) over by each way, `rounds` times; microseconds of each."""
        nbytes = order.nbytes
        foreign = self.own_memory(nbytes)
        self.driver.copy_in(foreign, bytes(nbytes))
        buffer = self.pool.allocate(nbytes)
        assert buffer is not None
        fd, extra = self.driver.export(buffer.slab.memory)
        slab = buffer.slab
        offer = SlabOffer(slab.epoch, slab.number, "cuda", self.pool.uuid, slab.nbytes, extra)
        self.other.send(offer, (fd,))
        os.close(fd)
        segment = Segment.create(nbytes)
        self.other.send(Order("segment"), (segment.fd,))
        self._hear()
        host = segment.buffer[:nbytes]

        def by_copy() -> None:
            self.driver.copy_within(buffer.address, foreign, nbytes)
            buffer.use_on(0)
            self.other.send(Order("ref", ref=self.pool.lend(buffer)))

        def by_host() -> None:
            self.driver.copy_out(host, buffer.address)
            self.other.send(Order("host"))

        ways: dict[str, Callable[[], None]] = {
            "message alone": lambda: self.other.send(Order("nothing")),
            "reference": lambda: self.other.send(Order("ref", ref=self.pool.lend(buffer))),
            "one device copy": by_copy,
            "legacy IPC": lambda: self._send_handle(foreign),
            "host arena": by_host,
        }
        facts = {name: self._measure(way, order.rounds) for name, way in ways.items()}
        self.other.send(Order("over"))
        segment.close()
        return Order("timed", facts=facts)

    def _measure(self, way: Callable[[], None], rounds: int) -> Any:
        times = []
        try:
            for _ in range(rounds):
                began = time.perf_counter()
                way()
                self._hear()
                times.append((time.perf_counter() - began) * 1e6)
        except ActorserveError as error:
            return str(error)
        return times

    def _hear(self) -> None:
        message, _ = self.other.recv()
        if isinstance(message, DeviceReleased):
            self.pool.returned(message)
        elif message.error:
            raise DeviceError(message.error)

    def _send_handle(self, address: int) -> None:
        calls = self.driver._calls
        with calls.current(0):
            handle = calls("cuIpcGetMemHandle", address)
        data = ctypes.string_at(handle.getPtr(), 64)
        self.other.send(Order("handle", facts={"handle": data}))


def be_a_peer(epoch: int, road_fd: int, other_fd: int, settings: DeviceSettings) -> None:
    """Be a peer until the end."""
    road, other = (Road(socket.socket(fileno=fd)) for fd in (road_fd, other_fd))
    for each in (road, other):
        each.sock.setblocking(False)
    try:
        Peer(epoch, road, other, settings).run()
    except PeerGone:
        pass
    except ActorserveError as error:
        road.send(Order("failed", error=error.message))
