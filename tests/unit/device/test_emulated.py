# SPDX-License-Identifier: Apache-2.0
"""The device that is none: no stray access, streams in order, fences that end, clear errors."""

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
from actorserve.device.emulated import FENCES
from actorserve.errors import ProtocolError

Make = Callable[..., Any]


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


def test_a_stray_access_from_the_host_is_a_fault(make_driver: Make) -> None:
    """Reading a device address kills, as on a device whose memory the host does not see."""
    memory = make_driver().create(0, 4096)

    def stray() -> None:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # no dump of stacks
        ctypes.string_at(memory.base, 1)

    assert os.waitpid(_fork(stray), 0)[1] & 127 == signal.SIGSEGV


def test_the_memory_outlives_its_maker_by_its_descriptor(make_driver: Make) -> None:
    """Closing and even the death of the process take nothing from who has the descriptor."""
    maker, other = make_driver(), make_driver()
    memory = maker.create(0, 4096)
    maker.copy_in(memory.base + 10, b"still here")
    fd, extra = maker.export(memory)
    maker.close(memory)
    again = other.import_("emulated-0", fd, memory.nbytes, extra)
    target = bytearray(10)
    other.copy_out(target, again.base + 10)
    assert target == b"still here"


def test_deferred_work_is_done_in_order_when_its_stream_is_waited_for(make_driver: Make) -> None:
    """One stream's; another one's is not."""
    driver = make_driver(delay_s=math.inf)
    memory = driver.create(0, 4096)
    driver.copy_in(memory.base, b"one", stream=1)
    driver.copy_in(memory.base, b"two", stream=1)
    driver.copy_in(memory.base + 100, b"other", stream=2)
    target = bytearray(3)
    driver.copy_out(target, memory.base, stream=3)
    assert target == bytes(3)
    driver.synchronize(1)
    driver.copy_out(target, memory.base, stream=3)
    assert target == b"two"
    driver.copy_out(target, memory.base + 100, stream=3)
    assert target == bytes(3)
    driver.synchronize()
    driver.copy_out(target, memory.base + 100, stream=3)
    assert target == b"oth"


def test_more_fences_than_there_are_words(make_driver: Make) -> None:
    """Words are used again once their fence is reached."""
    driver = make_driver(delay_s=math.inf)
    memory = driver.create(0, 4096)
    for _ in range(FENCES + 5):
        last = driver.record(memory, 1)
    driver.wait(memory, last, 0)
    driver.wait(memory, 1, 0)
    assert driver.counters().fences_recorded == FENCES + 5


def test_a_fence_of_a_dead_process_is_an_error_and_no_hang(make_driver: Make) -> None:
    """Its work was never done; the wait ends with the process."""
    driver = make_driver()
    memory = driver.create(0, 4096)
    fd, _ = driver.export(memory)
    told, tell = os.pipe()

    def die_before_the_work() -> None:
        maker = type(driver)(delay_s=math.inf)
        theirs = maker.import_("emulated-0", os.dup(fd), memory.nbytes, b"")
        os.write(tell, bytes([maker.record(theirs, 1)]))
        os.kill(os.getpid(), signal.SIGKILL)

    pid = _fork(die_before_the_work)
    fence = os.read(told, 1)[0]
    os.waitpid(pid, 0)
    with pytest.raises(DeviceError, match="died"):
        driver.wait(memory, fence, 0)
    for each in (fd, told, tell):
        os.close(each)


def test_wrong_calls_are_errors(make_driver: Make) -> None:
    """No such device, no such memory, closed twice, too large, not the memory that was said."""
    driver = make_driver(capacity_bytes=8192)
    memory = driver.create(0, 4096)
    with pytest.raises(NoDevice):
        driver.uuid(1)
    with pytest.raises(OutOfDeviceMemory):
        driver.create(0, 8192)
    with pytest.raises(DeviceError, match="no device memory"):
        driver.copy_in(memory.base + 4090, b"too long")
    with pytest.raises(DeviceError):
        driver.copy_out(bytearray(1), 4096)
    with pytest.raises(ProtocolError):
        driver.import_("emulated-0", driver.export(memory)[0], 8192, b"")
    with pytest.raises(NoDevice):
        driver.import_("emulated-7", driver.export(memory)[0], 4096, b"")
    assert driver.range_of(memory.base + 5).base == memory.base
    assert driver.range_of(memory.base + memory.nbytes) is None
    driver.close(memory)
    with pytest.raises(DeviceError, match="closed"):
        driver.close(memory)
    driver.create(0, 8192)


def test_a_poisoned_device_fails_every_call(make_driver: Make) -> None:
    """Until the process ends; shutting down still works."""
    driver = make_driver()
    memory = driver.create(0, 4096)
    driver.poison("illegal access")
    for call in (
        lambda: driver.create(0, 1),
        lambda: driver.copy_in(memory.base, b"x"),
        driver.synchronize,
        lambda: driver.record(memory, 0),
    ):
        with pytest.raises(DeviceLost, match="illegal access"):
            call()


def test_it_is_a_driver(make_driver: Make) -> None:
    """All parts of the protocol are there, and the counters add up."""
    driver = make_driver()
    assert isinstance(driver, DeviceDriver)
    memory = driver.create(0, 1)
    driver.copy_in(memory.base, b"abc")
    driver.copy_within(memory.base + 10, memory.base, 3)
    counters = driver.counters()
    assert (counters.open, counters.open_bytes) == (1, 4096)
    assert (counters.bytes_in, counters.bytes_within, counters.bytes_out) == (3, 3, 0)
