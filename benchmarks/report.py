# SPDX-License-Identifier: Apache-2.0
"""From findings to a result: medians, ratios and verdicts. Pure; what is written as JSON."""

from __future__ import annotations

import statistics

import msgspec

from benchmarks.machine import Machine
from benchmarks.rows import PEERS, Row, Target
from benchmarks.sampling import OURS, Findings


class Figure(msgspec.Struct, frozen=True):
    """The figures of one contender, in the row's unit. `reason` says why there are none (more)."""

    label: str
    values: list[float] = []
    reason: str = ""

    @property
    def median(self) -> float | None:
        """Return the middle one."""
        return statistics.median(self.values) if self.values else None


class Verdict(msgspec.Struct, frozen=True):
    """A target, and whether it is met; None where a figure is missing."""

    text: str
    peer: str
    is_met: bool | None


class RowResult(msgspec.Struct, frozen=True):
    """One row."""

    name: str
    title: str
    unit: str
    ours: Figure
    beside: list[Figure]
    verdicts: list[Verdict]
    recorded: str

    def ratio_to(self, label: str) -> float | None:
        """Return our median by that of a peer; None where one is missing or it is no peer."""
        for figure in self.beside:
            if figure.label == label and label in PEERS:
                return _ratio(self.ours, figure)
        return None


class Result(msgspec.Struct, frozen=True):
    """One run."""

    date: str
    is_quick: bool
    machine: Machine
    load_before: float
    load_after: float
    seconds: float
    rows: list[RowResult]


def result_of(row: Row, findings: Findings) -> RowResult:
    """Return a row's result from what its section found."""
    values = findings.values.get(row.name, {})
    reasons = findings.reasons.get(row.name, {})
    labels = dict.fromkeys([*values, *reasons])
    figures = {
        label: Figure(
            label,
            [value * row.scale for value in values.get(label, [])],
            reasons.get(label, ""),
        )
        for label in labels
    }
    ours = figures.pop(OURS, Figure(OURS, [], "its section found nothing"))
    beside = list(figures.values())
    verdicts = [_verdict(target, row.unit, ours, figures) for target in row.targets]
    return RowResult(row.name, row.title, row.unit, ours, beside, verdicts, row.recorded)


def _verdict(target: Target, unit: str, ours: Figure, figures: dict[str, Figure]) -> Verdict:
    sign = "≥" if target.at_least else "≤"
    if target.peer:
        text = f"{sign} {target.limit:g}x {target.peer}"
        value = _ratio(ours, figures.get(target.peer, Figure(target.peer)))
    else:
        note = f" ({target.note})" if target.note else ""
        text = f"{sign} {target.limit:g} {unit}{note}"
        value = ours.median
    if value is None:
        return Verdict(text, target.peer, None)
    is_met = value >= target.limit if target.at_least else value <= target.limit
    return Verdict(text, target.peer, is_met)


def _ratio(ours: Figure, peer: Figure) -> float | None:
    mine, theirs = ours.median, peer.median
    return mine / theirs if mine is not None and theirs else None
