# SPDX-License-Identifier: Apache-2.0
"""What is counted of one model version, and the form in which clients ask for it. Pure.

    Scheduler ─ succeeded, failed ─┐
    InFlight ── executed ──────────┼─► VersionStatistics ─► statistics() (v2 API), metrics
    factories ─ responded ─────────┘

A request's way has to stay cheap: a few additions to plain numbers, 0.3 µs for a request and as
much for a batch; to note things there and to add them up later takes no less. Counts only grow,
over restarts and reloads; whoever owns the object keeps it for that.
Times are in seconds where they come from two looks at the clock here, else in ns.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from actorserve.errors import ActorserveError, Cancelled, Code
from actorserve.state.metrics import Histogram, Summary

MOST_RESPONSES = 1024
"""Responses to one request that are counted by their index; those beyond it are not."""

FIRST_RESPONSE_BUCKETS_MS = (100.0, 500.0, 2000.0, 5000.0)


class Reason(enum.IntEnum):
    """Why requests fail; the names are those of the metric's label."""

    REJECTED = 0
    CANCELED = 1
    BACKEND = 2
    OTHER = 3


_REFUSALS = (Code.INVALID_ARG, Code.UNSUPPORTED)

Timing = tuple[int, int, int]
"""Where the time of one batch went, in its stub: input, infer and output (ns)."""


# --- what clients get ----------------------------------------------------------------------------


class Duration(msgspec.Struct, frozen=True):
    """How often something happened and how long it took altogether."""

    count: int = 0
    ns: int = 0


class InferStatistics(msgspec.Struct, frozen=True):
    """Requests: how they ended, and where those that succeeded spent their time."""

    success: Duration = Duration()
    fail: Duration = Duration()
    queue: Duration = Duration()
    compute_input: Duration = Duration()
    compute_infer: Duration = Duration()
    compute_output: Duration = Duration()
    cache_hit: Duration = Duration()
    cache_miss: Duration = Duration()


class ResponseStatistics(msgspec.Struct, frozen=True):
    """The responses of one index within their requests' streams."""

    compute_infer: Duration = Duration()
    compute_output: Duration = Duration()
    success: Duration = Duration()
    fail: Duration = Duration()
    empty_response: Duration = Duration()
    cancel: Duration = Duration()


class BatchStatistics(msgspec.Struct, frozen=True):
    """The executions of one batch size."""

    batch_size: int
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


class MemoryUsage(msgspec.Struct, frozen=True):
    """Memory of one kind, in bytes."""

    type: str
    id: int
    byte_size: int


class ModelStatistics(msgspec.Struct, frozen=True):
    """A version's statistics as the v2 protocol has them. `last_inference` is ms of the epoch."""

    name: str
    version: str
    last_inference: int
    inference_count: int
    execution_count: int
    inference_stats: InferStatistics
    response_stats: dict[str, ResponseStatistics]
    batch_stats: tuple[BatchStatistics, ...]
    memory_usage: tuple[MemoryUsage, ...] = ()


# --- what is counted -----------------------------------------------------------------------------


class _Responses:
    """The responses of one index."""

    __slots__ = (
        "cancel_s",
        "cancels",
        "empty",
        "empty_s",
        "failed",
        "failed_s",
        "ok",
        "ok_s",
        "output_s",
    )

    def __init__(self) -> None:
        self.ok = self.failed = self.empty = self.cancels = 0
        self.ok_s = self.failed_s = self.empty_s = self.cancel_s = self.output_s = 0.0

    def statistics(self) -> ResponseStatistics:
        """Return it as clients get it."""
        ok = _duration(self.ok, self.ok_s)
        output = _duration(self.ok, self.output_s)
        return ResponseStatistics(
            compute_infer=Duration(ok.count, max(0, ok.ns - output.ns)),
            compute_output=output,
            success=ok,
            fail=_duration(self.failed, self.failed_s),
            empty_response=_duration(self.empty, self.empty_s),
            cancel=_duration(self.cancels, self.cancel_s),
        )


