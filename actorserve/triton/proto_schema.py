# SPDX-License-Identifier: Apache-2.0
"""How a msgspec Struct states a proto3 message, and the table that is read out of it.

    class ModelInput(msgspec.Struct, kw_only=True):
        name: Annotated[str, 1] = ""                            # the number is the field's
        data_type: Annotated[DataType, 2] = DataType.TYPE_INVALID
        dims: Annotated[list[Int64], 4] = []                    # repeated
        reshape: Annotated[ModelTensorReshape | None, 5] = None # a message: None = absent

The qualified name of the class is the message's name, a trailing underscore of an attribute (for
Python's keywords) is not part of the field's. The text reader, the JSON reader and writer and the
tests all work from `schema_of()`, so that a field is stated once. Imports nothing of this package.
"""

from __future__ import annotations

import enum
import functools
import struct
import types
import typing
from typing import Annotated, Any, Union

import msgspec


class Kind(enum.Enum):
    """The type of a field's single value, by its name in a .proto file."""

    INT32 = "int32"
    UINT32 = "uint32"
    INT64 = "int64"
    UINT64 = "uint64"
    FLOAT = "float"
    DOUBLE = "double"
    BOOL = "bool"
    STRING = "string"
    ENUM = "enum"
    MESSAGE = "message"


Int32 = Annotated[int, Kind.INT32]
Uint32 = Annotated[int, Kind.UINT32]
Int64 = Annotated[int, Kind.INT64]
Uint64 = Annotated[int, Kind.UINT64]
Float = Annotated[float, Kind.FLOAT]
Double = Annotated[float, Kind.DOUBLE]

INTEGER_RANGES: dict[Kind, tuple[int, int]] = {
    Kind.INT32: (-(1 << 31), (1 << 31) - 1),
    Kind.UINT32: (0, (1 << 32) - 1),
    Kind.INT64: (-(1 << 63), (1 << 63) - 1),
    Kind.UINT64: (0, (1 << 64) - 1),
}
"""The least and the greatest value of each integer kind."""

_DEFAULTS: dict[Kind, Any] = {
    **dict.fromkeys(INTEGER_RANGES, 0),
    Kind.FLOAT: 0.0,
    Kind.DOUBLE: 0.0,
    Kind.BOOL: False,
    Kind.STRING: "",
}


class OneOf(msgspec.Struct, frozen=True):
    """Marks a field as a member of the oneof of that name: at most one of them is not None."""

    name: str


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """One field of a message.

    `of` is the class of an enum or a message. `has_presence` says that None means absent; other
    single fields always have a value. A map has `entry`: the schema of its key and value.
    """

    name: str
    attribute: str
    json_name: str
    number: int
    kind: Kind
    of: type[Any] | None = None
    is_repeated: bool = False
    has_presence: bool = False
    oneof: str = ""
    entry: Schema | None = None

    @property
    def default(self) -> Any:
        """What a single field without presence holds when nothing set it."""
        if self.kind is Kind.ENUM and self.of is not None:
            return self.of(0)
        return _DEFAULTS.get(self.kind)


class Schema(msgspec.Struct, frozen=True):
    """A message's name and its fields, by name and in the order of the .proto file."""

    name: str
    fields: dict[str, Field]


@functools.cache
def schema_of(message: type[msgspec.Struct]) -> Schema:
    """Read the table out of a message class; raises TypeError for a class that states none."""
    hints = typing.get_type_hints(message, include_extras=True)
    own = (_field_of(message.__qualname__, attribute, hint) for attribute, hint in hints.items())
    return Schema(message.__qualname__, {field.name: field for field in own})


def _field_of(message: str, attribute: str, hint: Any) -> Field:
    """Build the table's row of one annotated attribute."""
    marks = getattr(hint, "__metadata__", ())
    number = next((mark for mark in marks if isinstance(mark, int)), None)
    if number is None:
        raise TypeError(f"{message}.{attribute} has no field number: Annotated[type, number]")
    name = attribute.rstrip("_")
    base = hint.__origin__
    container = typing.get_origin(base)
    arguments = typing.get_args(base)
    has_presence = container in (Union, types.UnionType)
    entry = None
    if container is dict:
        entry = _entry_schema(message, name, *arguments)
        kind, of = Kind.MESSAGE, None
    elif container is list:
        kind, of = _kind_of(arguments[0], ())
    elif has_presence:
        kind, of = _kind_of(next(one for one in arguments if one is not types.NoneType), marks)
    else:
        kind, of = _kind_of(base, marks)
    return Field(
        name=name,
        attribute=attribute,
        json_name=_json_name(name),
        number=number,
        kind=kind,
        of=of,
        is_repeated=container in (list, dict),
        has_presence=has_presence,
        oneof=next((mark.name for mark in marks if isinstance(mark, OneOf)), ""),
        entry=entry,
    )


def _entry_schema(message: str, name: str, key: Any, value: Any) -> Schema:
    """Build the schema of a map's entry, which the text format writes as a message."""
    fields = {}
    for number, (part, hint) in enumerate((("key", key), ("value", value)), start=1):
        kind, of = _kind_of(hint, ())
        fields[part] = Field(
            name=part,
            attribute=part,
            json_name=part,
            number=number,
            kind=kind,
            of=of,
            has_presence=kind is Kind.MESSAGE,
        )
    camel = "".join(word[:1].upper() + word[1:] for word in name.split("_"))
    return Schema(f"{message}.{camel}Entry", fields)


def _kind_of(hint: Any, marks: tuple[Any, ...]) -> tuple[Kind, type[Any] | None]:
    """Return the kind of a single value's annotation, and its class for enums and messages."""
    marks = (*marks, *getattr(hint, "__metadata__", ()))
    for mark in marks:
        if isinstance(mark, Kind):
            return mark, None
    if hint is str:
        return Kind.STRING, None
    if hint is bool:
        return Kind.BOOL, None
    if issubclass(hint, enum.IntEnum):
        return Kind.ENUM, hint
    return Kind.MESSAGE, hint


def _json_name(name: str) -> str:
    """Return the lowerCamelCase form that proto3 JSON gives a field."""
    first, *rest = name.split("_")
    return first + "".join(word[:1].upper() + word[1:] for word in rest)


def to_float32(value: float) -> float:
    """Round to the nearest value of a proto `float`; what is beyond its range becomes infinite."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def shortest_float32(value: float) -> float:
    """Return the number with the fewest digits that rounds to this float32, as JSON shows it.

    So 0.1 stays 0.1 and does not become 0.10000000149011612.
    """
    for digits in range(6, 9):
        short = float(f"{value:.{digits}g}")
        if to_float32(short) == value:
            return short
    return float(f"{value:.9g}")


def suggestion(name: str, known: typing.Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` where a known name is close to the wrong one, else nothing."""
    import difflib

    close = difflib.get_close_matches(name[:100], list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
