# SPDX-License-Identifier: Apache-2.0
"""Split a text in the protobuf text format into tokens, and say where something is wrong.

The lexer never fails: what belongs to no token becomes one of kind OTHER, and the reader, which
knows what it expected there, reports it.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator

import msgspec

from actorserve.errors import ConfigError

_QUOTED = r"{0}[^{0}\\\n]*(?:\\.[^{0}\\\n]*)*{0}"
_TOKEN = re.compile(
    r"(?P<SPACE>\s+|\#[^\n]*)"
    r"|(?P<WORD>[A-Za-z_][0-9A-Za-z_]*)"
    # A sloppy superset of numbers: "1name" and "1.2.3" are one wrong number, not two tokens.
    r"|(?P<NUMBER>(?:[0-9+-]|\.[0-9])[0-9A-Za-z_.+-]*)"
    r"|(?P<STRING>" + _QUOTED.format('"') + "|" + _QUOTED.format("'") + ")"
    r"|(?P<MARK>[{}<>\[\]:,;])"
    r"|(?P<OTHER>.)"
)


class TokenKind(enum.Enum):
    """What a token is; END is the end of the text and has no characters."""

    WORD = "WORD"
    NUMBER = "NUMBER"
    STRING = "STRING"
    MARK = "MARK"
    OTHER = "OTHER"
    END = "END"


class Token(msgspec.Struct, frozen=True, gc=False):
    """A piece of the text; `offset` counts characters from its start."""

    kind: TokenKind
    text: str
    offset: int

    def describe(self) -> str:
        """Return the token as an error message shows it."""
        if self.kind is TokenKind.END:
            return "the end of the text"
        if self.kind is TokenKind.OTHER and self.text in "\"'":
            return "a string without its closing quote on the same line"
        if self.kind is TokenKind.OTHER and not self.text.isprintable():
            return f"the character U+{ord(self.text):04X}"
        return repr(self.text if len(self.text) <= 40 else f"{self.text[:37]}...")


class Source:
    """A text and the name that errors give it."""

    def __init__(self, text: str | bytes, filename: str) -> None:
        """Take the text in; raises ConfigError if it is not UTF-8 or has a byte order mark."""
        self.filename = filename
        self.text = text if isinstance(text, str) else self._decode(text)
        if self.text.startswith("\ufeff"):
            raise self.error(0, "the text starts with a byte order mark: save it as plain UTF-8")

    def error(self, offset: int, message: str) -> ConfigError:
        """Build the error for what is wrong at a character; lines and columns count from 1."""
        line_start = self.text.rfind("\n", 0, offset) + 1
        line = self.text.count("\n", 0, line_start) + 1
        return ConfigError(f"{self.filename}:{line}:{offset - line_start + 1}: {message}")

    def tokens(self) -> Iterator[Token]:
        """Yield the tokens, then END for ever after."""
        for match in _TOKEN.finditer(self.text):
            name = match.lastgroup
            if name is not None and name != "SPACE":
                yield Token(TokenKind[name], match.group(), match.start())
        end = Token(TokenKind.END, "", len(self.text))
        while True:
            yield end

    def _decode(self, raw: bytes) -> str:
        """Decode UTF-8, or say at which byte it stops being that."""
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            self.text = raw[: error.start].decode("utf-8")
            raise self.error(
                len(self.text), f"the text is not UTF-8: byte 0x{raw[error.start]:02x}"
            ) from None
