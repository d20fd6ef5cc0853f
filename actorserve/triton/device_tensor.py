# SPDX-License-Identifier: Apache-2.0
"""Tensors whose memory is a device's, and how models make them without any library.

What always holds: the memory lives as long as the tensor or anything that was made of it, in
whatever order they go. On every driver a tensor can be filled from the host, copied to it, named
anew and sent; only CUDA's memory is shown to libraries, by DLPack and the CUDA array interface,
because an address of another driver is nothing that they could use.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Any, NoReturn, cast

import numpy as np
import numpy.typing as npt

from actorserve.errors import InvalidArgument
from actorserve.triton.device_memory import (
    DEFAULT_STREAM,
    ForeignMemory,
    Memory,
    copy_within,
    current_pool,
    pool_to_allocate,
    shown_on,
    use_pool,
)
from actorserve.triton.dlpack import (
    CPU,
    CUDA,
    DLPackRefused,
    driver_stream,
    export_capsule,
    export_cuda,
    wants_version,
)
from actorserve.triton.error import TritonModelException, exact_str
from actorserve.triton.tensor import Tensor
from actorserve.wire.tensors import (
    BY_CONFIG_NAME,
    BY_NUMBER,
    BY_WIRE_NAME,
    NUMBER_BY_CHAR,
    DataType,
    element_count,
)

__all__ = [
    "DeviceTensor",
    "ForeignMemory",
    "Memory",
    "current_pool",
    "empty_device",
    "use_pool",
]

Array = npt.NDArray[Any]
Source = Array | Tensor

_BFLOAT16 = "bfloat16"
_WAYS = "`copy_to_numpy()` gives a copy on the CPU, on every device."


class DeviceTensor(Tensor):
    """A tensor on a device: made by the server, `empty_device` or `Tensor.from_dlpack`."""

    __slots__ = ("_memory",)

    _memory: Memory

    def __init__(self, *_: object, **__: object) -> None:
        raise TypeError("a tensor on a device is made by empty_device() or Tensor.from_dlpack()")

    @classmethod
    def _over(cls, name: str, number: int, shape: tuple[int, ...], memory: Memory) -> DeviceTensor:
        datatype = BY_NUMBER[number]
        if not datatype.element_bytes:
            raise InvalidArgument(
                f"tensor '{name}' of type {datatype.wire_name} cannot lie on a device"
            )
        nbytes = element_count(shape) * datatype.element_bytes
        if nbytes != memory.nbytes:
            raise InvalidArgument(
                f"tensor '{name}' of shape {list(shape)} and type {datatype.wire_name} needs "
                f"{nbytes} bytes, and has {memory.nbytes} on the device"
            )
        tensor = cls.__new__(cls)
        tensor._name = name
        tensor._number = number
        tensor._shape = shape
        tensor._array = None
        tensor._raw = None
        tensor._copy_on_read = False
        tensor._memory = memory
        return tensor

    def as_numpy(self) -> NoReturn:
        """Raise TritonModelException: an array lies on the CPU."""
        raise TritonModelException("Tensor is stored in GPU and cannot be converted to NumPy.")

    def is_cpu(self) -> bool:
        """Tell that the memory is not the CPU's."""
        return False

    # --- to the host and back ---------------------------------------------------------------------

    def copy_to_numpy(self) -> Array:
        """Return a copy on the CPU, complete and the caller's own; BF16 as uint16 words."""
        dtype = BY_NUMBER[self._number].body_dtype
        return np.ndarray(self._shape, dtype, self._host_bytes())

    def copy_from(self, source: Source) -> DeviceTensor:
        """Fill the tensor from an array or from another tensor of its type and shape; return it.

        BF16 is filled from uint16 words, or from what numpy has as bfloat16. What is done with the
        tensor afterwards finds the new data; the source may be changed at once. Raises
        TritonModelException for another type or shape.
        """
        if not isinstance(source, (np.ndarray, Tensor)):
            raise TypeError(f"copy_from takes a numpy array or a Tensor, got {type(source)}")
        self._check_fit(source)
        nbytes = self._memory.nbytes
        if nbytes and isinstance(source, DeviceTensor):
            copy_within(self._memory, source._memory, nbytes)
        elif nbytes:
            array = source if isinstance(source, np.ndarray) else source._body()[2]
            array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
            self._memory.copy_in(array.reshape(-1).view(np.uint8).data)
        return self

    def _check_fit(self, source: Source) -> None:
        if isinstance(source, Tensor):
            shape, fits = source._shape, source._number == self._number
            given = source.triton_dtype().wire_name
        else:
            shape, given = source.shape, str(source.dtype)
            number = NUMBER_BY_CHAR.get(source.dtype.char)
            if self._number == DataType.BF16:
                fits = number == DataType.UINT16 or source.dtype.name == _BFLOAT16
            else:
                fits = number == self._number
        if shape != self._shape or not fits:
            raise TritonModelException(
                f"Tensor '{self._name}' of shape {self.shape()} and type "
                f"{BY_NUMBER[self._number].wire_name} cannot be filled from one of shape "
                f"{list(shape)} and type {given}."
            )

    # --- to libraries -----------------------------------------------------------------------------

    def __dlpack__(
        self,
        stream: object = None,
        *,
        max_version: object = None,
        dl_device: object = None,
        copy: bool | None = None,
    ) -> object:
        """Return a capsule; the data is complete for the consumer's stream, as DLPack has it.

        On the CPU too, as a copy, where the consumer asks for it there.
        """
        is_versioned = wants_version(max_version)
        if dl_device == (CPU, 0):
            return self._export_copy(is_versioned, copy)
        here = self.__dlpack_device__()
        if dl_device is not None and dl_device != here:
            raise DLPackRefused(
                f"Tensor '{self._name}' lies on the device {here} and cannot be given on "
                f"{dl_device}; expected this one or (1, 0), the CPU."
            )
        number = driver_stream(stream)
        tensor = self._copy() if copy else self
        tensor._memory = memory = shown_on(tensor._memory, number)
        return export_cuda(
            self._number,
            self._shape,
            memory,
            here[1],
            is_versioned=is_versioned,
            is_copy=bool(copy),
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return CUDA's type of device, and the ordinal; TritonModelException for other drivers."""
        driver = self._memory.pool.driver
        if not driver.is_cuda:
            raise DLPackRefused(
                f"Tensor '{self._name}' lies on a device of the driver {driver.name!r}, whose "
                f"memory no other library can use, so that it cannot be given by DLPack. {_WAYS}"
            )
        return CUDA, self._memory.pool.ordinal

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """What cupy, numba and torch read, version 3; AttributeError where there is none.

        Who reads it is to wait for the stream that it names, and does not say which one it uses.
        """
        driver = self._memory.pool.driver
        if not driver.is_cuda:
            raise AttributeError(
                f"Tensor '{self._name}' lies on a device of the driver {driver.name!r}, whose "
                f"memory is not CUDA's, and has no `__cuda_array_interface__`. {_WAYS}"
            )
        if self._number == DataType.BF16:
            raise AttributeError(
                f"Tensor '{self._name}' is BF16, for which `__cuda_array_interface__` has no type; "
                "use DLPack."
            )
        self._memory = memory = shown_on(self._memory, DEFAULT_STREAM)
        return {
            "shape": self._shape,
            "typestr": BY_NUMBER[self._number].body_dtype.str,
            "data": (memory.address if memory.nbytes else 0, False),
            "strides": None,
            "stream": 1,  # the default stream, which is 0 for the driver
            "version": 3,
        }

    def _export_copy(self, is_versioned: bool, copy: bool | None) -> object:
        if copy is False:
            raise DLPackRefused(
                f"Tensor '{self._name}' lies on a device and cannot be given on the CPU without "
                "a copy."
            )
        return export_capsule(
            self._number, self.copy_to_numpy(), is_versioned=is_versioned, is_copy=True
        )

    def _copy(self) -> DeviceTensor:
        return empty_device(self._shape, BY_NUMBER[self._number], self._name).copy_from(self)

    # --- to the stub ------------------------------------------------------------------------------

    def _body(self) -> tuple[int, tuple[int, ...], Array]:
        """Return what travels through host memory: a copy, complete."""
        body = np.ndarray((self._memory.nbytes,), np.uint8, self._host_bytes())
        return self._number, self._shape, body

    def _device_body(self) -> tuple[int, tuple[int, ...], Memory]:
        """Return data type's number, shape and memory."""
        return self._number, self._shape, self._memory

    def _host_bytes(self) -> bytearray:
        return self._memory.copy_out() if self._memory.nbytes else bytearray()


def empty_device(
    shape: int | Iterable[int], dtype: npt.DTypeLike | DataType = np.float32, name: str = ""
) -> DeviceTensor:
    """Make a tensor of undefined content on this model's device, without any library.

    `dtype` is numpy's, or a data type's name ("BF16", "TYPE_BF16"). Without a name it is no output
    yet: `Tensor.from_dlpack(name, tensor)` gives it one, with the same memory. Raises
    TritonModelException where there is no device, and OutOfDeviceMemory where it is full.
    """
    name = exact_str(name, "the name of a Tensor")
    pool = pool_to_allocate()
    datatype = _datatype_of(dtype)
    extents = _extents_of(shape)
    try:
        nbytes = element_count(extents) * datatype.element_bytes
    except InvalidArgument as error:
        raise TritonModelException(f"empty_device: {error.message}") from None
    buffer = pool.allocate(nbytes)
    if buffer is None:
        from actorserve.device.driver import OutOfDeviceMemory

        raise OutOfDeviceMemory(f"{nbytes} bytes do not fit into the slabs on {pool.uuid}")
    return DeviceTensor._over(name, int(datatype), extents, buffer)


def _extents_of(shape: int | Iterable[int]) -> tuple[int, ...]:
    try:
        return tuple(map(index, shape if isinstance(shape, Iterable) else (shape,)))
    except TypeError:
        raise TypeError(f"empty_device: a shape is one integer or several, got {shape!r}") from None


def _datatype_of(dtype: npt.DTypeLike | DataType) -> DataType:
    datatype: DataType | None = None
    if isinstance(dtype, DataType):
        datatype = dtype
    elif isinstance(dtype, str):
        datatype = BY_WIRE_NAME.get(dtype) or BY_CONFIG_NAME.get(dtype)
    if datatype is None:
        try:
            made: np.dtype[Any] = np.dtype(cast(Any, dtype))
        except TypeError:
            raise TypeError(f"empty_device: {dtype!r} is no data type") from None
        bf16 = made.name == _BFLOAT16
        datatype = BY_NUMBER[DataType.BF16 if bf16 else NUMBER_BY_CHAR.get(made.char, 0)]
    if not datatype.element_bytes:
        raise TritonModelException(
            f"empty_device: a tensor of type {dtype!r} cannot lie on a device; expected numbers "
            "or booleans."
        )
    return datatype
