# SPDX-License-Identifier: Apache-2.0
"""What generation measures for Prometheus, as a model's own metrics.

Counters and histograms of all instances of a version are one; the gauges, which are set and not
added to, have the instance as a label.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actorserve.clock import monotonic_s
from actorserve.triton.pb_utils import Metric, MetricFamily

FIRST_TOKEN_BUCKETS_S = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0,
]  # fmt: skip
TOKEN_BUCKETS_S = [
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3,
    0.4, 0.5, 0.75, 1.0, 2.5,
]  # fmt: skip
TOLD_EVERY_S = 0.2

GAUGES = {
    "queued": "Requests that wait for the engine",
    "running": "Requests that the engine works on",
    "kv_usage": "Share of the key-value cache that is in use, 0 to 1",
}
COUNTERS = {
    "prompt_tokens_total": "Tokens of prompts",
    "tokens_total": "Tokens that were generated",
}
HISTOGRAMS = {
    "time_to_first_token_seconds": (
        "From the arrival of a streamed request at its instance to its first token",
        FIRST_TOKEN_BUCKETS_S,
    ),
    "time_per_output_token_seconds": (
        "Mean time of each further token of a streamed request",
        TOKEN_BUCKETS_S,
    ),
}


class GenerationMetrics:
    """The metrics of one instance. Held as long as it lives."""

    def __init__(self, model: str, version: str, instance: str) -> None:
        labels = {"model": model, "version": version}
        self._families: list[MetricFamily] = []
        gauges = {
            name: self._metric(name, text, MetricFamily.GAUGE, {**labels, "instance": instance})
            for name, text in GAUGES.items()
        }
        counters = {
            name: self._metric(name, text, MetricFamily.COUNTER, labels)
            for name, text in COUNTERS.items()
        }
        histograms = {
            name: self._metric(name, text, MetricFamily.HISTOGRAM, labels, buckets)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        self.queued, self.running, self.kv_usage = gauges.values()
        self.prompt_tokens, self._tokens = counters.values()
        self.first_token, self.further_token = histograms.values()
        self._uncounted = 0
        self._counted_s = 0.0
        self.note({})

    def _metric(
        self,
        name: str,
        text: str,
        kind: Any,
        labels: dict[str, str],
        buckets: list[float] | None = None,
    ) -> Metric:
        family = MetricFamily(f"actorserve_generation_{name}", text, kind)
        self._families.append(family)  # its metrics live no longer than it does
        return family.Metric(labels, buckets)

    def count_tokens(self, count: int, *, is_last: bool = False) -> None:
        """Count generated tokens; `is_last` says that those are a request's last ones.

        Told to the server a few times a second, as a message for each token would cost more than
        the token. One thread at a time.
        """
        self._uncounted += count
        now_s = monotonic_s()
        if self._uncounted and (is_last or now_s - self._counted_s >= TOLD_EVERY_S):
            self._tokens.increment(self._uncounted)
            self._uncounted, self._counted_s = 0, now_s

    def note(self, snapshot: Mapping[str, Any]) -> None:
        """Set the gauges by the engine's last snapshot; what it does not say is 0."""
        self.queued.set(_figure(snapshot, "waiting"))
        self.running.set(_figure(snapshot, "running"))
        self.kv_usage.set(_usage(snapshot))


def _usage(snapshot: Mapping[str, Any]) -> float:
    """Return the share of the cache that is in use, by tokens or else by slots."""
    for name in ("kv_tokens", "slots"):
        total = _figure(snapshot, name)
        if total > 0 and f"{name}_used" in snapshot:
            return _figure(snapshot, f"{name}_used") / total
    return _figure(snapshot, "kv_usage")


def _figure(snapshot: Mapping[str, Any], name: str) -> float:
    value = snapshot.get(name, 0)
    return float(value) if isinstance(value, (int, float)) else 0.0
