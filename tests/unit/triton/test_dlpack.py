# SPDX-License-Identifier: Apache-2.0
"""DLPack on the CPU, against numpy and against a producer and a consumer made by hand."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from actorserve.triton.pb_utils import Tensor, TritonModelException
from actorserve.wire.tensors import DataType
from tests.unit.triton.dlpack_by_hand import BFLOAT16, CODES, Consumer, Producer, references

# --- giving --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", CODES)
def test_capsule_tells_type_shape_and_place(dtype: str) -> None:
    """A consumer sees the array's own memory, contiguous, on the CPU."""
    array = np.ones((2, 3), dtype)
    consumer = Consumer(Tensor("x", array).to_dlpack())
    assert consumer.dtype == CODES[dtype]
    assert consumer.shape == (2, 3)
    assert consumer.device == (1, 0) == Tensor("x", array).__dlpack_device__()
    assert not consumer.has_strides
    assert consumer.address == array.ctypes.data
    consumer.free()


def test_memory_lives_until_the_consumer_is_done() -> None:
    """The tensor and the model's array may go before the consumer does."""
    array = np.arange(4, dtype=np.int32)
    before = references(array)
    tensor = Tensor("x", array)
    consumer = Consumer(tensor.to_dlpack())
    del tensor
    assert references(array) > before
    consumer.free()
    assert references(array) == before


def test_capsule_that_nobody_takes_frees_itself() -> None:
    """Both counts return when the capsule is dropped."""
    array = np.arange(4, dtype=np.int32)
    tensor = Tensor("x", array)
    before = references(array), references(tensor)
    capsule = tensor.to_dlpack()
    assert references(array) > before[0]
    del capsule
    assert (references(array), references(tensor)) == before


def test_capsule_dropped_while_an_exception_flies_does_not_swallow_it() -> None:
    """Its destructor runs in the middle of the unwinding and leaves the exception alone."""

    def fail() -> None:
        capsule = Tensor("x", np.ones(3)).to_dlpack()
        raise KeyError(str(capsule is None))

    with pytest.raises(KeyError):
        fail()


@pytest.mark.parametrize("dtype", [d for d in CODES if d != "?"])
def test_numpy_takes_tensors(dtype: str) -> None:
    """`np.from_dlpack(tensor)` is the tensor's memory."""
    array = np.arange(6).astype(dtype).reshape(2, 3)
    tensor = Tensor("x", array)
    before = references(array)
    taken = np.from_dlpack(tensor)  # type: ignore[arg-type]
    assert taken.dtype == array.dtype
    assert taken.tolist() == array.tolist()
    assert np.shares_memory(taken, array)
    del taken
    assert references(array) == before


def test_read_only_memory_is_copied() -> None:
    """A capsule cannot say that it must not be written to."""
    array = np.arange(4, dtype=np.int32)
    array.flags.writeable = False
    consumer = Consumer(Tensor("x", array).to_dlpack())
    assert consumer.address != array.ctypes.data
    consumer.free()


def test_bytes_have_no_dlpack() -> None:
    """The text is the documented one, by either door."""
    tensor = Tensor("x", np.array(["a"], np.object_))
    for give in (tensor.to_dlpack, tensor.__dlpack__):
        with pytest.raises(TritonModelException, match=r"^DLPack does not have support for string"):
            give()


@pytest.mark.parametrize("kind", [bytes, bytearray, lambda b: np.frombuffer(bytearray(b), "u1")])
def test_bf16_goes_by_dlpack(kind: Callable[[bytes], Any]) -> None:
    """A received BF16 tensor is given as bfloat16, the same memory each time."""
    raw = b"\x80\x3f\x00\x40\x40\x40"
    tensor = Tensor._received("x", DataType.BF16, (3,), kind(raw))
    first, second = Consumer(tensor.to_dlpack()), Consumer(tensor.to_dlpack())
    assert first.dtype == second.dtype == BFLOAT16
    assert first.address == second.address
    assert ctypes.string_at(first.address, 6) == raw
    first.free()
    second.free()
    assert tensor._body()[2].tobytes() == raw


# --- taking --------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_capsule", [True, False])
def test_producers_memory_is_taken_and_freed_once(by_capsule: bool) -> None:
    """The deleter runs when the last array goes, not before and not twice."""
    producer = Producer((2, 3))
    tensor = Tensor.from_dlpack("x", producer.capsule() if by_capsule else producer)
    array = tensor.as_numpy()
    assert array.dtype == np.float32
    assert array.shape == (2, 3)
    assert array.tobytes() == bytes(range(24))
    array[0, 0] = 0.0
    assert bytes(producer.memory[:4]) == b"\x00" * 4
    assert tensor._body()[2] is array
    del tensor
    gc.collect()
    assert producer.freed == 0
    del array
    gc.collect()
    assert producer.freed == 1
    assert producer.streams == ([] if by_capsule else [None])


@pytest.mark.parametrize(("dtype", "code"), CODES.items())
def test_types_are_recognised(dtype: str, code: tuple[int, int]) -> None:
    """Each of DLPack's types is its data type."""
    tensor = Tensor.from_dlpack("x", Producer((2,), dtype=code))
    assert tensor.as_numpy().dtype == np.dtype(dtype)
    assert tensor.triton_dtype() == DataType.of_dtype(np.dtype(dtype))


