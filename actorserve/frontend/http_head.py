# SPDX-License-Identifier: Apache-2.0
"""The heads of HTTP messages: what an inference reads from a request's, and a reply's bytes."""

from __future__ import annotations

from http import HTTPStatus

import msgspec

from actorserve.errors import InvalidArgument
from actorserve.frontend.v2_compression import accepted_encoding, content_encoding
from actorserve.frontend.v2_response import EncodedBody

Headers = list[tuple[bytes, bytes]]

_WANTED = frozenset(
    (
        b"content-length",
        b"transfer-encoding",
        b"connection",
        b"upgrade",
        b"expect",
        b"inference-header-content-length",
        b"content-encoding",
        b"accept-encoding",
    )
)
STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class InferHead(msgspec.Struct):
    """What the head of an inference request says of its body and of the wanted reply.

    `content_length` is -1 where it is unknown (chunked). `json_bytes` is the document's size, None
    where the whole body is the document, 0 for a raw binary request. `takes_chunks` is false for
    HTTP/1.0, where only the connection's end ends a reply of unknown length.
    """

    content_length: int = 0
    expects_continue: bool = False
    json_bytes: int | None = None
    encoding: str = ""
    accepted: str = ""
    takes_chunks: bool = True


def pick(headers: Headers) -> dict[bytes, bytes]:
    """Return the headers that matter here, by name."""
    return {name: value for name, value in headers if name in _WANTED}


def content_length_of(fields: dict[bytes, bytes]) -> int:
    """Return the Content-Length; -1 for a chunked body, 0 for none. The parser has checked it."""
    if b"transfer-encoding" in fields:
        return -1
    return int(fields.get(b"content-length", 0))


def unknown_coding(headers: Headers) -> str | None:
    """Return why a body's transfer coding cannot be read; None where it is plainly chunked.

    A body in gzip and chunks would else be taken for what is in the chunks (RFC 9112, 6.1: 501).
    """
    codings = b",".join(value for name, value in headers if name == b"transfer-encoding")
    if codings.strip().lower() == b"chunked":
        return None
    return (
        f"Transfer-Encoding {codings.decode('latin-1')[:100]!r} is not supported: expected "
        "'chunked'; a compressed body is named by Content-Encoding"
    )


def expects_continue(fields: dict[bytes, bytes]) -> bool:
    """Whether the peer waits for an interim response before it sends the body."""
    return fields.get(b"expect", b"").lower() == b"100-continue"


def fill_head(head: InferHead, fields: dict[bytes, bytes]) -> None:
    """Read the rest. Raises InvalidArgument, or UnsupportedEncoding for a content coding."""
    accepted = fields.get(b"accept-encoding")
    if accepted is not None:
        head.accepted = accepted_encoding(accepted)
    encoding = fields.get(b"content-encoding")
    if encoding is not None:
        head.encoding = content_encoding(encoding)
    size = fields.get(b"inference-header-content-length")
    if size is not None:
        head.json_bytes = _json_bytes(size, head)


def _json_bytes(value: bytes, head: InferHead) -> int:
    text = value.strip()
    if not text.isdigit() or len(text) > 19:
        raise InvalidArgument(
            f"Unable to parse Inference-Header-Content-Length {value[:32]!r}: "
            "expected the size of the JSON part in bytes"
        )
    size = int(text)
    if 0 <= head.content_length < size and not head.encoding:
        raise InvalidArgument(
            f"Inference-Header-Content-Length is {size}, "
            f"but the whole body has only {head.content_length} bytes"
        )
    return size


def reply_head(status: int, body: EncodedBody, keep_alive: bool, extra: bytes = b"") -> bytes:
    """Return the head of a reply. `extra` holds whole header lines."""
    json_bytes = body.json_bytes
    if json_bytes is None:
        what = b"content-type: application/json\r\n"
    else:
        what = (
            b"content-type: application/octet-stream\r\n"
            b"inference-header-content-length: %d\r\n" % json_bytes
        )
    if body.encoding:
        extra += b"content-encoding: %b\r\n" % body.encoding.encode()
    if not keep_alive:
        extra += b"connection: close\r\n"
    return b"%b%b%bcontent-length: %d\r\n\r\n" % (STATUS_LINES[status], what, extra, body.nbytes)


def stream_head(keep_alive: bool, takes_chunks: bool) -> bytes:
    """Return the head of a stream of events."""
    return b"".join(
        [
            STATUS_LINES[200],
            b"content-type: text/event-stream; charset=utf-8\r\n",
            b"transfer-encoding: chunked\r\n" if takes_chunks else b"",
            b"" if keep_alive else b"connection: close\r\n",
            b"\r\n",
        ]
    )
