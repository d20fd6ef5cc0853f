# SPDX-License-Identifier: Apache-2.0
"""Read and write the model configuration as JSON.

Reading takes proto3 JSON in both spellings (max_batch_size, maxBatchSize), as the load API's
`config` parameter brings it. Writing is the form of the config endpoint and of `model_config` in
a model's `initialize`: snake_case names in the order of the .proto file, every field present
(empty strings, lists and maps too), enums by name, 64-bit integers as numbers; messages and
members of a oneof that are absent are left out.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec

from actorserve.errors import ConfigError
from actorserve.triton.model_config import ModelConfig
from actorserve.triton.proto_schema import (
    INTEGER_RANGES,
    Field,
    Kind,
    Schema,
    schema_of,
    shortest_float32,
    suggestion,
    to_float32,
)

_INTEGER = re.compile(r"-?[0-9]{1,20}")
_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def model_config_to_dict(config: ModelConfig) -> dict[str, Any]:
    """Return the configuration as JSON's own types, every field present."""
    return _message_to_dict(config)


def model_config_to_json(config: ModelConfig) -> bytes:
    """Return the configuration as compact JSON, every field present."""
    return msgspec.json.encode(_message_to_dict(config))


def model_config_from_json(text: str | bytes, where: str) -> ModelConfig:
    """Read proto3 JSON; raises ConfigError as `where: path: what`."""
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant)
    except RecursionError:
        raise ConfigError(f"{where}: the JSON is nested too deep") from None
    except ValueError as error:  # JSON errors, bytes that are not UTF-8, absurdly long integers
        raise ConfigError(f"{where}: {error}") from None
    return model_config_from_dict(value, where)


def model_config_from_dict(value: object, where: str) -> ModelConfig:
    """Read proto3 JSON that is parsed already; raises ConfigError as `where: path: what`."""
    try:
        config = _message_from(value, ModelConfig, "")
    except _Wrong as wrong:
        raise ConfigError(f"{where}: {wrong}") from None
    assert isinstance(config, ModelConfig)
    return config


# Writing


def _message_to_dict(message: msgspec.Struct) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for field in schema_of(type(message)).fields.values():
        value = getattr(message, field.attribute)
        if value is None:
            continue
        if field.entry is not None:
            of_value = field.entry.fields["value"]
            out[field.name] = {str(k): _value_to_json(v, of_value) for k, v in value.items()}
        elif field.is_repeated:
            out[field.name] = [_value_to_json(one, field) for one in value]
        else:
            out[field.name] = _value_to_json(value, field)
    return out


def _value_to_json(value: Any, field: Field) -> Any:
    if field.kind is Kind.MESSAGE:
        return _message_to_dict(value)
    if field.kind is Kind.ENUM:
        return value.name
    if field.kind in (Kind.FLOAT, Kind.DOUBLE):
        if not math.isfinite(value):
            return next(name for name, one in _SPECIAL.items() if repr(one) == repr(value))
        return shortest_float32(value) if field.kind is Kind.FLOAT else value
    return value


# Reading


class _Wrong(Exception):
    """What is wrong with a value, with its path in front."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}" if path else message)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object, in which no name may come twice."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is given twice in one object")
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f'{text} is no JSON: write it in quotes, "{text}"')


def _message_from(value: object, message: type[msgspec.Struct], path: str) -> msgspec.Struct:
    """Read an object as a message."""
    schema = schema_of(message)
    target = message()
    chosen: dict[str, str] = {}
    for field, part, inner in _members(value, schema, path):
        first = chosen.setdefault(field.oneof or field.name, field.name)
        if first != field.name:
            both = f"both {first!r} and {field.name!r}"
            raise _Wrong(path, f"{schema.name} has {both}: only one {field.oneof} is allowed")
        setattr(target, field.attribute, _field_from(part, field, inner))
    return target


def _members(value: object, schema: Schema, path: str) -> list[tuple[Field, object, str]]:
    """Return the fields that an object gives, with their values and paths; null gives nothing."""
    members: list[tuple[Field, object, str]] = []
    seen: set[str] = set()
    by_json_name = {field.json_name: field for field in schema.fields.values()}
    for name, part in _expect(value, dict, "an object", path).items():
        field = schema.fields.get(name) or by_json_name.get(name)
        if field is None:
            known = suggestion(name, schema.fields)
            raise _Wrong(path, f"{schema.name} has no field {name!r}{known}")
        if field.name in seen:
            raise _Wrong(path, f"{schema.name} has {field.name!r} twice")
        seen.add(field.name)
        if part is not None:
            members.append((field, part, f"{path}.{name}" if path else name))
    return members


def _field_from(value: object, field: Field, path: str) -> Any:
    """Read a field's value: a map, a list or a single one."""
    if field.entry is not None:
        key, of_value = field.entry.fields["key"], field.entry.fields["value"]
        return {
            _scalar_from(name, key, f"{path}[{name!r}]"): _single_from(
                one, of_value, f"{path}[{name!r}]"
            )
            for name, one in _expect(value, dict, "an object", path).items()
        }
    if field.is_repeated:
        items = _expect(value, list, "a list", path)
        return [_single_from(one, field, f"{path}[{i}]") for i, one in enumerate(items)]
    return _single_from(value, field, path)


