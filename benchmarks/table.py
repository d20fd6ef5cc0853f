# SPDX-License-Identifier: Apache-2.0
"""A result as one aligned table, for a terminal and in Markdown. Pure."""

from __future__ import annotations

import msgspec

from benchmarks.report import Figure, Result, RowResult, Verdict

HEADS = (
    "what",
    "unit",
    "ours",
    "min…max",
    "beside it",
    "figure",
    "ratio",
    "target",
    "met",
    "Triton 2.51 (recorded)",
)
_RIGHT = frozenset((2, 3, 5, 6))
_NOTE_FROM = 5


class Line(msgspec.Struct, frozen=True):
    """One line of the table; a note stands instead of the cells from the figure on."""

    cells: tuple[str, ...]
    note: str = ""


def text_table(result: Result) -> str:
    """Return the table with what a reader has to know of the machine, for a terminal."""
    lines = [Line(HEADS), *_lines(result)]
    columns = range(len(HEADS))
    widths = [max(len(line.cells[at]) for line in lines) for at in columns]
    shown = [_text_line(line, widths) for line in lines]
    shown.insert(1, "─" * max(map(len, shown)))
    return "\n".join([*shown, "", *_facts(result)])


def markdown_table(result: Result) -> str:
    """Return the same in Markdown."""
    rows = [HEADS, tuple("--:" if at in _RIGHT else "---" for at in range(len(HEADS)))]
    for line in _lines(result):
        cells = line.cells
        if line.note:
            cells = (*cells[:_NOTE_FROM], line.note, *cells[_NOTE_FROM + 1 :])
        rows.append(cells)
    table = ["| " + " | ".join(_escaped(cell) for cell in cells) + " |" for cells in rows]
    return "\n".join([*table, "", *[f"- {fact}" for fact in _facts(result)]])


def _text_line(line: Line, widths: list[int]) -> str:
    shown = []
    for at, (cell, width) in enumerate(zip(line.cells, widths)):
        if line.note and at == _NOTE_FROM:
            shown.append(line.note)
            break
        shown.append(cell.rjust(width) if at in _RIGHT else cell.ljust(width))
    return "  ".join(shown).rstrip()


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")


def _lines(result: Result) -> list[Line]:
    return [line for row in result.rows for line in _row_lines(row)]


def _row_lines(row: RowResult) -> list[Line]:
    """Return a row's own line with its absolute target, then one line for each figure beside it.

    A row without an absolute target has the first of those on its own line.
    """
    mine, spread = _number(row.ours.median), _spread(row.ours)
    first = (row.title, row.unit, mine, spread)
    later = ("", "", "", "")
    if row.ours.median is None:
        cells = (*first, "", "", "", "", "", row.recorded)
        return [Line(cells, f"not run: {row.ours.reason}")]
    absolute = [verdict for verdict in row.verdicts if not verdict.peer]
    lines = [_line(row, first, None, verdict, row.recorded) for verdict in absolute]
    for figure in row.beside:
        verdict = next((v for v in row.verdicts if v.peer == figure.label), None)
        head = later if lines else first
        lines.append(_line(row, head, figure, verdict, "" if lines else row.recorded))
    if row.ours.reason:
        lines.append(Line((*later, "", "", "", "", "", ""), f"stopped early: {row.ours.reason}"))
    return lines or [_line(row, first, None, None, row.recorded)]


def _line(
    row: RowResult,
    head: tuple[str, ...],
    figure: Figure | None,
    verdict: Verdict | None,
    recorded: str,
) -> Line:
    target = verdict.text if verdict else ""
    met = {None: "-", True: "yes", False: "NO"}[verdict.is_met] if verdict else ""
    if figure is None:
        return Line((*head, "", "", "", target, met, recorded))
    if figure.median is None:
        cells = (*head, figure.label, "", "", target, met, recorded)
        return Line(cells, f"not run: {figure.reason}")
    ratio = row.ratio_to(figure.label)
    shown = f"{_number(ratio)}x" if ratio is not None else ""
    return Line((*head, figure.label, _number(figure.median), shown, target, met, recorded))


def _spread(figure: Figure) -> str:
    if not figure.values:
        return ""
    return f"{_number(min(figure.values))}…{_number(max(figure.values))}"


def _number(value: float | None) -> str:
    """Return about three digits."""
    if value is None:
        return "-"
    if value >= 100:
        return f"{value:.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.1 or not value else f"{value:.3f}"


def _facts(result: Result) -> list[str]:
    machine = result.machine
    packages = ", ".join(f"{name} {version}" for name, version in machine.packages.items())
    kind = " (quick: for a look only)" if result.is_quick else ""
    return [
        f"{machine.cores} cores of {machine.cpu_model}, {machine.memory_mib} MiB; "
        f"{machine.kernel}; {machine.python}; shared memory by {machine.shared_memory}",
        f"tools: {', '.join(machine.tools) or 'neither gcc nor wrk'}; {packages}"
        + (f"; commit {machine.commit}" if machine.commit else ""),
        f"{result.date}, {result.seconds:.0f} s{kind}; load average {result.load_before:.2f} "
        f"before, {result.load_after:.2f} after. Figures are medians; the ratio is ours by theirs.",
    ]
