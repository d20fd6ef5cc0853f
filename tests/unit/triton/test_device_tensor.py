# SPDX-License-Identifier: Apache-2.0
"""Tensors on a device that is none: made, filled, read, named anew, sent; refused to libraries."""

from __future__ import annotations

import itertools
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from actorserve.device.driver import OutOfDeviceMemory
from actorserve.device.emulated import EmulatedDriver
from actorserve.device.pool import SlabPool
from actorserve.errors import InvalidArgument
from actorserve.triton.device_tensor import DeviceTensor, current_pool, use_pool
from actorserve.triton.pb_utils import (
    InferenceResponse,
    Tensor,
    TritonModelException,
    empty_device,
)
from actorserve.wire.tensors import DataType
from tests.unit.triton.device_pools import pool_in_use

NUMBERS = ["?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"]


@pytest.fixture(params=[0.0, math.inf], ids=["at once", "deferred"])
def pool(request: pytest.FixtureRequest) -> Iterator[SlabPool]:
    """Return the pool in use; copies are done at once, or when somebody waits for them."""
    with pool_in_use(EmulatedDriver(delay_s=request.param)) as made:
        yield made


def on_device(array: Any, name: str = "x") -> DeviceTensor:
    """Return a tensor on the device with an array's content."""
    array = np.asarray(array)
    return empty_device(array.shape, array.dtype, name).copy_from(array)


# --- to the device and back ----------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (0,), (1, 0), (7,), (2, 3, 4)])
@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.usefixtures("pool")
def test_what_is_put_in_comes_out(dtype: str, shape: tuple[int, ...]) -> None:
    """Each data type, scalars and nothing too; the copy is the caller's."""
    array = np.arange(math.prod(shape)).astype(dtype).reshape(shape)
    tensor = on_device(array)
    copy = tensor.copy_to_numpy()
    assert copy.dtype == array.dtype
    assert copy.shape == array.shape
    assert copy.tobytes() == array.tobytes()
    assert copy.flags.writeable
    assert tensor.triton_dtype() == DataType.of_dtype(array.dtype)
    assert tensor.shape() == list(shape)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.arange(6, dtype="i4").reshape(3, 2).T,
        np.arange(12, dtype="i4").reshape(2, 6)[:, ::2],
        np.arange(6, dtype="q").astype("l").reshape(2, 3),
    ],
    ids=["big-endian", "transposed", "strided", "other char"],
)
@pytest.mark.usefixtures("pool")
def test_arrays_go_in_row_major_and_little_endian(array: Any) -> None:
    """However they lie on the host; what is done to them later is not seen."""
    tensor = empty_device(array.shape, array.dtype)
    expected = array.tolist()
    tensor.copy_from(array)
    array[...] = 0
    assert tensor.copy_to_numpy().tolist() == expected


@pytest.mark.parametrize("kind", ["BF16", "TYPE_BF16", DataType.BF16])
@pytest.mark.usefixtures("pool")
def test_bf16_goes_as_words(kind: Any) -> None:
    """As uint16, for numpy has nothing better."""
    words = np.array([0x3F80, 0x4000], np.uint16)
    tensor = empty_device(2, kind)
    assert tensor.triton_dtype() == DataType.BF16
    assert tensor.copy_from(words).copy_to_numpy().tolist() == words.tolist()


@pytest.mark.usefixtures("pool")
def test_bf16_goes_from_arrays_where_a_package_has_it() -> None:
    """What calls itself bfloat16 is one."""
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    tensor = empty_device(2, bfloat16).copy_from(np.array([3.0, 1.0], bfloat16))
    assert tensor.triton_dtype() == DataType.BF16
    assert tensor.copy_to_numpy().tolist() == [0x4040, 0x3F80]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("FP16", 10), ("TYPE_INT64", 9), (DataType.BOOL, 1), (bool, 1), (np.float32, 11), ("<f8", 12)],
)
@pytest.mark.usefixtures("pool")
def test_types_have_many_names(dtype: Any, expected: int) -> None:
    """numpy's, the protocol's and the configuration's."""
    assert int(empty_device([2], dtype).triton_dtype()) == expected


