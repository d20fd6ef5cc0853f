# SPDX-License-Identifier: Apache-2.0
"""Waiting for one thing, in a thread or in an event loop, until a limit."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from actorserve.clock import monotonic_s
from actorserve.runtime.waiting import Waiting, limit_of


def end_s_of(timeout: float | None) -> float | None:
    """Return when a wait of so many seconds from now is over; None for never."""
    limit_s = limit_of(timeout, "timeout")
    return None if limit_s is None else monotonic_s() + limit_s


def left_s_of(end_s: float | None) -> float | None:
    """Return how many seconds are left until then, at least 0; None for no end."""
    return None if end_s is None else max(0.0, end_s - monotonic_s())


def wait_here(waiting: Waiting, timeout_s: float | None) -> bool:
    """Wait in this thread for news; False after `timeout_s` seconds."""
    limit_s = limit_of(timeout_s, "timeout")
    end_s = None if limit_s is None else monotonic_s() + limit_s
    while not waiting.has_news():
        left_s = None if end_s is None else end_s - monotonic_s()
        if left_s is not None and left_s <= 0:
            return False
        waiting.wait_in_thread(left_s)
    return True


async def wait_async(waiting: Waiting, timeout_s: float | None) -> bool:
    """Wait in this event loop for news; False after `timeout_s` seconds."""
    limit_s = limit_of(timeout_s, "timeout")
    end_s = None if limit_s is None else monotonic_s() + limit_s
    while not waiting.has_news():
        left_s = None if end_s is None else end_s - monotonic_s()
        if left_s is not None and left_s <= 0:
            return False
        await _News(waiting, left_s)
    return True


class _News:
    __slots__ = ("_timeout_s", "_waiting")

    def __init__(self, waiting: Waiting, timeout_s: float | None) -> None:
        self._waiting = waiting
        self._timeout_s = timeout_s

    def __await__(self) -> Generator[Any, None, bool]:
        return self._waiting.wait_in_loop(self._timeout_s)
