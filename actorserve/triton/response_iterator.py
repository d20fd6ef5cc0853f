# SPDX-License-Identifier: Apache-2.0
"""`pb_utils.ResponseIterator`: the responses to one call, as they come and as often as wanted.

    for response in iterator: …      waits for each; break and go on with a second `for`
    for response in iterator: …      once it has ended: all of them again, from the first

An iterator that nobody holds any more cancels its call, and what still comes for it is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from actorserve.triton.response import InferenceResponse


class Source(Protocol):
    """Where the responses come from. `drop` may be called from a finalizer, in any thread."""

    def next(self) -> InferenceResponse | None:
        """Return the next response, waiting for it; None after the last."""

    def cancel(self) -> None:
        """Ask for the end; responses go on until the callee has given it."""

    def drop(self) -> None:
        """Hear that nobody waits for anything any more; idempotent."""


class ResponseIterator:
    """See the module's head."""

    __slots__ = ("__weakref__", "_at", "_is_over", "_seen", "_source")

    _source: Source
    _seen: list[InferenceResponse]
    _at: int
    _is_over: bool

    def __init__(self) -> None:
        raise TypeError("ResponseIterator: objects come from exec(decoupled=True) only")

    @classmethod
    def _over(cls, source: Source) -> ResponseIterator:
        iterator = cls.__new__(cls)
        iterator._source = source
        iterator._seen = []
        iterator._at = 0
        iterator._is_over = False
        return iterator

    def __iter__(self) -> Iterator[InferenceResponse]:
        if self._is_over and self._at == len(self._seen):
            self._at = 0
        return self

    def __next__(self) -> InferenceResponse:
        if self._at < len(self._seen):
            response = self._seen[self._at]
            self._at += 1
            return response
        if self._is_over:
            raise StopIteration
        found = self._source.next()
        if found is None:
            self._is_over = True
            raise StopIteration
        self._seen.append(found)
        self._at += 1
        return found

    def cancel(self) -> None:
        """Ask the callee to end; nothing happens where it has ended, or was asked already."""
        if not self._is_over:
            self._source.cancel()

    def __del__(self) -> None:
        source = getattr(self, "_source", None)
        if source is not None and not self._is_over:
            source.drop()
