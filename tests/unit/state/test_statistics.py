# SPDX-License-Identifier: Apache-2.0
"""What is counted of a version, and the form that clients get."""

from __future__ import annotations

import msgspec
import pytest

from actorserve.errors import Cancelled, InternalError
from actorserve.state.statistics import (
    MOST_RESPONSES,
    Duration,
    Reason,
    Summaries,
    VersionStatistics,
)


def test_a_success_counts_everything_once() -> None:
    """The batch's times count for each request, and as one execution of the batch's size."""
    counts = VersionStatistics()
    timing = (1000, 2000, 3000)
    counts.executed(3, timing)
    counts.succeeded(2, 10.0, 10.5, timing, 11.0)
    counts.succeeded(1, 10.25, 10.5, timing, 11.5)
    found = counts.statistics("m", "1", epoch_s=1000.0)
    assert (found.inference_count, found.execution_count) == (3, 1)
    assert found.last_inference == 1_011_500
    stats = found.inference_stats
    assert stats.success == Duration(2, 2_250_000_000)
    assert stats.queue == Duration(2, 750_000_000)
    assert stats.compute_input == Duration(2, 2000)
    assert stats.compute_infer == Duration(2, 4000)
    assert stats.compute_output == Duration(2, 6000)
    assert [(b.batch_size, b.compute_infer) for b in found.batch_stats] == [(3, Duration(1, 2000))]


def test_a_success_before_its_batch_ended_gets_its_compute_time_later() -> None:
    """Counted once, whichever comes first."""
    counts = VersionStatistics()
    counts.succeeded(1, 0.0, 0.5, None, 1.0)
    counts.add_compute((1, 2, 3))
    stats = counts.statistics("m", "1", epoch_s=0.0).inference_stats
    assert stats.compute_infer == Duration(1, 2)


def test_failures_are_told_apart_and_added_up() -> None:
    """Each has a reason; the API knows only their sum. No other count moves."""
    counts = VersionStatistics()
    for reason in Reason:
        counts.failed(reason, 0.25)
    assert counts.failures == [1, 1, 1, 1]
    found = counts.statistics("m", "1", epoch_s=5.0)
    assert found.inference_stats.fail == Duration(4, 1_000_000_000)
    assert found.inference_stats.success == Duration()
    assert (found.last_inference, found.inference_count) == (0, 0)


def test_responses_are_counted_by_their_place() -> None:
    """Good ones, errors, cancelled ones and the bare end of a stream."""
    counts = VersionStatistics()
    counts.responded(0, 0.003, 0.001)
    counts.responded(0, 0.005)
    counts.responded_without_outputs(1, 0.25, None)
    counts.responded_without_outputs(1, 0.5, Cancelled("x"))
    counts.responded_without_outputs(2, 1.0, InternalError("x"))
    found = counts.statistics("m", "1", epoch_s=0.0).response_stats
    assert list(found) == ["0", "1", "2"]
    assert found["0"].success.count == found["0"].compute_infer.count == 2
    assert found["0"].success.ns == pytest.approx(8_000_000, abs=2)
    assert found["0"].compute_infer.ns == pytest.approx(7_000_000, abs=2)
    assert found["0"].compute_output.ns == pytest.approx(1_000_000, abs=2)
    assert found["1"].empty_response == Duration(1, 250_000_000)
    assert found["1"].cancel == Duration(1, 500_000_000)
    assert found["2"].fail == Duration(1, 1_000_000_000)


def test_endless_streams_do_not_grow_the_table() -> None:
    """Responses beyond a number are not counted by their place."""
    counts = VersionStatistics()
    counts.responded(MOST_RESPONSES + 5, 0.1)
    counts.responded(MOST_RESPONSES - 1, 0.1)
    assert len(counts.statistics("m", "1", epoch_s=0.0).response_stats) == MOST_RESPONSES


def test_the_document_has_the_protocol_s_members() -> None:
    """Names and nesting as clients know them."""
    counts = VersionStatistics()
    counts.executed(1, (1, 1, 1))
    counts.responded(0, 0.1)
    document = msgspec.to_builtins(counts.statistics("m", "2", epoch_s=0.0))
    assert set(document) == {
        "name",
        "version",
        "last_inference",
        "inference_count",
        "execution_count",
        "inference_stats",
        "response_stats",
        "batch_stats",
        "memory_usage",
    }
    assert set(document["inference_stats"]) == {
        "success",
        "fail",
        "queue",
        "compute_input",
        "compute_infer",
        "compute_output",
        "cache_hit",
        "cache_miss",
    }
    assert set(document["response_stats"]["0"]) == {
        "compute_infer",
        "compute_output",
        "success",
        "fail",
        "empty_response",
        "cancel",
    }
    assert set(document["batch_stats"][0]) == {
        "batch_size",
        "compute_input",
        "compute_infer",
        "compute_output",
    }


def test_summaries_are_fed_where_there_are_some() -> None:
    """In microseconds, and nothing is counted for a failure."""
    counts = VersionStatistics()
    counts.summaries = Summaries()
    counts.succeeded(1, 1.0, 1.0005, (1000, 250_000, 3000), 1.002)
    counts.failed(Reason.OTHER, 1.0)
    found = {
        name: summary.quantiles([0.5], 1.002)[0]
        for name, summary in counts.summaries.by_name.items()
    }
    assert found["compute_infer"] == 250
    assert found["queue"] == pytest.approx(500, abs=1)
    assert found["request"] == pytest.approx(2000, abs=8)


def test_a_histogram_is_kept_while_its_buckets_are_the_same() -> None:
    """A reload goes on counting; other buckets begin anew."""
    counts = VersionStatistics()
    counts.use_histogram([1.0, 2.0])
    assert counts.first_response is not None
    counts.first_response.observe(1.5)
    before = counts.first_response
    counts.use_histogram((1.0, 2.0))
    assert counts.first_response is before
    counts.use_histogram([3.0])
    assert counts.first_response.count == 0
    counts.use_histogram(None)
    assert counts.first_response is None
