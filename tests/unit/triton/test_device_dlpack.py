# SPDX-License-Identifier: Apache-2.0
"""CUDA memory by DLPack and the CUDA array interface, both ways, with a driver that has no GPU.

The driver says that it is CUDA's, and that is all that capsules depend on: what they say is read
byte by byte, who waits for which stream is written down, and what is freed is counted.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import math
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from actorserve.device.emulated import EmulatedDriver
from actorserve.device.pool import SlabPool
from actorserve.triton.device_tensor import DeviceTensor, ForeignMemory
from actorserve.triton.pb_utils import Tensor, TritonModelException, empty_device
from actorserve.wire.device import SlabRetired
from actorserve.wire.tensors import DataType
from tests.unit.triton.device_pools import FakeCuda, lend_to_another, pool_in_use
from tests.unit.triton.dlpack_by_hand import (
    BFLOAT16,
    CODES,
    Consumer,
    Producer,
    get_pointer,
    is_valid,
    references,
)

HAS_VERSIONED = np.lib.NumpyVersion(np.__version__) >= "2.1.0"
versioned = pytest.mark.skipif(not HAS_VERSIONED, reason="numpy makes none")


@pytest.fixture
def delay_s() -> float:
    """Return how much later the driver does its work; tests parametrize it."""
    return 0.0


@pytest.fixture
def driver(delay_s: float) -> FakeCuda:
    """Return the driver of the pool in use."""
    return FakeCuda(devices=4, delay_s=delay_s)


@pytest.fixture
def pool(driver: FakeCuda) -> Iterator[SlabPool]:
    """Return the pool in use, on the third device."""
    with pool_in_use(driver, ordinal=2) as made:
        yield made


def cuda_producer(*arguments: Any, **options: Any) -> Producer:
    """Return a library's tensor on the pool's device."""
    return Producer(*arguments, **{"device": 2, "ordinal": 2} | options)


def memory_of(tensor: Tensor) -> Any:
    """Return what a tensor lies in."""
    body = tensor._device_body()
    assert body is not None
    return body[2]


# --- giving: what a capsule says -----------------------------------------------------------------


def test_capsule_byte_by_byte(pool: SlabPool) -> None:
    """The layout is DLPack's, whatever structure anybody has of it."""
    tensor = empty_device((5, 3), np.int16)
    capsule = tensor.to_dlpack()
    raw = ctypes.string_at(get_pointer(capsule, b"dltensor"), 64)
    data, kind, ordinal, ndim, code, bits, lanes, shape, strides, offset, context, deleter = (
        struct.unpack("<QiiiBBHQQQQQ", raw)
    )
    assert data == memory_of(tensor).address
    assert (kind, ordinal) == (2, 2)
    assert (ndim, code, bits, lanes, strides, offset) == (2, 0, 16, 1, 0, 0)
    assert struct.unpack("<qq", ctypes.string_at(shape, 16)) == (5, 3)
    assert context and deleter
    assert pool.stats().views == 1


@versioned
@pytest.mark.usefixtures("pool")
def test_versioned_capsule_byte_by_byte() -> None:
    """Version 1, writable, no copy; strides where they are spelled out."""
    tensor = empty_device((5, 3), np.int16)
    capsule = tensor.__dlpack__(max_version=(1, 0))
    raw = ctypes.string_at(get_pointer(capsule, b"dltensor_versioned"), 80)
    major, _, context, deleter, flags, data, kind, ordinal, ndim, code, bits, lanes = struct.unpack(
        "<IIQQQQiiiBBH", raw[:56]
    )
    shape, strides, offset = struct.unpack("<QQQ", raw[56:])
    assert (major, flags) == (1, 0)
    assert data == memory_of(tensor).address
    assert (kind, ordinal, ndim, code, bits, lanes, offset) == (2, 2, 2, 0, 16, 1, 0)
    assert struct.unpack("<qq", ctypes.string_at(shape, 16)) == (5, 3)
    if strides:
        assert struct.unpack("<qq", ctypes.string_at(strides, 16)) == (3, 1)
    assert context and deleter


