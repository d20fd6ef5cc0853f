# SPDX-License-Identifier: Apache-2.0
"""`pb_utils.Tensor`: a named array, as models make and read it.

A tensor that a model made holds its array; a BYTES one is encoded at once, so that what the
model does to the array later is not seen. A tensor that came in holds the body as it came, and
becomes an array when the model asks for one. Names without an underscore are the model's; the
stub uses `_received` to make a tensor and `_body` to send one. Those on a device are of a kind of
their own, device_tensor.DeviceTensor: the stub makes them by `_on_device`, and sees by
`_device_body` what it has.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt

from actorserve.errors import InvalidArgument
from actorserve.triton.device_memory import ForeignMemory, Memory
from actorserve.triton.dlpack import (
    CPU,
    DLPackRefused,
    export_capsule,
    import_tensor,
    wants_version,
)
from actorserve.triton.error import TritonModelException, exact_str
from actorserve.wire.tensors import (
    BY_NUMBER,
    NUMBER_BY_CHAR,
    Body,
    DataType,
    decode_bytes,
    element_count,
    encode_bytes,
)

Array = npt.NDArray[Any]

_BYTES = int(DataType.BYTES)
_BF16 = int(DataType.BF16)
_BYTE = np.dtype(np.uint8)
_BODY_DTYPES = tuple(t.body_dtype for t in BY_NUMBER)


class Tensor:
    """A tensor with a name; see the module's head."""

    # `_array` is what as_numpy() gives (None until it is asked for, and always for BF16).
    # `_raw` is what travels where `_array` does not: BYTES, BF16, and bodies not looked at yet.
    __slots__ = ("__weakref__", "_array", "_copy_on_read", "_name", "_number", "_raw", "_shape")

    _array: Array | None
    _copy_on_read: bool
    _raw: Body | None

    def __init__(self, name: str, numpy_array: Array) -> None:
        """Make a tensor of a numpy array, without a copy if it is in C order and native bytes.

        Raises TypeError for other types, TritonModelException for an empty name or a dtype that
        no tensor can have.
        """
        if type(name) is not str:
            name = exact_str(name, "the name of a Tensor")
        if not isinstance(numpy_array, np.ndarray):
            raise TypeError(f"a Tensor is made of a numpy array, got {type(numpy_array)}")
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        dtype = numpy_array.dtype
        number = NUMBER_BY_CHAR.get(dtype.char)
        if number is None:
            raise TritonModelException("NumPy dtype is not supported.")
        body = None
        if number == _BYTES:
            body = _encode(numpy_array)
        elif not dtype.isnative or not numpy_array.flags.c_contiguous:
            numpy_array = numpy_array.astype(dtype.newbyteorder("="), order="C", subok=False)
        self._name = name
        self._number = number
        self._shape = numpy_array.shape
        self._array = numpy_array
        self._raw = body
        self._copy_on_read = False

    @classmethod
    def _received(
        cls,
        name: str,
        number: int,
        shape: tuple[int, ...],
        body: Body,
        copy_on_read: bool = False,
    ) -> Tensor:
        """Make a tensor of a body from the wire; `number` is the data type's.

        `body` is bytes-like, or an array of the body's bytes (or of the type and shape). The array
        that the model gets lies over it, and is a copy only where the body is immutable bytes or
        where `copy_on_read` says that others use the memory too.
        """
        tensor = cls.__new__(cls)
        tensor._name = name
        tensor._number = number
        tensor._shape = shape
        tensor._array = None
        tensor._raw = body
        tensor._copy_on_read = copy_on_read
        return tensor

    @staticmethod
    def _on_device(name: str, number: int, shape: tuple[int, ...], memory: Memory) -> Tensor:
        """Make a tensor of memory on a device, which lives as long as anybody sees it.

        Raises InvalidArgument for a type that no device knows and for memory of another size.
        """
        from actorserve.triton.device_tensor import DeviceTensor  # which is built on this class

        return DeviceTensor._over(name, number, shape, memory)

    def name(self) -> str:
        """Return the name."""
        return self._name

    def as_numpy(self) -> Array:
        """Return the array; the same one each time, writable unless the model chose otherwise.

        The elements of a received BYTES tensor are `bytes`. Raises TritonModelException for BF16,
        which numpy lacks.
        """
        array = self._array
        return array if array is not None else self._load()

    def triton_dtype(self) -> DataType:
        """Return the data type; `int()` of it is the API's number."""
        return BY_NUMBER[self._number]

    def shape(self) -> list[int]:
        """Return the shape."""
        return list(self._shape)

    def is_cpu(self) -> bool:
        """Tell whether the memory is the CPU's."""
        return True

    def to_dlpack(self) -> object:
        """Return a DLPack capsule over the memory, for one consumer.

        Raises TritonModelException for BYTES.
        """
        return self.__dlpack__()

    def __dlpack__(
        self,
        stream: object = None,
        *,
        max_version: object = None,
        dl_device: object = None,
        copy: bool | None = None,
    ) -> object:
        if self._number == _BYTES:
            raise TritonModelException("DLPack does not have support for string tensors.")
        if dl_device is not None and dl_device != (CPU, 0):
            raise DLPackRefused(
                f"Tensor '{self._name}' lies on the CPU and cannot be given on the device "
                f"{dl_device}; expected (1, 0), or let the consumer copy it."
            )
        array = self._raw_bf16() if self._number == _BF16 else self.as_numpy()
        return export_capsule(
            self._number,
            array.copy() if copy else array,
            is_versioned=wants_version(max_version),
            is_copy=bool(copy),
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return (CPU, 0)

    @staticmethod
    def from_dlpack(name: str, tensor: object) -> Tensor:
        """Make a tensor over the memory of a DLPack capsule, or of an object that gives one.

        Raises TritonModelException for anything else, and for memory that is not in C order, or
        neither on the CPU nor on the device that this process has.
        """
        name = exact_str(name, "the name of a Tensor")
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        body = tensor._device_body() if isinstance(tensor, Tensor) else None
        if body is not None:  # one of ours: whatever the driver, only the name is new
            return Tensor._on_device(name, *body)
        number, shape, array = import_tensor(tensor)
        if isinstance(array, ForeignMemory):
            return Tensor._on_device(name, number, shape, array)
        made = Tensor._received(name, number, shape, b"" if array is None else array)
        if number != _BF16:
            made._array = array
        return made

    def __repr__(self) -> str:
        return f"Tensor({self._name!r}, {BY_NUMBER[self._number].wire_name}, {self.shape()})"

    def _body(self) -> tuple[int, tuple[int, ...], Array]:
        """Return what travels: data type's number, shape, and a C-contiguous array. Never a copy.

        The array is the model's own, or the body's bytes as uint8. Raises InvalidArgument for a
        tensor without a data type, which DLPack can make.
        """
        number = self._number
        array = self._array
        if array is None or number == _BYTES:
            if number == 0:
                raise InvalidArgument(self._invalid_text())
            raw = self._raw
            if raw is None:  # another thread has just made the array
                array = cast(Array, self._array)
            else:
                array = raw if isinstance(raw, np.ndarray) else np.frombuffer(raw, _BYTE)
        elif array.shape != self._shape:
            raise InvalidArgument(
                f"Tensor '{self._name}' was made of an array of shape {list(self._shape)}, which "
                f"has been resized to {list(array.shape)} since"
            )
        if type(array) is not np.ndarray:
            array = array.view(np.ndarray)  # subclasses (masked arrays) redefine what views do
        return number, self._shape, array

    def _host_body(self) -> tuple[int, tuple[int, ...], Array]:
        """Return what travels through host memory: `_body()`, a copy where it is on a device."""
        return self._body()

    def _device_body(self) -> tuple[int, tuple[int, ...], Memory] | None:
        """Return data type's number, shape and memory of a tensor on a device, else None."""
        return None

    def _load(self) -> Array:
        """Make the array of a received body, once."""
        number = self._number
        raw = self._raw
        if raw is None:  # another thread has just made it
            return cast(Array, self._array)
        if number == _BF16:
            raise TritonModelException(
                "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and "
                "from_dlpack() instead."
            )
        if number == _BYTES:
            array = self._decode(raw)
        elif number == 0:
            raise TritonModelException(self._invalid_text())
        else:
            array = self._place(raw)
        self._array = array
        if number != _BYTES:
            self._raw = None  # so that the lease of a body that was copied ends here
        return array

    def _decode(self, raw: Body) -> Array:
        try:
            return decode_bytes(raw, element_count(self._shape)).reshape(self._shape)
        except InvalidArgument as error:
            raise TritonModelException(f"Tensor '{self._name}': {error}") from None

    def _place(self, raw: Body) -> Array:
        """Lay an array of the right type and shape over the body, writable if it may be."""
        dtype = _BODY_DTYPES[self._number]
        if isinstance(raw, bytes) or self._copy_on_read:
            raw = raw.copy() if isinstance(raw, np.ndarray) else bytearray(raw)
        try:
            if isinstance(raw, np.ndarray):
                return raw.view(dtype).reshape(self._shape)
            array: Array = np.ndarray(self._shape, dtype, raw)
        except (TypeError, ValueError):
            raise self._misfit(raw) from None
        if array.nbytes != _nbytes(raw):
            raise self._misfit(raw)
        return array

    def _raw_bf16(self) -> Array:
        """Return the memory of a BF16 tensor as uint16, the same each time."""
        raw = cast(Body, self._raw)
        if isinstance(raw, np.ndarray) and raw.shape == self._shape and not self._copy_on_read:
            return raw
        array = self._place(raw)
        self._raw = array
        self._copy_on_read = False
        return array

    def _misfit(self, raw: Body) -> TritonModelException:
        return TritonModelException(
            f"Tensor '{self._name}' of shape {self.shape()} and type "
            f"{BY_NUMBER[self._number].wire_name} has a body of {_nbytes(raw)} bytes, "
            "which does not fit."
        )

    def _invalid_text(self) -> str:
        return f"Tensor '{self._name}' came by DLPack with a data type that is not supported."


def _nbytes(raw: Body) -> int:
    return len(raw) if isinstance(raw, (bytes, bytearray)) else raw.nbytes


def _encode(array: Array) -> bytes:
    try:
        return encode_bytes(array)
    except InvalidArgument as error:
        raise TritonModelException(str(error)) from None