@pytest.mark.usefixtures("pool")
def test_tensors_are_filled_from_tensors() -> None:
    """From one on the CPU, and on the device without the host."""
    array = np.arange(5, dtype=np.int16)
    first = empty_device(5, np.int16).copy_from(Tensor("c", array))
    second = empty_device((5,), np.int16).copy_from(first)
    first.copy_from(np.zeros(5, np.int16))
    assert second.copy_to_numpy().tolist() == array.tolist()
    assert first.copy_to_numpy().tolist() == [0] * 5


@pytest.mark.usefixtures("pool")
def test_a_copy_on_the_device_waits_for_the_sources_stream() -> None:
    """And not only for the one that it is done on; on that one both are in use from then on."""
    source, target = empty_device(4, np.uint8), empty_device(4, np.uint8)
    source._memory.copy_in(b"abcd", stream=9)  # type: ignore[call-arg]
    target.copy_from(source)
    assert (source._memory.stream, target._memory.stream) == (0, 0)
    assert target.copy_to_numpy().tobytes() == b"abcd"


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (np.zeros(3, np.float32), r"shape \[3\] and type float32"),
        (np.zeros((2, 1), np.float32), r"shape \[2, 1\]"),
        (np.zeros(2, np.int32), "type int32"),
        (np.array(["a", "b"], np.object_), "type object"),
        (np.zeros(2, np.complex64), "type complex64"),
        (Tensor("y", np.zeros(2, np.float64)), "type FP64"),
        (Tensor("y", np.array([b"a", b"b"])), "type BYTES"),
    ],
)
@pytest.mark.usefixtures("pool")
def test_what_does_not_fit_is_refused(source: Any, told: str) -> None:
    """Nothing is converted in silence."""
    with pytest.raises(TritonModelException, match=rf"^Tensor 'x' of shape \[2\] and .*{told}"):
        empty_device(2, np.float32, "x").copy_from(source)


@pytest.mark.parametrize("source", [None, [1.0, 2.0], b"12345678"])
@pytest.mark.usefixtures("pool")
def test_only_arrays_and_tensors_fill(source: Any) -> None:
    """Anything else is a TypeError."""
    with pytest.raises(TypeError, match="takes a numpy array or a Tensor"):
        empty_device(2).copy_from(source)


# --- as a tensor ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("pool")
def test_a_tensor_on_the_device_says_so() -> None:
    """It is a Tensor; the text of as_numpy() is the documented one."""
    tensor = on_device([1.0, 2.0])
    assert isinstance(tensor, Tensor)
    assert not tensor.is_cpu()
    assert Tensor("x", np.ones(1)).is_cpu()
    assert tensor.name() == "x"
    with pytest.raises(TritonModelException) as caught:
        tensor.as_numpy()
    assert str(caught.value) == "Tensor is stored in GPU and cannot be converted to NumPy."
    assert InferenceResponse([tensor]).output_tensors() == [tensor]
    assert repr(tensor) == "Tensor('x', FP64, [2])"


def test_what_travels_is_memory_or_a_copy(pool: SlabPool) -> None:
    """The device's body is the buffer itself; the host's is a finished copy of it."""
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    tensor = on_device(array)
    body = tensor._device_body()
    assert body is not None
    number, shape, memory = body
    assert (number, shape, memory.nbytes) == (DataType.INT32, (2, 3), 24)
    assert memory.pool is pool
    for number, shape, copy in (tensor._host_body(), tensor._body()):
        assert (number, shape, copy.shape) == (DataType.INT32, (2, 3), (24,))
        assert copy.tobytes() == array.tobytes()
        assert type(copy) is np.ndarray and copy.dtype == np.uint8


def test_tensors_on_the_cpu_have_only_a_body_of_the_host() -> None:
    """And it is the array itself."""
    array = np.ones(3)
    tensor = Tensor("x", array)
    assert tensor._device_body() is None
    assert tensor._host_body()[2] is array