@pytest.mark.parametrize("is_versioned", [False, pytest.param(True, marks=versioned)])
@pytest.mark.parametrize("shape", [(), (0, 3), (1, 1), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [*CODES, "BF16"])
@pytest.mark.usefixtures("pool")
def test_capsule_tells_type_shape_and_place(
    dtype: str, shape: tuple[int, ...], is_versioned: bool
) -> None:
    """Of every type, in both forms."""
    tensor = empty_device(shape, dtype)
    consumer = Consumer(tensor.__dlpack__(max_version=(1, 1) if is_versioned else None))
    assert consumer.is_versioned is is_versioned
    assert consumer.dtype == (BFLOAT16 if dtype == "BF16" else CODES[dtype])
    assert consumer.shape == shape
    assert consumer.lanes == 1
    assert consumer.device == tensor.__dlpack_device__() == (2, 2)
    assert consumer.address == memory_of(tensor).address
    if not is_versioned:
        assert consumer.strides is None
    elif consumer.strides and math.prod(shape) > 1:
        assert consumer.strides == tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    consumer.free()


@pytest.mark.parametrize(
    ("max_version", "name"),
    [
        (None, b"dltensor"),
        ((0, 8), b"dltensor"),
        pytest.param((1, 0), b"dltensor_versioned", marks=versioned),
        pytest.param((2, 3), b"dltensor_versioned", marks=versioned),
    ],
)
@pytest.mark.usefixtures("pool")
def test_consumers_get_the_form_that_they_know(max_version: Any, name: bytes) -> None:
    """Never a newer one than they ask for; tensors on the CPU too."""
    for tensor in (empty_device(3), Tensor("c", np.ones(3))):
        assert is_valid(tensor.__dlpack__(max_version=max_version), name)


# --- giving: streams -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stream", "noted", "waits"),
    [(None, 0, 9), (1, 0, 9), (0x7F00, 0x7F00, 9), (9, 9, None), (2, 0, 9), (-1, 9, None)],
)
def test_the_consumers_stream_finds_the_data_complete(
    pool: SlabPool, driver: FakeCuda, stream: Any, noted: int, waits: int | None
) -> None:
    """Work on another stream is waited for, except where the consumer wants nobody to wait."""
    tensor = empty_device(4, np.uint8)
    memory_of(tensor).copy_in(b"abcd", stream=9)
    consumer = Consumer(tensor.__dlpack__(stream=stream))
    assert driver.synchronized == ([] if waits is None else [waits])
    assert memory_of(tensor).stream == noted
    consumer.free()
    del tensor
    driver.synchronized.clear()
    pool.take_releases()
    assert driver.synchronized[-1] == noted, "its work is done before others get the memory"


def test_each_consumers_stream_is_waited_for(pool: SlabPool, driver: FakeCuda) -> None:
    """All see one memory, and others get it when the last stream has done its work."""
    tensor = empty_device(4, np.uint8)
    address = memory_of(tensor).address
    consumers = [Consumer(tensor.__dlpack__(stream=stream)) for stream in (5, 7, 9)]
    assert tensor.__cuda_array_interface__["data"] == (address, False)
    consumers += [Consumer(tensor.__dlpack__(stream=5))]
    assert {consumer.address for consumer in consumers} == {address}
    assert memory_of(tensor).address == address
    del tensor
    pool.take_releases()
    driver.synchronized.clear()
    for consumer in consumers:
        assert pool.stats().used_bytes > 0
        consumer.free()
    pool.take_releases()
    assert set(driver.synchronized) == {5, 7, 9}
    assert pool.stats().used_bytes == 0
    assert driver.counters().copies_within == 0


