# SPDX-License-Identifier: Apache-2.0
"""Tables for people: the models that `actorserve start` has loaded, and whatever else aligns."""

from __future__ import annotations

from collections.abc import Sequence

from actorserve.actors.supervisor import SupervisorStats

REASON_LINES = 12


def model_table(stats: SupervisorStats) -> str:
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
            lines = [line for line in model.reason.splitlines() if line.strip()]
            shown = lines[:REASON_LINES]
            if len(lines) > REASON_LINES:
                shown.append(f"… {len(lines) - REASON_LINES} more lines are in the log")
            reasons.append(f"{model.name}: " + "\n    ".join(shown))
    if len(rows) == 1:
        return "No models are loaded."
    return "\n".join([aligned(rows), *(["", *reasons] if reasons else [])])


def aligned(rows: Sequence[tuple[str, ...]]) -> str:
    """Return rows of cells as text, each column as wide as its widest cell."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
    )
