# SPDX-License-Identifier: Apache-2.0
"""What a stub may ask of the server and wait for: the contents of `Asked` (wire/messages.py).

The answer's result is a plain value; what each question is answered with stands at it.
"""

from __future__ import annotations

import msgspec


class OpenFamily(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Open a metric family; `family` is the stub's number for the handle. No result.

    `kind` is a number of state.metrics.MetricKind.
    """

    family: int
    name: str
    description: str
    kind: int


class OpenMetric(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Open a metric of a family; `metric` is the stub's number for the handle. No result."""

    metric: int
    family: int
    labels: dict[str, str]
    buckets: list[float] | None = None


class ReadMetric(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Ask for a metric's value; the result is a float."""

    metric: int


Question = OpenFamily | OpenMetric | ReadMetric