def test_a_slab_that_is_retired_is_shown_on_any_stream(pool: SlabPool, driver: FakeCuda) -> None:
    """It has no more views to give: the one that there is serves all, without a copy."""
    tensor = empty_device(4, np.uint8)
    memory = memory_of(tensor)
    pool.retire(SlabRetired(memory.slab.epoch, memory.slab.number))
    for stream in (5, 7):
        consumer = Consumer(tensor.__dlpack__(stream=stream))
        assert consumer.address == memory.address
        consumer.free()
    assert driver.synchronized == [5]
    assert driver.counters().copies_within == 0


@pytest.mark.parametrize(("stream", "on"), [(None, 0), (1, 0), (2, 2), (77, 77), (-1, 0)])
def test_a_fence_is_waited_for_on_the_consumers_stream(
    pool: SlabPool, stream: Any, on: int
) -> None:
    """By the device, once; not by this thread, and by no driver's synchronize."""
    lender = pool
    made = empty_device(4, np.uint8)
    made_in = memory_of(made)
    made_in.copy_in(b"abcd", stream=5)
    made_in.fence = lender.driver.record(made_in.slab.memory, 5)
    made_in.stream = None
    other = FakeCuda(devices=4)
    borrower = lend_to_another(lender, other)
    tensor = Tensor._on_device("x", DataType.UINT8, (4,), borrower.borrow(lender.lend(made_in)))
    first = Consumer(tensor.__dlpack__(stream=stream))
    second = Consumer(tensor.__dlpack__(stream=stream))
    assert other.waited == [(1, on)]
    first.free()
    second.free()
    del tensor
    assert borrower.take_releases() is not None
    other.shutdown()


def test_data_that_is_complete_calls_no_driver(pool: SlabPool, driver: FakeCuda) -> None:
    """A tensor that came in without a fence is shown for nothing."""
    buffer = pool.allocate(4)
    assert buffer is not None
    tensor = Tensor._on_device("x", DataType.UINT8, (4,), buffer)
    Consumer(tensor.__dlpack__(stream=77)).free()
    assert (driver.waited, driver.synchronized) == ([], [])


@pytest.mark.parametrize("stream", [0, -2, 1.0, "1", True])
@pytest.mark.usefixtures("pool")
def test_what_is_no_stream_is_refused(stream: Any) -> None:
    """0 too, which means two things."""
    with pytest.raises(BufferError, match="is no CUDA stream for `__dlpack__`: expected None"):
        empty_device(3).__dlpack__(stream=stream)


# --- giving: elsewhere, and copies ---------------------------------------------------------------


@pytest.mark.usefixtures("pool")
def test_numpy_refuses_memory_of_the_device() -> None:
    """It must not be able to read it: that would be the end of the process."""
    tensor = empty_device(3)
    with pytest.raises((BufferError, RuntimeError), match="[Uu]nsupported device"):
        np.from_dlpack(tensor)  # type: ignore[arg-type]


@versioned
@pytest.mark.usefixtures("pool")
def test_copies_are_made_where_a_consumer_asks() -> None:
    """On the device, or on the CPU; the capsule says that it is one."""
    tensor = empty_device(3, np.uint8).copy_from(np.frombuffer(b"abc", np.uint8))
    there = Consumer(tensor.__dlpack__(stream=1, copy=True, max_version=(1, 0)))
    here = Consumer(tensor.__dlpack__(dl_device=(1, 0), max_version=(1, 0)))
    assert there.device == (2, 2)
    assert there.address != memory_of(tensor).address
    assert (there.flags, here.flags) == (2, 2)
    assert here.device == (1, 0)
    assert ctypes.string_at(here.address, 3) == b"abc"
    there.free()
    here.free()
    same = Consumer(tensor.__dlpack__(stream=1, copy=False, dl_device=(2, 2)))
    assert same.address == memory_of(tensor).address
    same.free()


@pytest.mark.usefixtures("pool")
def test_other_devices_are_not_served() -> None:
    """A consumer copies to where it wants to have it."""
    with pytest.raises(BufferError, match=r"lies on the device \(2, 2\).*given on \(2, 0\)"):
        empty_device(3).__dlpack__(dl_device=(2, 0))
    with pytest.raises(BufferError, match=r"lies on the CPU and cannot be given .* \(2, 0\)"):
        Tensor("c", np.ones(3)).__dlpack__(dl_device=(2, 0))


