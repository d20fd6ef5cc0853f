# SPDX-License-Identifier: Apache-2.0
"""The heads of HTTP messages: what an inference reads from a request's, and a reply's bytes."""

from __future__ import annotations

from http import HTTPStatus

import msgspec

from actorserve.errors import InvalidArgument
from actorserve.frontend.v2_compression import accepted_encoding, content_encoding

Headers = list[tuple[bytes, bytes]]

_WANTED = frozenset(
    (
        b"content-length",
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
    where the whole body is the document, 0 for a raw binary request.
    """

    content_length: int = 0
    json_bytes: int | None = None
    encoding: str = ""
    accepted: str = ""


def content_length_of(headers: Headers) -> int:
    """Return the Content-Length; -1 for a chunked body, 0 for none. The parser has checked it."""
    length = 0
    for name, value in headers:
        if name == b"content-length":
            length = int(value)
        elif name == b"transfer-encoding":
            return -1
    return length


def read_infer_head(headers: Headers, content_length: int) -> InferHead:
    """Read the fields that matter. Raises InvalidArgument, or UnsupportedEncoding for a coding."""
    head = InferHead(content_length)
    fields = {name: value for name, value in headers if name in _WANTED}
    accepted = fields.get(b"accept-encoding")
    if accepted is not None:
        head.accepted = accepted_encoding(accepted)
    encoding = fields.get(b"content-encoding")
    if encoding is not None:
        head.encoding = content_encoding(encoding)
    size = fields.get(b"inference-header-content-length")
    if size is not None:
        head.json_bytes = _json_bytes(size, head)
    return head


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


def reply_head(
    status: int,
    content_type: bytes,
    nbytes: int,
    keep_alive: bool,
    json_bytes: int | None = None,
    extra: bytes = b"",
) -> bytes:
    """Return the head of a reply. `extra` holds whole header lines."""
    blocks = b""
    if json_bytes is not None:
        blocks = b"inference-header-content-length: %d\r\n" % json_bytes
    return b"%bcontent-type: %b\r\n%b%bcontent-length: %d\r\n%b\r\n" % (
        STATUS_LINES[status],
        content_type,
        blocks,
        extra,
        nbytes,
        b"" if keep_alive else b"connection: close\r\n",
    )