def _single_from(value: object, field: Field, path: str) -> Any:
    """Read one value of the field's kind."""
    if field.kind is Kind.MESSAGE:
        assert field.of is not None, field
        return _message_from(value, field.of, path)
    return _scalar_from(value, field, path)


def _scalar_from(value: object, field: Field, path: str) -> Any:
    """Read a number, a boolean, a string or an enum's value."""
    return _SCALARS[field.kind](value, field, path)


def _integer_from(value: object, field: Field, path: str) -> int:
    """Read an integer: a number, or one in quotes (as JSON writes 64 bits)."""
    number = None
    if isinstance(value, str) and _INTEGER.fullmatch(value):
        number = int(value)
    elif isinstance(value, str) and _NUMBER.fullmatch(value):
        value = float(value)
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif isinstance(value, float) and value.is_integer():
        number = int(value)
    least, greatest = INTEGER_RANGES[field.kind]
    if number is None or not least <= number <= greatest:
        raise _wrong(value, f"an integer from {least} to {greatest} ({field.kind.value})", path)
    return number


def _float_from(value: object, field: Field, path: str) -> float:
    """Read a number, or one in quotes (as JSON writes what is not finite)."""
    if isinstance(value, str) and value in _SPECIAL:
        return _SPECIAL[value]
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = float(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and _fits(value):
        number = float(value)
        number = to_float32(number) if field.kind is Kind.FLOAT else number
        if math.isfinite(number):
            return number
    raise _wrong(value, f"a number ({field.kind.value})", path)


def _fits(value: float) -> bool:
    """Whether a number, however long an integer it is, can be a float."""
    return abs(value) <= sys.float_info.max


def _bool_from(value: object, field: Field, path: str) -> bool:
    return bool(_expect(value, bool, "true or false", path))


def _string_from(value: object, field: Field, path: str) -> str:
    text: str = _expect(value, str, "a string", path)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise _wrong(value, "a string of whole characters (no lone surrogates)", path) from None
    return text


def _enum_from(value: object, field: Field, path: str) -> int:
    """Read an enum's value by name or number."""
    assert field.of is not None, field
    names: dict[str, int] = field.of.__members__
    if isinstance(value, str) and value in names:
        return names[value]
    number = int(value) if isinstance(value, str) and _INTEGER.fullmatch(value) else value
    if isinstance(number, int) and not isinstance(number, bool):
        for one in names.values():
            if one == number:
                return one
    hint = suggestion(value, names) if isinstance(value, str) else ""
    raise _wrong(
        value, f"a value of {field.of.__qualname__}{hint or ': ' + ', '.join(names)}", path
    )


_SCALARS: dict[Kind, Callable[[object, Field, str], Any]] = {
    **dict.fromkeys(INTEGER_RANGES, _integer_from),
    Kind.FLOAT: _float_from,
    Kind.DOUBLE: _float_from,
    Kind.BOOL: _bool_from,
    Kind.STRING: _string_from,
    Kind.ENUM: _enum_from,
}


def _expect(value: object, kind: type, name: str, path: str) -> Any:
    """Return the value if it is of that type."""
    if not isinstance(value, kind):
        raise _wrong(value, name, path)
    return value


def _wrong(value: object, expected: str, path: str) -> _Wrong:
    """Build the error for a value that is something else."""
    shown = repr(value) if not isinstance(value, (dict, list)) else f"a {type(value).__name__}"
    return _Wrong(path, f"expected {expected}, got {shown[:60]}")