def test_tensors_on_the_cpu_are_copied_where_a_consumer_asks() -> None:
    """And only there."""
    array = np.ones(3)
    tensor = Tensor("c", array)
    consumers = [Consumer(tensor.__dlpack__(copy=copy)) for copy in (None, False, True)]
    assert [c.address == array.ctypes.data for c in consumers] == [True, True, False]
    for consumer in consumers:
        consumer.free()


# --- giving: lifetimes ---------------------------------------------------------------------------


@pytest.mark.parametrize("max_version", [None, pytest.param((1, 0), marks=versioned)])
@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_memory_lives_as_long_as_any_consumer(
    pool: SlabPool, order: tuple[int, ...], max_version: Any
) -> None:
    """Two consumers, a capsule that nobody takes and the tensor, in whatever order they go."""
    tensor = empty_device(4)
    first = Consumer(tensor.__dlpack__(max_version=max_version))
    second = Consumer(tensor.__dlpack__(max_version=max_version))
    holders: list[Any] = [tensor, tensor.__dlpack__(max_version=max_version)]
    del tensor

    def forget(which: int) -> None:
        holders[which] = None

    ends: list[Callable[[], None]] = [
        first.free, second.free, lambda: forget(0), lambda: forget(1)
    ]  # fmt: skip
    for left, which in enumerate(order, start=1):
        assert pool.stats().views == 1
        ends[which]()
        assert pool.stats().views == (1 if left < 4 else 0)


