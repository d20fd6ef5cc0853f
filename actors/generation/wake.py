# SPDX-License-Identifier: Apache-2.0
"""Waking many waiters at once: each event loop once, whatever the number of its tasks.

The rule is that of runtime/waiting.py: a waiter enters itself and looks again, a teller writes
the news and then takes the waiters out; one of the two always sees the other. Here the teller
gathers the waiters of a whole batch first. A waiter is a future of an event loop, or anything
that can be called.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

Wake = Callable[[], object] | asyncio.Future[None]
Waiters = list[Wake]


def wake_all(wakes: Sequence[Wake]) -> None:
    """Wake everybody, from any thread."""
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for wake in wakes:
        if isinstance(wake, asyncio.Future):
            loop = wake.get_loop()
            if loop in by_loop:
                by_loop[loop].append(wake)
            else:
                by_loop[loop] = [wake]
        else:
            wake()
    if not by_loop:
        return
    here = running_loop()
    for loop, futures in by_loop.items():
        if loop is here:
            _resolve(futures)
            continue
        try:
            loop.call_soon_threadsafe(_resolve, futures)
        except RuntimeError:
            pass  # the loop is closed: nobody waits any more


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that this thread is running; None for none."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def take(waiters: Waiters, taken: list[Wake]) -> None:
    """Move the waiters over."""
    while waiters:
        try:
            taken.append(waiters.pop())
        except IndexError:  # another teller was quicker
            return


def leave(waiters: Waiters, wake: Wake) -> None:
    """Wait no more; it may have been woken already."""
    if waiters:
        try:
            waiters.remove(wake)
        except ValueError:
            pass


def wait_in_thread(waiters: Waiters, has_news: Callable[[], bool], timeout_s: float | None) -> bool:
    """Wait for news; False after `timeout_s` seconds."""
    lock = threading.Lock()
    lock.acquire()
    waiters.append(lock.release)
    try:
        if not has_news():
            limit_s = -1.0 if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX)
            lock.acquire(timeout=limit_s)
    finally:
        leave(waiters, lock.release)
    return has_news()


def wait_in_loop(
    waiters: Waiters, has_news: Callable[[], bool], timeout_s: float | None
) -> Generator[Any, None, bool]:
    """Wait for news; False after `timeout_s` seconds. To be used with `yield from`."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    waiters.append(future)
    timer = None if timeout_s is None else loop.call_later(timeout_s, _resolve, (future,))
    try:
        if not has_news():
            yield from future
    finally:
        if timer is not None:
            timer.cancel()
        leave(waiters, future)
    return has_news()


def _resolve(futures: Sequence[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
