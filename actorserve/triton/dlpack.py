# SPDX-License-Identifier: Apache-2.0
"""Tensors by DLPack: capsules made of memory, and memory taken over from capsules.

Both ways go through numpy, which makes, takes and frees capsules in C, with any thread and any
consumer; what numpy does not know (bfloat16; bool before 1.25; every device but the CPU) passes
as unsigned integers of the same size on the CPU, and the capsule is put right afterwards. A
destructor of our own would be a ctypes callback, and a capsule may die while an exception is on
its way: the callback would swallow it. Arrays over device memory are never seen outside.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from actorserve.triton.device_memory import ForeignMemory, Memory, pool_for_cuda
from actorserve.triton.error import TritonModelException
from actorserve.wire.tensors import BY_NUMBER, DataType, element_count

Array = npt.NDArray[Any]

CPU = 1
CUDA = 2
CUDA_HOST = 3

_NAME = b"dltensor"
_VERSIONED_NAME = b"dltensor_versioned"
_LEGACY_STREAM = 1
"""DLPack's number of CUDA's default stream, which is 0 for the driver."""

# DLPack's (code, bits) of each data type: 0 int, 1 uint, 2 float, 4 bfloat, 6 bool.
_CODE_BITS: dict[int, tuple[int, int]] = {
    DataType.BOOL: (6, 8),
    DataType.UINT8: (1, 8),
    DataType.UINT16: (1, 16),
    DataType.UINT32: (1, 32),
    DataType.UINT64: (1, 64),
    DataType.INT8: (0, 8),
    DataType.INT16: (0, 16),
    DataType.INT32: (0, 32),
    DataType.INT64: (0, 64),
    DataType.FP16: (2, 16),
    DataType.FP32: (2, 32),
    DataType.FP64: (2, 64),
    DataType.BF16: (4, 16),
}
_NUMBERS = {code_bits: number for number, code_bits in _CODE_BITS.items()}


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("number", ctypes.c_int32))


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    """DLPack's DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """DLPack's DLManagedTensor."""

    _fields_ = (
        ("tensor", _Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class _Versioned(ctypes.Structure):
    """DLPack's DLManagedTensorVersioned."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_IS_COPIED = 2
"""The flag of a versioned capsule over a copy that nobody else sees."""

_NUMPY = np.lib.NumpyVersion(np.__version__)
_HAS_VERSIONED = _NUMPY >= "2.1.0"
_NEEDS_LOCK = _NUMPY < "1.25.0"
"""Deleters of old numpys rely on the interpreter's lock, which consumers need not hold."""


class DLPackRefused(TritonModelException, BufferError):
    """What a consumer asks for cannot be had; it is what DLPack wants raised, and models catch."""


# Prototypes of our own: those on ctypes.pythonapi belong to the whole process.
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def export_capsule(
    number: int, array: Array, *, is_versioned: bool = False, is_copy: bool = False
) -> object:
    """Return a capsule over a C-contiguous array, which lives until the consumer is done.

    A capsule without a version cannot say that its memory is read-only, so that of a read-only
    array is a copy. With numpy before 2.1 there are no others.
    """
    is_versioned = is_versioned and _HAS_VERSIONED
    if not array.flags.writeable and not is_versioned:
        array = array.copy()
    capsule, tensor = _make(array.view(f"u{array.itemsize}"), is_versioned, is_copy)
    tensor.dtype.code, tensor.dtype.bits = _CODE_BITS[number]
    return capsule


def export_cuda(
    number: int,
    shape: tuple[int, ...],
    memory: Memory,
    ordinal: int,
    *,
    is_versioned: bool = False,
    is_copy: bool = False,
) -> object:
    """Return a capsule over CUDA memory, which it keeps until the consumer is done."""
    address = memory.address
    dtype = np.dtype(f"<u{BY_NUMBER[number].element_bytes}")
    # Where nothing is, the address may be null, which numpy would not take for one.
    shown = np.asarray(cast(Any, _Memory(memory, address or dtype.itemsize, shape, dtype)))
    capsule, tensor = _make(shown, is_versioned and _HAS_VERSIONED, is_copy)
    tensor.data = address
    tensor.device.kind, tensor.device.number = CUDA, ordinal
    tensor.dtype.code, tensor.dtype.bits = _CODE_BITS[number]
    return capsule


def wants_version(max_version: object) -> bool:
    """Tell whether a consumer that said `max_version` takes capsules with a version."""
    return isinstance(max_version, tuple) and bool(max_version) and max_version[0] >= 1


def driver_stream(stream: object) -> int | None:
    """Return the driver's number of a consumer's CUDA stream, None for -1: nobody is to wait.

    Raises DLPackRefused for what is no stream.
    """
    if stream is None:
        return 0
    if type(stream) is not int or stream == 0 or stream < -1:
        raise DLPackRefused(
            f"{stream!r} is no CUDA stream for `__dlpack__`: expected None, -1 (nobody waits), 1 "
            "(the default stream), 2 (the thread's default stream) or a stream's address."
        )
    if stream == -1:
        return None
    return 0 if stream == _LEGACY_STREAM else stream


