# SPDX-License-Identifier: Apache-2.0
"""Compressed bodies, both ways: gzip and deflate, as HTTP's content codings. Pure.

What counts against a limit is always the decoded size: a body that would grow beyond it is never
decoded further than one byte over.
"""

from __future__ import annotations

import zlib

from actorserve.errors import InvalidArgument, TooLarge, Unsupported
from actorserve.frontend.v2_response import EncodedBody
from actorserve.frontend.v2_values import View

_AUTOMATIC = 47  # zlib's or gzip's header, whichever stands there
_BARE = -15  # what some clients send under the name of deflate
MAX_MEMBERS = 64
"""Each member costs a copy of what follows it: many small ones would take quadratic time."""
_FAST_LEVEL_ABOVE_BYTES = 64 * 1024


class UnsupportedEncoding(Unsupported):
    """A content coding that nobody here decodes."""

    @property
    def http_status(self) -> int:
        """415, which has no other cause."""
        return 415


def content_encoding(header: bytes) -> str:
    """Return "gzip", "deflate" or "" for a Content-Encoding header; raise UnsupportedEncoding."""
    name = header.decode("latin-1").strip().lower()
    if name in ("", "identity"):
        return ""
    if name in ("gzip", "deflate"):
        return name
    raise UnsupportedEncoding(
        f"Unsupported Media Type: content encoding {name[:64]!r}, expected gzip or deflate, once"
    )


def inflate(body: View, encoding: str, limit_bytes: int) -> bytes:
    """Decode a whole body. Raises InvalidArgument for a broken one, TooLarge beyond the limit."""
    try:
        return _inflate(body, _AUTOMATIC, limit_bytes)
    except zlib.error as error:
        if encoding == "deflate":
            try:
                return _inflate(body, _BARE, limit_bytes)
            except zlib.error:
                pass
        raise InvalidArgument(f"the body is no valid {encoding} data: {error}") from None


def _inflate(body: View, window_bits: int, limit_bytes: int) -> bytes:
    pieces: list[bytes] = []
    room = limit_bytes
    rest: View = body
    while True:
        if len(pieces) >= MAX_MEMBERS:
            raise InvalidArgument(f"the body has more than {MAX_MEMBERS} gzip members")
        unpacker = zlib.decompressobj(window_bits)
        piece = unpacker.decompress(rest, room + 1)
        room -= len(piece)
        if room < 0:
            raise TooLarge(
                f"the decoded body exceeds the maximum allowed input size of {limit_bytes} bytes. "
                "Use --http-max-input-size to increase the limit."
            )
        pieces.append(piece)
        if not unpacker.eof:
            raise InvalidArgument("the compressed body is cut off")
        rest = unpacker.unused_data  # gzip allows several members, one after the other
        if not rest:
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def accepted_encoding(header: bytes) -> str:
    """Return "gzip", "deflate" or "": what an Accept-Encoding header prefers.

    The highest quality wins, then the one named first; identity is never refused.
    """
    best, best_quality = "", 0.0
    for item in header.decode("latin-1").lower().split(","):
        name, _, rest = item.partition(";")
        name = name.strip()
        quality = 1.0
        if rest.strip().startswith("q="):
            try:
                quality = float(rest.strip()[2:])
            except ValueError:
                quality = 0.0
        if name in ("gzip", "deflate") and quality > best_quality:
            best, best_quality = name, quality
    return best


def compress(body: EncodedBody, encoding: str) -> EncodedBody:
    """Return the body compressed by "gzip" or "deflate" (zlib's format, as clients expect)."""
    level = 1 if body.nbytes > _FAST_LEVEL_ABOVE_BYTES else 6
    packer = zlib.compressobj(level, zlib.DEFLATED, 31 if encoding == "gzip" else 15)
    pieces: list[View] = [packer.compress(piece) for piece in body.pieces]
    pieces.append(packer.flush())
    pieces = [piece for piece in pieces if len(piece)]
    return EncodedBody(pieces, sum(map(len, pieces)), body.json_bytes, encoding)
