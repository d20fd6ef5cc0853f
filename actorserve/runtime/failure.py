# SPDX-License-Identifier: Apache-2.0
"""Errors to the wire and back, and what user code raised as an error of ours."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from actorserve import errors
from actorserve.errors import ActorserveError, Crash, ReceiveError, Unavailable
from actorserve.wire.actors import WireFailure

_LONGEST_BYTES = 8 << 10  # of each text: a failure has to fit into a frame of the control lane
_CLASSES: dict[str, type[ActorserveError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, ActorserveError)
}


def failure_of(error: ActorserveError) -> WireFailure:
    """Turn an error into what travels."""
    name = type(error).__name__
    if name not in _CLASSES:  # a user's own subclass: its nearest relative of ours
        name = next(base.__name__ for base in type(error).__mro__ if base.__name__ in _CLASSES)
    text = clip(error.message)
    if isinstance(error, ReceiveError):
        detail, stack = clip(error.detail), clip(error.stack, is_end_kept=True)
        return WireFailure(name, error.code, text, clip(error.kind), detail, stack)
    retry_after_s = error.retry_after_s if isinstance(error, Unavailable) else None
    return WireFailure(name, error.code, text, retry_after_s=retry_after_s)


def error_of(failure: WireFailure) -> ActorserveError:
    """Build the error that a failure stands for."""
    kind = _CLASSES.get(failure.error)
    if kind is None:
        return errors.error_for(failure.code, failure.message)
    if issubclass(kind, ReceiveError):
        return kind(failure.message, failure.kind, failure.detail, failure.stack)
    if issubclass(kind, Unavailable):
        return kind(failure.message, failure.retry_after_s)
    return kind(failure.message)


def again(error: ActorserveError) -> ActorserveError:
    """Return an error of the same kind and text for another caller: tracebacks are not shared."""
    return error_of(failure_of(error))


def cut(error: BaseException) -> None:
    """Drop our own frame from the traceback of what user code raised.

    The frame knows the caller, who will hold the error: a cycle that only the garbage collector
    would end.
    """
    trace = error.__traceback__
    error.__traceback__ = trace.tb_next if trace is not None else None


def of_user_code(error: BaseException, where: str) -> ActorserveError:
    """Return the error for the caller of code that raised; `where` says which, for people.

    Errors of this package are passed on as they are: an actor may refuse with NotFound.
    """
    if isinstance(error, ActorserveError) and not isinstance(error, Crash):
        return error.with_traceback(None)
    kind = type(error).__name__
    detail = text_of(error)
    wrapped = ReceiveError(
        f"{where}: {kind}: {detail}" if detail else f"{where}: {kind}",
        kind,
        detail,
        _stack(error),
    )
    wrapped.__cause__ = error
    return wrapped


def crash_reason(error: BaseException) -> str:
    """Say in words why an actor crashed."""
    if isinstance(error, SystemExit):
        return f"called sys.exit({'' if error.code is None else _said(repr, error.code)})"
    detail = text_of(error)
    if isinstance(error, Crash):
        return f"crashed: {detail}"
    return f"crashed: {type(error).__name__}{': ' if detail else ''}{detail}"


def start_reason(error: BaseException) -> str:
    """Say in words why an actor did not get ready."""
    detail = text_of(error)
    if isinstance(error, ActorserveError):
        return detail
    return f"{type(error).__name__}{': ' if detail else ''}{detail}"


def is_crash(error: BaseException) -> bool:
    """Whether this ends the actor, and not only the message."""
    return isinstance(error, (Crash, SystemExit, KeyboardInterrupt))


def clip(text: str, *, is_end_kept: bool = False) -> str:
    """Return a text that can travel: what no UTF-8 can say is escaped, what is too long is cut."""
    most = _LONGEST_BYTES
    data = (text[-most:] if is_end_kept else text[:most]).encode("utf-8", "backslashreplace")
    if len(text) <= most and len(data) <= most:
        return data.decode()
    kept = data[-most:] if is_end_kept else data[:most]
    return kept.decode("utf-8", "ignore")


def text_of(error: BaseException) -> str:
    """Return what an exception says, whatever its own code may do instead."""
    if isinstance(error, ActorserveError):
        return _said(lambda each: each.message, error)
    return _said(str, error)


def _said(words: Callable[[Any], str], value: object) -> str:
    """Return what user code says of a value, whatever it may do instead."""
    try:
        return clip(words(value))
    except BaseException:
        return "(its text cannot be had)"


def _stack(error: BaseException) -> str:
    try:
        lines = traceback.format_exception(type(error), error, error.__traceback__)
    except BaseException:  # it asks the exception, and every cause of it, for a text
        return "(its traceback cannot be had)"
    return clip("".join(lines), is_end_kept=True)