def test_bf16_is_taken_by_dlpack() -> None:
    """Bfloat16 comes in, cannot be an array, and is sent as it came."""
    producer = Producer((3,), dtype=BFLOAT16)
    tensor = Tensor.from_dlpack("x", producer)
    assert tensor.triton_dtype() == DataType.BF16
    with pytest.raises(TritonModelException, match="BF16"):
        tensor.as_numpy()
    assert tensor._body()[2].tobytes() == bytes(range(6))
    del tensor
    gc.collect()
    assert producer.freed == 1


@pytest.mark.parametrize(
    "producer",
    [Producer((2,), dtype=(5, 64)), Producer((2,), dtype=(2, 8)), Producer((2,), lanes=4)],
    ids=["complex", "unknown bits", "lanes"],
)
def test_types_that_no_tensor_has_are_invalid(producer: Producer) -> None:
    """The capsule is left to its producer."""
    tensor = Tensor.from_dlpack("x", producer)
    assert tensor.triton_dtype() == DataType.INVALID
    assert producer.freed == 0


def test_offset_into_the_memory_is_respected() -> None:
    """The data begins `byte_offset` behind the pointer."""
    tensor = Tensor.from_dlpack("x", Producer((2,), dtype=CODES["u1"], byte_offset=5))
    assert tensor.as_numpy().tolist() == [5, 6]


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((2, 3), (3, 1)), ((1, 3), (77, 1)), ((3, 1), (1, 9)), ((0, 3), (5, 5)), ((1, 1), (8, 8))],
)
def test_c_order_is_taken(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """Strides of extents of 1, and of tensors without elements, do not matter."""
    producer = Producer(shape, strides)
    tensor = Tensor.from_dlpack("x", producer)
    assert tensor.shape() == list(shape)
    assert tensor.as_numpy().shape == shape


@pytest.mark.parametrize(
    ("shape", "strides"), [((2, 3), (1, 2)), ((2, 2), (4, 1)), ((3,), (2,)), ((3,), (-1,))]
)
def test_other_orders_are_refused(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """The text is the documented one, and the producer keeps its memory."""
    producer = Producer(shape, strides)
    with pytest.raises(TritonModelException) as caught:
        Tensor.from_dlpack("x", producer)
    assert str(caught.value) == (
        "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in "
        "C-Order are supported."
    )
    assert producer.freed == 0


@pytest.mark.parametrize("shape", [(), (0,), (1, 0), (2, 2)])
def test_tensors_take_tensors(shape: tuple[int, ...]) -> None:
    """A tensor is a producer like any other, whatever its shape."""
    array = np.ones(shape, np.float32)
    before = references(array)
    tensor = Tensor.from_dlpack("y", Tensor("x", array))
    assert tensor.name() == "y"
    assert tensor.as_numpy().shape == shape
    assert tensor.as_numpy().flags.writeable
    del tensor
    assert references(array) == before


def test_pinned_host_memory_counts_as_the_cpus() -> None:
    """Device type 3 is the CPU's memory, pinned."""
    assert Tensor.from_dlpack("x", Producer((2,), device=3)).is_cpu()


@pytest.mark.parametrize(
    ("device", "text"),
    [
        (2, "^Provided tensor lies on a GPU, and this process has no"),
        (7, "^DLDevice type 7 is not support by Python backend.$"),
    ],
)
@pytest.mark.parametrize("by_capsule", [True, False])
def test_other_devices_are_refused(device: int, text: str, by_capsule: bool) -> None:
    """Memory elsewhere cannot be taken, and is not asked for."""
    producer = Producer((2,), device=device)
    with pytest.raises(TritonModelException, match=text):
        Tensor.from_dlpack("x", producer.capsule() if by_capsule else producer)
    assert producer.streams == []


@pytest.mark.parametrize("source", [None, 3, "x", object(), np.float32])
def test_what_is_no_dlpack_tensor_is_refused(source: object) -> None:
    """Not with a TypeError, whatever it is and whatever the name."""
    for name in ("OUTPUT0", ""):
        with pytest.raises(TritonModelException):
            Tensor.from_dlpack(name, source)
    with pytest.raises(TritonModelException, match="or have `__dlpack__` and `__dlpack_device__`"):
        Tensor.from_dlpack("x", source)


def test_capsule_is_taken_once() -> None:
    """The second time says that it is used."""
    producer = Producer((2,))
    capsule = producer.capsule()
    tensor = Tensor.from_dlpack("x", capsule)
    with pytest.raises(TritonModelException, match="still to be consumed"):
        Tensor.from_dlpack("y", capsule)
    del tensor
    gc.collect()
    assert producer.freed == 1


def test_producer_that_gives_no_capsule_is_refused() -> None:
    """What `__dlpack__` returns is looked at."""

    class Liar(Producer):
        def __dlpack__(self, stream: object = None) -> object:
            return 42

    with pytest.raises(TritonModelException, match="must return a DLPack capsule, got 42"):
        Tensor.from_dlpack("x", Liar((1,)))


def test_ten_thousand_exchanges_leak_nothing() -> None:
    """References and capsules are all given back."""
    array = np.ones(4, np.float32)
    before = references(array)
    producer = Producer((4,))
    for _ in range(10_000):
        Tensor("x", array).to_dlpack()
        Tensor.from_dlpack("x", Tensor("x", array)).as_numpy()
        Tensor.from_dlpack("x", producer)
    assert references(array) == before
    assert producer.freed == 10_000
