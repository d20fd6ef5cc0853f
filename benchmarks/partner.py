# SPDX-License-Identifier: Apache-2.0
"""The other process of a measurement: a fork that has all that its parent made, and surely ends."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from types import TracebackType

END_S = 5.0

ANY_CORE = -1

_fork = multiprocessing.get_context("fork")


def two_cores() -> tuple[int, int]:
    """Return two cores to pin a pair of processes to, or ANY_CORE twice where there is only one.

    On one core a wake-up is a mere switch, five to ten times quicker than waking the other core.
    The kernel puts a pair now here and now there, so a round trip that is not pinned has two
    values and no meaning.
    """
    cores = sorted(os.sched_getaffinity(0))
    return (cores[0], cores[1]) if len(cores) > 1 else (ANY_CORE, ANY_CORE)


@contextlib.contextmanager
def pinned(core: int) -> Iterator[None]:
    """Keep this thread on a core for the length of a `with` block."""
    before = os.sched_getaffinity(0)
    if core != ANY_CORE:
        os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Partner:
    """Run a function in a forked process for the length of a `with` block, then kill it.

    A section has one thread when it forks, so that a fork is safe; it is what the queues of
    multiprocessing are used with most.
    """

    def __init__(self, work: Callable[[], None], core: int = ANY_CORE) -> None:
        def run() -> None:
            with pinned(core):
                work()

        self._process: BaseProcess = _fork.Process(target=run, daemon=True)

    def __enter__(self) -> Partner:
        """Start it."""
        self._process.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Kill it, and wait for its end."""
        self._process.kill()
        self._process.join(END_S)
        self._process.close()

    @property
    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self._process.is_alive()
