# SPDX-License-Identifier: Apache-2.0
"""Actor systems for the tests of this room: coroutines run in a loop of either kind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import numpy as np
import pytest

from actorserve import ActorSystem, Process
from tests.unit.runtime.sample_actors import Scale, Worker

T = TypeVar("T")
PATIENCE_S = 50.0

Run = Callable[[Callable[[], Awaitable[T]]], T]


def new_loop(kind: str) -> asyncio.AbstractEventLoop:
    """Return a loop of this kind; uvloop's where it is installed."""
    if kind == "uvloop":
        return pytest.importorskip("uvloop").new_event_loop()  # type: ignore[no-any-return]
    return asyncio.new_event_loop()


def runner(kind: str) -> Run[T]:
    """Return what runs a coroutine function in a fresh loop of this kind."""

    def run_in_loop(main: Callable[[], Awaitable[T]]) -> T:
        loop = new_loop(kind)
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


RunWarm = Callable[[Callable[[ActorSystem], Awaitable[T]]], T]


@pytest.fixture(scope="module")
def warm() -> Iterator[RunWarm[T]]:
    """Run coroutine functions with one system and one loop for a whole file: starts are dear."""
    yield from warm_runner("asyncio")


@pytest.fixture(scope="module", params=["asyncio", "uvloop"])
def warm_each(request: pytest.FixtureRequest) -> Iterator[RunWarm[T]]:
    """Run coroutine functions as `warm` does, in a loop of each kind."""
    yield from warm_runner(request.param)


def warm_runner(kind: str) -> Iterator[RunWarm[T]]:
    """Have one system in one loop; its processes are looked at more often than in life."""
    loop = new_loop(kind)
    system = ActorSystem()
    often = pytest.MonkeyPatch()
    often.setattr("actorserve.runtime.processes.WATCH_INTERVAL_S", 0.1)

    async def start() -> None:
        await system.__aenter__()
        ref = await system.spawn(Worker, where=Process())
        large = np.ones(4 << 20, np.uint8)
        await asyncio.gather(*[wait_for(ref.ask(Scale(1.0, large))) for _ in range(4)])
        await end_actors()

    async def end_actors() -> None:
        assert system._top is not None
        await system._top.stop()
        gc.collect()  # what a caught error's frames hold of an actor that has died …
        system.stats()  # … is given back when the system looks

    def run_warm(main: Callable[[ActorSystem], Awaitable[T]]) -> T:
        try:
            return loop.run_until_complete(asyncio.wait_for(main(system), PATIENCE_S))
        finally:
            loop.run_until_complete(end_actors())

    loop.run_until_complete(start())
    yield run_warm
    loop.run_until_complete(system.__aexit__(None, None, None))
    loop.close()
    often.undo()


async def wait_for(answer: Awaitable[T]) -> T:
    """Turn anything that can be awaited into a coroutine."""
    return await answer


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run[T]:
    """Run a coroutine function to its end in a fresh loop, of each kind."""
    return runner(request.param)


@pytest.fixture
def run_plain() -> Run[T]:
    """Run a coroutine function to its end in a fresh asyncio loop."""
    return runner("asyncio")
