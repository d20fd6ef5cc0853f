# SPDX-License-Identifier: Apache-2.0
"""Tables for people: the models that `actorserve start` has loaded, and whatever else aligns."""

from __future__ import annotations

from collections.abc import Sequence

from actorserve.actors.supervisor import SupervisorStats
from actorserve.frontend.colour import painted

REASON_LINES = 12
GAP = "  "
_FRAMES = "\nAt:\n"


def model_table(stats: SupervisorStats, *, is_coloured: bool = False) -> str:
    """Return an aligned table: a row for each version, and the reason where a model failed."""
    rows = [("MODEL", "VERSION", "STATE", "INSTANCES")]
    reasons: list[str] = []
    for model in stats.models:
        if not model.versions:
            rows.append((model.name, "-", model.state, "-"))
        for version in model.versions:
            running = sum(each.state == "RUNNING" for each in version.instances)
            instances = f"{running}/{len(version.instances)}"
            rows.append((model.name, version.version, version.state, instances))
        if model.reason:
            text, _, frames = model.reason.partition(_FRAMES)  # those are in the log
            lines = [line for line in text.splitlines() if line.strip()]
            shown = lines[:REASON_LINES]
            if len(lines) > REASON_LINES:
                shown.append(f"… {len(lines) - REASON_LINES} more lines are in the log")
            elif frames:
                shown.append("the log says where")
            reasons.append(f"{model.name}: " + "\n    ".join(shown))
    if len(rows) == 1:
        return "No models are loaded."
    table = aligned(rows, state_column=2 if is_coloured else None)
    return "\n".join([table, *(["", *reasons] if reasons else [])])


def aligned(
    rows: Sequence[tuple[str, ...]], *, state_column: int | None = None, width: int | None = None
) -> str:
    """Return rows of cells as text, each column as wide as its widest cell.

    The words of `state_column` are coloured. Lines are cut to `width` characters, if there is one.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        line = GAP.join(cell.ljust(size) for cell, size in zip(row, widths)).rstrip()
        line = cut(line, width)
        if state_column is not None:
            before = sum(widths[:state_column]) + len(GAP) * state_column
            after = before + len(row[state_column])
            line = line[:before] + painted(row[state_column], line[before:after]) + line[after:]
        lines.append(line)
    return "\n".join(lines)


def cut(line: str, width: int | None) -> str:
    """Return a line of at most `width` characters, with a sign that there were more."""
    return line if width is None or len(line) <= width else line[: max(0, width - 1)] + "…"
