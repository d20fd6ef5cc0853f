# SPDX-License-Identifier: Apache-2.0
"""Actor systems for the tests of this room: coroutines run in a loop of either kind."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

T = TypeVar("T")
PATIENCE_S = 50.0

Run = Callable[[Callable[[], Awaitable[T]]], T]


def runner(kind: str) -> Run[T]:
    """Return what runs a coroutine function in a fresh loop of this kind."""
    if kind == "uvloop":
        uvloop = pytest.importorskip("uvloop")
        new_loop = uvloop.new_event_loop
    else:
        new_loop = asyncio.new_event_loop

    def run_in_loop(main: Callable[[], Awaitable[T]]) -> T:
        loop = new_loop()
        asyncio.set_event_loop(loop)
        try:
            return loop.run_until_complete(asyncio.wait_for(main(), PATIENCE_S))  # type: ignore[no-any-return]
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
            asyncio.set_event_loop(None)

    return run_in_loop


@pytest.fixture(scope="session", autouse=True)
def warm_uvloop() -> None:
    """Have libuv open what it keeps for the life of a process, before anybody counts."""
    with contextlib.suppress(ImportError):
        import uvloop

        uvloop.new_event_loop().close()


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run[T]:
    """Run a coroutine function to its end in a fresh loop, of each kind."""
    return runner(request.param)


@pytest.fixture
def run_plain() -> Run[T]:
    """Run a coroutine function to its end in a fresh asyncio loop."""
    return runner("asyncio")
