# SPDX-License-Identifier: Apache-2.0
"""What every driver keeps of the protocol: no stray access, streams in order, fences that end."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from actorserve.device.driver import (
    DeviceDriver,
    DeviceError,
    DeviceLost,
    NoDevice,
    OutOfDeviceMemory,
)
from actorserve.errors import ProtocolError
from actorserve.process.packet import packet_pair, receive_packet, send_packet
from tests.unit.device.conftest import MAKERS, poison

Make = Callable[..., Any]
KIB = 1 << 10


def _fork(function: Callable[[], object]) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            function()
        finally:
            os._exit(0)
    return pid


def _read(driver: Any, address: int, nbytes: int, stream: int = 0) -> bytes:
    target = bytearray(nbytes)
    driver.copy_out(target, address, stream)
    return bytes(target)


def test_a_stray_access_from_the_host_is_a_fault(make_driver: Make) -> None:
    """Reading a device address kills, as on a device whose memory the host does not see."""
    memory = make_driver().create(0, 4 * KIB)

    def stray() -> None:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # no dump of stacks
        ctypes.string_at(memory.base, 1)

    assert os.waitpid(_fork(stray), 0)[1] & 127 == signal.SIGSEGV


def test_the_memory_outlives_its_maker_by_its_descriptor(make_driver: Make) -> None:
    """Closing takes nothing from who has the descriptor."""
    maker, other = make_driver(), make_driver()
    memory = maker.create(0, 4 * KIB)
    maker.copy_in(memory.base + 10, b"still here")
    fd, extra = maker.export(memory)
    maker.close(memory)
    again = other.import_(maker.uuid(0), fd, memory.nbytes, extra)
    assert _read(other, again.base + 10, 10) == b"still here"


def test_deferred_work_is_done_in_order_when_its_stream_is_waited_for(make_driver: Make) -> None:
    """One stream's; another one's is not."""
    driver = make_driver(delay_s=math.inf)
    source, target = driver.create(0, 4 * KIB), driver.create(0, 4 * KIB)
    driver.copy_in(source.base, b"onetwoother")
    driver.synchronize()
    driver.copy_within(target.base, source.base, 3, stream=5)
    driver.copy_within(target.base, source.base + 3, 3, stream=5)
    driver.copy_within(target.base + 100, source.base + 6, 5, stream=6)
    assert _read(driver, target.base, 3, stream=7) == bytes(3)
    driver.synchronize(5)
    assert _read(driver, target.base, 3, stream=7) == b"two"
    assert _read(driver, target.base + 100, 5, stream=7) == bytes(5)
    driver.synchronize()
    assert _read(driver, target.base + 100, 5, stream=7) == b"other"


@pytest.mark.parametrize("victim", ["nobody", "the creator"])
def test_a_fence_is_waited_for_or_its_creator_is_dead(driver_kind: str, victim: str) -> None:
    """Across processes; its work comes a moment later, or never: an error then, and no hang."""
    ours, theirs = packet_pair()

    def create() -> None:
        maker = MAKERS[driver_kind](delay_s=math.inf if victim == "the creator" else 0.1)
        memory = maker.create(0, 4 * KIB)
        maker.copy_in(memory.base, b"ready")
        maker.synchronize()
        maker.copy_within(memory.base + 100, memory.base, 5, 8)
        fence = maker.record(memory, 8)
        fd, extra = maker.export(memory)
        send_packet(theirs, bytes([fence]) + extra, (fd,))
        signal.pause()

    pid = _fork(create)
    theirs.close()
    driver = MAKERS[driver_kind]()
    try:
        packet = _receive(ours)
        memory = driver.import_(driver.uuid(0), packet.fds[0], 4 * KIB, packet.data[1:])
        if victim == "nobody":
            driver.wait(memory, packet.data[0], 9)
            assert _read(driver, memory.base + 100, 5, stream=9) == b"ready"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if victim == "the creator" or driver.is_cuda:  # there, not even a reached one counts
        with pytest.raises(DeviceError, match="died"):
            driver.wait(memory, packet.data[0], 9)
        assert _read(driver, memory.base, 5) == b"ready", "the memory is good"
    driver.shutdown()
    ours.close()


def _receive(sock: Any) -> Any:
    sock.setblocking(True)
    sock.settimeout(30.0)
    return receive_packet(sock)


def test_wrong_calls_are_errors(make_driver: Make) -> None:
    """No such device, no such memory, closed twice, too large, not the memory that was said."""
    driver = make_driver(capacity_bytes=8 * KIB)
    memory = driver.create(0, 4 * KIB)
    with pytest.raises(NoDevice):
        driver.uuid(7)
    with pytest.raises(OutOfDeviceMemory):
        driver.create(0, 8 * KIB)
    with pytest.raises(DeviceError, match="no device memory"):
        driver.copy_in(memory.base + 4090, b"too long")
    with pytest.raises(DeviceError):
        driver.copy_out(bytearray(1), 4096)
    with pytest.raises(TypeError):
        driver.copy_out(bytes(1), memory.base)
    fd, extra = driver.export(memory)
    with pytest.raises(ProtocolError):
        driver.import_(driver.uuid(0), fd, 8 * KIB, extra)
    with pytest.raises(NoDevice):
        driver.import_("emulated-7", driver.export(memory)[0], 4 * KIB, extra)
    assert driver.range_of(memory.base + 5).base == memory.base
    assert driver.range_of(4096) is None
    driver.close(memory)
    with pytest.raises(DeviceError, match="closed"):
        driver.close(memory)
    driver.create(0, 8 * KIB)


def test_a_poisoned_device_fails_every_call(make_driver: Make) -> None:
    """Until the process ends; shutting down still works."""
    driver = make_driver()
    memory = driver.create(0, 4 * KIB)
    poison(driver)
    for call in (
        lambda: driver.create(0, 1),
        lambda: driver.copy_in(memory.base, b"x"),
        driver.synchronize,
        lambda: driver.record(memory, 0),
        lambda: driver.export(memory),
    ):
        with pytest.raises(DeviceLost, match="illegal"):
            call()


def test_it_is_a_driver(make_driver: Make) -> None:
    """All parts of the protocol are there, and the counters add up."""
    driver = make_driver()
    assert isinstance(driver, DeviceDriver)
    memory = driver.create(0, 1)
    driver.copy_in(memory.base, b"abc")
    driver.copy_in(memory.base, b"")
    driver.copy_within(memory.base + 10, memory.base, 3)
    counters = driver.counters()
    assert (counters.open, counters.open_bytes) == (1, 4096)
    assert (counters.bytes_in, counters.bytes_within, counters.bytes_out) == (3, 3, 0)
