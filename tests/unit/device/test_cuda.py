# SPDX-License-Identifier: Apache-2.0
"""What only the cuda driver has, over the fake library: UUIDs, contexts, errors, no GPU at all."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from actorserve.device.driver import DeviceError, DeviceLost, NoDevice, OutOfDeviceMemory
from actorserve.device.pool import SlabPool
from actorserve.device.settings import DeviceSettings
from actorserve.errors import ProtocolError
from actorserve.process.packet import packet_pair, receive_packet, send_packet
from actorserve.wire.device import DeviceRef, SlabOffer, decode_device_message
from tests.unit.device import fake_cuda

Make = Callable[..., Any]
KIB = 1 << 10

on_the_fake = pytest.mark.parametrize("driver_kind", ["cuda"], indirect=True)
"""Two devices, granularity of 4 KiB, in a fork of pytest."""


def _lend_from_the_second_device(road: Any) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
    lender = SlabPool(
        fake_cuda.make_cuda(),
        epoch=1,
        ordinal=1,
        on_slab=lambda offer, fd: send_packet(road, msgspec.msgpack.encode(offer), (fd,)),
    )
    buffer = lender.allocate(4)
    assert buffer is not None
    buffer.copy_in(b"data")
    send_packet(road, msgspec.msgpack.encode(lender.lend(buffer)), ())
    signal.pause()


@on_the_fake
def test_a_device_is_known_by_its_uuid_whatever_its_ordinal(make_driver: Make) -> None:
    """The second device of one process is the first one of another, and the slab is mapped."""
    ours, theirs = packet_pair()
    pid = os.fork()
    if pid == 0:
        try:
            _lend_from_the_second_device(theirs)
        finally:
            os._exit(1)
    theirs.close()
    ours.settimeout(30.0)
    os.environ["CUDA_VISIBLE_DEVICES"] = "GPU-fafafafa-fafa-fafa-fafa-fafafafafa01,0"
    borrower = SlabPool(make_driver(), epoch=2, ordinal=0)
    try:
        packet = receive_packet(ours)
        assert packet is not None
        offer = decode_device_message(packet.data)
        assert isinstance(offer, SlabOffer)
        assert offer.uuid == borrower.uuid == "GPU-fafafafa-fafa-fafa-fafa-fafafafafa01"
        assert borrower.accept(offer, packet.fds[0]).error == ""
        packet = receive_packet(ours)
        assert packet is not None
        ref = msgspec.msgpack.decode(packet.data, type=DeviceRef)
        assert bytes(borrower.borrow(ref).copy_out()) == b"data"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    borrower.close()
    ours.close()


@on_the_fake
def test_a_device_that_is_hidden_here_is_no_device(make_driver: Make) -> None:
    """The answer says which ones are visible; the descriptor is closed."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"
    driver = make_driver()
    with pytest.raises(NoDevice, match="1 are visible"):
        driver.uuid(1)
    memory = driver.create(0, 1)
    fd, extra = driver.export(memory)
    hidden = "GPU-fafafafa-fafa-fafa-fafa-fafafafafa00"
    with pytest.raises(NoDevice, match=f"{hidden}.*visible are {driver.uuid(0)}"):
        driver.import_(hidden, fd, memory.nbytes, extra)


@on_the_fake
def test_any_thread_may_call_and_keeps_its_own_context(make_driver: Make) -> None:
    """A new thread has no current context, and a model's thread may have another device's."""
    driver = make_driver()
    first, second = driver.create(0, 4 * KIB), driver.create(1, 4 * KIB)
    from cuda.bindings import driver as cuda

    failures: list[BaseException] = []

    def use(memory: Any) -> None:
        try:
            before = int(cuda.cuCtxGetCurrent()[1])
            for number in range(50):
                driver.copy_in(memory.base, bytes([number]) * 100)
                target = bytearray(100)
                driver.copy_out(target, memory.base)
                assert target == bytes([number]) * 100
            fence = driver.record(memory, 0)
            driver.wait(memory, fence, 3)
            driver.range_of(memory.base)
            driver.synchronize()
            assert int(cuda.cuCtxGetCurrent()[1]) == before
        except BaseException as error:
            failures.append(error)

    def use_below_another() -> None:
        cuda.cuCtxSetCurrent(cuda.cuDevicePrimaryCtxRetain(1)[1])
        use(first)
        cuda.cuDevicePrimaryCtxRelease(1)

    threads = [threading.Thread(target=use, args=(each,)) for each in (first, second)]
    threads.append(threading.Thread(target=use_below_another))
    for thread in threads:
        thread.start()
        thread.join(30.0)
    assert failures == []


@on_the_fake
@pytest.mark.parametrize(
    ("code", "error", "text"),
    [
        (1, DeviceError, r"cuCtxPushCurrent: CUDA_ERROR_INVALID_VALUE \(1\): invalid argument"),
        (2, OutOfDeviceMemory, "no room: .*CUDA_ERROR_OUT_OF_MEMORY"),
        (100, NoDevice, "CUDA_ERROR_NO_DEVICE"),
        (801, DeviceError, "CUDA_ERROR_NOT_SUPPORTED"),
        (9876, DeviceError, "9876"),
    ],
)
def test_an_error_is_of_this_call_only(make_driver: Make, code: int, error: Any, text: str) -> None:
    """It names the call, the code and CUDA's words; the next call works."""
    driver = make_driver()
    memory = driver.create(0, 4 * KIB)
    fake_cuda.library().fakecuda_poison(code)
    with pytest.raises(error, match=text) as caught:
        driver.copy_in(memory.base, b"data")
    fake_cuda.library().fakecuda_poison(0)
    assert not isinstance(caught.value, DeviceLost)
    driver.copy_in(memory.base, b"data")


