# SPDX-License-Identifier: Apache-2.0
"""The `data` member of a tensor: JSON values to a body's bytes, and back.

Pure. Whatever the JSON holds, the result is a body of exactly the elements that the shape asks
for, or an InvalidArgument that says which element is wrong; a value is never rounded into range.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from itertools import chain
from typing import Any, cast

import msgspec
import numpy as np

from actorserve.errors import InternalError, InvalidArgument
from actorserve.wire.tensors import BytesError, DataType, decode_bytes, encode_bytes

MAX_DEPTH = 100
"""How deep arrays may be nested in `data`."""

_FLOAT32_LIMIT = 3.4028235677973366e38  # the first double that rounds to infinity
_PACK_AT_ONCE = 1 << 16

_INTEGER_CODES = {
    DataType.UINT8: "B",
    DataType.UINT16: "H",
    DataType.UINT32: "I",
    DataType.UINT64: "Q",
    DataType.INT8: "b",
    DataType.INT16: "h",
    DataType.INT32: "i",
    DataType.INT64: "q",
}
_CODES = {**_INTEGER_CODES, DataType.BOOL: "?", DataType.FP32: "f", DataType.FP64: "d"}
_LIST_TYPES: dict[DataType, Any] = {
    **dict.fromkeys(_INTEGER_CODES, list[int]),
    DataType.BOOL: list[bool],
    DataType.FP32: list[float],
    DataType.FP64: list[float],
    DataType.BYTES: list[str],
}
_DECODERS: dict[DataType, Callable[[Any], list[Any]]] = {
    datatype: msgspec.json.Decoder(kind).decode for datatype, kind in _LIST_TYPES.items()
}
_decode_any = msgspec.json.Decoder(Any).decode
_encode = msgspec.json.Encoder().encode

View = bytes | bytearray | memoryview


# --- JSON to bytes -------------------------------------------------------------------------------


def body_of_json(name: str, datatype: DataType, count: int, data: msgspec.Raw) -> bytes:
    """Return the body of input `name` from its `data`, an array that may be nested in any way.

    `count` is the number of elements that its shape asks for. Raises InvalidArgument for a wrong
    number of elements, for one of another type or out of the type's range, and for FP16 and
    BF16, which JSON numbers cannot carry exactly.
    """
    decode = _decoder(name, datatype)
    try:
        values = decode(data)
    except msgspec.ValidationError as error:
        values = _flattened(name, datatype, data, error)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"Unable to parse 'data' of input '{name}': {error}") from None
    if len(values) != count:
        raise InvalidArgument(
            "Unable to parse 'data': Shape does not match true shape of 'data' field "
            f"(input '{name}': expected {count} elements, got {len(values)})"
        )
    return pack_values(name, datatype, values)


FLAT_RULE = (
    "generate takes one request without a batch: for each input one value, or the flat list of its "
    "elements; send a batch, or any other shape, to infer"
)


def flat_values(name: str, datatype: DataType, data: msgspec.Raw) -> list[Any]:
    """Return the elements of input `name` from one JSON value, or an array of them, not nested.

    Raises InvalidArgument for what is no such thing, for an element of another type, and for the
    types that JSON cannot carry.
    """
    decode = _decoder(name, datatype)
    try:
        is_array = bytes(memoryview(data)[:1]) == b"["
        return decode(data if is_array else b"[%b]" % bytes(data))
    except msgspec.ValidationError as error:
        text = str(error).replace("`$", "`value")
        if "got `array`" in text:
            text += f" ({FLAT_RULE})"
        raise InvalidArgument(
            f"Unable to parse input '{name}' as {datatype.wire_name}: {text}"
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"Unable to parse input '{name}': {error}") from None
    except RecursionError:
        raise _too_deep(name) from None


def pack_values(name: str, datatype: DataType, values: list[Any]) -> bytes:
    """Return the body of elements of the right type; InvalidArgument for one out of range."""
    if datatype is DataType.BYTES:
        return encode_bytes(values)
    return _packed(name, datatype, values)


def _decoder(name: str, datatype: DataType) -> Callable[[Any], list[Any]]:
    decode = _DECODERS.get(datatype)
    if decode is None:
        raise InvalidArgument(
            f"receiving {datatype.wire_name} data via JSON is not supported. "
            f"Please use the binary data format for input '{name}'"
        )
    return decode


def _flattened(
    name: str, datatype: DataType, data: msgspec.Raw, first_error: msgspec.ValidationError
) -> list[Any]:
    """Take nested arrays apart, level by level, then check the elements."""
    try:
        values = _decode_any(data)
        if not isinstance(values, list) or not any(type(v) is list for v in values):
            raise first_error
        depth = 1
        while any(type(v) is list for v in values):
            depth += 1
            if depth > MAX_DEPTH:
                raise _too_deep(name)
            if not all(type(v) is list for v in values):
                raise InvalidArgument(
                    f"Unable to parse 'data' of input '{name}': arrays and elements are mixed "
                    f"at depth {depth - 1}"
                )
            values = list(chain.from_iterable(values))
        return cast("list[Any]", msgspec.convert(values, _LIST_TYPES[datatype]))
    except msgspec.ValidationError as error:
        text = str(error).replace("`$", "`data")
        raise InvalidArgument(
            f"Unable to parse 'data' of input '{name}' as {datatype.wire_name}: {text}"
        ) from None
    except RecursionError:
        raise _too_deep(name) from None


def _too_deep(name: str) -> InvalidArgument:
    return InvalidArgument(
        f"Unable to parse 'data' of input '{name}': it is nested deeper than {MAX_DEPTH} levels"
    )


def _packed(name: str, datatype: DataType, values: list[Any]) -> bytes:
    code = _CODES[datatype]
    try:
        if len(values) <= _PACK_AT_ONCE:
            return struct.pack(f"<{len(values)}{code}", *values)
        pieces = (values[i : i + _PACK_AT_ONCE] for i in range(0, len(values), _PACK_AT_ONCE))
        return b"".join([struct.pack(f"<{len(piece)}{code}", *piece) for piece in pieces])
    except (struct.error, OverflowError):
        raise _out_of_range(name, datatype, values) from None


def _out_of_range(name: str, datatype: DataType, values: list[Any]) -> InvalidArgument:
    if datatype in _INTEGER_CODES:
        info = np.iinfo(datatype.body_dtype)
        low, high = int(info.min), int(info.max)
        allowed = f"{low} to {high}"
        index = next(i for i, v in enumerate(values) if not low <= v <= high)
    else:
        allowed = "at most 3.4028235e38 in size"
        index = next(i for i, v in enumerate(values) if abs(v) >= _FLOAT32_LIMIT)
    shown = str(values[index])
    if len(shown) > 40:
        shown = f"{shown[:40]}…"
    return InvalidArgument(
        f"Unable to parse 'data' of input '{name}': element {index} is {shown}, which does not "
        f"fit into {datatype.wire_name} ({allowed})"
    )


# --- bytes to JSON -------------------------------------------------------------------------------


def json_of_body(
    name: str, datatype: DataType, body: View, strict: bool, unwrap: bool = False
) -> msgspec.Raw:
    """Return the flat JSON array of output `name`. FP32 values are printed as the doubles they are.

    With `unwrap`, a single element stands alone.

    Not a number and infinities become the bare words NaN and Infinity, which clients of the v2
    protocol read though JSON does not have them; with `strict` they are an error. Raises
    InvalidArgument where only binary data can carry the output, InternalError for a body that is
    no whole number of elements.
    """
    if datatype is DataType.BYTES:
        strings = _strings(name, body)
        return msgspec.Raw(_encode(strings[0] if unwrap and len(strings) == 1 else strings))
    if datatype not in _CODES:
        raise InvalidArgument(
            f"sending {datatype.wire_name} data via JSON is not supported. "
            f"Please use the binary data format for output '{name}'"
        )
    if not len(body):
        return msgspec.Raw(b"[]")
    try:
        values: Any = np.frombuffer(body, datatype.body_dtype).tolist()
    except ValueError:
        raise InternalError(
            f"output '{name}' has {len(body)} bytes, which is no whole number of "
            f"{datatype.wire_name} elements"
        ) from None
    if unwrap and len(values) == 1:
        values = values[0]
    text = _encode(values)
    if b"null" in text:  # how the encoder writes what JSON cannot express
        if strict:
            raise InvalidArgument(
                f"output '{name}' holds NaN or Infinity, which JSON cannot express. "
                f"Please use the binary data format for output '{name}'"
            )
        text = json.dumps(values, separators=(",", ":")).encode()
    return msgspec.Raw(text)


def _strings(name: str, body: View) -> list[str]:
    try:
        elements = decode_bytes(body).tolist()
    except BytesError as error:
        raise InternalError(f"output '{name}' is malformed: {error.message}") from None
    try:
        return [element.decode() for element in elements]
    except UnicodeDecodeError:
        raise InvalidArgument(
            f"output '{name}' holds bytes that are not UTF-8, which JSON cannot express. "
            f"Please use the binary data format for output '{name}'"
        ) from None
