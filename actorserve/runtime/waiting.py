# SPDX-License-Identifier: Apache-2.0
"""Waiting for news from any thread or event loop, and telling it from any other.

No lock: a waiter enters itself and looks again; a teller writes the news and then takes the
waiters out. One of the two always sees the other. Telling somebody twice does no harm.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from typing import Any, Protocol

from actorserve.errors import InvalidArgument

_FOREVER_S = 1e9  # thirty years: more is no limit, and some clocks cannot say it


class Blocker(Protocol):
    """Whoever knows how a thread waits here without keeping the news from coming."""

    def block(self, waiting: Waiting, timeout_s: float | None) -> bool:
        """Wait in this thread until there is news; False after `timeout_s` seconds.

        Raises InvalidArgument in a thread that must not wait.
        """


def limit_of(timeout_s: object, name: str = "timeout_s") -> float | None:
    """Return a user's timeout in seconds; None where it is none, or as good as none.

    Raises InvalidArgument unless it is 0 or more; `name` is what the user calls it.
    """
    if timeout_s is None:
        return None
    try:
        limit_s = float(timeout_s)  # type: ignore[arg-type]  # what users give
    except (TypeError, ValueError):
        limit_s = -1.0
    if isinstance(timeout_s, str) or not limit_s >= 0:
        raise InvalidArgument(f"{name} is {timeout_s!r}, expected seconds, 0 or more")
    return limit_s if limit_s < _FOREVER_S else None


class Waiting:
    """Base of what can be waited for."""

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters: list[Callable[[], object]] = []

    def has_news(self) -> bool:
        """Whether there is no need to wait."""
        raise NotImplementedError

    def tell(self) -> None:
        """Wake everybody who waits; the news has been written before."""
        waiters = self._waiters
        while waiters:
            try:
                wake = waiters.pop()
            except IndexError:  # another teller was quicker
                return
            wake()

    def listen(self, wake: Callable[[], object]) -> None:
        """Have `wake` called, from whatever thread, when there is news."""
        self._waiters.append(wake)

    def leave(self, wake: Callable[[], object]) -> None:
        """Listen no more."""
        try:
            self._waiters.remove(wake)
        except ValueError:
            pass

    def wait_in_thread(self, timeout_s: float | None) -> bool:
        """Wait for news; False after `timeout_s` seconds."""
        lock = threading.Lock()
        lock.acquire()
        self._waiters.append(lock.release)
        if not self.has_news():
            limit_s = -1.0 if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX)
            lock.acquire(timeout=limit_s)
        self.leave(lock.release)
        return self.has_news()

    def wait_in_loop(self, timeout_s: float | None) -> Generator[Any, None, bool]:
        """Wait for news; False after `timeout_s` seconds. To be used with `yield from`."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        wake = _waker(loop, future)
        self._waiters.append(wake)
        timer = None if timeout_s is None else loop.call_later(timeout_s, wake)
        try:
            if not self.has_news():
                yield from future
        finally:
            if timer is not None:
                timer.cancel()
            self.leave(wake)
        return self.has_news()


def _waker(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> Callable[[], None]:
    thread = threading.get_ident()

    def wake() -> None:
        if threading.get_ident() == thread:
            _resolve(future)
            return
        try:
            loop.call_soon_threadsafe(_resolve, future)
        except RuntimeError:
            pass  # its loop is closed: nobody waits any more

    return wake


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
