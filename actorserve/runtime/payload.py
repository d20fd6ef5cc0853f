# SPDX-License-Identifier: Apache-2.0
"""Values to msgpack and back: msgspec data, with numpy arrays and references in it.

    value ── pack ──► Packed: body, arrays ── (placed in an arena) ──► Parcel ──► the wire
    value ◄─ unpack ─ Packed: body, views ◄── (viewed, not copied) ──◄

In the body, an array is an extension with its index, and a reference one with its actor's id and
name. Never pickle: what comes is decoded into the types that the receiver expects, or refused.
"""

from __future__ import annotations

import re
import struct
import threading
from collections.abc import Callable
from functools import lru_cache
from types import NoneType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from actorserve.errors import InvalidArgument, ProtocolError
from actorserve.runtime.failure import text_of
from actorserve.runtime.message import Message, reply_type
from actorserve.runtime.naming import name_of, resolve
from actorserve.runtime.ref import ActorRef, Door
from actorserve.wire.actors import Parcel, WireArray
from actorserve.wire.messages import INLINE_BYTES, Handle

Array = npt.NDArray[Any]

INLINE_TOTAL_BYTES = 16 << 10
"""Body and arrays inside one frame altogether; the control lane's frames are the smallest."""

_ARRAY, _REF = 1, 2
_INDEX = struct.Struct("<I")
_ID = struct.Struct("<Q")


class Packed:
    """A value that is ready to travel: `kind` names a message's class, "" is any other value."""

    __slots__ = ("arrays", "body", "kind")

    def __init__(self, kind: str, body: bytes | Array, arrays: list[Array]) -> None:
        self.kind = kind
        self.body = body
        self.arrays = arrays


class _Hooks(threading.local):
    """What the hooks of msgspec need to know of the value in hand; each thread has its own.

    A thread may have several in hand: a finalizer, a signal handler or a `__post_init__` may send
    while another value is packed or unpacked. So each puts back what it found.
    """

    def __init__(self) -> None:
        self.arrays: list[Array] = []
        self.door: Door | None = None


_hooks = _Hooks()
_PLACE = re.compile(r" - at `\$\[(\d+)\]([^`]*)`$")


# --- packing -------------------------------------------------------------------------------------


def pack(value: object, door: Door, what: str = "") -> Packed:
    """Pack any value. Raises InvalidArgument, saying what cannot travel (`what` for people)."""
    return _pack("", value, door, what or type(value).__name__)


def pack_message(message: Message[Any], door: Door) -> Packed:
    """Pack a message with the name of its class. Raises InvalidArgument."""
    kind = type(message)
    return _pack(name_of(kind), message, door, kind.__name__)


def _pack(kind: str, value: object, door: Door, what: str) -> Packed:
    hooks = _hooks
    outer, outer_door = hooks.arrays, hooks.door
    arrays: list[Array] = []
    hooks.arrays, hooks.door = arrays, door
    try:
        body = _encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidArgument(f"{what} cannot be sent to another process: {error}") from None
    finally:
        hooks.arrays, hooks.door = outer, outer_door
    return Packed(kind, body, arrays)


