# SPDX-License-Identifier: Apache-2.0
"""`pb_utils.Logger`: levels, places, and where lines go."""

from __future__ import annotations

import _thread
import inspect
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from actorserve.clock import monotonic_s
from actorserve.triton.logger import MAX_MESSAGE_CHARS, set_sink
from actorserve.triton.pb_utils import Logger, LogLevel

LINE = re.compile(
    r"^(?P<level>[IWEV])(?P<date>\d{4}) (?P<time>\d\d:\d\d:\d\d\.\d{6}) (?P<pid>\d+) "
    r"(?P<file>[^:]+):(?P<line>\d+)\] (?P<text>.*)\n$"
)


@pytest.fixture
def lines() -> Iterator[list[tuple[LogLevel, str, int, str]]]:
    """Collect what is logged."""
    collected: list[tuple[LogLevel, str, int, str]] = []
    set_sink(lambda *line: collected.append(line))
    yield collected
    set_sink(None)


def test_levels_have_the_apis_numbers() -> None:
    """They are members of one enum, on the class and outside."""
    assert [int(x) for x in (Logger.INFO, Logger.WARNING, Logger.ERROR, Logger.VERBOSE)] == [
        0, 1, 2, 3,
    ]  # fmt: skip
    assert Logger.LogLevel is LogLevel


def test_each_method_logs_at_its_level(lines: list[tuple[LogLevel, str, int, str]]) -> None:
    """The sink gets level and text."""
    Logger.log("default")
    Logger.log("given", Logger.ERROR)
    Logger.log(level=Logger.WARNING, message="by name")
    Logger.log_info("i")
    Logger.log_warn("w")
    Logger.log_error("e")
    Logger.log_verbose("v")
    assert [(int(level), text) for level, _, _, text in lines] == [
        (0, "default"), (2, "given"), (1, "by name"), (0, "i"), (1, "w"), (2, "e"), (3, "v"),
    ]  # fmt: skip


def test_place_is_the_callers(lines: list[tuple[LogLevel, str, int, str]]) -> None:
    """File and line are those of the model's code, not of the logger's."""
    frame = inspect.currentframe()
    assert frame is not None
    Logger.log_info("x")
    Logger.log("x")
    here = frame.f_lineno
    assert [(file, line) for _, file, line, _ in lines] == [
        ("test_pb_logger.py", here - 2),
        ("test_pb_logger.py", here - 1),
    ]


@pytest.mark.parametrize("method", ["log", "log_info", "log_warn", "log_error", "log_verbose"])
@pytest.mark.parametrize("message", [None, 7, b"x", ValueError("x")])
def test_message_is_a_str(method: str, message: Any) -> None:
    """Anything else is a TypeError."""
    with pytest.raises(TypeError):
        getattr(Logger, method)(message)


@pytest.mark.parametrize("level", [None, 1, "INFO"])
def test_level_is_one_of_the_loggers(level: Any) -> None:
    """Not even the right number will do."""
    with pytest.raises(TypeError, match="level must be"):
        Logger.log("x", level)


def test_long_message_is_cut(lines: list[tuple[LogLevel, str, int, str]]) -> None:
    """A line fits into a frame, and says how much is left out."""
    Logger.log_info("x" * (MAX_MESSAGE_CHARS + 7))
    assert lines[0][3] == "x" * MAX_MESSAGE_CHARS + "… (7 more characters)"


def test_without_a_sink_lines_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    """The format is the server's."""
    Logger.log_warn('say "hi"')
    found = LINE.match(capsys.readouterr().err)
    assert found is not None
    assert found["level"] == "W"
    assert int(found["pid"]) == os.getpid()
    assert found["file"] == "test_pb_logger.py"
    assert found["text"] == '"say \\"hi\\""'


def test_text_cannot_forge_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Line ends and escape sequences are escaped; letters are not."""
    Logger.log_info("a\nE0101 00:00:00.000000 1 x.py:1] forged\x1b[31m żółw")
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert "\x1b" not in text
    assert "żółw" in text
    found = LINE.match(text)
    assert found is not None
    assert json.loads(found["text"]).startswith("a\nE0101")


def test_escaping_can_be_turned_off(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's environment variable does it."""
    monkeypatch.setenv("TRITON_SERVER_ESCAPE_LOG_MESSAGES", "0")
    Logger.log_info('plain "text"')
    assert capsys.readouterr().err.endswith('] plain "text"\n')


@pytest.mark.parametrize("failure", [BrokenPipeError, ValueError])
def test_broken_stderr_loses_the_line_only(
    failure: Callable[[], Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A closed log never fails a model (row 57 of the fault matrix)."""

    class Broken:
        def write(self, text: str) -> int:
            raise failure()

        def flush(self) -> None:
            raise failure()

    monkeypatch.setattr(sys, "stderr", Broken())
    Logger.log_error("lost")


def test_a_line_without_a_frame_has_no_place(lines: list[tuple[LogLevel, str, int, str]]) -> None:
    """Such as one of an exit function, or of a thread that runs nothing else."""
    done = threading.Event()
    _thread.start_new_thread(_log_and_set, (done,))
    assert done.wait(20)
    _thread.start_new_thread(Logger.log_info, ("bare",))
    deadline_s = monotonic_s() + 20
    while len(lines) < 2 and monotonic_s() < deadline_s:
        done.wait(0.001)
    assert [(file, text) for _, file, _, text in lines] == [
        ("test_pb_logger.py", "framed"), ("<python>", "bare"),
    ]  # fmt: skip


def _log_and_set(done: threading.Event) -> None:
    Logger.log_info("framed")
    done.set()
