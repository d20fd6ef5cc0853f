# SPDX-License-Identifier: Apache-2.0
"""One process's slabs: quota, what full means, fences, leases, adoption, lying references."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from actorserve.clock import monotonic_ns
from actorserve.device.driver import DeviceError, DeviceLost, OutOfDeviceMemory, StaleReference
from actorserve.device.pool import SlabPool
from actorserve.device.settings import DeviceSettings
from actorserve.errors import ConfigError, InternalError, InvalidArgument, ProtocolError
from actorserve.wire.codec import encode
from actorserve.wire.device import DeviceRef, DeviceReleased, SlabRetired, decode_device_message
from tests.unit.device.conftest import poison

KIB = 1 << 10
Make = Callable[..., Any]


def _pool(driver: Any, epoch: int = 1, **settings: Any) -> SlabPool:
    return SlabPool(
        driver, epoch=epoch, settings=DeviceSettings(**{"slab_bytes": 64 * KIB} | settings)
    )


@pytest.fixture
def pair(make_driver: Make) -> tuple[SlabPool, SlabPool]:
    """Return a lender and a borrower that has mapped the lender's first slab."""
    borrower = _pool(make_driver(), epoch=2)
    lender = SlabPool(
        make_driver(),
        epoch=1,
        settings=DeviceSettings(slab_bytes=64 * KIB),
        on_slab=lambda offer, fd: _accept(borrower, offer, fd),
    )
    return lender, borrower


def _accept(pool: SlabPool, offer: Any, fd: int) -> None:
    assert pool.accept(offer, fd).error == ""


def test_a_dead_buffer_is_free_again_under_the_next_generation(make_driver: Make) -> None:
    """The slot and the range are used again, the name is not."""
    pool = _pool(make_driver())
    first = pool.allocate(1000)
    assert first is not None
    old = pool.lend(first, peer=9)
    pool.returned(DeviceReleased([old.key]), peer=9)
    address = first.address
    del first
    gc.collect()
    second = pool.allocate(1000)
    assert second is not None and second.address == address
    assert (second.slot, second.generation) == (old.slot, old.generation + 1)
    with pytest.raises(StaleReference):
        pool.borrow(old)
    assert pool.stats().own_slabs == 1


def test_full_grows_within_the_quota_and_then_fails_that_request_only(make_driver: Make) -> None:
    """Out of memory is an error of one request; what fits still goes."""
    pool = _pool(make_driver(), max_bytes=128 * KIB)
    kept = [pool.allocate(60 * KIB), pool.allocate(60 * KIB)]
    with pytest.raises(OutOfDeviceMemory, match="quota"):
        pool.allocate(60 * KIB)
    small = pool.allocate(512)
    assert small is not None
    assert pool.stats().own_bytes == 128 * KIB
    assert len(kept) == 2


def test_out_of_memory_of_the_device_fails_that_request_only(make_driver: Make) -> None:
    """The driver has no room for another slab; the slabs that there are go on."""
    pool = _pool(make_driver(capacity_bytes=100 * KIB))
    kept = pool.allocate(60 * KIB)
    with pytest.raises(OutOfDeviceMemory, match="no room"):
        pool.allocate(60 * KIB)
    del kept
    assert pool.allocate(60 * KIB) is not None


@pytest.mark.parametrize("full", ["host", "error"])
def test_full_goes_by_host_memory_or_fails_where_set(make_driver: Make, full: str) -> None:
    """Only `grow` makes a second slab."""
    pool = _pool(make_driver(), full=full)
    kept = pool.allocate(60 * KIB)
    if full == "host":
        assert pool.allocate(60 * KIB) is None
    else:
        with pytest.raises(OutOfDeviceMemory):
            pool.allocate(60 * KIB)
    assert kept is not None and pool.stats().own_slabs == 1


def test_host_memory_carries_it_where_the_device_has_no_first_slab(make_driver: Make) -> None:
    """`host` never fails for lack of device memory."""
    assert _pool(make_driver(capacity_bytes=1), full="host").allocate(10) is None


