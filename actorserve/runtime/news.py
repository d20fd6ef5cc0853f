# SPDX-License-Identifier: Apache-2.0
"""Waiting in one event loop for a condition that others bring about."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from actorserve.clock import monotonic_s


class News:
    """Whoever brings news calls `tell`; whoever waits looks again each time.

    The news may be made in another thread, which has it told only if somebody waits: so the
    waiter looks again after it has entered itself, and one of the two sees the other.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiters: list[asyncio.Future[None]] = []

    def is_awaited(self) -> bool:
        """Whether anybody waits. From any thread."""
        return bool(self._waiters)

    def tell(self) -> None:
        """Have everybody look again."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait_while(self, holds: Callable[[], bool], deadline_s: float | None = None) -> None:
        """Wait as long as it holds, and until the deadline."""
        await self.wait_while_until(holds, lambda: deadline_s)

    async def wait_while_until(
        self, holds: Callable[[], bool], due: Callable[[], float | None]
    ) -> None:
        """Wait as long as it holds, and until a deadline that may be another after a `tell`."""
        while holds() and not is_past(due()):
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._waiters.append(waiter)
            if holds():
                due_s = due()
                left_s = None if due_s is None else max(0.0, due_s - monotonic_s())
                await asyncio.wait([waiter], timeout=left_s)


def is_past(deadline_s: float | None) -> bool:
    """Whether a deadline has passed; None is none."""
    return deadline_s is not None and monotonic_s() >= deadline_s
