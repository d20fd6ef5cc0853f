# SPDX-License-Identifier: Apache-2.0
"""The text format, held against Prometheus's own parser."""

from __future__ import annotations

import math

from prometheus_client.parser import text_string_to_metric_families

from actorserve.frontend.metrics_text import exposition
from actorserve.state.metrics import Family, Histogram, Sample, Summary

ODD = 'quote " backslash \\ newline \n end ünï'


def test_nothing_is_an_empty_page() -> None:
    """Prometheus takes it."""
    assert exposition([]) == ""


def test_the_text_is_what_the_format_says() -> None:
    """Help, type, samples; labels in their order."""
    families = [
        Family("a", "gauge", "first", [Sample("", (), 1.5), Sample("", (("x", "1"),), math.inf)]),
        Family("b", "counter", "second\nline \\"),
    ]
    assert exposition(families) == (
        "# HELP a first\n"
        "# TYPE a gauge\n"
        "a 1.5\n"
        'a{x="1"} +Inf\n'
        "# HELP b second\\nline \\\\\n"
        "# TYPE b counter\n"
    )


def test_whatever_is_in_it_is_read_back() -> None:
    """Odd texts, all kinds, all numbers."""
    histogram = Histogram([0.25, 1])
    histogram.observe(0.5)
    summary = Summary()
    summary.observe(12, 1.0)
    labels = (("label", ODD),)
    families = [
        Family("c", "counter", ODD, [Sample("", labels, 2**60)]),
        Family("g", "gauge", ODD, [Sample("", labels, math.nan)]),
        Family("h", "histogram", ODD, list(histogram.samples(labels))),
        Family("s", "summary", ODD, list(summary.samples(labels, [0.5], 1.0))),
    ]
    read = {family.name: family for family in text_string_to_metric_families(exposition(families))}
    assert {name: family.type for name, family in read.items()} == {
        "c": "counter",
        "g": "gauge",
        "h": "histogram",
        "s": "summary",
    }
    for family in read.values():
        assert family.documentation == ODD
        for sample in family.samples:
            assert sample.labels["label"] == ODD
    assert read["c"].samples[0].value == 2**60
    assert math.isnan(read["g"].samples[0].value)
    found = {
        sample.name + sample.labels.get("le", ""): sample.value for sample in read["h"].samples
    }
    assert found == {
        "h_count": 1,
        "h_sum": 0.5,
        "h_bucket0.25": 0,
        "h_bucket1": 1,
        "h_bucket+Inf": 1,
    }
    assert [sample.value for sample in read["s"].samples] == [1, 12, 12]
