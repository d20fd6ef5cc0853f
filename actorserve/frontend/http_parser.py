# SPDX-License-Identifier: Apache-2.0
"""Parsers that begin elsewhere than at the start of a connection.

httptools takes a request that offers an upgrade (`Upgrade: h2c`, which Java's client sends with
every request) for the last one, and never looks at its body. The offer is not taken up here, so
the body is read by a second parser, which is told of its length by a head of our own making.
"""

from __future__ import annotations

from typing import Protocol

import httptools


class ParserTarget(Protocol):
    """Who is called by a parser."""

    def on_message_begin(self) -> None:
        """A request begins."""

    def on_url(self, url: bytes) -> None:
        """A part of its target."""

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header."""

    def on_headers_complete(self) -> None:
        """The head is complete."""

    def on_body(self, body: bytes) -> None:
        """A part of the body."""

    def on_message_complete(self) -> None:
        """The request is complete."""


def new_parser(target: ParserTarget) -> httptools.HttpRequestParser:
    """Return a parser for the next request; what follows a last one is no error, as in uvicorn."""
    parser = httptools.HttpRequestParser(target)
    if hasattr(parser, "set_dangerous_leniencies"):  # since httptools 0.6.3
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def body_parser(target: ParserTarget, length: int) -> httptools.HttpRequestParser:
    """Return a parser whose next bytes are a body of `length` bytes, chunked where that is -1."""
    parser = new_parser(_AfterFirstHead(target))
    framing = b"Transfer-Encoding: chunked" if length < 0 else b"Content-Length: %d" % length
    parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n\r\n")
    return parser


class _AfterFirstHead:
    """Pass everything on but the first head."""

    def __init__(self, target: ParserTarget) -> None:
        self._target = target
        self._is_first = True
        self.on_body = target.on_body
        self.on_message_complete = target.on_message_complete

    def on_message_begin(self) -> None:
        if not self._is_first:
            self._target.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._is_first:
            self._target.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_first:
            self._target.on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_first:
            self._is_first = False
        else:
            self._target.on_headers_complete()