def _encode_other(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        arrays = _hooks.arrays
        arrays.append(_sendable(value))
        return msgspec.msgpack.Ext(_ARRAY, _INDEX.pack(len(arrays) - 1))
    if isinstance(value, ActorRef):
        if not value.is_behind(_hooks.door):
            raise InvalidArgument(f"{value} belongs to another ActorSystem and cannot be sent")
        return msgspec.msgpack.Ext(_REF, _ID.pack(value.id) + value.name.encode())
    if isinstance(value, np.generic):
        plain = value.item()
        is_time = value.dtype.kind in "mM"  # as an int, it would lose its unit
        if not (isinstance(plain, np.generic) or (is_time and isinstance(plain, (int, NoneType)))):
            return plain
    raise TypeError(
        f"{type(value).__module__}.{type(value).__qualname__} is neither msgspec data "
        "nor a numpy array nor an ActorRef"
    )


def _sendable(array: Array) -> Array:
    if array.dtype.hasobject or array.dtype.kind == "V":
        raise TypeError(f"an array of dtype {array.dtype} holds more than plain elements")
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError("a masked array has a mask: send `.filled()`, or data and mask")
    return np.ascontiguousarray(array).reshape(array.shape)  # the first makes 1-d of 0-d


_encode = msgspec.msgpack.Encoder(enc_hook=_encode_other).encode


# --- unpacking -----------------------------------------------------------------------------------


def unpack(packed: Packed, expected: Any, door: Door) -> Any:
    """Return the value as the type that is expected. Raises ProtocolError if it is another."""
    hooks = _hooks
    outer, outer_door = hooks.arrays, hooks.door
    hooks.arrays, hooks.door = packed.arrays, door
    try:
        return _decoder(expected)(packed.body)
    except ProtocolError:
        raise
    except Exception as error:  # the types may have code of their own, and errors of this package
        raise ProtocolError(text_of(error)) from None
    finally:
        hooks.arrays, hooks.door = outer, outer_door


def unpack_message(packed: Packed, door: Door) -> Message[Any]:
    """Return the message; its class is imported if need be.

    Raises BootError where the class cannot be had, and ProtocolError for what is none of its
    messages: the error names the field and what it should hold.
    """
    kind = resolve(packed.kind)
    if not issubclass(kind, Message):
        raise ProtocolError(f"{packed.kind} is no class of messages")
    try:
        message: Message[Any] = unpack(packed, kind, door)
    except ProtocolError as error:
        raise ProtocolError(_with_field(kind, error.message)) from None
    return message


def _with_field(kind: type[Message[Any]], text: str) -> str:
    """Say which field of a message a decoder's text is about; it counts them, behind the tag."""
    found = _PLACE.search(text)
    fields = kind.__struct_fields__
    if found is None or not 0 < int(found[1]) <= len(fields):
        return text
    what = text[: found.start()]
    return (
        f"its field {fields[int(found[1]) - 1] + found[2]!r} does not fit {kind.__name__}: "
        f"{what[:1].lower()}{what[1:]}"
    )


def unpack_reply(packed: Packed, kind: type[Message[Any]], door: Door) -> Any:
    """Return the answer to a message of this class. Raises ProtocolError for a wrong one."""
    return unpack(packed, _reply_type(kind), door)


def convert(value: object, expected: Any) -> Any:
    """Turn plain data into the type that is expected. Raises InvalidArgument."""
    try:
        return msgspec.convert(value, expected, dec_hook=_as_it_is)
    except (TypeError, msgspec.MsgspecError) as error:
        raise InvalidArgument(str(error)) from None


_reply_type = lru_cache(maxsize=None)(reply_type)
_decoders: dict[Any, Callable[[bytes | Array], Any]] = {}


def _decoder(expected: Any) -> Callable[[bytes | Array], Any]:
    try:
        return _decoders[expected]
    except KeyError:
        pass
    try:
        made = msgspec.msgpack.Decoder(expected, dec_hook=_as_it_is, ext_hook=_decode_extension)
    except TypeError as error:
        raise ProtocolError(f"values of {expected} cannot be read: {error}") from None
    decode = _decoders[expected] = made.decode  # type: ignore[assignment]
    return decode  # type: ignore[return-value]


def _as_it_is(_expected: Any, value: Any) -> Any:
    """Take an array or a reference, which the other hook has made; msgspec checks its type."""
    return value


def _decode_extension(code: int, view: memoryview) -> Any:
    data = bytes(view)  # slices of the view go beyond its end before msgspec 0.20
    try:
        if code == _ARRAY:
            return _hooks.arrays[_INDEX.unpack(data)[0]]
        if code == _REF:
            (number,) = _ID.unpack(data[: _ID.size])
            assert _hooks.door is not None
            return _hooks.door.ref(number, str(data[_ID.size :], "utf-8"))
    except (struct.error, IndexError) as error:
        raise ProtocolError(f"an extension of code {code} is broken: {error}") from None
    raise ProtocolError(f"there is no extension of code {code}")


# --- to and from the wire ------------------------------------------------------------------------


def is_small(packed: Packed) -> bool:
    """Whether all of it travels inside the frame."""
    total = len(packed.body)
    for array in packed.arrays:
        if array.nbytes > INLINE_BYTES:
            return False
        total += array.nbytes
    return total <= INLINE_TOTAL_BYTES


def parcel_of(packed: Packed, place: Callable[[Array], Handle]) -> Parcel:
    """Return what travels; `place` puts an array into shared memory. Raises what it raises."""
    left = INLINE_TOTAL_BYTES
    body: bytes | Handle
    if isinstance(packed.body, bytes) and len(packed.body) <= left:
        body = packed.body
        left -= len(body)
    else:
        body = place(np.frombuffer(packed.body, np.uint8))
    arrays = []
    for array in packed.arrays:
        data: bytes | Handle
        if array.nbytes <= min(left, INLINE_BYTES):
            data = array.tobytes()
            left -= len(data)
        else:
            data = place(array)
        arrays.append(WireArray(array.dtype.str, array.shape, data))
    return Parcel(packed.kind, body, arrays)


def packed_of(parcel: Parcel, view: Callable[[Handle], Array]) -> Packed:
    """Return what came; `view` maps a handle's bytes. Raises ProtocolError for what is wrong.

    The arrays are read-only: others may see the same memory.
    """
    body = parcel.body
    if not parcel.arrays:
        return Packed(parcel.kind, body if isinstance(body, bytes) else view(body), [])
    arrays = [_array(wire, view) for wire in parcel.arrays]
    return Packed(parcel.kind, body if isinstance(body, bytes) else view(body), arrays)


def _array(wire: WireArray, view: Callable[[Handle], Array]) -> Array:
    data = wire.data
    raw = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else view(data)
    try:
        return raw.view(_dtype(wire.dtype)).reshape(wire.shape)
    except (TypeError, ValueError) as error:
        raise ProtocolError(
            f"{raw.nbytes} bytes are no array of {wire.dtype} and shape {wire.shape}: {error}"
        ) from None


@lru_cache(maxsize=256)
def _dtype(text: str) -> np.dtype[Any]:
    dtype = np.dtype(text)
    if dtype.hasobject or dtype.kind == "V" or not dtype.itemsize:
        raise TypeError(f"dtype {text} holds more than plain elements")
    return dtype
