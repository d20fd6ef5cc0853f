# SPDX-License-Identifier: Apache-2.0
"""Tensors by DLPack, on the CPU: capsules made of arrays, and arrays over capsules.

Both ways go through numpy, which makes, takes and frees capsules in C; what numpy does not know
(bfloat16; bool before 1.25) passes as unsigned integers of the same size, and the type's code is
put right in the capsule. A destructor of our own would be a ctypes callback, and a capsule may
die while an exception is on its way: the callback would swallow it.
"""

from __future__ import annotations

import ctypes
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from actorserve.triton.error import TritonModelException
from actorserve.wire.tensors import BY_NUMBER, DataType

Array = npt.NDArray[Any]

CPU = 1
CUDA = 2
CUDA_HOST = 3

_NAME = b"dltensor"

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
    """The head of DLPack's DLManagedTensor: all that is read or written here."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


# Prototypes of our own: those on ctypes.pythonapi belong to the whole process.
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def export_capsule(number: int, array: Array) -> object:
    """Return a capsule over a C-contiguous array, which lives until the consumer is done.

    A capsule cannot say that its memory is read-only, so that of a read-only array is a copy.
    """
    if not array.flags.writeable:
        array = array.copy()
    capsule = array.view(f"u{array.itemsize}").__dlpack__()
    tensor = _tensor_of(capsule)
    tensor.dtype.code, tensor.dtype.bits = _CODE_BITS[number]
    tensor.strides = None  # means: contiguous, in C order
    return capsule


def import_tensor(source: object) -> tuple[int, tuple[int, ...], Array | None]:
    """Take a capsule, or what gives one, over: return data type, shape and array, without a copy.

    Bfloat16 comes as uint16. A type that no tensor can have is INVALID, with no array. Raises
    TritonModelException for what is no DLPack tensor, lies on another device or is not in C order.
    """
    capsule = _capsule_of(source)
    tensor = _tensor_of(capsule)
    _check_device(tensor.device.kind)
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
    tensor.dtype.code = 1
    try:
        taken = np.from_dlpack(cast(Any, _Offer(capsule)))
    except BaseException:
        tensor.dtype.code = code[0]
        raise
    return number, shape, _writable(taken, BY_NUMBER[number].body_dtype)


class _Offer:
    """Hand a bare capsule to numpy."""

    def __init__(self, capsule: object) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: object) -> object:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (CPU, 0)


class _Memory:
    """The memory of an array that numpy took from a capsule, and its owner.

    numpy marks such an array as read-only, because the old capsules cannot say what they are;
    to a model, a tensor is writable.
    """

    def __init__(self, owner: Array, dtype: np.dtype[Any]) -> None:
        self._owner = owner
        self.__array_interface__ = {
            "version": 3,
            "shape": owner.shape,
            "typestr": dtype.str,
            "data": (owner.__array_interface__["data"][0], False),
        }


def _writable(taken: Array, dtype: np.dtype[Any]) -> Array:
    if taken.size == 0:  # its address may be null
        return np.empty(taken.shape, dtype)
    return np.asarray(cast(Any, _Memory(taken, dtype)))


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
    _check_device(int(device()[0]))
    capsule: object = give(stream=None)
    if not _is_valid(capsule, _NAME):
        raise TritonModelException(
            f"`__dlpack__` of the provided tensor must return a DLPack capsule, got {capsule!r}."
        )
    return capsule


def _tensor_of(capsule: object) -> _Tensor:
    return _Tensor.from_address(_pointer(capsule, _NAME))


def _check_device(kind: int) -> None:
    if kind == CUDA:
        raise TritonModelException(
            "Provided tensor lies on a GPU, and this version takes tensors on the CPU only."
        )
    if kind not in (CPU, CUDA_HOST):
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
