# SPDX-License-Identifier: Apache-2.0
"""Read the literals of the protobuf text format: numbers, booleans, enums, strings.

All functions raise ValueError with a message that says what was expected; the caller knows where.
What one implementation or another lets pass beyond the published grammar (underscores between
digits, 0b1, unknown escapes) is refused, because the reference server refuses it too.
"""

from __future__ import annotations

import re

from actorserve.triton.proto_schema import INTEGER_RANGES, Field, Kind, suggestion, to_float32

_INTEGER = re.compile(r"([+-]?)(?:0[xX]([0-9a-fA-F]+)|(0[0-7]*)|([1-9][0-9]*))")
_DECIMAL = re.compile(
    r"[+-]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?(?=[fF]?$)"
)
_SPECIAL = re.compile(r"([+-]?(?:inf(?:inity)?|nan))f?", re.IGNORECASE)
_BOOLEANS = {
    **dict.fromkeys(("true", "True", "t", "1"), True),
    **dict.fromkeys(("false", "False", "f", "0"), False),
}
_ESCAPE = re.compile(
    r"\\(?:([abfnrtv\\'\"?])|([0-7]{1,3})|x([0-9a-fA-F]{1,2})"
    r"|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)"
)
_SIMPLE_ESCAPES = dict(zip("abfnrtv\\'\"?", "\a\b\f\n\r\t\v\\'\"?", strict=True))
_MAX_DIGITS = 64  # of an integer: more is out of range whatever they are, and slow to convert


def read_integer(text: str, kind: Kind) -> int:
    """Read a decimal, octal (leading 0) or hexadecimal integer that fits the kind."""
    match = _INTEGER.fullmatch(text)
    if match is None:
        raise ValueError(f"expected an integer ({kind.value})")
    sign, hexadecimal, octal, decimal = match.groups()
    digits = (hexadecimal or octal or decimal).lstrip("0")
    least, greatest = INTEGER_RANGES[kind]
    if len(digits) <= _MAX_DIGITS:
        value = int(digits or "0", 16 if hexadecimal else 8 if octal else 10)
        value = -value if sign == "-" else value
        if least <= value <= greatest:
            return value
    raise ValueError(f"out of range for {kind.value}: expected {least} to {greatest}")


def read_float(text: str, kind: Kind) -> float:
    """Read a decimal number, inf or nan, with or without the suffix f; rounds for a `float`."""
    match = _DECIMAL.match(text)
    if match is None:
        match = _SPECIAL.fullmatch(text)
        if match is None:
            raise ValueError(f"expected a number ({kind.value})")
        return float(match.group(1))
    value = float(match.group())
    return to_float32(value) if kind is Kind.FLOAT else value


def read_bool(text: str) -> bool:
    """Read a boolean; only the spellings of the grammar count."""
    try:
        return _BOOLEANS[text]
    except KeyError:
        raise ValueError("expected true or false") from None


def read_enum(text: str, field: Field) -> int:
    """Read an enum's value by name or number; a number that the enum lacks is refused."""
    assert field.of is not None, field
    values: dict[str, int] = field.of.__members__
    if text in values:
        return values[text]
    if _INTEGER.fullmatch(text):
        number = read_integer(text, Kind.INT32)
        for value in values.values():
            if value == number:
                return value
    raise ValueError(
        f"expected a value of {field.of.__qualname__}"
        + (suggestion(text, values) or f": {', '.join(values)}")
    )


def unescape(text: str) -> bytes:
    """Read what stands between two quotes, as UTF-8 where it is written as characters."""
    if "\\" not in text:
        return text.encode("utf-8")
    pieces = []
    end = 0
    for match in _ESCAPE.finditer(text):
        pieces.append(text[end : match.start()].encode("utf-8"))
        pieces.append(_escaped(match))
        end = match.end()
    pieces.append(text[end:].encode("utf-8"))
    return b"".join(pieces)


def _escaped(match: re.Match[str]) -> bytes:
    """Return the bytes that one escape sequence stands for."""
    simple, octal, hexadecimal, *unicode = match.groups()
    if simple:
        return _SIMPLE_ESCAPES[simple].encode("ascii")
    if octal or hexadecimal:
        value = int(octal, 8) if octal else int(hexadecimal, 16)
        if value > 0xFF:
            raise ValueError(f"the escape {match.group()} is more than one byte (\\0 to \\377)")
        return bytes((value,))
    digits = unicode[0] or unicode[1]
    if not digits:
        raise ValueError(f"unknown escape {match.group()} in a string")
    point = int(digits, 16)
    if point > 0x10FFFF or 0xD800 <= point <= 0xDFFF:
        raise ValueError(f"the escape {match.group()} is no character of Unicode")
    return chr(point).encode("utf-8")
