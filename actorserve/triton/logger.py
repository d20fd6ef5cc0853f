# SPDX-License-Identifier: Apache-2.0
"""`pb_utils.Logger`: a model's lines in the server's log, with the place that wrote them.

The stub sets where lines go once its channel is up (`set_sink`); until then, as while a model is
being imported in a test, they go to stderr in the server's format.
"""

from __future__ import annotations

import enum
import json
import os
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from typing import ClassVar

from actorserve.triton.error import exact_str


class LogLevel(enum.IntEnum):
    """How grave a line is."""

    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3


# The class Logger has a member LogLevel, which would hide the name from its annotations.
Level = LogLevel

Sink = Callable[[Level, str, int, str], None]
"""Called with the level, the file's name without folders, the line's number and the text."""


MAX_MESSAGE_CHARS = 64 << 10
"""What is longer is cut: a line travels in one frame, and is for people."""

NO_FILE = "<python>"
"""Where a line comes from that no Python code wrote."""


def format_line(level: Level, file: str, line: int, message: str) -> str:
    """Return a line in the server's format, at this moment (UTC), in this process.

    The text is a JSON string, so that it cannot forge another line; the environment variable
    TRITON_SERVER_ESCAPE_LOG_MESSAGES=0 turns that off, as it does in the real server.
    """
    if os.environ.get("TRITON_SERVER_ESCAPE_LOG_MESSAGES") != "0":
        message = json.dumps(message, ensure_ascii=False)
    now = datetime.now(timezone.utc)
    return f"{'IWEV'[level]}{now:%m%d %H:%M:%S.%f} {os.getpid()} {file}:{line}] {message}"


def write_to_stderr(level: Level, file: str, line: int, message: str) -> None:
    """Write one line to stderr; a closed stderr loses it."""
    try:
        # In one piece, so that lines of several processes do not mix.
        sys.stderr.write(format_line(level, file, line, message) + "\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        pass


_sink: Sink = write_to_stderr


def set_sink(sink: Sink | None) -> None:
    """Send every later line to `sink`, from whichever thread logs; None means stderr again."""
    global _sink
    _sink = write_to_stderr if sink is None else sink


def _log(level: Level, message: str) -> None:
    """Hand on a line written by the caller's caller."""
    message = exact_str(message, "a log message")
    if len(message) > MAX_MESSAGE_CHARS:
        left_out = len(message) - MAX_MESSAGE_CHARS
        message = f"{message[:MAX_MESSAGE_CHARS]}… ({left_out} more characters)"
    try:
        frame = sys._getframe(2)
    except ValueError:  # called by the interpreter itself: an exit function, a callback from C
        _sink(level, NO_FILE, 0, message)
        return
    _sink(level, frame.f_code.co_filename.rpartition("/")[2], frame.f_lineno, message)


class Logger:
    """Write to the server's log. A message that is not a str is a TypeError."""

    LogLevel: ClassVar[type[Level]] = LogLevel
    INFO: ClassVar[Level] = LogLevel.INFO
    WARNING: ClassVar[Level] = LogLevel.WARNING
    ERROR: ClassVar[Level] = LogLevel.ERROR
    VERBOSE: ClassVar[Level] = LogLevel.VERBOSE

    @staticmethod
    def log(message: str, level: Level = LogLevel.INFO) -> None:
        """Write a line at `level`, which must be one of Logger's own (an int is a TypeError)."""
        if not isinstance(level, LogLevel):
            raise TypeError(f"level must be Logger.INFO, WARNING, ERROR or VERBOSE, got {level!r}")
        _log(level, message)

    @staticmethod
    def log_info(message: str) -> None:
        """Write a line at level INFO."""
        _log(LogLevel.INFO, message)

    @staticmethod
    def log_warn(message: str) -> None:
        """Write a line at level WARNING."""
        _log(LogLevel.WARNING, message)

    @staticmethod
    def log_error(message: str) -> None:
        """Write a line at level ERROR."""
        _log(LogLevel.ERROR, message)

    @staticmethod
    def log_verbose(message: str) -> None:
        """Write a line at level VERBOSE."""
        _log(LogLevel.VERBOSE, message)