def test_zero_bytes_have_an_address_and_a_reference(pair: Any) -> None:
    """An empty tensor travels like any other."""
    lender, borrower = pair
    buffer = lender.allocate(0)
    view = borrower.borrow(lender.lend(buffer, peer=2))
    assert view.nbytes == 0 and bytes(view.copy_out()) == b""


@pytest.mark.parametrize("fence", ["sync", "event"])
def test_a_borrower_never_sees_work_that_is_not_done(make_driver: Make, fence: Any) -> None:
    """By either kind of fence; the event's work is done in a thread, a moment later."""
    borrower = _pool(make_driver(), epoch=2)
    lender = SlabPool(
        make_driver(delay_s=0.05),
        epoch=1,
        settings=DeviceSettings(slab_bytes=64 * KIB, fence=fence),
        on_slab=lambda offer, fd: _accept(borrower, offer, fd),
    )
    source, buffer = lender.allocate(5), lender.allocate(5)
    assert source is not None and buffer is not None
    source.copy_in(b"ready", stream=3)
    buffer.copy_from(source, stream=3)
    ref = lender.lend(buffer, peer=2)
    assert bool(ref.fence) == (fence == "event")
    assert bytes(borrower.borrow(ref).copy_out()) == b"ready"


def test_a_missing_fence_shows(make_driver: Make) -> None:
    """The deferred driver is worth something: without the wait the bytes are old."""
    borrower = _pool(make_driver(), epoch=2)
    lender = SlabPool(
        make_driver(delay_s=math.inf),
        epoch=1,
        on_slab=lambda offer, fd: _accept(borrower, offer, fd),
        settings=DeviceSettings(slab_bytes=64 * KIB),
    )
    source, buffer = lender.allocate(5), lender.allocate(5)
    assert source is not None and buffer is not None
    source.copy_in(b"ready")
    buffer.copy_from(source, stream=7)
    buffer.stream = None  # as if nobody had noted it
    assert bytes(borrower.borrow(lender.lend(buffer, peer=2)).copy_out()) == bytes(5)


def test_a_borrowed_block_is_given_back_only_when_its_reader_is_done(make_driver: Make) -> None:
    """The copy that was started out of it is finished before the release exists."""
    borrower = _pool(make_driver(delay_s=math.inf), epoch=2)
    lender = SlabPool(
        make_driver(),
        epoch=1,
        on_slab=lambda offer, fd: _accept(borrower, offer, fd),
        settings=DeviceSettings(slab_bytes=64 * KIB),
    )
    buffer = lender.allocate(3)
    assert buffer is not None
    buffer.copy_in(b"old")
    view = borrower.borrow(lender.lend(buffer, peer=2))
    copy = borrower.allocate(3)
    assert copy is not None
    copy.copy_from(view, stream=4)
    view.release()
    releases = borrower.take_releases()
    assert releases is not None
    buffer.copy_in(b"new")
    assert bytes(copy.copy_out(stream=9)) == b"old"


def test_twice_released_unknown_and_foreign_releases_change_nothing(pair: Any) -> None:
    """Counted and ignored; in the end nothing is in use."""
    lender, borrower = pair
    buffer = lender.allocate(100)
    ref = lender.lend(buffer, peer=2)
    view = borrower.borrow(ref)
    view.release()
    view.release()
    releases = borrower.take_releases()
    assert releases is not None and len(releases.blocks) == 1
    assert borrower.take_releases() is None
    assert lender.returned(DeviceReleased([ref.key]), peer=3) == 1
    assert lender.returned(releases, peer=2) == 0
    assert lender.returned(releases, peer=2) == 1
    assert lender.returned(DeviceReleased([(77, 1, 0, 1), (1, 1, -5, 1)]), peer=2) == 2
    assert lender.stats().used_bytes == 512 and bytes(buffer.copy_out()) == bytes(100)
    buffer.release()
    assert (lender.stats().used_bytes, lender.stats().refused) == (0, 4)
    with pytest.raises(InvalidArgument, match="released already"):
        buffer.copy_out()


