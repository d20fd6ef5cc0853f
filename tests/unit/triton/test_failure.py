# SPDX-License-Identifier: Apache-2.0
"""Exceptions of user code as text: the recorded form, and whatever an exception may do.

Row 92 of the fault matrix.
"""

from __future__ import annotations

import asyncio
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actorserve.errors import BootError
from actorserve.triton import pb_utils
from actorserve.triton.failure import MAX_TEXT_CHARS, format_exception

CASES = Path(__file__).parents[2] / "cases"
REPO = "/repo"


def run(source: str, path: str = "/repo/m/1/model.py", **names: Any) -> dict[str, Any]:
    """Run source as a model's file and return its names."""
    module = types.ModuleType("1.model")
    module.__dict__.update(names)
    exec(compile(source, path, "exec"), module.__dict__)
    return module.__dict__


def failure_of(call: Callable[[], object]) -> BaseException:
    """Return what a call raises."""
    try:
        call()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def without_caller(text: str) -> list[str]:
    """Return the lines of a text but those of this file."""
    return [line for line in text.splitlines() if f"{__file__}(" not in line]


@pytest.mark.parametrize(
    "case",
    [
        "own_raise_exc",
        "own_raise_model_exc",
        "own_kbd_interrupt",
        "own_sys_exit_again",
        "own_out_unsupported_dtype",
    ],
)
def test_recorded_failures_read_as_recorded(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real server's answer to the letter, from the type to the last frame."""
    recorded = json.loads((CASES / "recorded" / f"{case}.json").read_text())
    path = CASES / "repository" / recorded["model"] / "1" / "model.py"
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", pb_utils)
    model = run(path.read_text(), str(path))["TritonPythonModel"]()
    text = format_exception(failure_of(lambda: model.execute([None])), str(path))
    expected = recorded["response"]["json"]["error"].split("message: ", 1)[1]
    if sys.version_info >= (3, 12):  # comprehensions have no frame of their own any more
        expected = "".join(x for x in expected.splitlines(True) if "<listcomp>" not in x)
    assert text.replace(f"{CASES}/repository", "<REPO>") == expected


def test_frames_are_innermost_first() -> None:
    """Each with its file, line and function."""
    names = run("def outer():\n    inner()\n\ndef inner():\n    raise ValueError('x')\n")
    error = failure_of(names["outer"])
    assert format_exception(error, "/repo/m/1/model.py") == (
        "ValueError: x\n\nAt:\n  /repo/m/1/model.py(5): inner\n  /repo/m/1/model.py(2): outer\n"
    )


def test_frames_of_this_package_are_left_out() -> None:
    """A model sees where it called us, not where we found the mistake."""
    names = run("def execute():\n    Tensor('', array)\n", Tensor=pb_utils.Tensor, array=np.ones(1))
    text = format_exception(failure_of(names["execute"]))
    assert "actorserve" not in text
    assert without_caller(text)[-1] == "  /repo/m/1/model.py(2): execute"


def test_line_is_that_of_the_call_even_after_cleaning_up() -> None:
    """A frame that ran a `finally` afterwards still shows where it called."""
    names = run(
        "def outer():\n    try:\n        inner()\n    finally:\n        x = 1\n\n"
        "def inner():\n    raise ValueError('x')\n"
    )
    assert "model.py(3): outer" in format_exception(failure_of(names["outer"]))


def test_callers_of_the_model_are_left_out() -> None:
    """With the model's path, what stands outside its folder's outermost frame is not shown."""
    names = run("async def execute():\n    raise ValueError('x')\n")
    error = failure_of(lambda: asyncio.run(names["execute"]()))
    assert "asyncio" in format_exception(error)
    assert format_exception(error, "/repo/m/1/model.py") == (
        "ValueError: x\n\nAt:\n  /repo/m/1/model.py(2): execute\n"
    )


def test_failure_outside_the_models_folder_keeps_its_frames() -> None:
    """A library that a thread of the model runs in shows itself."""
    names = run("def work():\n    raise ValueError('x')\n", "/usr/lib/library.py")
    text = format_exception(failure_of(names["work"]), "/repo/m/1/model.py")
    assert "  /usr/lib/library.py(2): work\n" in text


def test_exception_that_was_never_raised_has_no_frames() -> None:
    """Then there is no 'At:' either."""
    assert format_exception(ValueError("x")) == "ValueError: x"


def test_own_errors_are_their_message() -> None:
    """What this package says on purpose needs no type and no frames."""
    assert (
        format_exception(failure_of(lambda: raising(BootError("no such file")))) == "no such file"
    )


def raising(error: BaseException) -> None:
    """Raise the error."""
    raise error


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError(), "ValueError: <EMPTY MESSAGE>"),
        (SystemExit(3), "SystemExit: 3"),
        (SystemExit(), "SystemExit: <EMPTY MESSAGE>"),
        (KeyError("k"), "KeyError: 'k'"),
        (ValueError(1, b"x", None), "ValueError: (1, b'x', None)"),
        (ValueError(lambda: None).__class__({"a": {1}}), "ValueError: {'a': {1}}"),
        (OSError(2, "No such file", "f"), "FileNotFoundError: [Errno 2] No such file: 'f'"),
        (ValueError("\ud800"), "ValueError: \\ud800"),
        (ValueError("nul \x00"), "ValueError: nul \x00"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_any_arguments_make_a_text(error: BaseException, text: str) -> None:
    """No, many, and odd arguments; what UTF-8 lacks is escaped."""
    assert format_exception(error) == text
    text.encode()


def test_notes_follow_the_message() -> None:
    """As the interpreter prints them."""
    error = ValueError("x")
    error.__notes__ = ["one", "two"]  # type: ignore[attr-defined]
    assert format_exception(error) == "ValueError: x\none\ntwo"
    error.__notes__ = 7  # type: ignore[attr-defined]
    assert format_exception(error) == "ValueError: x"


class ExplodingText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class ExitingText(Exception):
    def __str__(self) -> str:
        raise SystemExit(1)


class NoText(Exception):
    def __str__(self) -> str:
        return 7  # type: ignore[return-value]  # noqa: PLE0307


class RecursiveText(Exception):
    def __str__(self) -> str:
        return str(self)


class ExplodingNotes(Exception):
    @property
    def __notes__(self) -> list[str]:
        raise RuntimeError("no notes")


@pytest.mark.parametrize(
    "kind", [ExplodingText, ExitingText, NoText, RecursiveText, ExplodingNotes]
)
def test_exploding_exceptions_are_survived(kind: type[Exception]) -> None:
    """Nothing that an exception does when it is looked at gets out."""
    text = format_exception(failure_of(lambda: raising(kind())))
    first = text.splitlines()[0]
    assert first == f"{kind.__name__}: <MESSAGE UNAVAILABLE DUE TO ANOTHER EXCEPTION>"
    assert f"{__file__}(" in text


def test_text_of_an_odd_type_is_made_plain() -> None:
    """A subclass of str with methods of its own cannot trick the formatting."""

    class Odd(str):
        def __len__(self) -> int:
            raise RuntimeError

        def __getitem__(self, key: Any) -> str:
            raise RuntimeError

        def encode(self, *_: Any) -> bytes:
            raise RuntimeError

    class Failing(Exception):
        def __str__(self) -> str:
            return Odd("odd")

    text = format_exception(Failing())
    assert text == "Failing: odd"
    assert type(text) is str


def test_huge_message_is_cut() -> None:
    """100 MB of text stay under the limit, and say that something is missing."""
    text = format_exception(failure_of(lambda: raising(ValueError("x" * 100_000_000))))
    assert len(text) <= MAX_TEXT_CHARS
    assert "more characters)\n\nAt:\n" in text


def test_deep_recursion_is_cut() -> None:
    """The innermost frames are shown, the rest is counted."""
    names = run("def f(n):\n    f(n + 1)\n")
    text = format_exception(failure_of(lambda: names["f"](0)))
    assert text.startswith("RecursionError: maximum recursion depth exceeded")
    assert text.count("model.py(2): f") == 64
    assert text.endswith(" more frames)\n")


def test_long_names_keep_the_text_bounded() -> None:
    """Files and functions of any length do not break the limit."""
    name = "f" * 10_000
    names = run(
        f"def {name}(n):\n    {name}(n + 1) if n < 100 else 1 / 0\n", "/" + "p" * 10_000 + ".py"
    )
    text = format_exception(failure_of(lambda: names[name](0)))
    assert len(text) <= MAX_TEXT_CHARS
    assert text.startswith("ZeroDivisionError: division by zero\n\nAt:\n  /ppp")


def test_causes_in_a_circle_are_no_matter() -> None:
    """Only the exception itself is described."""
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    one.__context__, two.__context__ = two, one
    assert format_exception(one) == "ValueError: one"
