# SPDX-License-Identifier: Apache-2.0
"""The server's log on a stream: the real server's line format, ISO 8601, or JSON.

    I1130 14:49:24.123456 4711 supervisor.py:120] "the text, escaped"
    I1130 14:49:24.123456 4711 add_sub_0_0 model.py:12] "a line of the model's Logger"
    I1130 14:49:24.123456 4711 add_sub_0_0 stdout] "a line that the model printed"

A library logs to the logger "actorserve" and installs nothing; only the command line calls
`installed`. Texts are escaped, so that no client and no model can forge a line. Levels and format
may be changed while it runs (`ServerLog.change`), and the next line obeys.
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

import msgspec

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


class LogSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What of a log can be seen, and but for its file be changed; the names are the protocol's."""

    log_file: str = ""
    log_info: bool = True
    log_warning: bool = True
    log_error: bool = True
    log_verbose_level: int = 0
    log_format: str = "default"

    def is_on(self, level: int) -> bool:
        """Whether lines of one of logging's levels are written."""
        return {
            logging.DEBUG: self.log_verbose_level > 0,
            logging.INFO: self.log_info,
            logging.WARNING: self.log_warning,
            logging.ERROR: self.log_error,
        }.get(level, True)


class _LineHandler(logging.Handler):
    """Hand formatted records to a writer."""

    def __init__(self, writer: LogWriter, settings: LogSettings) -> None:
        super().__init__()
        self._writer = writer
        self.obey(settings)

    def obey(self, settings: LogSettings) -> None:
        """Write by these settings from now on."""
        self._levels = {level: settings.is_on(level) for level in _LETTERS}
        self.setFormatter(LineFormatter(settings.log_format))

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written."""
        return self._levels.get(record.levelno, True)

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the record's line."""
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        self._writer.write(line)


class ServerLog:
    """The log of a server that runs; `console` writes to stderr, for people."""

    def __init__(self, settings: LogSettings, writer: LogWriter, console: LogWriter) -> None:
        self.settings = settings
        self.console = console
        self._handler = _LineHandler(writer, settings)
        self._logger = logging.getLogger("actorserve")
        self._obey()
        self._logger.addHandler(self._handler)
        self._logger.propagate = False

    def change(self, settings: LogSettings) -> None:
        """Log by other settings from the next line on; the file stays."""
        self.settings = msgspec.structs.replace(settings, log_file=self.settings.log_file)
        self._handler.obey(self.settings)
        self._obey()

    def _obey(self) -> None:
        """Spare the making of lines that nobody would see."""
        levels = [level for level in sorted(_LETTERS) if self.settings.is_on(level)]
        self._logger.setLevel(levels[0] if levels else logging.CRITICAL)

    def close(self) -> None:
        """Take the handler away."""
        self._logger.removeHandler(self._handler)


@contextlib.contextmanager
def installed(settings: Settings) -> Iterator[ServerLog]:
    """Send the log to stderr or to the settings' file.

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
        log = ServerLog(_log_settings(settings), writer, console)
        stack.callback(log.close)
        yield log


def _log_settings(settings: Settings) -> LogSettings:
    return LogSettings(
        log_file=settings.log_file,
        log_info=settings.log_info,
        log_warning=settings.log_warning,
        log_error=settings.log_error,
        log_verbose_level=settings.log_verbose,
        log_format=settings.log_format,
    )


def _open(name: str) -> TextIO:
    try:
        return open(name, "a", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(f"--log-file '{name}': {error.strerror}") from None


def _close(file: TextIO) -> None:
    with contextlib.suppress(OSError):  # a full disk, again
        file.close()