@on_the_fake
@pytest.mark.parametrize("code", [700, 702])
def test_a_sticky_error_is_for_good(make_driver: Make, code: int) -> None:
    """Later calls say the first reason, even if the library would answer again."""
    driver = make_driver()
    memory = driver.create(0, 4 * KIB)
    fake_cuda.library().fakecuda_poison(code)
    with pytest.raises(DeviceLost, match=f"lost to this process: .*{code}") as first:
        driver.synchronize()
    fake_cuda.library().fakecuda_poison(0)
    with pytest.raises(DeviceLost) as second:
        driver.copy_in(memory.base, b"")
    assert second.value.message == first.value.message


@on_the_fake
def test_what_does_not_fit_leaves_nothing_behind(make_driver: Make) -> None:
    """No room, a descriptor that is none of CUDA's, an extra that lies: all is given back."""
    driver = make_driver(capacity_bytes=64 * KIB)
    memory = driver.create(0, 60 * KIB)
    with pytest.raises(OutOfDeviceMemory):
        driver.create(0, 8 * KIB)
    assert fake_cuda.library().fakecuda_used() == 60 * KIB
    fd, extra = driver.export(memory)
    for wrong in (b"", b"\xff", msgspec.msgpack.encode([1, 2, b"x" * 65])):
        with pytest.raises(ProtocolError):
            driver.import_(driver.uuid(0), os.dup(fd), memory.nbytes, wrong)
    with pytest.raises(ProtocolError, match="no CUDA slab"):
        driver.import_(driver.uuid(0), os.open(os.devnull, os.O_RDONLY), memory.nbytes, extra)
    os.close(fd)
    driver.close(memory)
    assert fake_cuda.library().fakecuda_used() == 0


@on_the_fake
def test_without_shared_events_the_producer_waits(make_driver: Make) -> None:
    """`fence: event` is then what `sync` is, on that device only."""
    os.environ["FAKECUDA_NO_IPC_EVENTS"] = "1"
    driver = make_driver(delay_s=float("inf"))
    pool = SlabPool(driver, epoch=1, settings=DeviceSettings(slab_bytes=8 * KIB, fence="event"))
    source, buffer = pool.allocate(5), pool.allocate(5)
    assert source is not None and buffer is not None
    source.copy_in(b"ready")
    buffer.copy_from(source, stream=5)
    assert pool.lend(buffer).fence == 0
    target = bytearray(5)
    driver.copy_out(target, buffer.address, 9)
    assert target == b"ready"
    pool.close()


@on_the_fake
def test_the_tenant_of_a_leased_slab_waits_itself(make_driver: Make) -> None:
    """The lender could not tell that the tenant died before its fence."""
    driver = make_driver()
    memory = driver.create(0, 4 * KIB)
    fd, extra = driver.export(memory)
    other = msgspec.msgpack.encode([1, *msgspec.msgpack.decode(extra)[1:]])  # of process 1
    leased = driver.import_(driver.uuid(0), fd, memory.nbytes, other)
    assert driver.record(leased, 5) == 0
    assert driver.record(memory, 5) == 1
    with pytest.raises(DeviceError, match="died"):
        driver.wait(leased, 1, 5)
    with pytest.raises(DeviceError, match="no|without such a fence"):
        driver.wait(memory, 0, 5)


@on_the_fake
def test_a_fork_of_a_process_with_cuda_is_told_so(make_driver: Make) -> None:
    """CUDA answers nothing there: DeviceLost, with the reason."""
    driver = make_driver()
    driver.create(0, 4 * KIB)
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            driver.create(0, 4 * KIB)
        except DeviceLost as error:
            os.write(tell, error.message.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert b"forked child cannot use" in os.read(told, 1000)
    os.close(told)
    os.close(tell)


@pytest.mark.parametrize(
    ("before", "text"),
    [
        ("pass", "no CUDA: "),
        ("sys.modules['cuda'] = None", "cuda-bindings cannot be imported.*actorserve.cuda"),
    ],
    ids=["no driver library", "no package"],
)
def test_without_a_gpu_it_is_no_device_with_one_clear_text(before: str, text: str) -> None:
    """Host memory carries everything then; what is missing is named."""
    program = (
        f"import sys; {before}\n"
        "from actorserve.device.plugins import open_driver\n"
        "from actorserve.device.driver import NoDevice\n"
        "try:\n    open_driver('cuda')\nexcept NoDevice as error:\n    print(error.message)\n"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    out = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=environment,
    )
    lines = out.stdout.strip().split("\n")
    assert len(lines) == 1, out.stdout
    assert re.search(text, lines[0]), lines[0]


@on_the_fake
def test_what_a_cuda_library_allocated_is_copied_once(make_driver: Make) -> None:
    """By its address alone, on its stream; a later allocation has another number."""
    driver = make_driver()
    pool = SlabPool(driver, epoch=1, settings=DeviceSettings(slab_bytes=64 * KIB))
    from cuda.bindings import driver as cuda

    with driver._calls.current(0):
        theirs = int(cuda.cuMemAlloc(5000)[1])
    driver.copy_in(theirs, b"theirs")
    buffer = pool.adopt(theirs, 6, stream=5)
    assert buffer is not None and bytes(buffer.copy_out()) == b"theirs"
    assert driver.counters().copies_within == 1
    found = driver.range_of(theirs + 4000)
    assert (found.base, found.nbytes) == (theirs, 8192)
    with driver._calls.current(0):
        cuda.cuMemFree(theirs)
        again = int(cuda.cuMemAlloc(5000)[1])
    assert driver.range_of(again).number != found.number
    with driver._calls.current(0):
        cuda.cuMemFree(again)
    buffer.release()
    pool.close()
