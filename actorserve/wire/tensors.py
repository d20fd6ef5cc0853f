# SPDX-License-Identifier: Apache-2.0
"""What the bytes of a tensor mean: data types, the arithmetic of shapes, and the BYTES codec.

A body is little-endian and row-major. The body of a BYTES tensor is its elements one after the
other, each as an unsigned 32-bit length and that many bytes. Nothing here trusts its input: a
shape or body that cannot be right is an InvalidArgument that says where it is wrong.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Union

import numpy as np
import numpy.typing as npt

from actorserve.errors import InvalidArgument

MAX_ELEMENTS = (1 << 63) - 1
"""No tensor has more elements or bytes than a signed 64-bit integer counts."""

MAX_RANK = 64
"""What numpy can hold (32 before numpy 2)."""

LENGTH_BYTES = 4
"""The size of the length in front of each element of a BYTES body."""

Body = Union[bytes, bytearray, memoryview, "npt.NDArray[Any]"]
Objects = npt.NDArray[np.object_]


class DataType(enum.IntEnum):
    """A data type; its value is the model API's number.

    `wire_name` is the protocol's name and `config_name` the model configuration's.
    `element_bytes` is exact, 0 for BYTES, whose elements vary. `numpy_dtype` is what a model sees
    (None where numpy has no such type), `body_dtype` how the bytes of a body lie in an array.
    """

    wire_name: str
    config_name: str
    element_bytes: int
    numpy_dtype: np.dtype[Any] | None
    body_dtype: np.dtype[Any]

    def __new__(cls, number: int, wire_name: str, code: str, body_code: str = "") -> DataType:
        """Make one member from its number, its names and numpy's codes."""
        member = int.__new__(cls, number)
        member._value_ = number
        member.wire_name = wire_name
        member.config_name = "TYPE_STRING" if wire_name == "BYTES" else f"TYPE_{wire_name}"
        member.numpy_dtype = np.dtype(code) if code else None
        member.body_dtype = np.dtype(body_code or code)
        member.element_bytes = 0 if number in (0, 13) else member.body_dtype.itemsize
        return member

    INVALID = 0, "INVALID", "", "u1"
    BOOL = 1, "BOOL", "?"
    UINT8 = 2, "UINT8", "u1"
    UINT16 = 3, "UINT16", "<u2"
    UINT32 = 4, "UINT32", "<u4"
    UINT64 = 5, "UINT64", "<u8"
    INT8 = 6, "INT8", "i1"
    INT16 = 7, "INT16", "<i2"
    INT32 = 8, "INT32", "<i4"
    INT64 = 9, "INT64", "<i8"
    FP16 = 10, "FP16", "<f2"
    FP32 = 11, "FP32", "<f4"
    FP64 = 12, "FP64", "<f8"
    BYTES = 13, "BYTES", "O", "u1"
    BF16 = 14, "BF16", "", "<u2"

    @classmethod
    def of_wire_name(cls, name: str) -> DataType:
        """Return the type that the protocol calls `name`. Raises InvalidArgument."""
        found = BY_WIRE_NAME.get(name)
        if found is None:
            raise InvalidArgument(f"unknown data type {name!r}: expected {_names(BY_WIRE_NAME)}")
        return found

    @classmethod
    def of_config_name(cls, name: str) -> DataType:
        """Return the type that a configuration calls `name`. Raises InvalidArgument."""
        found = BY_CONFIG_NAME.get(name)
        if found is None:
            raise InvalidArgument(f"unknown data type {name!r}: expected {_names(BY_CONFIG_NAME)}")
        return found

    @classmethod
    def of_dtype(cls, dtype: np.dtype[Any]) -> DataType:
        """Return the type of arrays of `dtype`, in any byte order. Raises InvalidArgument."""
        number = NUMBER_BY_CHAR.get(dtype.char)
        if number is None:
            raise InvalidArgument(f"numpy's dtype {dtype} has no counterpart among the data types")
        return BY_NUMBER[number]


BY_NUMBER: tuple[DataType, ...] = tuple(DataType)
BY_WIRE_NAME: dict[str, DataType] = {t.wire_name: t for t in BY_NUMBER[1:]}
BY_CONFIG_NAME: dict[str, DataType] = {t.config_name: t for t in BY_NUMBER[1:]}

