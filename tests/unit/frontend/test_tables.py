# SPDX-License-Identifier: Apache-2.0
"""What people see: alignment, colours, wrapping."""

from __future__ import annotations

import io
import re

import pytest

from actorserve.actors.check import Finding, SampleRun
from actorserve.frontend.colour import is_coloured, painted
from actorserve.frontend.findings import findings_text
from actorserve.frontend.operator import age_text
from actorserve.frontend.screen import Screen
from actorserve.frontend.table import aligned, cut

ROWS = [("NAME", "STATE", "WHY"), ("a", "FATAL", "it died"), ("longer", "READY", "")]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def unpainted(text: str) -> str:
    """Return a text without colours."""
    return re.sub("\x1b\\[\\d*m", "", text)


@pytest.mark.parametrize("width", [None, 6, 9, 11, 14, 15, 80])
def test_colour_changes_no_width(width: int | None):
    """Not even where a line is cut in the middle of a painted word."""
    plain = aligned(ROWS, width=width)
    assert unpainted(aligned(ROWS, state_column=1, width=width)) == plain
    assert width is None or max(map(len, plain.splitlines())) <= width
    assert aligned(ROWS).splitlines()[1] == "a       FATAL  it died"


def test_only_the_state_is_painted():
    """A model may be called READY."""
    assert aligned([("READY", "FATAL")], state_column=1) == "READY  \x1b[31mFATAL\x1b[0m"
    assert painted("anything") == "anything"
    assert painted("BACKOFF") == "\x1b[33mBACKOFF\x1b[0m"


def test_what_is_cut_says_so():
    """With a sign of its own."""
    assert (cut("abcdef", 4), cut("abcd", 4), cut("abcd", None)) == ("abc…", "abcd", "abcd")


@pytest.mark.parametrize(
    ("environment", "on_terminal", "in_pipe"),
    [
        ({}, True, False),
        ({"TERM": "xterm"}, True, False),
        ({"TERM": "dumb"}, False, False),
        ({"NO_COLOR": "1"}, False, False),
        ({"NO_COLOR": ""}, True, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"FORCE_COLOR": "1", "TERM": "dumb"}, True, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False),
    ],
)
def test_when_there_is_colour(environment: dict[str, str], on_terminal: bool, in_pipe: bool):
    """The variables beat what the stream is; NO_COLOR beats all."""
    assert is_coloured(_Terminal(), environment) is on_terminal
    assert is_coloured(io.StringIO(), environment) is in_pipe


def test_reasons_are_wrapped_in_their_column():
    """Every line fits; empty ones and importlib's own frames are left out."""
    reason = "ValueError: " + "words " * 30 + "\n\nAt:\n  /m.py(1): f\n  <frozen importlib>(2): g\n"
    text = findings_text([Finding("a_model", "1", reason), Finding("b", "1, 2", "")], width=60)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 60
    assert lines[1].startswith("a_model  1         failed  ValueError: words")
    assert lines[2].startswith(" " * 27 + "  words")
    assert lines[-5].strip() == "/m.py(1): f"
    assert lines[-4] == "b        1, 2      ok      can be read; not run"
    assert lines[-2] == "2 models: 1 ok, 1 failed"
    assert lines[-1].startswith("Nothing was run")
    assert "At:" not in text and "frozen" not in text


def test_a_traceback_in_a_reason_stays_one():
    """Its lines keep their indentation, and the marks below them are left out."""
    reason = (
        "ValueError: no\nTraceback (most recent call last):\n"
        '  File "<frozen importlib._bootstrap>", line 1, in g\n'
        '  File "/m.py", line 7, in start\n    self.load(path)\n    ~~~~~~~~~^^^^^^\n'
        "ValueError: no\n"
    )
    lines = findings_text([Finding("a", "1", reason)], width=100).splitlines()
    column = lines[0].index("DETAIL")
    assert [line[column:] for line in lines[1:6]] == [
        "ValueError: no",
        "  Traceback (most recent call last):",
        '  File "/m.py", line 7, in start',
        "    self.load(path)",
        "  ValueError: no",
    ]
    assert "^" not in "".join(lines) and "frozen" not in "".join(lines)


def test_a_reason_without_words_keeps_its_row():
    """A model is never missing from the table."""
    assert "a      1         failed" in findings_text([Finding("a", "1", "\n")])


def test_samples_stand_below_their_model():
    """Each with its result; a model is ok only if all of them are."""
    samples = (
        SampleRun("one", 1, 0.0123),
        SampleRun("two", 3, 1.5, "no"),
        SampleRun("three", 0, 0.0, skipped="why"),
    )
    text = findings_text([Finding("m", "1", "", ("w",), ("bad",), 0.25, samples)], width=90)
    cells = [re.split(" {2,}", line.strip()) for line in text.splitlines()]
    assert cells[1:6] == [
        ["m", "1", "failed", "initialized in 0.25 s; 1 of 3 warm-up samples failed"],
        ["ok", "one: 12.3 ms"],
        ["failed", "two: 1.50 s, 3 runs: no"],
        ["skipped", "three: why"],
        ["warning", "w"],
    ]
    assert "bad" not in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.9, "59 s"), (60, "1 min"), (3599, "59 min"), (7200, "2 h"), (9e5, "10 d")],
)
def test_ages_have_one_unit(seconds: float, text: str):
    """The largest that fits."""
    assert age_text(seconds) == text


def test_json_is_never_redrawn():
    """Programs read it, also from a terminal that a script watches."""
    stream = _Terminal()
    screen = Screen(stream, is_json=True)
    screen.show("{}")
    screen.end()
    assert (stream.getvalue(), screen.width) == ("{}\n", None)
