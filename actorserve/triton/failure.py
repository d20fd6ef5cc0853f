# SPDX-License-Identifier: Apache-2.0
"""An exception of user code as the text that clients get.

    <type>: <text>

    At:
      <file>(<line>): <function>          innermost first

What always holds: the text is at most `MAX_TEXT_CHARS` long and can be encoded as UTF-8, and
nothing that an exception does when it is looked at (its `__str__` may do anything) gets out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType

from actorserve.errors import ActorserveError

MAX_TEXT_CHARS = 64 << 10
_MAX_MESSAGE_CHARS = 48 << 10
_MAX_FRAMES = 64

_OURS = "actorserve."


def format_exception(exc: BaseException, model_path: str = "") -> str:
    """Return the text of an exception, with the frames of user code.

    `model_path` is the model's file: what called into its folder is left out, except the import
    system's frames. Errors that this package raises on purpose are their message alone.
    """
    if isinstance(exc, ActorserveError):
        return _clean(exc.message, _MAX_MESSAGE_CHARS)
    text = f"{_type_name(exc)}: {_message(exc)}"
    frames = _user_frames(exc.__traceback__, model_path)
    if not frames:
        return text
    lines = [
        f"  {_clean(frame.f_code.co_filename, 1024)}({line}): {_clean(frame.f_code.co_name, 256)}\n"
        for frame, line in frames[:_MAX_FRAMES]
    ]
    room = MAX_TEXT_CHARS - len(text) - 64
    shown = 0
    for line in lines:
        if len(line) > room:
            break
        room -= len(line)
        shown += 1
    left_out = len(frames) - shown
    more = f"  ({left_out} more frames)\n" if left_out else ""
    return f"{text}\n\nAt:\n{''.join(lines[:shown])}{more}"


def plain_text(text: str) -> str:
    """Return a text of user code as one that can travel: not too long, and fit for UTF-8."""
    return _clean(text, _MAX_MESSAGE_CHARS)


def _type_name(exc: BaseException) -> str:
    try:
        return _clean(type(exc).__name__, 256)
    except BaseException:
        return "<unknown>"


def _message(exc: BaseException) -> str:
    """Return what the exception says, with its notes; a placeholder where it says nothing."""
    try:
        text = _clean(str(exc), _MAX_MESSAGE_CHARS)
        notes = getattr(exc, "__notes__", None)
        if isinstance(notes, list):
            text = "\n".join([text, *(_clean(str(note), 1024) for note in notes[:8])])
    except BaseException:
        return "<MESSAGE UNAVAILABLE DUE TO ANOTHER EXCEPTION>"
    return text or "<EMPTY MESSAGE>"


def _clean(text: str, limit: int) -> str:
    """Return a plain str of at most `limit` characters and a remark, fit for UTF-8."""
    # A subclass of str may have made these methods anything.
    length = str.__len__(text)
    plain = str.__getitem__(text, slice(0, limit))
    plain = str.encode(plain, "utf-8", "backslashreplace").decode()
    return plain if length <= limit else f"{plain}… ({length - limit} more characters)"


def _user_frames(traceback: TracebackType | None, model_path: str) -> list[tuple[FrameType, int]]:
    """Return frames and line numbers, innermost first, without ours and those that called us."""
    frames = [(frame, line) for frame, line in _frames(traceback) if not _is_ours(frame)]
    if not model_path:
        return frames
    model_dir = f"{Path(model_path).absolute().parent.parent}/"
    inside = [frame.f_code.co_filename.startswith(model_dir) for frame, _ in frames]
    if True not in inside:
        return frames
    end = len(inside) - inside[::-1].index(True)
    while end < len(frames) and frames[end][0].f_code.co_filename.startswith("<frozen importlib"):
        end += 1
    return frames[:end]


def _is_ours(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__")
    return isinstance(name, str) and name.startswith(_OURS)


def _frames(traceback: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames that an exception passed through, innermost first.

    The import system cuts its own frames out of tracebacks; where they stand between two that
    are left, they are found again by the frames' own links.
    """
    passed: list[TracebackType] = []
    while traceback is not None:
        passed.append(traceback)
        traceback = traceback.tb_next
    outer: TracebackType | None
    for inner, outer in zip(reversed(passed), [*reversed(passed[:-1]), None]):
        yield inner.tb_frame, inner.tb_lineno
        if outer is not None:
            yield from _between(inner.tb_frame, outer.tb_frame)


def _between(inner: FrameType, outer: FrameType) -> list[tuple[FrameType, int]]:
    """Return the frames between a frame and one of its callers; none if it is no caller."""
    found: list[tuple[FrameType, int]] = []
    frame = inner.f_back
    while frame is not None and frame is not outer:
        found.append((frame, frame.f_lineno))
        frame = frame.f_back
    return found if frame is outer else []
