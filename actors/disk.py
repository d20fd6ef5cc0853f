# SPDX-License-Identifier: Apache-2.0
"""Work on disks, in a daemon thread of its own: a file system that hangs holds nothing up.

A pool would not do: its threads are waited for when the loop or the interpreter ends, and a thread
that the kernel keeps in a dead mount never ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def on_disk(work: Callable[[], T]) -> T:
    """Run `work` in a thread and return its result, or raise its error.

    Cancelling the wait leaves the thread to itself.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]
        else:
            future.set_exception(error)

    def run() -> None:
        result, problem = None, None
        try:
            result = work()
        except BaseException as error:
            problem = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, problem)

    threading.Thread(target=run, name="actorserve-disk", daemon=True).start()
    return await future
