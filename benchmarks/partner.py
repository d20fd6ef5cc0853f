# SPDX-License-Identifier: Apache-2.0
"""The other process of a measurement: a fork that has all that its parent made, and surely ends."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from types import TracebackType

END_S = 5.0

_fork = multiprocessing.get_context("fork")


class Partner:
    """Run a function in a forked process for the length of a `with` block, then kill it.

    A section has one thread when it forks, so that a fork is safe; it is what the queues of
    multiprocessing are used with most.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._process: BaseProcess = _fork.Process(target=work, daemon=True)

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
