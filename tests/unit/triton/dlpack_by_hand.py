# SPDX-License-Identifier: Apache-2.0
"""A producer and a consumer of DLPack capsules made by hand.

They follow the specification alone, so that two errors of one library cannot cancel out, and
count what is freed.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from typing import Any

CODES = {
    "?": (6, 8), "u1": (1, 8), "u2": (1, 16), "u4": (1, 32), "u8": (1, 64), "i1": (0, 8),
    "i2": (0, 16), "i4": (0, 32), "i8": (0, 64), "f2": (2, 16), "f4": (2, 32), "f8": (2, 64),
}  # fmt: skip
BFLOAT16 = (4, 16)


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class DLManagedTensor(ctypes.Structure):
    pass


Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(DLManagedTensor))
DLManagedTensor._fields_ = (
    ("tensor", DLTensor),
    ("context", ctypes.c_void_p),
    ("deleter", Deleter),
)


class DLManagedTensorVersioned(ctypes.Structure):
    pass


VersionedDeleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(DLManagedTensorVersioned))
DLManagedTensorVersioned._fields_ = (
    ("major", ctypes.c_uint32),
    ("minor", ctypes.c_uint32),
    ("context", ctypes.c_void_p),
    ("deleter", VersionedDeleter),
    ("flags", ctypes.c_uint64),
    ("tensor", DLTensor),
)

# A capsule keeps the pointer to its name, so the names are buffers that stay.
new_capsule = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
)(("PyCapsule_New", ctypes.pythonapi))
get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
set_name = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)(
    ("PyCapsule_SetName", ctypes.pythonapi)
)
is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
NAME = ctypes.create_string_buffer(b"dltensor")
USED = ctypes.create_string_buffer(b"used_dltensor")
USED_VERSIONED = ctypes.create_string_buffer(b"used_dltensor_versioned")


_GIVEN: list[Producer] = []
"""Producers whose capsules are somewhere: what a capsule points to must not be garbage."""


class Producer:
    """Makes capsules over 64 bytes of its own and counts how often they are freed."""

    def __init__(
        self,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
        dtype: tuple[int, int] = CODES["f4"],
        *,
        lanes: int = 1,
        device: int = 1,
        ordinal: int = 0,
        byte_offset: int = 0,
        is_null: bool = False,
    ) -> None:
        self.memory = (ctypes.c_uint8 * 64)(*range(64))
        self.freed = 0
        self._deleter = Deleter(self._delete)
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        self._strides = (ctypes.c_int64 * len(strides))(*strides) if strides else None
        tensor = DLTensor(
            None if is_null else ctypes.addressof(self.memory), device, ordinal, len(shape), *dtype,
            lanes, self._shape, self._strides, byte_offset,
        )  # fmt: skip
        self.device = device
        self.ordinal = ordinal
        self.managed = DLManagedTensor(tensor, None, self._deleter)
        self.streams: list[object] = []

    def _delete(self, managed: Any) -> None:
        self.freed += 1
        if self in _GIVEN:
            _GIVEN.remove(self)

    def capsule(self) -> object:
        _GIVEN.append(self)
        return new_capsule(ctypes.addressof(self.managed), ctypes.addressof(NAME), None)

    def __dlpack__(self, stream: object = "not given") -> object:
        self.streams.append(stream)
        return self.capsule()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.device, self.ordinal)


class Consumer:
    """Takes a capsule as the specification says, and frees it when told to."""

    managed: Any

    def __init__(self, capsule: object) -> None:
        self.is_versioned = bool(is_valid(capsule, b"dltensor_versioned"))
        if self.is_versioned:
            pointer = get_pointer(capsule, b"dltensor_versioned")
            self.managed = DLManagedTensorVersioned.from_address(pointer)
            set_name(capsule, ctypes.addressof(USED_VERSIONED))
            self.version = (self.managed.major, self.managed.minor)
            self.flags = self.managed.flags
        else:
            pointer = get_pointer(capsule, b"dltensor")
            self.managed = DLManagedTensor.from_address(pointer)
            set_name(capsule, ctypes.addressof(USED))
        tensor = self.managed.tensor
        self.shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
        self.dtype = (tensor.code, tensor.bits)
        self.lanes = tensor.lanes
        self.has_strides = bool(tensor.strides)
        self.strides = (
            tuple(tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else None
        )
        self.data = tensor.data or 0
        self.address = self.data + tensor.byte_offset
        self.device = (tensor.device_type, tensor.device_id)

    def free(self) -> None:
        self.managed.deleter(ctypes.byref(self.managed))


def references(thing: object) -> int:
    """Return the reference count of an object, after all garbage is gone."""
    gc.collect()
    return sys.getrefcount(thing)
