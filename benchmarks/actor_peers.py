# SPDX-License-Identifier: Apache-2.0
"""Who else runs an object or a function elsewhere and answers: Pykka, xoscar, concurrent.futures.

Each gives the same questions, for the length of a `with` block, as our actors do. One that is not
installed raises CannotRun.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.actor_load import LoopAsk, ThreadAsk
from benchmarks.sample_actors import Add, Tally, add, ends
from benchmarks.sampling import CannotRun

PYKKA, XOSCAR = "Pykka", "xoscar"
THREAD_POOL, PROCESS_POOL = "ThreadPoolExecutor", "ProcessPoolExecutor"
ENDS = 2.0
"""What the ends of an array of ones add up to."""


# --- concurrent.futures --------------------------------------------------------------------------


def _executor(label: str) -> Executor:
    """Return an executor with one worker, as an actor is one."""
    if label == THREAD_POOL:
        return ThreadPoolExecutor(1)
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


@contextlib.contextmanager
def executor_from_thread(label: str) -> Iterator[ThreadAsk]:
    """Submit calls, and wait for their results."""
    with _executor(label) as executor:
        yield ThreadAsk(post=partial(executor.submit, add, 1, 2), wait=Future.result, expected=3)


@contextlib.asynccontextmanager
async def executor_from_loop(label: str) -> AsyncIterator[LoopAsk]:
    """Await calls in an executor, as asyncio does it."""
    with _executor(label) as executor:
        post = partial(asyncio.get_running_loop().run_in_executor, executor, add, 1, 2)
        yield LoopAsk(ask=post, post=post, expected=3)


@contextlib.asynccontextmanager
async def executor_with_arrays(array: npt.NDArray[np.float32]) -> AsyncIterator[LoopAsk]:
    """Let another process look at an array, which is pickled."""
    with _executor(PROCESS_POOL) as executor:
        post = partial(asyncio.get_running_loop().run_in_executor, executor, ends, array)
        yield LoopAsk(ask=post, post=post, expected=ENDS)


# --- Pykka ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def pykka_actor() -> Iterator[Any]:
    """Start a thread actor that adds two numbers and knows how often it did."""
    try:
        import pykka
    except ModuleNotFoundError:
        raise CannotRun("Pykka is not installed") from None

    class Adder(pykka.ThreadingActor):
        seen = 0

        def on_receive(self, message: Any) -> int:
            if isinstance(message, Tally):
                return self.seen
            self.seen += 1
            return int(message.a + message.b)

    actor = Adder.start()
    try:
        yield actor
    finally:
        actor.stop()


@contextlib.contextmanager
def pykka_from_thread() -> Iterator[ThreadAsk]:
    """Ask a thread actor."""
    with pykka_actor() as actor:
        yield ThreadAsk(
            post=lambda: actor.ask(Add(1, 2), block=False),
            wait=lambda future: future.get(),
            expected=3,
        )


# --- xoscar --------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def xoscar_actor(*, is_process: bool) -> AsyncIterator[Any]:
    """Start a pool of one process beside this one, and an actor in either of the two."""
    try:
        import xoscar
    except ImportError as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == "xoscar"
        raise CannotRun("xoscar is not installed" if is_missing else f"xoscar: {error}") from None
    from benchmarks.xoscar_actor import XoscarActor

    pool = await xoscar.create_actor_pool("127.0.0.1:0", n_process=int(is_process))
    async with pool:
        address = next(iter(pool.sub_processes)) if is_process else pool.external_address
        yield await xoscar.create_actor(XoscarActor, address=address, uid="measured")


@contextlib.asynccontextmanager
async def xoscar_from_loop(*, is_process: bool) -> AsyncIterator[LoopAsk]:
    """Ask an actor in this process, or in another."""
    async with xoscar_actor(is_process=is_process) as actor:
        yield _of_coroutines(lambda: actor.add(1, 2), 3)


@contextlib.asynccontextmanager
async def xoscar_with_arrays(array: npt.NDArray[np.float32]) -> AsyncIterator[LoopAsk]:
    """Let an actor in another process look at an array."""
    async with xoscar_actor(is_process=True) as actor:
        yield _of_coroutines(lambda: actor.ends(array), ENDS)


def _of_coroutines(ask: Callable[[], Coroutine[Any, Any, object]], expected: object) -> LoopAsk:
    def post() -> Awaitable[object]:
        return asyncio.ensure_future(ask())

    return LoopAsk(ask=ask, post=post, expected=expected)