# By numpy's type character: several stand for one type (on Linux, "l" and "q" are both int64).
NUMBER_BY_CHAR: dict[str, int] = {
    char: next(int(t) for t in BY_NUMBER if t.numpy_dtype is not None and t.numpy_dtype == char)
    for char in "?bBhHiIlLqQefd"
} | {"O": 13, "S": 13}


def _names(known: Iterable[str]) -> str:
    return "one of " + ", ".join(known)


# --- shapes --------------------------------------------------------------------------------------


def element_count(shape: Sequence[int]) -> int:
    """Return the number of elements of a shape; the empty shape is a scalar and has one.

    Raises InvalidArgument for more than 64 dimensions, a negative one, or more elements than 63
    bits count. A shape of no elements is refused too where its other extents alone exceed what
    numpy can address, because no array could be made of it.
    """
    if len(shape) > MAX_RANK:
        raise InvalidArgument(f"a shape of {len(shape)} dimensions: expected at most {MAX_RANK}")
    count = 1
    for extent in shape:
        if extent < 0:
            raise InvalidArgument(
                f"dimension {list(shape).index(extent)} of shape {_show(shape)} is {extent}: "
                "expected 0 or more"
            )
        count *= extent
    if count > MAX_ELEMENTS or (count == 0 and _rest(shape) > MAX_ELEMENTS // 8):
        raise InvalidArgument(
            f"shape {_show(shape)} has too many elements: expected at most {MAX_ELEMENTS}"
        )
    return count


def byte_size(datatype: int, shape: Sequence[int]) -> int:
    """Return the exact size of a body in bytes.

    Raises InvalidArgument as `element_count` does, for a size beyond 63 bits, and for BYTES and
    INVALID, which have no fixed element size.
    """
    element_bytes = BY_NUMBER[datatype].element_bytes
    if not element_bytes:
        raise InvalidArgument(f"{BY_NUMBER[datatype].wire_name} tensors have no fixed byte size")
    nbytes = element_count(shape) * element_bytes
    if nbytes > MAX_ELEMENTS:
        raise InvalidArgument(
            f"shape {_show(shape)} of {BY_NUMBER[datatype].wire_name} is too large: "
            f"expected at most {MAX_ELEMENTS} bytes"
        )
    return nbytes


def _rest(shape: Sequence[int]) -> int:
    """Multiply the extents that are not 0."""
    product = 1
    for extent in shape:
        product *= extent or 1
    return product


def _show(shape: Sequence[int]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"


# --- BYTES ---------------------------------------------------------------------------------------

BytesFault = Literal["length_truncated", "element_truncated", "too_few", "too_many"]


class BytesError(InvalidArgument):
    """A BYTES body that is not what it says.

    `kind` says what is wrong. `index` counts from 0 and names the element that is cut off; for
    "too_few" it is the number of elements found, for "too_many" that number when the check gave
    up (one more than expected). `offset` is where the element's length stands, in bytes.
    `available` is how many bytes were left for what is cut off, `declared` the element's length.
    """

    def __init__(
        self,
        kind: BytesFault,
        message: str,
        *,
        index: int,
        offset: int,
        available: int = 0,
        declared: int = 0,
    ) -> None:
        super().__init__(message)
        self.kind: BytesFault = kind
        self.index = index
        self.offset = offset
        self.available = available
        self.declared = declared


_OBJECT = np.dtype(np.object_)
_pack_length = struct.Struct("<I").pack
_unpack_length: Callable[[Any, int], tuple[int]] = struct.Struct("<I").unpack_from

# Below: one pass in the interpreter. Above: numpy's fixed costs pay, if elements are short.
_FEW_ELEMENTS = 32
_SHORT_ELEMENT_BYTES = 256


def encode_bytes(elements: npt.NDArray[Any] | Iterable[Any]) -> bytes:
    """Return the BYTES body of the elements, an array's in C order.

    An element that is exactly `bytes` is taken as it is; of anything else, `str()` is encoded as
    UTF-8. Raises InvalidArgument for an element that UTF-8 cannot express or of 4 GiB and more.
    """
    if isinstance(elements, np.ndarray):
        items = [elements.item()] if elements.size == 1 else elements.ravel().tolist()
    else:
        items = list(elements)
    if len(items) <= _FEW_ELEMENTS:
        return _join(_as_bytes(items))
    if set(map(type, items)) == {str}:
        text = "".join(items)
        if text.isascii():  # one character is one byte, so the elements need no encoding each
            return _interleave(items, text.encode())
    parts = _as_bytes(items)
    if sum(map(len, parts)) <= len(parts) * _SHORT_ELEMENT_BYTES and max(map(len, parts)) < 1 << 32:
        return _interleave(parts, b"".join(parts))
    return _join(parts)


def _as_bytes(items: list[Any]) -> list[bytes]:
    try:
        return [e if type(e) is bytes else str(e).encode("utf-8") for e in items]
    except UnicodeEncodeError:
        raise _unencodable(items) from None


def _join(parts: list[bytes]) -> bytes:
    """Join lengths and elements without a copy between, however long the elements are."""
    try:
        return b"".join([piece for part in parts for piece in (_pack_length(len(part)), part)])
    except struct.error:
        raise InvalidArgument(
            f"an element of a BYTES tensor has {max(map(len, parts))} bytes: "
            "expected less than 4 GiB"
        ) from None


def _unencodable(items: list[Any]) -> InvalidArgument:
    for index, item in enumerate(items):
        try:
            str(item).encode("utf-8")
        except UnicodeEncodeError as error:
            return InvalidArgument(
                f"element {index} of a BYTES tensor cannot be encoded as UTF-8: {error.reason} "
                f"at character {error.start}; give it as bytes"
            )
    return InvalidArgument("an element of a BYTES tensor cannot be encoded as UTF-8")


def _interleave(items: Sequence[str] | Sequence[bytes], payload: bytes) -> bytes:
    """Put each item's length in front of its part of the joined payload.

    Nearly twice as fast as `_join` for a million short elements, but its mask costs a byte for
    each byte of the body.
    """
    lengths = np.fromiter(map(len, items), np.int64, len(items))
    starts = np.zeros(len(items), np.int64)
    np.cumsum(lengths[:-1] + LENGTH_BYTES, out=starts[1:])
    body = np.empty(len(payload) + LENGTH_BYTES * len(items), np.uint8)
    is_payload = np.ones(len(body), np.bool_)
    prefixes = lengths.astype("<u4").view(np.uint8).reshape(-1, LENGTH_BYTES)
    for k in range(LENGTH_BYTES):
        at = starts + k
        body[at] = prefixes[:, k]
        is_payload[at] = False
    body[is_payload] = np.frombuffer(payload, np.uint8)
    return body.tobytes()


def decode_bytes(buffer: Body, count: int | None = None) -> Objects:
    """Return the elements of a BYTES body as a one-dimensional object array of `bytes`.

    Raises BytesError as `check_bytes` does.
    """
    data = buffer if type(buffer) is bytes else bytes(buffer)
    size = len(data)
    elements: list[bytes] = []
    append = elements.append
    offset = 0
    try:
        while offset < size:
            start = offset + 4
            offset = start + _unpack_length(data, offset)[0]
            append(data[start:offset])
    except struct.error:
        offset = -1
    if offset != size or (count is not None and count != len(elements)):
        check_bytes(data, count)
    return np.fromiter(elements, _OBJECT, len(elements))


def check_bytes(buffer: Body, count: int | None = None) -> int:
    """Walk through a BYTES body without copying and return the number of its elements.

    Raises BytesError for a length or an element that is cut off, and where `count` is given and
    is not the number of elements.
    """
    size = len(buffer) if isinstance(buffer, (bytes, bytearray)) else buffer.nbytes
    offset = index = 0
    while offset + LENGTH_BYTES <= size:
        if index == count:
            raise BytesError(
                "too_many",
                f"more than {count} elements in a BYTES body: {size - offset} bytes are left over "
                f"at offset {offset}",
                index=index + 1,
                offset=offset,
                available=size - offset,
            )
        declared = _unpack_length(buffer, offset)[0]
        end = offset + LENGTH_BYTES + declared
        if end > size:
            available = size - offset - LENGTH_BYTES
            raise BytesError(
                "element_truncated",
                f"element {index} of a BYTES body, at offset {offset}, says that it has "
                f"{declared} bytes, but only {available} are left",
                index=index,
                offset=offset,
                available=available,
                declared=declared,
            )
        offset = end
        index += 1
    if offset < size:
        raise BytesError(
            "length_truncated",
            f"the length of element {index} of a BYTES body, at offset {offset}, is cut off: "
            f"expected {LENGTH_BYTES} bytes, but only {size - offset} are left",
            index=index,
            offset=offset,
            available=size - offset,
        )
    if count is not None and index < count:
        raise BytesError(
            "too_few",
            f"{index} elements in a BYTES body: expected {count}",
            index=index,
            offset=offset,
        )
    return index
