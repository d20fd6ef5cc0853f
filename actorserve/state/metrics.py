# SPDX-License-Identifier: Apache-2.0
"""Measures, and the form in which whoever writes them down gets them. Pure: no clock, no I/O.

    Histogram, Summary ── samples() ──► Family (name, kind, help, samples) ──► an exposition

A counter or a gauge needs no machine: it is a number. What is here is cheap to feed, since it is
fed on a request's way; whatever is costly happens where somebody looks.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

import msgspec

Labels = tuple[tuple[str, str], ...]
"""Names and values, in the order in which they are shown."""

INFINITY = float("inf")


class MetricKind(enum.IntEnum):
    """What a metric does: only grow, go up and down, or count into buckets."""

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


class Sample(msgspec.Struct, frozen=True, gc=False):
    """One line: the family's name and `suffix`, the labels, the value."""

    suffix: str
    labels: Labels
    value: float | int


class Family(msgspec.Struct):
    """Samples of one name. `kind` is "counter", "gauge", "histogram" or "summary"."""

    name: str
    kind: str
    help: str
    samples: list[Sample] = []


def check_buckets(bounds: Sequence[float]) -> None:
    """Raise ValueError unless upper bounds ascend strictly; none at all are fine."""
    for index in range(1, len(bounds)):
        lower, upper = bounds[index - 1 : index + 1]
        if not lower < upper:
            raise ValueError(f"buckets must be strictly ascending, got {lower:g} before {upper:g}")
    if any(bound != bound for bound in bounds):
        raise ValueError("buckets must be numbers, got nan")


class Histogram:
    """Counts of values by upper bound (inclusive); the last bucket has none."""

    __slots__ = ("_counts", "bounds", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """Take bounds that `check_buckets` takes."""
        check_buckets(bounds)
        self.bounds = tuple(bound for bound in bounds if bound != INFINITY)
        self.total = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self.bounds, value) if value == value else -1] += 1
        self.total += value

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self._counts)

    def samples(self, labels: Labels) -> Iterator[Sample]:
        """Yield the lines: count, sum, and the cumulative buckets."""
        yield Sample("_count", labels, self.count)
        yield Sample("_sum", labels, self.total)
        below = 0
        for bound, count in zip((*self.bounds, INFINITY), self._counts):
            below += count
            yield Sample("_bucket", (*labels, ("le", number_text(bound))), below)


def number_text(value: float | int) -> str:
    """Return a number as it is shown: the shortest text that means it, `+Inf`, `-Inf` or `NaN`."""
    if value != value:
        return "NaN"
    if value in (INFINITY, -INFINITY):
        return "+Inf" if value > 0 else "-Inf"
    if isinstance(value, float) and not (value.is_integer() and abs(value) < 1 << 53):
        return repr(value)
    return str(int(value))


class Summary:
    """Quantiles of the whole numbers of the last WINDOW_S seconds, and their sum for ever.

    Values are counted exactly, by what is left of them with BITS binary digits: so a quantile's
    rank has no error at all, and its value one below 0.2 %. That is finer than any error that one
    could ask for, costs two dictionary steps a value, and is bounded: there are 512 such values in
    each power of two. The window moves in steps of a sixth of its length.
    """

    WINDOW_S = 60.0
    SLOTS = 6
    BITS = 10

    __slots__ = ("_slot_end_s", "_slots", "count", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0
        self._slots: list[dict[int, int]] = [{}]
        self._slot_end_s = 0.0

    def observe(self, value: int, now_s: float) -> None:
        """Count a value, 0 or more, at a monotonic time."""
        if now_s >= self._slot_end_s:
            self._turn(now_s)
        shift = value.bit_length() - self.BITS
        key = (value >> shift) << shift if shift > 0 else value
        slot = self._slots[-1]
        slot[key] = slot.get(key, 0) + 1
        self.count += 1
        self.total += value

    def _turn(self, now_s: float) -> None:
        """Begin a new slot, and forget those that are too old."""
        slot_s = self.WINDOW_S / self.SLOTS
        missed = int((now_s - self._slot_end_s) / slot_s) + 1
        if missed >= self.SLOTS:
            self._slots = [{}]
            self._slot_end_s = now_s + slot_s
            return
        self._slots.extend([{} for _ in range(missed)])
        del self._slots[: -self.SLOTS]
        self._slot_end_s += missed * slot_s

    def quantiles(self, ranks: Iterable[float], now_s: float) -> list[float]:
        """Return the value of each rank (0 to 1) in the window; nan where it is empty."""
        if now_s >= self._slot_end_s:
            self._turn(now_s)
        merged: dict[int, int] = {}
        for slot in self._slots:
            for key, count in slot.items():
                merged[key] = merged.get(key, 0) + count
        total = sum(merged.values())
        if not total:
            return [float("nan") for _ in ranks]
        ordered = sorted(merged.items())
        return [_at(ordered, rank * total) for rank in ranks]

    def samples(self, labels: Labels, ranks: Sequence[float], now_s: float) -> Iterator[Sample]:
        """Yield the lines: count, sum, and a quantile for each rank."""
        yield Sample("_count", labels, self.count)
        yield Sample("_sum", labels, self.total)
        for rank, value in zip(ranks, self.quantiles(ranks, now_s)):
            yield Sample("", (*labels, ("quantile", f"{rank:g}")), value)


def _at(ordered: list[tuple[int, int]], wanted: float) -> float:
    """Return the first value up to which there are as many as `wanted`."""
    below = 0
    for value, count in ordered:
        below += count
        if below >= wanted:
            return float(value)
    return float(ordered[-1][0])