@pytest.mark.parametrize(
    "change",
    [{"epoch": 9}, {"slab": 9}, {"offset": -512}, {"nbytes": 1 << 40}, {"nbytes": -1}],
    ids=str,
)
def test_a_lying_reference_is_refused(pair: Any, change: dict[str, int]) -> None:
    """Of a slab that is not mapped, or outside it: an error, no crash, nothing counted."""
    lender, borrower = pair
    buffer = lender.allocate(100)
    ref = msgspec.structs.replace(lender.lend(buffer, peer=2), **change)
    with pytest.raises(ProtocolError):
        borrower.borrow(ref)
    assert borrower.stats().views == 0


@pytest.mark.parametrize(
    "change", [{"slot": 5}, {"generation": 2}, {"offset": 512}, {"nbytes": 513}], ids=str
)
def test_the_tenant_checks_what_comes_home_to_the_byte(pair: Any, change: dict[str, int]) -> None:
    """Its own book knows every block."""
    lender, _ = pair
    buffer = lender.allocate(100)
    ref = lender.lend(buffer, peer=2)
    with pytest.raises(ProtocolError):
        lender.borrow(msgspec.structs.replace(ref, **change))


def test_a_slab_of_another_device_or_driver_is_refused(make_driver: Make) -> None:
    """By its UUID: the ordinals of two processes need not agree. The descriptor is closed."""
    offers: list[Any] = []
    lender = SlabPool(
        make_driver(devices=2), epoch=1, ordinal=1, on_slab=lambda *each: offers.append(each)
    )
    kept = lender.allocate(10)
    offer, fd = offers[0]
    borrower = _pool(make_driver(), epoch=2)
    assert lender.uuid in borrower.accept(offer, os.dup(fd)).error
    other = msgspec.structs.replace(offer, driver="other")
    assert "'other'" in borrower.accept(other, fd).error
    assert kept is not None


def test_a_retired_slab_takes_no_more_references_and_goes_with_its_last_view(pair: Any) -> None:
    """The view that is alive stays readable until then."""
    lender, borrower = pair
    buffer = lender.allocate(4)
    buffer.copy_in(b"data")
    ref = lender.lend(buffer, peer=2)
    view = borrower.borrow(ref)
    borrower.retire(SlabRetired(ref.epoch, ref.slab))
    with pytest.raises(StaleReference):
        borrower.borrow(ref)
    assert bytes(view.copy_out()) == b"data"
    assert borrower.driver.counters().open == 1
    view.release()
    assert borrower.stats().retired_slabs == 0
    assert borrower.driver.counters().open == 0


def test_a_leased_slab_has_the_other_process_as_its_tenant(make_driver: Make) -> None:
    """The lender makes it and reads it; only the tenant allocates; its death retires it."""
    lender = _pool(make_driver(), epoch=1)
    tenant = SlabPool(make_driver(), epoch=2, can_create=False)
    with pytest.raises(OutOfDeviceMemory):
        tenant.allocate(10)
    offer, fd = lender.lease(2, 1, 64 * KIB)
    assert tenant.accept(offer, fd).error == ""
    output = tenant.allocate(4)
    assert output is not None
    output.copy_in(b"out!")
    view = lender.borrow(tenant.lend(output))
    lender.peer_died(2, now_s=5.0)
    assert bytes(view.copy_out()) == b"out!"
    view.release()
    assert lender.take_releases() is None
    assert lender.stats().retired_slabs == 0 and lender.driver.counters().open == 0


def test_a_dead_peers_loans_come_back_after_the_quarantine(pair: Any) -> None:
    """Not at its death: what it had started on the device may still run."""
    lender, _ = pair
    buffer = lender.allocate(100)
    lender.lend(buffer, peer=2)
    buffer.release()
    lender.peer_died(2, now_s=10.0)
    assert lender.settle(10.0) == pytest.approx(10.1)
    assert lender.stats().used_bytes == 512
    assert lender.settle(10.2) is None
    assert lender.stats().used_bytes == 0