class Summaries:
    """Quantiles of the five durations, in microseconds."""

    NAMES = ("request", "queue", "compute_input", "compute_infer", "compute_output")

    def __init__(self) -> None:
        self.by_name = {name: Summary() for name in self.NAMES}
        self._all = tuple(self.by_name.values())

    def observe(self, request_s: float, queue_s: float, timing: Timing, now_s: float) -> None:
        """Count a request that succeeded."""
        values = (int(request_s * 1e6), int(queue_s * 1e6), *[each // 1000 for each in timing])
        for summary, value in zip(self._all, values):
            summary.observe(value, now_s)


_UNKNOWN: Timing = (0, 0, 0)


class VersionStatistics:
    """The counts of one model version. `now_s` and the like are monotonic seconds.

    `is_streamed` says that responses are to be counted by their place within a request, too.
    `refusal_reason` is why a request fails that the model refuses, as its client's mistake.
    """

    __slots__ = (
        "_batches",
        "_responses",
        "executions",
        "failures",
        "failures_s",
        "first_response",
        "infer_ns",
        "inferences",
        "input_ns",
        "is_streamed",
        "last_inference_s",
        "output_ns",
        "queue_s",
        "refusal_reason",
        "request_s",
        "restarts",
        "successes",
        "summaries",
    )

    def __init__(self) -> None:
        self.successes = self.inferences = self.executions = self.restarts = 0
        self.failures = [0] * len(Reason)
        self.failures_s = self.request_s = self.queue_s = 0.0
        self.input_ns = self.infer_ns = self.output_ns = 0
        self.last_inference_s = 0.0
        self.is_streamed = False
        self.refusal_reason: int = Reason.BACKEND
        self.first_response: Histogram | None = None
        self.summaries: Summaries | None = None
        self._batches: dict[int, list[int]] = {}  # size to count, input, infer and output (ns)
        self._responses: list[_Responses] = []

    # --- on a request's way ----------------------------------------------------------------------

    def succeeded(
        self,
        rows: int,
        arrival_s: float,
        dispatched_s: float,
        timing: Timing | None,
        now_s: float,
    ) -> None:
        """Count a request that ended well, and the compute time of its batch if it is known."""
        request_s, queue_s = now_s - arrival_s, dispatched_s - arrival_s
        self.successes += 1
        self.inferences += rows
        self.request_s += request_s
        self.queue_s += queue_s
        self.last_inference_s = now_s
        if timing is not None:
            self.input_ns += timing[0]
            self.infer_ns += timing[1]
            self.output_ns += timing[2]
        if self.summaries is not None:
            self.summaries.observe(request_s, queue_s, timing or _UNKNOWN, now_s)

    def add_compute(self, timing: Timing) -> None:
        """Add the time of a batch for a request that had succeeded before its batch ended."""
        self.input_ns += timing[0]
        self.infer_ns += timing[1]
        self.output_ns += timing[2]

    def failed(self, reason: int, duration_s: float) -> None:
        """Count a request that ended in an error."""
        self.failures[reason] += 1
        self.failures_s += duration_s

    def reason_of(self, code: int) -> int:
        """Return why a request fails that the model answered with an error of this code."""
        if code == Code.CANCELLED:
            return Reason.CANCELED
        return self.refusal_reason if code in _REFUSALS else Reason.BACKEND

    def executed(self, size: int, timing: Timing) -> None:
        """Count a call of `execute`, with the rows that it had."""
        self.executions += 1
        sums = self._batches.get(size)
        if sums is None:
            sums = self._batches[size] = [0, 0, 0, 0]
        sums[0] += 1
        sums[1] += timing[0]
        sums[2] += timing[1]
        sums[3] += timing[2]

    def responded(self, index: int, duration_s: float, output_s: float = 0.0) -> None:
        """Count a response with outputs; `duration_s` since the one before, or the dispatch."""
        responses = self._responses_at(index)
        if responses is not None:
            responses.ok += 1
            responses.ok_s += duration_s
            responses.output_s += output_s

    def responded_without_outputs(
        self, index: int, duration_s: float, error: ActorserveError | None
    ) -> None:
        """Count an error within a stream, or its bare end."""
        responses = self._responses_at(index)
        if responses is None:
            return
        if error is None:
            responses.empty += 1
            responses.empty_s += duration_s
        elif isinstance(error, Cancelled):
            responses.cancels += 1
            responses.cancel_s += duration_s
        else:
            responses.failed += 1
            responses.failed_s += duration_s

    def _responses_at(self, index: int) -> _Responses | None:
        responses = self._responses
        if index >= len(responses):
            if index >= MOST_RESPONSES:
                return None
            responses.extend([_Responses() for _ in range(len(responses), index + 1)])
        return responses[index]

    # --- looks -----------------------------------------------------------------------------------

    def use_histogram(self, bounds_ms: Sequence[float] | None) -> None:
        """Count first responses into these buckets from now on; None for not at all."""
        if bounds_ms is None:
            self.first_response = None
        elif self.first_response is None or self.first_response.bounds != tuple(bounds_ms):
            self.first_response = Histogram(bounds_ms)

    def statistics(
        self,
        name: str,
        version: str,
        *,
        epoch_s: float,
        memory: tuple[MemoryUsage, ...] = (),
    ) -> ModelStatistics:
        """Return what clients get. `epoch_s` is the epoch's time of the monotonic clock's zero."""
        count = self.successes
        return ModelStatistics(
            name,
            version,
            int((epoch_s + self.last_inference_s) * 1e3) if self.last_inference_s else 0,
            self.inferences,
            self.executions,
            InferStatistics(
                success=_duration(count, self.request_s),
                fail=_duration(sum(self.failures), self.failures_s),
                queue=_duration(count, self.queue_s),
                compute_input=Duration(count, self.input_ns),
                compute_infer=Duration(count, self.infer_ns),
                compute_output=Duration(count, self.output_ns),
            ),
            {str(i): each.statistics() for i, each in enumerate(self._responses)},
            tuple(
                BatchStatistics(size, *[Duration(times, ns) for ns in sums])
                for size, (times, *sums) in sorted(self._batches.items())
            ),
            memory,
        )


def _duration(count: int, seconds: float) -> Duration:
    return Duration(count, int(seconds * 1e9))