def test_consumers_free_in_threads_that_python_does_not_know_of(pool: SlabPool) -> None:
    """The deleter takes what locks it needs; it is called without any, from everywhere."""
    consumers = [Consumer(empty_device(64).to_dlpack()) for _ in range(200)]
    assert pool.stats().views == 200
    threads = [
        threading.Thread(target=lambda part=consumers[i::4]: [c.free() for c in part])  # type: ignore[misc]
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pool.stats().views == 0


@pytest.mark.usefixtures("pool")
def test_capsule_dropped_while_an_exception_flies_does_not_swallow_it() -> None:
    """Its destructor runs in the middle of the unwinding and leaves the exception alone."""

    def fail() -> None:
        capsule = empty_device(3).to_dlpack()
        raise KeyError(str(capsule is None))

    with pytest.raises(KeyError):
        fail()


def test_thousands_of_exchanges_leak_nothing(pool: SlabPool) -> None:
    """References, capsules and memory are all given back."""
    tensor = empty_device(4)
    producer = cuda_producer((4,))
    before = references(memory_of(tensor)), references(pool)
    for _ in range(2000):
        tensor.to_dlpack()
        Consumer(tensor.to_dlpack()).free()
        Tensor.from_dlpack("x", producer).to_dlpack()
    assert (references(memory_of(tensor)), references(pool)) == before
    assert producer.freed == 2000


# --- giving: the CUDA array interface ------------------------------------------------------------


def test_cuda_array_interface_is_version_three(pool: SlabPool, driver: FakeCuda) -> None:
    """Whoever reads it waits for the default stream, which has the data complete."""
    tensor = empty_device((2, 3), np.float16)
    memory_of(tensor).copy_in(b"ab", stream=9)
    assert tensor.__cuda_array_interface__ == {
        "shape": (2, 3),
        "typestr": "<f2",
        "data": (memory_of(tensor).address, False),
        "strides": None,
        "stream": 1,
        "version": 3,
    }
    assert driver.synchronized == [9]
    del tensor
    pool.take_releases()
    assert driver.synchronized[-1] == 0


@pytest.mark.usefixtures("pool")
def test_cuda_array_interface_of_other_types() -> None:
    """Booleans have one; nothing has no address; bfloat16 has no name there."""
    assert empty_device(2, bool).__cuda_array_interface__["typestr"] == "|b1"
    assert empty_device((0, 2)).__cuda_array_interface__["data"] == (0, False)
    assert not hasattr(empty_device(2, "BF16"), "__cuda_array_interface__")
    assert not hasattr(Tensor("c", np.ones(1)), "__cuda_array_interface__")


# --- taking --------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_capsule", [True, False])
def test_a_librarys_memory_is_taken_and_freed_once(by_capsule: bool, pool: SlabPool) -> None:
    """It is asked to have the data complete for our stream, and gets its memory back."""
    producer = cuda_producer((2, 3))
    tensor = Tensor.from_dlpack("x", producer.capsule() if by_capsule else producer)
    assert isinstance(tensor, DeviceTensor)
    assert (tensor.triton_dtype(), tensor.shape()) == (DataType.FP32, [2, 3])
    memory = memory_of(tensor)
    assert isinstance(memory, ForeignMemory)
    assert memory.address == ctypes.addressof(producer.memory)
    assert (memory.nbytes, memory.device, memory.stream, memory.pool) == (24, 2, 0, pool)
    assert producer.streams == ([] if by_capsule else [1])
    assert producer.managed.tensor.device_type == 2, "its deleter finds what it made"
    assert tensor.copy_to_numpy().tobytes() == bytes(range(24))
    del tensor
    gc.collect()
    assert producer.freed == 0
    del memory
    gc.collect()
    assert producer.freed == 1


@pytest.mark.parametrize(("dtype", "code"), [*CODES.items(), ("BF16", BFLOAT16)])
@pytest.mark.usefixtures("pool")
def test_types_are_recognised(dtype: str, code: tuple[int, int]) -> None:
    """Each of DLPack's types is its data type."""
    tensor = Tensor.from_dlpack("x", cuda_producer((2,), dtype=code))
    assert tensor.triton_dtype() == empty_device(2, dtype).triton_dtype()
    assert memory_of(tensor).nbytes == 2 * code[1] // 8


@pytest.mark.parametrize("shape", [(), (0,), (0, 3)])
@pytest.mark.parametrize("is_null", [True, False])
@pytest.mark.usefixtures("pool")
def test_scalars_and_nothing_are_taken(shape: tuple[int, ...], is_null: bool) -> None:
    """Where nothing is, the address may be null; it goes on to others."""
    producer = cuda_producer(shape, is_null=is_null and shape != ())
    tensor = Tensor.from_dlpack("x", producer)
    assert memory_of(tensor).nbytes == (4 if shape == () else 0)
    number, _, body = tensor._host_body()
    assert (number, body.nbytes) == (DataType.FP32, memory_of(tensor).nbytes)
    consumer = Consumer(tensor.to_dlpack())
    assert consumer.shape == shape
    assert consumer.address == memory_of(tensor).address
    consumer.free()
    del tensor
    gc.collect()
    assert producer.freed == 1


@pytest.mark.usefixtures("pool")
def test_offset_into_the_memory_is_respected() -> None:
    """The data begins `byte_offset` behind the pointer."""
    tensor = Tensor.from_dlpack("x", cuda_producer((2,), dtype=CODES["u1"], byte_offset=5))
    assert isinstance(tensor, DeviceTensor)
    assert tensor.copy_to_numpy().tolist() == [5, 6]


@pytest.mark.parametrize(
    ("producer", "told"),
    [
        (cuda_producer((2, 3), (1, 2)), "^DLPack tensor is not contiguous. Only contiguous"),
        (cuda_producer((2,), ordinal=1), "is GPU 1, while this process works on GPU 2. .*to GPU 2"),
    ],
    ids=["order", "ordinal"],
)
@pytest.mark.parametrize("by_capsule", [True, False])
@pytest.mark.usefixtures("pool")
def test_what_cannot_be_used_stays_its_producers(
    producer: Producer, told: str, by_capsule: bool
) -> None:
    """The capsule is as it was, and nothing was freed."""
    capsule = producer.capsule()
    with pytest.raises(TritonModelException, match=told):
        Tensor.from_dlpack("x", capsule if by_capsule else producer)
    assert is_valid(capsule, b"dltensor")
    assert producer.freed == 0
    assert producer.managed.tensor.device_type == 2
    assert (producer.managed.tensor.code, producer.managed.tensor.bits) == CODES["f4"]


@pytest.mark.usefixtures("pool")
def test_types_that_no_tensor_has_are_invalid() -> None:
    """The capsule is left to its producer."""
    producer = cuda_producer((2,), dtype=(5, 64))
    assert Tensor.from_dlpack("x", producer).triton_dtype() == DataType.INVALID
    assert producer.freed == 0


def test_other_drivers_cannot_read_a_librarys_memory() -> None:
    """Their addresses are of another kind: what, why and what to do."""
    producer = cuda_producer((2,), ordinal=0)
    with pool_in_use(EmulatedDriver()):
        for source in (producer, producer.capsule()):
            with pytest.raises(TritonModelException, match="'emulated' .* cannot read it"):
                Tensor.from_dlpack("x", source)
    assert (producer.streams, producer.freed) == ([], 0)


def test_a_librarys_memory_is_given_on(pool: SlabPool, driver: FakeCuda) -> None:
    """Another consumer's stream waits for ours; the memory lives until that one is done."""
    producer = cuda_producer((3,), dtype=CODES["u1"])
    tensor = Tensor.from_dlpack("x", producer)
    consumer = Consumer(tensor.__dlpack__(stream=77))
    assert driver.synchronized == [0]
    assert consumer.address == ctypes.addressof(producer.memory)
    assert consumer.device == (2, 2)
    address = tensor.__cuda_array_interface__["data"][0]  # type: ignore[attr-defined]
    assert address == consumer.address
    assert driver.synchronized == [0, 77]
    del tensor
    gc.collect()
    assert producer.freed == 0
    consumer.free()
    gc.collect()
    assert producer.freed == 1
    assert pool.stats().views == 0


@pytest.mark.parametrize("delay_s", [0.0, math.inf])
@pytest.mark.usefixtures("pool")
def test_a_librarys_memory_is_copied_to_the_pool_and_back() -> None:
    """Copies are finished where a library's memory is concerned: it may be gone then."""
    producer = cuda_producer((4,), dtype=CODES["u1"])
    foreign = Tensor.from_dlpack("x", producer)
    ours = empty_device(4, np.uint8).copy_from(foreign)
    producer.memory[0] = 99
    assert ours.copy_to_numpy().tolist() == [0, 1, 2, 3]
    assert isinstance(foreign, DeviceTensor)
    foreign.copy_from(np.array([7, 7, 7, 7], np.uint8))
    assert bytes(producer.memory[:5]) == bytes([7, 7, 7, 7, 4])
    foreign.copy_from(ours)
    assert bytes(producer.memory[:5]) == bytes([0, 1, 2, 3, 4])


def test_what_lies_in_the_pool_is_adopted_and_not_copied(pool: SlabPool, driver: FakeCuda) -> None:
    """A library's view of our memory comes back as our memory."""
    tensor = empty_device(4, np.uint8).copy_from(np.arange(4, dtype=np.uint8))
    back = Tensor.from_dlpack("OUT", tensor.to_dlpack())
    memory = memory_of(back)
    assert isinstance(memory, ForeignMemory)
    adopted = pool.adopt(memory.address, memory.nbytes, stream=memory.stream)
    assert adopted is not None
    assert adopted.address == memory_of(tensor).address
    assert adopted.slot == memory_of(tensor).slot
    assert driver.counters().copies_within == 0


def test_producer_that_changes_its_mind_is_refused(pool: SlabPool) -> None:
    """The capsule's device counts, whatever was said before."""

    class Liar(Producer):
        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 2)

    producer = Liar((2,), device=2, ordinal=0)
    with pytest.raises(TritonModelException, match="is GPU 0"):
        Tensor.from_dlpack("x", producer)
    assert producer.freed == 0
    assert pool.stats().views == 0