def test_what_a_library_has_is_copied_once_or_recognized(pair: Any) -> None:
    """A pointer into a living block is that block again; any other one costs one device copy."""
    lender, borrower = pair
    buffer = lender.allocate(1024)
    buffer.copy_in(bytes(range(256)) * 4)
    within = lender.adopt(buffer.address + 512, 256)
    assert within is not None and within.slot == buffer.slot
    assert lender.driver.counters().copies_within == 0
    view = borrower.borrow(lender.lend(buffer, peer=2))
    again = borrower.adopt(view.address + 256, 256)
    assert borrower.lend(again).key == lender.lend(buffer, peer=2).key
    view.release()
    assert borrower.take_releases() is None, "a view of the same loan is alive"
    again.release()
    assert len(borrower.take_releases().blocks) == 1
    foreign = lender.driver.create(0, 4096)
    lender.driver.copy_in(foreign.base, b"mine")
    copied = lender.adopt(foreign.base, 4)
    assert bytes(copied.copy_out()) == b"mine"
    assert lender.driver.counters().copies_within == 1


def test_idle_slabs_go_back_to_the_device(pair: Any) -> None:
    """Only those that nobody needs, here or elsewhere."""
    lender, _ = pair
    buffer = lender.allocate(10)
    ref = lender.lend(buffer, peer=2)
    buffer.release()
    assert lender.trim() == []
    lender.returned(DeviceReleased([ref.key]), peer=2)
    assert lender.trim() == [SlabRetired(1, 1)]
    assert lender.driver.counters().open == 0


def test_a_lost_device_says_so(pair: Any) -> None:
    """DeviceLost tells a stub to end itself; its books can still be closed."""
    lender, _ = pair
    buffer = lender.allocate(4)
    buffer.copy_in(b"data")
    poison(lender.driver)
    for _ in range(2):
        with pytest.raises(DeviceLost, match="illegal"):
            buffer.copy_out()
    with pytest.raises(DeviceLost):
        lender.allocate(1 << 20)
    buffer.release()
    assert lender.stats().views == 0
    assert issubclass(DeviceLost, DeviceError)


def test_memory_of_others_is_exported_only_where_the_driver_can(make_driver: Make) -> None:
    """A setting that would be ignored is an error."""
    with pytest.raises(ConfigError, match="foreign is 'export'.*expected 'copy'"):
        _pool(make_driver(), foreign="export")


def test_a_forked_child_releases_nothing_and_allocates_nothing(pair: Any) -> None:
    """The blocks are its parent's."""
    lender, borrower = pair
    buffer = lender.allocate(100)
    view = borrower.borrow(lender.lend(buffer, peer=2))
    borrower.sever()
    del view
    with pytest.raises(InternalError, match="forked"):
        borrower.allocate(10)
    assert borrower.stats().owed == 0


def test_only_cuda_memory_is_shown_to_cuda_libraries(pair: Any) -> None:
    """Emulated memory has no CUDA address, and says so as an attribute that is not there."""
    lender, _ = pair
    buffer = lender.allocate(10)
    shown = getattr(buffer, "__cuda_array_interface__", None)
    if not lender.driver.is_cuda:
        assert shown is None
        return
    assert (shown["shape"], shown["typestr"], shown["data"]) == (
        (10,),
        "|u1",
        (buffer.address, False),
    )


def test_a_reference_takes_some_20_bytes() -> None:
    """A typical one; messages come back as they went."""
    ref = DeviceRef(3, 2, 17, 200, 192 << 20, 64 << 20)
    data = encode(ref)  # type: ignore[arg-type]
    assert len(data) <= 20
    assert msgspec.msgpack.decode(data, type=DeviceRef) == ref
    released = DeviceReleased([ref.key])
    assert decode_device_message(encode(released)) == released
    with pytest.raises(ProtocolError):
        decode_device_message(data)


def test_a_hop_by_reference_is_cheap(pair: Any) -> None:
    """Lend, encode, decode, borrow, release and its return: 30 µs are wanted; tenfold slack."""
    lender, borrower = pair
    buffer = lender.allocate(4096)
    decode = msgspec.msgpack.Decoder(DeviceRef).decode
    times_ns = []
    for _ in range(500):
        began_ns = monotonic_ns()
        data = encode(lender.lend(buffer, peer=2))
        borrower.borrow(decode(data)).release()
        lender.returned(borrower.take_releases(), peer=2)
        times_ns.append(monotonic_ns() - began_ns)
    assert sorted(times_ns)[250] < 300_000
