# SPDX-License-Identifier: Apache-2.0
"""Heads that were seen before: what they mean, without parsing them again.

A client that keeps its connection sends the same head with every request, and reading it costs
more than a small inference does. Only heads that the parser has taken are kept, byte for byte, and
only of plain inferences that arrived in one piece: a known length, nothing to negotiate, nothing
that ends the connection. Equal bytes mean the same thing, so nothing can be mistaken.
"""

from __future__ import annotations

import msgspec

from actorserve.frontend.http_head import InferHead
from actorserve.frontend.http_route import ModelPath

_STARTS = (b"POST /v2/models/", b"POST /v1/")
_END = b"\r\n\r\n"
_MAX_HEAD_BYTES = 1024
_MAX_HEADS = 1024
_TELLING = frozenset((b"expect", b"transfer-encoding", b"upgrade"))


class KnownHead(msgspec.Struct, frozen=True):
    """Where an inference goes, and what its head says of its body."""

    route: ModelPath
    head: InferHead


def is_plain(fields: dict[bytes, bytes]) -> bool:
    """Whether a head with these fields says nothing but where the body goes and how it is made."""
    return _TELLING.isdisjoint(fields)


class HeadMemo:
    """The heads of one server, a bounded number of them."""

    __slots__ = ("_heads",)

    def __init__(self) -> None:
        self._heads: dict[bytes, KnownHead] = {}

    def find(self, data: bytes) -> tuple[KnownHead, bytes] | None:
        """Return the meaning and the body, where `data` is exactly one request with a known head.

        Must only be asked at the border of two requests.
        """
        end = data.find(_END, 0, _MAX_HEAD_BYTES) + len(_END)
        known = self._heads.get(data[:end])
        if known is None or len(data) - end != known.head.content_length:
            return None
        return known, data[end:]

    def keep(self, data: bytes, known: KnownHead) -> None:
        """Remember the head of `data`, which the parser took for exactly one whole request."""
        end = data.find(_END, 0, _MAX_HEAD_BYTES) + len(_END)
        # With a border elsewhere than at the blank line, the sizes would not agree.
        if not data.startswith(_STARTS) or len(data) - end != known.head.content_length:
            return
        if len(self._heads) >= _MAX_HEADS:
            self._heads.clear()
        self._heads[data[:end]] = known
