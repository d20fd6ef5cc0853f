# SPDX-License-Identifier: Apache-2.0
"""Log lines: three formats, levels, and texts that cannot forge a line."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from actorserve.actors import server_log
from actorserve.actors.server_log import LineFormatter
from actorserve.config import Settings
from actorserve.errors import ConfigError

NASTY = 'a"b\\c\nI1130 00:00:00.000000 1 fake.py:1] "x"\r\t\x1b[31m\x7f\x9b31m\u2028\u2029\x85ü東'


def record(text: str = "hello", level: int = logging.INFO, **extra: Any) -> logging.LogRecord:
    """Return a record of 3 January 2026, 04:05:06.000789 UTC."""
    made = logging.LogRecord("actorserve", level, "/x/serve.py", 12, "%s", (text,), None)
    made.created = 1767413106.000789
    made.__dict__.update(extra)
    return made


@pytest.mark.parametrize(
    ("level", "letter"),
    [(logging.DEBUG, "V"), (logging.INFO, "I"), (logging.WARNING, "W"), (logging.ERROR, "E")],
)
def test_the_default_format_is_the_real_server_s(level, letter):
    """Letter, date, time, process, place, the text in quotes."""
    line = LineFormatter("default").format(record(level=level))
    assert line == f'{letter}0103 04:05:06.000789 {os.getpid()} serve.py:12] "hello"'


def test_iso_8601():
    """The same with another date."""
    line = LineFormatter("ISO8601").format(record(level=logging.WARNING))
    assert line == f'2026-01-03T04:05:06Z W {os.getpid()} serve.py:12] "hello"'


def test_json():
    """One object with everything by name."""
    assert json.loads(LineFormatter("json").format(record())) == {
        "time": "2026-01-03T04:05:06.000789+00:00",
        "level": "INFO",
        "pid": os.getpid(),
        "instance": "",
        "source": "serve.py:12",
        "message": "hello",
    }


@pytest.mark.parametrize(
    ("extra", "place"),
    [
        ({"instance": "add_sub_0_0", "stream": "stdout"}, "add_sub_0_0 stdout"),
        ({"instance": "add_sub_0_0", "file": "model.py", "file_line": 7}, "add_sub_0_0 model.py:7"),
        ({}, "serve.py:12"),
    ],
)
def test_a_line_says_where_it_comes_from(extra, place):
    """The instance, and the model's own file or stream."""
    assert f" {place}] " in LineFormatter("default").format(record(**extra))
    fields = json.loads(LineFormatter("json").format(record(**extra)))
    assert f"{fields['instance']} {fields['source']}".strip() == place


@pytest.mark.parametrize("style", ["default", "ISO8601", "json"])
@pytest.mark.parametrize("where", ["message", "file"])
def test_no_text_can_forge_a_line(style, where):
    """Nor obey a terminal's control codes; what people write in any script stays readable."""
    made = record(NASTY) if where == "message" else record(file=NASTY, file_line=1, instance="i")
    line = LineFormatter(style).format(made)
    assert line.isprintable()
    assert len(line.splitlines()) == 1
    assert "ü東" in line
    if style == "json":
        assert NASTY in json.loads(line)["message" if where == "message" else "source"]


def test_a_stack_is_part_of_the_line():
    """An exception's, escaped as all texts."""
    try:
        raise ValueError("no")
    except ValueError as error:
        made = record()
        made.exc_info = (type(error), error, error.__traceback__)
    line = LineFormatter("default").format(made)
    assert "hello\\nTraceback (most recent call last):" in line
    assert "ValueError: no" in line
    assert "\n" not in line


def test_escaping_may_be_switched_off(monkeypatch):
    """As with the real server."""
    monkeypatch.setenv("TRITON_SERVER_ESCAPE_LOG_MESSAGES", "0")
    assert LineFormatter("default").format(record('a "b"\nc')).endswith('] a "b"\nc')


# --- the handler ---------------------------------------------------------------------------------


@pytest.fixture
def install() -> Iterator[Callable[..., logging.Logger]]:
    """Return `install(**settings)`: send the log somewhere until the end of the test.

    `install.flush()` writes what is queued and takes the handlers away.
    """
    logger = logging.getLogger("actorserve")
    before = (logger.level, logger.propagate)
    with contextlib.ExitStack() as stack:

        def run(**settings: Any) -> logging.Logger:
            stack.enter_context(server_log.installed(Settings(**settings)))
            return logger

        run.flush = stack.close  # type: ignore[attr-defined]
        yield run
    logger.setLevel(before[0])
    logger.propagate = before[1]


def test_levels_are_switched_one_by_one(install, monkeypatch):
    """Errors may be on while warnings are off."""
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    logger = install(log_info=False, log_warning=False, log_verbose=1)
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
        logger.log(level, "at %d", level)
    logging.getLogger("actorserve.http").error("of a part")
    install.flush()
    texts = [line.partition("] ")[2] for line in stream.getvalue().splitlines()]
    assert texts == ['"at 10"', '"at 40"', '"of a part"']


def test_verbose_is_off_by_default(install, monkeypatch):
    """Debug lines are not even made."""
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert not install().isEnabledFor(logging.DEBUG)


def test_a_file_gets_the_lines(install, tmp_path):
    """At once, appended, in UTF-8, whatever a text holds."""
    file = tmp_path / "log"
    file.write_text("before\n")
    install(log_file=str(file)).info("ü \ud800")
    install.flush()
    assert file.read_text(encoding="utf-8").splitlines()[0] == "before"
    assert file.read_text(encoding="utf-8").splitlines()[1].endswith('] "ü \\ud800"')


def test_a_file_that_cannot_be_opened_is_named(tmp_path):
    """With the system's reason."""
    with (
        pytest.raises(ConfigError, match="--log-file '/nowhere/log': No such file or directory"),
        server_log.installed(Settings(log_file="/nowhere/log")),
    ):
        pass
    with (
        pytest.raises(ConfigError, match="Is a directory"),
        server_log.installed(Settings(log_file=str(tmp_path))),
    ):
        pass


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_lines_that_nobody_can_take_are_lost(install):
    """A full disk does not stop the server, and says nothing of its own."""
    install(log_file="/dev/full").info("lost")
