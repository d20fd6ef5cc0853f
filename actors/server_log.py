# SPDX-License-Identifier: Apache-2.0
"""The server's log on a stream: the real server's line format, ISO 8601, or JSON.

    I1130 14:49:24.123456 4711 supervisor.py:120] "the text, escaped"
    I1130 14:49:24.123456 4711 add_sub_0_0 model.py:12] "a line of the model's Logger"
    I1130 14:49:24.123456 4711 add_sub_0_0 stdout] "a line that the model printed"

A library logs to the logger "actorserve" and installs nothing; only the command line calls
`installed`. Texts are escaped, so that no client and no model can forge a line.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import TextIO

from actorserve.actors.log_writer import LogWriter
from actorserve.config import Settings
from actorserve.errors import ConfigError

# JSON leaves these as they are; terminals obey some of them and some readers break lines there.
_CONTROLS = {code: f"\\u{code:04x}" for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)}
_LETTERS = {logging.DEBUG: "V", logging.INFO: "I", logging.WARNING: "W", logging.ERROR: "E"}


class LineFormatter(logging.Formatter):
    """Format one record as one line."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self._layout = style
        self._is_escaped = os.environ.get("TRITON_SERVER_ESCAPE_LOG_MESSAGES") != "0"

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        text = record.getMessage()
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        when = datetime.fromtimestamp(record.created, timezone.utc)
        instance = getattr(record, "instance", "")
        source = _source(record)
        if self._layout == "json":
            fields = {
                "time": when.isoformat(timespec="microseconds"),
                "level": record.levelname,
                "pid": os.getpid(),
                "instance": instance,
                "source": source,
                "message": text,
            }
            return json.dumps(fields, ensure_ascii=False).translate(_CONTROLS)
        if self._is_escaped:
            text = json.dumps(text, ensure_ascii=False).translate(_CONTROLS)
        letter = _LETTERS.get(record.levelno, "I")
        place = (f"{instance} {source}" if instance else source).translate(_CONTROLS)
        if self._layout == "ISO8601":
            return f"{when:%Y-%m-%dT%H:%M:%SZ} {letter} {os.getpid()} {place}] {text}"
        return f"{letter}{when:%m%d %H:%M:%S.%f} {os.getpid()} {place}] {text}"


def _source(record: logging.LogRecord) -> str:
    """Say where a line comes from: a model's file and line, a stream, or our own."""
    stream = getattr(record, "stream", "")
    if stream:
        return str(stream)
    file = getattr(record, "file", "")
    if file:
        return f"{file}:{getattr(record, 'file_line', 0)}"
    return f"{record.filename}:{record.lineno}"


class _LevelFilter(logging.Filter):
    """Let through the levels that the settings switch on."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._on = {
            logging.DEBUG: settings.log_verbose > 0,
            logging.INFO: settings.log_info,
            logging.WARNING: settings.log_warning,
            logging.ERROR: settings.log_error,
        }

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written."""
        return self._on.get(record.levelno, True)


class _LineHandler(logging.Handler):
    """Hand formatted records to a writer."""

    def __init__(self, writer: LogWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the record's line."""
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        self._writer.write(line)


@contextlib.contextmanager
def installed(settings: Settings) -> Iterator[LogWriter]:
    """Send the log to stderr or to the settings' file; yields a writer to stderr, for people.

    Raises ConfigError for a bad file.
    """
    with contextlib.ExitStack() as stack:
        console = LogWriter(sys.stderr)
        stack.callback(console.close)
        writer = console
        if settings.log_file:
            file = _open(settings.log_file)
            stack.callback(_close, file)
            writer = LogWriter(file)
            stack.callback(writer.close)
        handler = _LineHandler(writer)
        handler.setFormatter(LineFormatter(settings.log_format))
        handler.addFilter(_LevelFilter(settings))
        logger = logging.getLogger("actorserve")
        logger.setLevel(logging.DEBUG if settings.log_verbose else logging.INFO)
        logger.addHandler(handler)
        stack.callback(logger.removeHandler, handler)
        logger.propagate = False
        yield console


def _open(name: str) -> TextIO:
    try:
        return open(name, "a", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(f"--log-file '{name}': {error.strerror}") from None


def _close(file: TextIO) -> None:
    with contextlib.suppress(OSError):  # a full disk, again
        file.close()
