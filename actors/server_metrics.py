# SPDX-License-Identifier: Apache-2.0
"""The server's own metrics: from what versions count to families with labels.

Runs when somebody looks: nothing here is on a request's way. A version that was reloaded may be
there twice for a while, with the same counts; what is shown then is the counts once, and the
gauges of both together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from actorserve.actors.metrics_settings import MetricsSettings
from actorserve.runtime.exchange import ExchangeStats
from actorserve.state.lifecycle import State
from actorserve.state.metric_registry import shown_names
from actorserve.state.metrics import Family, Labels, MetricKind, Sample
from actorserve.state.statistics import Reason, Summaries, VersionStatistics


class VersionGauges(msgspec.Struct):
    """Where a version stands, as far as metrics go."""

    pending: int = 0
    in_flight: int = 0
    backlog: int = 0
    states: dict[str, int] = {}

    def add(self, other: VersionGauges) -> None:
        """Add those of another version of the same name."""
        self.pending += other.pending
        self.in_flight += other.in_flight
        self.backlog += other.backlog
        for state, count in other.states.items():
            self.states[state] = self.states.get(state, 0) + count


class VersionView(msgspec.Struct):
    """A version that is to be shown."""

    labels: Labels
    counts: VersionStatistics
    gauges: VersionGauges
    load_duration_s: float


_Reader = Callable[[VersionView], float]

_COUNTERS: tuple[tuple[str, str, _Reader], ...] = (
    (
        "nv_inference_request_success",
        "Requests that ended well",
        lambda view: view.counts.successes,
    ),
    (
        "nv_inference_count",
        "Inferences that ended well: a request counts as many as it has rows",
        lambda view: view.counts.inferences,
    ),
    (
        "nv_inference_exec_count",
        "Calls of a model's execute",
        lambda view: view.counts.executions,
    ),
    (
        "actorserve_stub_restarts_total",
        "Starts of stubs after the first of each instance",
        lambda view: view.counts.restarts,
    ),
)

_LATENCIES: tuple[tuple[str, str, _Reader], ...] = (
    (
        "nv_inference_request_duration_us",
        "Time of requests that ended well, from arrival to end (microseconds)",
        lambda view: int(view.counts.request_s * 1e6),
    ),
    (
        "nv_inference_queue_duration_us",
        "Time that these requests waited for a stub (microseconds)",
        lambda view: int(view.counts.queue_s * 1e6),
    ),
    (
        "nv_inference_compute_input_duration_us",
        "Time that stubs took to prepare their inputs (microseconds)",
        lambda view: view.counts.input_ns // 1000,
    ),
    (
        "nv_inference_compute_infer_duration_us",
        "Time that their batches spent in execute (microseconds)",
        lambda view: view.counts.infer_ns // 1000,
    ),
    (
        "nv_inference_compute_output_duration_us",
        "Time that stubs took to make their outputs ready (microseconds)",
        lambda view: view.counts.output_ns // 1000,
    ),
)

_GAUGES: tuple[tuple[str, str, _Reader], ...] = (
    (
        "nv_inference_pending_request_count",
        "Requests that wait for a stub",
        lambda view: view.gauges.pending,
    ),
    (
        "nv_model_load_duration_secs",
        "Time that the last load took (seconds)",
        lambda view: view.load_duration_s,
    ),
    (
        "actorserve_requests_in_flight",
        "Requests that stubs work on",
        lambda view: view.gauges.in_flight,
    ),
    (
        "actorserve_backlog_messages",
        "Messages that wait for room in the rings of stubs",
        lambda view: view.gauges.backlog,
    ),
)

_MEMORY: tuple[tuple[str, str, Callable[[ExchangeStats], float]], ...] = (
    (
        "actorserve_arena_used_bytes",
        "Shared memory of the server that tensors use",
        lambda stats: stats.arena.used_bytes,
    ),
    (
        "actorserve_arena_segment_bytes",
        "Shared memory that the server has taken for tensors",
        lambda stats: stats.arena.segment_bytes,
    ),
)

_FAILURE = "nv_inference_request_failure"
_FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"
_STUBS = "actorserve_stubs"
_CPU = ("nv_cpu_utilization", "nv_cpu_memory_total_bytes", "nv_cpu_memory_used_bytes")


def _summary_name(name: str) -> str:
    return f"nv_inference_{name}_summary_us"


SERVER_NAMES = frozenset(
    {name for name, _, _ in (*_COUNTERS, *_LATENCIES, *_GAUGES)}
    | {name for name, _, _ in _MEMORY}
    | {_FAILURE, _STUBS, *_CPU}
    | shown_names(_FIRST_RESPONSE, MetricKind.HISTOGRAM)
    | {
        _summary_name(name) + suffix
        for name in Summaries.NAMES
        for suffix in ("", "_count", "_sum")
    }
)
"""The names that no model may take for a metric of its own."""


def merged(views: Sequence[VersionView]) -> list[VersionView]:
    """Return one view for each set of labels; later ones are of later loads."""
    found: dict[Labels, VersionView] = {}
    for view in views:
        before = found.get(view.labels)
        if before is not None:
            view.gauges.add(before.gauges)
        found[view.labels] = view
    return list(found.values())


def version_families(
    views: Sequence[VersionView], settings: MetricsSettings, now_s: float
) -> Iterator[Family]:
    """Yield all families with a label for the model."""
    latencies = _LATENCIES if settings.counter_latencies else ()
    for name, text, read in (*_COUNTERS, *latencies):
        yield _family(name, "counter", text, views, read)
    yield _failures(views)
    for name, text, read in _GAUGES:
        yield _family(name, "gauge", text, views, read)
    yield _stubs(views)
    if settings.histogram_latencies:
        yield _first_responses(views)
    if settings.summary_latencies:
        yield from _summaries(views, settings.summary_quantiles, now_s)


def memory_families(stats: ExchangeStats) -> Iterator[Family]:
    """Yield what is said of the server's own memory."""
    for name, text, read in _MEMORY:
        yield Family(name, "gauge", text, [Sample("", (), read(stats))])