def import_tensor(source: object) -> tuple[int, tuple[int, ...], Array | ForeignMemory | None]:
    """Take a capsule, or what gives one, over: return data type, shape and memory, without a copy.

    The memory is an array (uint16 for bfloat16), or CUDA's. A type that no tensor can have is
    INVALID, with no memory. Raises TritonModelException for what is no DLPack tensor, lies where
    this process cannot reach it or is not in C order.
    """
    capsule = _capsule_of(source)
    tensor = _tensor_of(capsule)
    _check_device(tensor.device.kind, tensor.device.number)
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    if tensor.strides and not _is_contiguous(shape, tensor):
        raise TritonModelException(
            "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in "
            "C-Order are supported."
        )
    code = (tensor.dtype.code, tensor.dtype.bits)
    number = _NUMBERS.get(code, 0) if tensor.dtype.lanes == 1 else 0
    if not number:
        return 0, shape, None
    if tensor.device.kind == CUDA:
        return number, shape, _take_cuda(capsule, tensor, shape, BY_NUMBER[number])
    taken = _take(capsule, tensor)
    return number, shape, _writable(taken, BY_NUMBER[number].body_dtype)


def _take(capsule: object, tensor: _Tensor) -> Array:
    """Have numpy take a capsule over; it stays its producer's where that fails."""
    code = tensor.dtype.code
    tensor.dtype.code = 1
    try:
        taken: Array = np.from_dlpack(cast(Any, _Offer(capsule)))
    except BaseException:
        tensor.dtype.code = code
        raise
    return taken


def _take_cuda(
    capsule: object, tensor: _Tensor, shape: tuple[int, ...], datatype: DataType
) -> ForeignMemory:
    """Take CUDA memory over; its producer gets it back when nobody has it any more."""
    ordinal = tensor.device.number
    address = (tensor.data or 0) + tensor.byte_offset
    nbytes = element_count(shape) * datatype.element_bytes
    pool = pool_for_cuda(ordinal)
    tensor.device.kind = CPU
    try:
        taken = _take(capsule, tensor)
    finally:
        tensor.device.kind = CUDA  # its deleter may look, and what numpy took is still this
    owner = taken.base  # a capsule that runs the deleter; the array over it must not be read
    assert owner is not None
    return ForeignMemory(pool, address, nbytes, ordinal, owner)


class _Offer:
    """Hand a bare capsule to numpy."""

    def __init__(self, capsule: object) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: object) -> object:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (CPU, 0)


class _Memory:
    """Memory as numpy takes it, and its owner.

    What numpy took from a capsule it marks as read-only, because the old capsules cannot say what
    they are; to a model, a tensor is writable.
    """

    def __init__(
        self, owner: object, address: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self._owner = owner
        self.__array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": dtype.str,
            "data": (address, False),
        }


def _writable(taken: Array, dtype: np.dtype[Any]) -> Array:
    if taken.size == 0:  # its address may be null
        return np.empty(taken.shape, dtype)
    address = taken.__array_interface__["data"][0]
    return np.asarray(cast(Any, _Memory(taken, address, taken.shape, dtype)))


def _capsule_of(source: object) -> object:
    if _is_valid(source, _NAME):
        return source
    if type(source).__name__ == "PyCapsule":
        raise TritonModelException(
            "Provided capsule is not a DLPack capsule that is still to be consumed: expected the "
            f"name 'dltensor', got {source!r}."
        )
    give: Any = getattr(source, "__dlpack__", None)
    device: Any = getattr(source, "__dlpack_device__", None)
    if give is None or device is None:
        raise TritonModelException(
            "Provided tensor is not supported. Tensor must be a DLPack capsule         or have "
            "`__dlpack__` and `__dlpack_device__` attributes"
        )
    kind, number = map(int, device())
    _check_device(kind, number)
    # The data is to be complete for our default stream, on which all we do with it is done.
    capsule: object = give(stream=_LEGACY_STREAM if kind == CUDA else None)
    if not _is_valid(capsule, _NAME):
        raise TritonModelException(
            f"`__dlpack__` of the provided tensor must return a DLPack capsule, got {capsule!r}."
        )
    return capsule


def _make(array: Array, is_versioned: bool, is_copy: bool) -> tuple[object, _Tensor]:
    """Have numpy make a capsule over an array; return it and what it says of the memory."""
    if is_versioned:
        capsule = cast(Any, array).__dlpack__(max_version=(1, 0))
        managed = _Versioned.from_address(_pointer(capsule, _VERSIONED_NAME))
        if is_copy:
            managed.flags |= _IS_COPIED
        return capsule, managed.tensor
    capsule = array.__dlpack__()
    tensor = _tensor_of(capsule)
    tensor.strides = None  # means: contiguous, in C order
    if _NEEDS_LOCK:
        old = _Managed.from_address(_pointer(capsule, _NAME))
        old.deleter = ctypes.cast(_locking(old.deleter), ctypes.c_void_p).value
    return capsule, tensor


@functools.cache
def _locking(deleter: int) -> Any:
    """Return a callback that takes the interpreter's lock for a deleter; it is never freed.

    Unlike a destructor it swallows nothing: numpy saves an exception that is on its way before it
    calls a deleter.
    """
    locked = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(deleter)
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(locked)


def _tensor_of(capsule: object) -> _Tensor:
    return _Tensor.from_address(_pointer(capsule, _NAME))


def _check_device(kind: int, number: int) -> None:
    if kind == CUDA:
        pool_for_cuda(number)
    elif kind not in (CPU, CUDA_HOST):
        raise TritonModelException(f"DLDevice type {kind} is not support by Python backend.")


def _is_contiguous(shape: tuple[int, ...], tensor: _Tensor) -> bool:
    if 0 in shape:
        return True
    expected = 1
    for i in reversed(range(len(shape))):
        if shape[i] != 1 and tensor.strides[i] != expected:
            return False
        expected *= shape[i]
    return True
