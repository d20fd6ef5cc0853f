# SPDX-License-Identifier: Apache-2.0
"""Protobuf itself as the oracle: the same messages, built from the package's own schema table."""

from __future__ import annotations

import warnings
from typing import Any

import msgspec
import pytest
from google.protobuf import (
    descriptor_pb2,
    descriptor_pool,
    json_format,
    message_factory,
    text_format,
)
from google.protobuf.message import Message

from actorserve.triton.model_config import ModelConfig
from actorserve.triton.proto_schema import Field, Kind, Schema, schema_of

_PROTO = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    Kind.INT32: _PROTO.TYPE_INT32,
    Kind.UINT32: _PROTO.TYPE_UINT32,
    Kind.INT64: _PROTO.TYPE_INT64,
    Kind.UINT64: _PROTO.TYPE_UINT64,
    Kind.FLOAT: _PROTO.TYPE_FLOAT,
    Kind.DOUBLE: _PROTO.TYPE_DOUBLE,
    Kind.BOOL: _PROTO.TYPE_BOOL,
    Kind.STRING: _PROTO.TYPE_STRING,
}


class ProtoFile:
    """Builds the .proto file that a message class and all that it names would stand in."""

    def __init__(self, root: type[msgspec.Struct]) -> None:
        self.proto = descriptor_pb2.FileDescriptorProto(
            name="oracle.proto", package="inference", syntax="proto3"
        )
        self._known: dict[str, Any] = {}
        self._message(root)

    def _scope(self, qualified: str) -> tuple[Any, str]:
        """Return the message (or the file) that a type is nested in, and its own name."""
        parent, _, name = qualified.rpartition(".")
        return (self._place(parent) if parent else self.proto), name

    def _place(self, qualified: str) -> Any:
        """Return the descriptor of a message, made empty if it is new."""
        if qualified not in self._known:
            scope, name = self._scope(qualified)
            types = scope.message_type if scope is self.proto else scope.nested_type
            self._known[qualified] = types.add(name=name)
        return self._known[qualified]

    def _message(self, message: type[msgspec.Struct]) -> None:
        schema = schema_of(message)
        place = self._place(schema.name)
        if not place.field:
            self._fields(place, schema)

    def _enum(self, enum: Any) -> None:
        if enum.__qualname__ in self._known:
            return
        scope, name = self._scope(enum.__qualname__)
        self._known[enum.__qualname__] = place = scope.enum_type.add(name=name)
        for value in enum:
            place.value.add(name=value.name, number=int(value))

    def _fields(self, place: Any, schema: Schema) -> None:
        for field in schema.fields.values():
            repeated = _PROTO.LABEL_REPEATED if field.is_repeated else _PROTO.LABEL_OPTIONAL
            row = place.field.add(name=field.name, number=field.number, label=repeated)
            row.json_name = field.json_name
            if field.entry is not None:
                entry = self._place(field.entry.name)
                entry.options.map_entry = True
                self._fields(entry, field.entry)
                row.type, row.type_name = _PROTO.TYPE_MESSAGE, f".inference.{field.entry.name}"
            else:
                self._type(row, field)
            if field.oneof:
                names = [one.name for one in place.oneof_decl]
                if field.oneof not in names:
                    place.oneof_decl.add(name=field.oneof)
                    names.append(field.oneof)
                row.oneof_index = names.index(field.oneof)

    def _type(self, row: Any, field: Field) -> None:
        if field.of is None:
            row.type = _SCALARS[field.kind]
            return
        is_enum = field.kind is Kind.ENUM
        (self._enum if is_enum else self._message)(field.of)
        row.type = _PROTO.TYPE_ENUM if is_enum else _PROTO.TYPE_MESSAGE
        row.type_name = f".inference.{field.of.__qualname__}"


class Oracle:
    """Protobuf's own readers of ModelConfig. A refusal is None, a value a dict of all fields."""

    def __init__(self) -> None:
        self.proto = ProtoFile(ModelConfig).proto
        pool = descriptor_pool.DescriptorPool()
        pool.AddSerializedFile(self.proto.SerializeToString())
        self._class = message_factory.GetMessageClass(
            pool.FindMessageTypeByName("inference.ModelConfig")
        )

    def read_text(self, text: str | bytes) -> dict[str, Any] | None:
        """Read the text format."""
        message = self._class()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it unescapes by a codec that warns of some slips
                text_format.Parse(text, message)
        except text_format.ParseError:
            return None
        return self._to_dict(message)

    def read_json(self, text: str) -> dict[str, Any] | None:
        """Read proto3 JSON."""
        message = self._class()
        try:
            json_format.Parse(text, message)
        except (json_format.ParseError, TypeError):  # older ones trip over a number for a message
            return None
        return self._to_dict(message)

    def _to_dict(self, message: Message) -> dict[str, Any]:
        value = json_format.MessageToDict(
            message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        return normalized(value, schema_of(ModelConfig))


def normalized(value: dict[str, Any], schema: Schema) -> dict[str, Any]:
    """Turn protobuf's quoted 64-bit integers into numbers; all else stays."""

    def single(one: Any, field: Field) -> Any:
        if field.kind is Kind.MESSAGE:
            return normalized(one, schema_of(field.of))
        return int(one) if field.kind in (Kind.INT64, Kind.UINT64) else one

    out: dict[str, Any] = {}
    for name, part in value.items():
        field = schema.fields[name]
        if field.entry is not None:
            of_value = field.entry.fields["value"]
            out[name] = {key: single(one, of_value) for key, one in part.items()}
        elif field.is_repeated:
            out[name] = [single(one, field) for one in part]
        else:
            out[name] = single(part, field)
    return out


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    """Protobuf's own readers, for the whole room."""
    return Oracle()