def test_a_name_is_given_without_a_copy(pool: SlabPool) -> None:
    """`from_dlpack` of one of ours works on every driver: it is the same memory."""
    unnamed = empty_device(4, np.float32)
    assert unnamed.name() == ""
    named = Tensor.from_dlpack("OUT", unnamed)
    assert named.name() == "OUT"
    unnamed.copy_from(np.arange(4, dtype=np.float32))
    del unnamed
    assert isinstance(named, DeviceTensor)
    assert named.copy_to_numpy().tolist() == [0.0, 1.0, 2.0, 3.0]
    assert pool.stats().views == 1
    with pytest.raises(TritonModelException, match="cannot be an empty string"):
        Tensor.from_dlpack("", named)


def test_received_memory_goes_on_as_it_came(pool: SlabPool) -> None:
    """An input is passed on as a reference to the same block."""
    buffer = pool.allocate(8)
    assert buffer is not None
    buffer.copy_in(b"abcdefgh")
    ref = pool.lend(buffer, peer=7)
    tensor = Tensor._on_device("in", DataType.UINT8, (8,), pool.borrow(ref))
    del buffer
    body = Tensor.from_dlpack("out", tensor)._device_body()
    assert body is not None
    again = pool.lend(body[2], peer=8)  # type: ignore[arg-type]
    assert again.key == ref.key
    assert tensor._host_body()[2].tobytes() == b"abcdefgh"


@pytest.mark.parametrize(
    ("number", "shape", "told"),
    [
        (DataType.FP32, (3,), r"needs 12 bytes, and has 8 on the device"),
        (DataType.FP64, (), "^tensor 'x' .* has 8"),
        (DataType.BYTES, (2,), "^tensor 'x' of type BYTES cannot lie on a device"),
        (DataType.INVALID, (8,), "type INVALID"),
        (DataType.INT8, (-8,), "expected 0 or more"),
    ],
)
def test_memory_that_does_not_fit_is_refused(
    pool: SlabPool, number: int, shape: tuple[int, ...], told: str
) -> None:
    """A tensor never reaches beyond its memory."""
    if shape == ():
        number = DataType.UINT8
    with pytest.raises(InvalidArgument, match=told):
        Tensor._on_device("x", number, shape, pool.allocate(8))  # type: ignore[arg-type]


def test_nobody_makes_one_of_an_array() -> None:
    """The class's own door is shut."""
    with pytest.raises(TypeError, match="empty_device"):
        DeviceTensor("x", np.ones(1))


# --- libraries -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        lambda tensor: tensor.to_dlpack(),
        lambda tensor: tensor.__dlpack__(stream=1),
        lambda tensor: tensor.__dlpack_device__(),
        np.from_dlpack,
    ],
    ids=["to_dlpack", "__dlpack__", "__dlpack_device__", "numpy"],
)
@pytest.mark.usefixtures("pool")
def test_memory_that_no_library_can_read_is_not_shown(use: Callable[[Any], object]) -> None:
    """What, why and what to do; as an error that models and that DLPack know."""
    told = (
        r"^Tensor 'x' lies on a device of the driver 'emulated', whose memory no other library "
        r"can use, .* `copy_to_numpy\(\)` gives a copy"
    )
    tensor = on_device([1.0])
    with pytest.raises(TritonModelException, match=told):
        use(tensor)
    with pytest.raises(BufferError, match=told):
        use(tensor)


@pytest.mark.usefixtures("pool")
def test_there_is_no_cuda_array_interface_without_cuda() -> None:
    """Libraries that look for it find none; who asks is told why."""
    tensor = on_device([1.0])
    assert not hasattr(tensor, "__cuda_array_interface__")
    assert not hasattr(Tensor("c", np.ones(1)), "__cuda_array_interface__")
    with pytest.raises(AttributeError, match=r"driver 'emulated'.*copy_to_numpy"):
        tensor.__cuda_array_interface__  # noqa: B018


