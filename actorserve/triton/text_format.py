# SPDX-License-Identifier: Apache-2.0
"""Read the protobuf text format (config.pbtxt) into Structs, by their schema.

    text ──► text_lexer: tokens ──► Reader: fields ──► text_values: literals ──► Structs

It accepts what protobuf's own reader accepts and gives the same values, with the exceptions that
text_values names and one more: a number that an enum lacks is an error. Every error is a
ConfigError that begins with `file:line:column:`.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from actorserve.errors import ConfigError
from actorserve.triton.model_config import ModelConfig
from actorserve.triton.proto_schema import (
    INTEGER_RANGES,
    Field,
    Kind,
    Schema,
    schema_of,
    suggestion,
)
from actorserve.triton.text_lexer import Source, Token, TokenKind
from actorserve.triton.text_values import (
    read_bool,
    read_enum,
    read_float,
    read_integer,
    unescape,
)

MAX_DEPTH = 100
"""Messages inside messages; what protobuf recommends. The reader recurses once for each."""

MessageT = TypeVar("MessageT", bound=msgspec.Struct)


def parse_model_config(text: str | bytes, filename: str) -> ModelConfig:
    """Read a model configuration; raises ConfigError with `filename:line:column: what`."""
    return parse(text, ModelConfig, filename)


def parse(text: str | bytes, message: type[MessageT], filename: str) -> MessageT:
    """Read a text in the text format as a message of any class; raises ConfigError."""
    return _Reader(Source(text, filename)).read(message)


class _Entry:
    """A map's entry while it is read: the text format writes it as a message."""

    __slots__ = ("key", "value")

    def __init__(self, schema: Schema) -> None:
        self.key: Any = schema.fields["key"].default
        self.value: Any = schema.fields["value"].default


class _Reader:
    """One pass over the tokens. `_token` is the next one that nobody has taken yet."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._tokens = source.tokens()
        self._token = next(self._tokens)
        self._depth = 0

    def read(self, message: type[MessageT]) -> MessageT:
        """Read the whole text as the fields of one message."""
        target = message()
        self._fields(target, schema_of(message), "")
        return target

    # Structure

    def _fields(self, target: Any, schema: Schema, end: str) -> None:
        """Read fields into `target` up to the closing mark; an empty one is the text's end."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(f"messages are nested more than {MAX_DEPTH} deep")
        while not self._accept(end):
            self._field(target, schema, end)
        self._depth -= 1

    def _field(self, target: Any, schema: Schema, end: str) -> None:
        """Read one field: its name, its value or values, and a separator."""
        named = self._token
        field = self._known_field(schema, end)
        self._refuse_second_choice(target, field, schema, named)
        if not self._accept(":") and field.kind is not Kind.MESSAGE:
            raise self._error(f"expected ':' after {field.name!r}")
        if field.is_repeated and self._accept("["):
            if not self._accept("]"):
                self._value_into(target, field)
                while not self._accept("]"):
                    self._expect(",", f"between the values of {field.name!r}, or ']'")
                    self._value_into(target, field)
        else:
            if not field.is_repeated and _is_set(target, field):
                raise self._error(f"{schema.name} has {field.name!r} twice", named)
            self._value_into(target, field)
        if not self._accept(","):
            self._accept(";")

    def _known_field(self, schema: Schema, end: str) -> Field:
        """Take a field's name and look it up."""
        token = self._token
        if token.text == "[":
            raise self._error("extensions and Any values ('[...]' as a field) are not supported")
        field = schema.fields.get(token.text)
        if field is not None:
            self._advance()
            return field
        if token.kind is TokenKind.WORD:
            known = suggestion(token.text, schema.fields)
            raise self._error(f"{schema.name} has no field {token.text!r}{known}")
        expected = f"a field of {schema.name}" + (f" or {end!r}" if end else "")
        raise self._error(f"expected {expected}, found {token.describe()}")

    def _refuse_second_choice(
        self, target: Any, field: Field, schema: Schema, named: Token
    ) -> None:
        """Refuse a field of a oneof of which another one is set."""
        if not field.oneof:
            return
        for other in schema.fields.values():
            if other.oneof == field.oneof and other is not field and _is_set(target, other):
                raise self._error(
                    f"{schema.name} has both {other.name!r} and {field.name!r}: "
                    f"only one {field.oneof} is allowed",
                    named,
                )

    def _value_into(self, target: Any, field: Field) -> None:
        """Read one value and put it where the field says."""
        if field.entry is not None:
            entry = self._entry(field.entry)
            getattr(target, field.attribute)[entry.key] = entry.value
        elif field.is_repeated:
            getattr(target, field.attribute).append(self._value(field))
        else:
            setattr(target, field.attribute, self._value(field))

    def _entry(self, schema: Schema) -> _Entry:
        """Read a map's entry; what it leaves out has its default."""
        entry = _Entry(schema)
        self._fields(entry, schema, self._opening(schema.name))
        if entry.value is None:
            entry.value = _class_of(schema.fields["value"])()
        return entry

    # Values

    def _value(self, field: Field) -> Any:
        """Read one value of the field's kind."""
        if field.kind is Kind.MESSAGE:
            message = _class_of(field)
            end = self._opening(field.name)
            target = message()
            self._fields(target, schema_of(message), end)
            return target
        first = self._token
        try:
            return self._string() if field.kind is Kind.STRING else self._literal(field)
        except ValueError as error:
            # The piece of a string that is wrong is still the next token.
            token = self._token if self._token.kind is TokenKind.STRING else first
            raise self._error(f"{field.name}: {error}, found {token.describe()}", token) from None

    def _literal(self, field: Field) -> Any:
        """Read a number, a boolean or an enum's value: one token."""
        text = self._token.text
        value: Any
        if field.kind in INTEGER_RANGES:
            value = read_integer(text, field.kind)
        elif field.kind is Kind.BOOL:
            value = read_bool(text)
        elif field.kind is Kind.ENUM:
            value = read_enum(text, field)
        else:
            value = read_float(text, field.kind)
        self._advance()
        return value

    def _string(self) -> str:
        """Read a string: one or more quoted pieces."""
        pieces = []
        while self._token.kind is TokenKind.STRING:
            pieces.append(unescape(self._token.text[1:-1]))
            self._advance()
        if not pieces:
            raise ValueError("expected a string in quotes")
        try:
            return b"".join(pieces).decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError("expected bytes that are UTF-8") from None

    # Tokens

    def _opening(self, name: str) -> str:
        """Take the mark that opens a message, and return the one that will close it."""
        if self._accept("{"):
            return "}"
        if self._accept("<"):
            return ">"
        raise self._error(f"expected '{{' to open {name!r}, found {self._token.describe()}")

    def _accept(self, text: str) -> bool:
        """Take the next token if it is this one."""
        if self._token.text != text:
            return False
        self._advance()
        return True

    def _expect(self, text: str, why: str) -> None:
        """Take the next token, which must be this one."""
        if not self._accept(text):
            raise self._error(f"expected {text!r} {why}, found {self._token.describe()}")

    def _advance(self) -> None:
        self._token = next(self._tokens)

    def _error(self, message: str, token: Token | None = None) -> ConfigError:
        """Build the error for a token, by default the next one."""
        return self._source.error((token or self._token).offset, message)


def _is_set(target: Any, field: Field) -> bool:
    """Whether a single field holds something; proto3 cannot tell an explicit default from none."""
    value = getattr(target, field.attribute)
    return value is not None if field.has_presence else bool(value)


def _class_of(field: Field) -> type[msgspec.Struct]:
    """Return the class of a message field."""
    assert field.of is not None, field
    return field.of
