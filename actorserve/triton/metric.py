# SPDX-License-Identifier: Apache-2.0
"""Custom metrics: their names are there, so that models import; this version offers none."""

from __future__ import annotations

import enum
from typing import ClassVar

from actorserve.triton.error import TritonModelException

_TEXT = "custom metrics are not offered by this version of actorserve."


class MetricKind(enum.IntEnum):
    """What a metric does: only grow, go up and down, or count into buckets."""

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


# MetricFamily has a member MetricKind, which would hide the name from its annotations.
_Kind = MetricKind


class MetricFamily:
    """A named group of metrics of one kind; making one raises TritonModelException."""

    MetricKind: ClassVar[type[_Kind]] = MetricKind
    COUNTER: ClassVar[_Kind] = MetricKind.COUNTER
    GAUGE: ClassVar[_Kind] = MetricKind.GAUGE
    HISTOGRAM: ClassVar[_Kind] = MetricKind.HISTOGRAM

    def __init__(self, name: str, description: str, kind: _Kind) -> None:
        raise TritonModelException(f"Error when creating MetricFamily: {_TEXT}")


class Metric:
    """One time series of a family; making one raises TritonModelException."""

    def __init__(self) -> None:
        raise TritonModelException(f"Error when creating Metric: {_TEXT}")
