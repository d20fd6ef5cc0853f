# SPDX-License-Identifier: Apache-2.0
"""What `actorserve check` found, for people: a table whose last column says why, wrapped."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import TextIO

from actorserve.actors.check import Finding, SampleRun
from actorserve.frontend.table import aligned

DEFAULT_WIDTH = 100
LEAST_DETAIL_WIDTH = 24
RESULT = 2
_FROZEN = ("<frozen ", 'File "<frozen ')

_Row = tuple[str, str, str, str]


def findings_text(
    findings: Sequence[Finding], *, is_coloured: bool = False, width: int | None = None
) -> str:
    """Return the findings as a table, and a line that counts them.

    Reasons are wrapped so that lines have `width` characters, by default those of the terminal.
    """
    if not findings:
        return "There are no models."
    if width is None:
        width = shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns
    rows: list[_Row] = [("MODEL", "VERSIONS", "RESULT", "DETAIL")]
    for each in findings:
        rows += _rows(each)
    before = len(aligned([row[:-1] + ("|",) for row in rows]).splitlines()[0]) - 1
    room = max(LEAST_DETAIL_WIDTH, width - before)
    wrapped = [part for row in rows for part in _wrap(row, room)]
    table = aligned(wrapped, state_column=RESULT if is_coloured else None)
    ok = sum(each.is_ok for each in findings)
    failed = f", {len(findings) - ok} failed" if ok < len(findings) else ""
    models = "1 model" if len(findings) == 1 else f"{len(findings)} models"
    text = f"{table}\n\n{models}: {ok} ok{failed}"
    if any(each.is_ok and each.load_s is None for each in findings):
        text += "\nNothing was run: --dry-run loads each model."
    return text


def _rows(finding: Finding) -> Iterator[_Row]:
    word = "ok" if finding.is_ok else "failed"
    yield finding.model, finding.versions, word, _summary(finding)
    for each in finding.samples:
        yield "", "", _sample_word(each), _sample_text(each)
    bad_samples = finding.bad_samples if finding.load_s is None else ()
    for warning in (*finding.warnings, *bad_samples):
        yield "", "", "warning", warning


def _summary(finding: Finding) -> str:
    if finding.problem:
        return finding.problem
    if finding.load_s is None:
        return "can be read; not run"
    loaded = f"initialized in {_duration(finding.load_s)}"
    if not finding.samples:
        return f"{loaded}; no warm-up samples"
    failed = sum(bool(each.problem) for each in finding.samples)
    if failed:
        return f"{loaded}; {failed} of {len(finding.samples)} warm-up samples failed"
    return loaded


def _sample_word(sample: SampleRun) -> str:
    if sample.problem:
        return "failed"
    return "skipped" if sample.skipped else "ok"


def _sample_text(sample: SampleRun) -> str:
    if sample.skipped:
        return f"{sample.title}: {sample.skipped}"
    runs = f", {sample.runs} runs" if sample.runs > 1 else ""
    text = f"{sample.title}: {_duration(sample.duration_s)}{runs}"
    return f"{text}: {sample.problem}" if sample.problem else text


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 0.1 else f"{seconds:.2f} s"


def _wrap(row: _Row, room: int) -> Iterator[_Row]:
    """Yield the row, and below it what of its last cell has no room; each keeps its indent.

    What says nothing about a model is left out: marks below a line, frames of Python's own.
    """
    cells = row[:-1]
    for line in row[-1].splitlines() or [""]:
        text = line.strip()
        if not text.strip("^~ ") or text == "At:" or text.startswith(_FROZEN):
            continue
        own = line[: len(line) - len(line.lstrip())].expandtabs()[: room // 2]
        indent = own or ("  " if cells[RESULT] == "" else "")
        for part in textwrap.wrap(
            text,
            room,
            initial_indent=indent,
            subsequent_indent=own + "  ",
            break_long_words=False,
            break_on_hyphens=False,
        ):
            yield (*cells, part)
            cells = ("", "", "")
    if cells[RESULT]:
        yield (*cells, "")


class Progress:
    """One line on a terminal that says which models are being tried; nothing anywhere else."""

    def __init__(self, total: int, stream: TextIO | None = None, *, is_wanted: bool = True) -> None:
        self._total = total
        self._stream = stream or sys.stderr
        self._is_shown = is_wanted and self._stream.isatty()

    def __enter__(self) -> Progress:
        """Begin without a line."""
        return self

    def __exit__(self, *error: object) -> None:
        """Take the line away."""
        self([], 0)

    def __call__(self, trying: Sequence[str], done: int) -> None:
        """Show where the dry run stands."""
        if not self._is_shown:
            return
        text = f"{done} of {self._total} models done; trying {', '.join(trying)}"
        room = shutil.get_terminal_size().columns - 1
        self._stream.write(f"\r{text[:room]}\x1b[K" if trying else "\r\x1b[K")
        self._stream.flush()
