# SPDX-License-Identifier: Apache-2.0
"""Metrics as Prometheus reads them: the text format, version 0.0.4."""

from __future__ import annotations

from collections.abc import Iterable

from actorserve.state.metrics import Family, Labels, number_text

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition(families: Iterable[Family]) -> str:
    """Return families as text: for each, what it is, then its samples."""
    lines: list[str] = []
    for family in families:
        name = family.name
        lines.append(f"# HELP {name} {_escaped_help(family.help)}")
        lines.append(f"# TYPE {name} {family.kind}")
        for sample in family.samples:
            labels = _labels_text(sample.labels)
            lines.append(f"{name}{sample.suffix}{labels} {number_text(sample.value)}")
    lines.append("")
    return "\n".join(lines)


def _labels_text(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join([f'{name}="{_escaped(value)}"' for name, value in labels]) + "}"


def _escaped_help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _escaped(value: str) -> str:
    if '"' in value or "\\" in value or "\n" in value:
        return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
    return value
