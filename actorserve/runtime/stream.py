# SPDX-License-Identifier: Apache-2.0
"""What comes back many times: iterated in an event loop, or in a thread.

The reader grants the sender credit: WINDOW items at first, then half as many whenever it has
taken that many. A reader that is slow, or stops reading, thereby stops its own sender, and
nobody else; the queue here never holds more than the window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Generator, Iterator
from typing import Any, Generic, Protocol, TypeVar

from actorserve.clock import monotonic_s
from actorserve.errors import ActorserveError, DeadlineExceeded
from actorserve.runtime.answer import Owner
from actorserve.runtime.waiting import Waiting

R = TypeVar("R")

WINDOW = 64
"""Items that may be on their way, or wait here."""


class StreamOwner(Owner, Protocol):
    """What a stream belongs to."""

    def granted(self, count: int) -> None:
        """Hear that so many more items may be sent."""

    def dropped(self) -> None:
        """Hear that nobody waits any more, in the middle of a garbage collection.

        That may be anywhere, within any lock of ours too: only note it, for later.
        """


class Stream(Waiting, Generic[R]):
    """The items that an actor's `receive` yields; `async for`, or `for` in a thread.

    One reader at a time. An error of the actor is raised after the items that came before it.
    """

    __slots__ = (
        "__weakref__",
        "_error",
        "_is_ended",
        "_item_timeout_s",
        "_items",
        "_owner",
        "_taken",
        "_token",
    )

    def __init__(self, owner: StreamOwner, item_timeout_s: float | None = None) -> None:
        super().__init__()
        self._items: deque[R] = deque()
        self._owner: StreamOwner | None = owner
        self._item_timeout_s = item_timeout_s
        self._taken = 0
        self._token = [True]  # whoever pops it ends the stream
        self._is_ended = False
        self._error: ActorserveError | None = None

    # --- for the reader --------------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[R]:
        """Iterate in an event loop."""
        return self

    async def __anext__(self) -> R:
        """Return the next item; raise the error that ended the stream."""
        deadline_s = self._deadline_s()
        while not self._items:
            if self._is_ended:
                self._raise_end(StopAsyncIteration)
            try:
                if not await _Wait(self, deadline_s):
                    self._expire(deadline_s)
            except BaseException:
                self.close()
                raise
        return self._take()

    def __iter__(self) -> Iterator[R]:
        """Iterate in a thread."""
        return self

    def __next__(self) -> R:
        """Return the next item; raise the error that ended the stream."""
        deadline_s = self._deadline_s()
        while not self._items:
            if self._is_ended:
                self._raise_end(StopIteration)
            owner = self._owner
            if owner is not None and not owner.door.block(self, _left_s(deadline_s)):
                self._expire(deadline_s)
        return self._take()

    def close(self) -> None:
        """End the stream and the generator behind it. Idempotent."""
        owner = self._owner
        if self._end(None):
            self._items.clear()
            if owner is not None:
                owner.given_up()

    def __del__(self) -> None:
        owner = getattr(self, "_owner", None)
        if owner is not None and self._end(None):
            owner.dropped()

    # --- for the sender --------------------------------------------------------------------------

    def push(self, item: R) -> None:
        """Add an item; it is dropped when the stream has ended. From any thread."""
        if not self._is_ended:
            self._items.append(item)
            self.tell()

    def finish(self) -> None:
        """End the stream after its last item. From any thread."""
        self._end(None)

    def fail(self, error: ActorserveError) -> None:
        """End the stream with an error. From any thread."""
        self._end(error)

    def is_over(self) -> bool:
        """Whether no item is wanted any more."""
        return self._is_ended

    def has_news(self) -> bool:
        """See Waiting."""
        return bool(self._items) or self._is_ended

    # --- inside ----------------------------------------------------------------------------------

    def _take(self) -> R:
        item = self._items.popleft()
        self._taken += 1
        if self._taken == WINDOW // 2:
            self._taken = 0
            if self._owner is not None:
                self._owner.granted(WINDOW // 2)
        return item

    def _end(self, error: ActorserveError | None) -> bool:
        try:
            self._token.pop()
        except IndexError:
            return False
        self._error = error
        self._is_ended = True
        self._owner = None
        self.tell()
        return True

    def _raise_end(self, kind: type[BaseException]) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error.with_traceback(None)
        raise kind

    def _deadline_s(self) -> float | None:
        return None if self._item_timeout_s is None else monotonic_s() + self._item_timeout_s

    def _expire(self, deadline_s: float | None) -> None:
        """End the stream if its reader has waited long enough: it may be woken for nothing."""
        owner = self._owner
        if deadline_s is None or monotonic_s() < deadline_s or owner is None or self._items:
            return
        what = owner.describe()
        if self._end(DeadlineExceeded(f"{what}: no item in {self._item_timeout_s:g} s")):
            owner.given_up()


class _Wait:
    """An awaitable look for news."""

    __slots__ = ("_deadline_s", "_stream")

    def __init__(self, stream: Stream[Any], deadline_s: float | None) -> None:
        self._stream = stream
        self._deadline_s = deadline_s

    def __await__(self) -> Generator[Any, None, bool]:
        return self._stream.wait_in_loop(_left_s(self._deadline_s))


def _left_s(deadline_s: float | None) -> float | None:
    return None if deadline_s is None else max(0.0, deadline_s - monotonic_s())
