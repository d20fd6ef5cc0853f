# SPDX-License-Identifier: Apache-2.0
"""Code of the model's that failed: it answers nothing any more, whoever keeps its exception.

    a task, a thread, an executor's job ─► fails ─► its frames let go of requests and senders
                                                        └─► nobody else has them: they end

An exception that somebody keeps (a task in a list, an executor's future) keeps the frames that it
went through, and with them the senders in their variables, which nobody will use again. So those
variables are cleared. Whoever else has the sender still has it, and may answer; the traceback
keeps its lines.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from itertools import islice
from types import FrameType, TracebackType
from typing import Any

from actorserve.actors.replies import thread_errors
from actorserve.actors.reply import Reply
from actorserve.triton.failure import format_exception
from actorserve.triton.request import InferenceRequest
from actorserve.triton.response_sender import InferenceResponseSender

_SUSPENDABLE = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
_OWN_REFERENCES = 2  # to a frame that is being looked at here: the dictionary's and the call's
_MOST_LOOKED_AT = 1000
"""Elements of one container in a failed frame that are looked at for senders."""


def watch_threads() -> None:
    """Look at what ends the model's threads and the jobs of its executors, from now on."""
    shown = threading.excepthook

    def note(args: threading.ExceptHookArgs) -> None:
        error = args.exc_value
        if error is not None:
            thread_errors.text = format_exception(error)
        shown(args)
        if error is not None:
            let_go(error)

    threading.excepthook = note
    _watch_executors()


def _watch_executors() -> None:
    """An executor catches what its job raised, and no hook hears of it."""
    kept = concurrent.futures.Future.set_exception

    @functools.wraps(kept)
    def set_exception(self: Any, exception: BaseException | None) -> None:
        kept(self, exception)
        if exception is not None and exception.__traceback__ is not None:
            let_go(exception)

    concurrent.futures.Future.set_exception = set_exception  # type: ignore[method-assign]


def watched_task(
    loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any
) -> asyncio.Task[Any]:
    """Make a task that lets go when it fails: a loop's task factory."""
    task = asyncio.Task(coroutine, loop=loop, **options)
    task.add_done_callback(_on_done)  # the first one: before anybody who waits for the task runs
    return task


def _on_done(task: asyncio.Task[Any]) -> None:
    if task.cancelled():
        try:
            task.exception()  # takes the error, with its frames, out of the task
        except asyncio.CancelledError as cancelled:
            let_go(cancelled)
        return
    # Not `exception()`: that would count as somebody's having looked at it.
    error: BaseException | None = getattr(task, "_exception", None)
    if error is not None:
        let_go(error)


def let_go(error: BaseException) -> None:
    """Take requests and senders from the variables of the frames that failed with `error`.

    It is the reason that their clients hear, where nobody else can answer them.
    """
    traces = list(_traces(error))
    holding = {id(each): each for each in _frames(traces) if any(True for _ in _replies(each))}
    if not holding:
        return
    text = format_exception(error)
    for frame in holding.values():
        for reply in _replies(frame):
            reply.note_cause(text)
    del frame, reply  # the last names here of what is to be let go
    _clear(holding, traces)


def _traces(error: BaseException) -> Iterator[TracebackType]:
    """Yield the steps of the tracebacks of an error, and of those that it came from or holds."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        trace = each.__traceback__
        while trace is not None:
            yield trace
            trace = trace.tb_next
        left += [each.__cause__, each.__context__, *getattr(each, "exceptions", ())]


def _frames(traces: list[TracebackType]) -> Iterator[FrameType]:
    for trace in traces:
        yield trace.tb_frame


def _replies(frame: FrameType) -> Iterator[Reply]:
    """Yield what a frame's variables can answer, in them or in what they hold directly."""
    for value in _variables(frame):
        for each in (value, *_inside(value)):
            if isinstance(each, (InferenceResponseSender, InferenceRequest)):
                reply = each._reply
                if isinstance(reply, Reply):
                    yield reply


def _variables(frame: FrameType) -> list[object]:
    """Return the values of a frame's variables, and leave no copy of them behind."""
    look = frame.f_locals
    values = list(look.values())
    # Before 3.13 that is a dictionary which the frame keeps, unless it is a module's own.
    is_copy = sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if is_copy and sys.getrefcount(look) <= _OWN_REFERENCES + 1:
        look.clear()
    return values


def _inside(value: object) -> list[object]:
    if isinstance(value, dict):
        found: Iterable[object] = value.values()
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        found = value
    else:
        found = getattr(value, "__dict__", {}).values() if not isinstance(value, type) else ()
    try:
        return list(islice(found, _MOST_LOOKED_AT))
    except (RuntimeError, TypeError):  # it changes in another thread, or is of an odd kind
        return []


def _clear(holding: dict[int, FrameType], traces: list[TracebackType]) -> None:
    """Empty frames that have ended; those that still run, or will again, stay as they are."""
    known = Counter(id(frame) for frame in _frames(traces))
    distinct = {id(frame): frame for frame in _frames(traces)}
    for frame in distinct.values():
        if frame.f_back is not None:
            known[id(frame.f_back)] += 1
    distinct.clear()
    frame = None  # type: ignore[assignment]
    for key in list(holding):
        # Before 3.13, `clear` throws GeneratorExit into a coroutine that is suspended. Its frame
        # is known by one more reference than tracebacks and inner frames have: the coroutine's.
        is_suspendable = holding[key].f_code.co_flags & _SUSPENDABLE
        if is_suspendable and sys.getrefcount(holding[key]) > known[key] + _OWN_REFERENCES:
            continue
        with contextlib.suppress(RuntimeError):  # it runs
            holding[key].clear()