@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.1.0", reason="numpy cannot ask")
@pytest.mark.usefixtures("pool")
def test_a_consumer_may_ask_for_a_copy_on_the_cpu() -> None:
    """By the device that it names, with every driver."""
    tensor = on_device(np.arange(3, dtype=np.float32))
    first = np.from_dlpack(tensor, device="cpu")  # type: ignore[call-overload]
    second = np.from_dlpack(tensor, device="cpu", copy=True)  # type: ignore[call-overload]
    assert first.tolist() == second.tolist() == [0.0, 1.0, 2.0]
    assert not np.shares_memory(first, second)


@pytest.mark.usefixtures("pool")
def test_a_consumer_that_wants_no_copy_gets_none_on_the_cpu() -> None:
    """It is told, and not deceived."""
    with pytest.raises(BufferError, match="without a copy"):
        on_device([1.0]).__dlpack__(dl_device=(1, 0), copy=False)


# --- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_memory_lives_as_long_as_anything_made_of_it(
    pool: SlabPool, order: tuple[int, ...]
) -> None:
    """Whatever dies first."""
    tensor = on_device(np.arange(3))
    holders: list[Any] = [tensor, Tensor.from_dlpack("y", tensor), Tensor.from_dlpack("z", tensor)]
    del tensor
    for left, index in enumerate(order, start=1):
        holders[index] = None
        assert pool.stats().views == (0 if left == 3 else 1)


def test_threads_make_and_drop_tensors_of_one_pool(pool: SlabPool) -> None:
    """Each sees its own bytes, and everything is given back."""
    wrong: list[object] = []

    def work(seed: int) -> None:
        for i in range(100):
            array = np.full(64, seed * 1000 + i)
            tensor = Tensor.from_dlpack("x", on_device(array))
            if not np.array_equal(tensor._host_body()[2].view(array.dtype), array):
                wrong.append((seed, i))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert pool.stats().used_bytes == 0


def test_full_devices_fail_the_one_who_asks() -> None:
    """Also where other tensors would go by host memory: this one was asked for on the device."""
    for settings in ({"full": "error"}, {"full": "host"}, {"max_bytes": 64 << 10}):
        with pool_in_use(EmulatedDriver(), **settings):
            kept = empty_device(60 << 10, np.uint8)
            with pytest.raises(OutOfDeviceMemory, match=str(60 << 10)):
                empty_device(60 << 10, np.uint8)
            assert empty_device(512, np.uint8).shape() == [512]
            del kept


# --- where there is no device --------------------------------------------------------------------


def test_without_a_device_none_is_made() -> None:
    """The text says why and what to do."""
    assert current_pool() is None
    with pytest.raises(TritonModelException, match=r"no device memory in this process.*numpy"):
        empty_device(3)


def test_the_pool_is_what_the_stub_says() -> None:
    """And is no more when the stub takes it back."""
    with pool_in_use(EmulatedDriver()) as pool:
        assert current_pool() is pool
        use_pool(None)
        with pytest.raises(TritonModelException):
            empty_device(3)


@pytest.mark.usefixtures("pool")
def test_a_forked_child_has_no_device() -> None:
    """Its parent's context is of no use to it."""
    kept = on_device([1.0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            empty_device(3)
        except TritonModelException:
            os._exit(0 if current_pool() is None else 2)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert kept.copy_to_numpy().tolist() == [1.0]


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        (((2,), np.object_), TritonModelException, "cannot lie on a device"),
        (((2,), "TYPE_STRING"), TritonModelException, "cannot lie on a device"),
        (((2,), "U3"), TritonModelException, "cannot lie on a device"),
        (((2,), np.complex64), TritonModelException, "cannot lie on a device"),
        (((2,), "FP99"), TypeError, "'FP99' is no data type"),
        (((-1,), "f4"), TritonModelException, "^empty_device: dimension 0"),
        (((1 << 40, 1 << 40), "f4"), TritonModelException, "too many elements"),
        (((2,), "f4", None), TypeError, "name"),
        (("2", "f4"), TypeError, "shape"),
        ((2.0, "f4"), TypeError, "shape"),
    ],
)
@pytest.mark.usefixtures("pool")
def test_wrong_arguments_are_refused(arguments: Any, error: type[Exception], told: str) -> None:
    """Before any memory is taken."""
    with pytest.raises(error, match=told):
        empty_device(*arguments)
