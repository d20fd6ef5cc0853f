# SPDX-License-Identifier: Apache-2.0
"""All numbers of one server: what versions count, and what models measure themselves.

    versions ─► VersionStatistics ─┐
    stubs ─► MetricRegistry ───────┴─► families() ─► whoever writes them down

What is counted of a version is kept under its name, so that a reload, or a load after an unload,
goes on counting where the last one stopped; it is shown while the version is there. Belongs to the
supervisor's loop.
"""

from __future__ import annotations

from collections.abc import Sequence

from actorserve.actors.machine import CpuMetrics
from actorserve.actors.metrics_settings import MetricsSettings, parse_metrics_config
from actorserve.actors.server_metrics import (
    SERVER_NAMES,
    VersionView,
    memory_families,
    merged,
    version_families,
)
from actorserve.config import Settings
from actorserve.ids import Serial
from actorserve.runtime.exchange import ExchangeStats
from actorserve.state.metric_registry import MetricRegistry
from actorserve.state.metrics import Family
from actorserve.state.statistics import Summaries, VersionStatistics


class MetricStore:
    """See the module's head."""

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigError for a `metrics_config` that cannot be read."""
        self.settings: MetricsSettings = parse_metrics_config(settings.metrics_config)
        self.registry = MetricRegistry(SERVER_NAMES)
        self.holders = Serial()
        self._versions: dict[tuple[str, str], VersionStatistics] = {}
        interval_s = settings.metrics_interval_ms / 1000
        self._cpu = CpuMetrics(interval_s) if settings.allow_cpu_metrics else None

    def counts(
        self, model: str, version: str, first_response_ms: Sequence[float] | None
    ) -> VersionStatistics:
        """Return what is counted of a version, from now on with these buckets (None: none)."""
        counts = self._versions.get((model, version))
        if counts is None:
            counts = self._versions[model, version] = VersionStatistics()
            if self.settings.summary_latencies:
                counts.summaries = Summaries()
        counts.use_histogram(first_response_ms if self.settings.histogram_latencies else None)
        return counts

    def families(
        self, views: Sequence[VersionView], exchange: ExchangeStats, now_s: float
    ) -> list[Family]:
        """Return everything there is to be shown now."""
        return [
            *version_families(merged(views), self.settings, now_s),
            *memory_families(exchange),
            *(self._cpu.families(now_s) if self._cpu is not None else ()),
            *self.registry.families(),
        ]
