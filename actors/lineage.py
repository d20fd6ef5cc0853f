# SPDX-License-Identifier: Apache-2.0
"""For which requests a model's other threads work, so that their calls end with those.

    execute ─┬─► tasks, callbacks, asyncio.to_thread     take the context variable along
             ├─► a request that is made there            remembers it, in whatever thread it is sent
             ├─► a thread that is started there          remembers it
             └─► a job for a ThreadPoolExecutor          remembers it

What is none of these, such as a thread of `initialize` that takes work out of a queue, works for
nobody: its calls are cancelled by nobody, unless their requests were made in `execute`. A request
that has ended cancels nothing either, so what a long-lived thread remembers does no harm.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from actorserve.triton.calling import calling_for

_MARK = "_actorserve_started_for"


def follow_threads() -> None:
    """Have each thread and job remember for whom the code ran that started it."""
    begin = threading.Thread.start

    @functools.wraps(begin)
    def start(self: threading.Thread) -> None:
        parents = calling_for.get() or started_for()
        if parents:
            self.__dict__[_MARK] = parents
        begin(self)

    threading.Thread.start = start  # type: ignore[method-assign]
    _follow_executors()


def started_for() -> Sequence[int]:
    """Return the requests for which this thread was started; none where nobody knows."""
    parents: Sequence[int] = threading.current_thread().__dict__.get(_MARK, ())
    return parents


def _follow_executors() -> None:
    """Have each job remember for whom the code ran that has submitted it.

    That is `run_in_executor`, too, and `map`. Other context variables stay as the stdlib has them.
    """
    accept: Any = ThreadPoolExecutor.submit

    @functools.wraps(accept)
    def submit(self: Any, fn: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        parents = calling_for.get() or started_for()
        if parents:
            return accept(self, _run_for, parents, fn, args, options)
        return accept(self, fn, *args, **options)

    ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]


def _run_for(
    parents: Sequence[int], job: Callable[..., Any], args: Any, options: dict[str, Any]
) -> Any:
    token = calling_for.set(parents)
    try:
        return job(*args, **options)
    finally:
        calling_for.reset(token)