def _family(name: str, kind: str, text: str, views: Sequence[VersionView], read: _Reader) -> Family:
    return Family(name, kind, text, [Sample("", view.labels, read(view)) for view in views])


def _failures(views: Sequence[VersionView]) -> Family:
    samples = [
        Sample("", _with(view.labels, "reason", reason.name), view.counts.failures[reason])
        for view in views
        for reason in Reason
    ]
    return Family(_FAILURE, "counter", "Requests that failed, by reason", samples)


def _stubs(views: Sequence[VersionView]) -> Family:
    samples = [
        Sample("", _with(view.labels, "state", state.value), view.gauges.states.get(state.value, 0))
        for view in views
        for state in State
    ]
    return Family(_STUBS, "gauge", "Stubs by state", samples)


def _first_responses(views: Sequence[VersionView]) -> Family:
    samples = [
        sample
        for view in views
        if view.counts.first_response is not None
        for sample in view.counts.first_response.samples(view.labels)
    ]
    text = "Time from a request's arrival to its first response (milliseconds)"
    return Family(_FIRST_RESPONSE, "histogram", text, samples)


def _summaries(
    views: Sequence[VersionView], ranks: Sequence[float], now_s: float
) -> Iterator[Family]:
    for name in Summaries.NAMES:
        samples: list[Sample] = []
        for view in views:
            if view.counts.summaries is not None:
                summary = view.counts.summaries.by_name[name]
                samples.extend(summary.samples(view.labels, ranks, now_s))
        text = f"Quantiles of the last minute's {name.replace('_', ' ')} times (microseconds)"
        yield Family(_summary_name(name), "summary", text, samples)


def _with(labels: Labels, name: str, value: str) -> Labels:
    return tuple(sorted((*labels, (name, value))))
