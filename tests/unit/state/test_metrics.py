# SPDX-License-Identifier: Apache-2.0
"""Histograms, summaries and numbers as text."""

from __future__ import annotations

import math
import random

import pytest

from actorserve.state.metrics import Histogram, Sample, Summary, check_buckets, number_text

INF = float("inf")
RANKS = {0.5: 0.05, 0.9: 0.01, 0.95: 0.001, 0.99: 0.001, 0.999: 0.001}


@pytest.mark.parametrize("bounds", [[1.0, 1.0], [2.0, 1.0], [1.0, math.nan], [math.nan]])
def test_buckets_have_to_ascend(bounds: list[float]) -> None:
    """Equal, falling and unordered bounds are refused."""
    with pytest.raises(ValueError, match="buckets must be"):
        check_buckets(bounds)


def test_a_histogram_counts_up_to_and_including_its_bounds() -> None:
    """Buckets are cumulative, and hold the values that equal their bounds."""
    histogram = Histogram([0.1, 1, 2.5])
    for value in (0.1, 0.2, 1.0, 2.5, 9.0):
        histogram.observe(value)
    labels = (("a", "b"),)
    assert list(histogram.samples(labels)) == [
        Sample("_count", labels, 5),
        Sample("_sum", labels, pytest.approx(12.8)),
        Sample("_bucket", (("a", "b"), ("le", "0.1")), 1),
        Sample("_bucket", (("a", "b"), ("le", "1")), 3),
        Sample("_bucket", (("a", "b"), ("le", "2.5")), 4),
        Sample("_bucket", (("a", "b"), ("le", "+Inf")), 5),
    ]


@pytest.mark.parametrize("bounds", [[], [INF]])
def test_a_histogram_has_one_last_bucket(bounds: list[float]) -> None:
    """Without bounds, or with infinity named, there is `+Inf` once; it holds what is no number."""
    histogram = Histogram(bounds)
    histogram.observe(-INF)
    histogram.observe(math.nan)
    assert [s.labels for s in histogram.samples(())][2:] == [(("le", "+Inf"),)]
    assert histogram.count == 2


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1.0, "1"),
        (0.1, "0.1"),
        (2.5, "2.5"),
        (-3.0, "-3"),
        (1e16, "1e+16"),
        (10**18, "1000000000000000000"),
        (INF, "+Inf"),
        (-INF, "-Inf"),
        (math.nan, "NaN"),
    ],
)
def test_numbers_are_written_short(value: float, text: str) -> None:
    """The shortest text that reads back as the number."""
    assert number_text(value) == text


@pytest.mark.parametrize("shape", ["uniform", "bursts", "long tail", "constant"])
def test_quantiles_are_within_their_errors(shape: str) -> None:
    """The rank of each quantile is off by no more than was asked for."""
    chance = random.Random(7)
    make = {
        "uniform": lambda: chance.randrange(0, 50_000),
        "bursts": lambda: chance.choice((120, 450, 451, 90_000)),
        "long tail": lambda: int(chance.lognormvariate(6, 2)),
        "constant": lambda: 777,
    }[shape]
    values = [make() for _ in range(20_000)]
    summary = Summary()
    for value in values:
        summary.observe(value, 1.0)
    for (rank, error), found in zip(RANKS.items(), summary.quantiles(RANKS, 1.0)):
        # Values are kept to 1/512, so the ranks of those that are that close count as met.
        low = sum(value < found for value in values) / len(values)
        high = sum(value <= found * (1 + 1 / 512) for value in values) / len(values)
        assert low - error <= rank <= high + error, (rank, found)


def test_small_values_are_exact() -> None:
    """Up to a thousand microseconds nothing is rounded."""
    summary = Summary()
    for value in range(1000):
        summary.observe(value, 0.0)
    assert summary.quantiles([0, 0.5, 0.9, 1], 0.0) == [0, 499, 899, 999]


def test_a_summary_forgets_what_is_older_than_its_window() -> None:
    """Quantiles are those of the last minute; count and sum are for ever."""
    summary = Summary()
    summary.observe(1000, 100.0)
    assert summary.quantiles([0.5], 155.0) == [1000]
    summary.observe(10, 155.0)
    assert summary.quantiles([0.5, 1], 155.0) == [10, 1000]
    assert summary.quantiles([1], 165.0) == [10]
    assert math.isnan(summary.quantiles([1], 1000.0)[0])
    assert (summary.count, summary.total) == (2, 1010)


def test_a_summary_without_values_has_no_quantiles() -> None:
    """They are not a number, and count and sum are zero."""
    labels = (("model", "m"),)
    samples = list(Summary().samples(labels, [0.5, 0.999], 5.0))
    assert samples[:2] == [Sample("_count", labels, 0), Sample("_sum", labels, 0)]
    assert [each.labels[-1] for each in samples[2:]] == [("quantile", "0.5"), ("quantile", "0.999")]
    assert all(math.isnan(each.value) for each in samples[2:])


def test_a_summary_stays_small() -> None:
    """However many different values come, what is kept is bounded."""
    summary = Summary()
    for value in range(0, 3_000_000, 7):
        summary.observe(value, 0.0)
    assert sum(len(slot) for slot in summary._slots) < 1024 + 512 * 13
