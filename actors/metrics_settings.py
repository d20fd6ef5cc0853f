# SPDX-License-Identifier: Apache-2.0
"""What `--metrics-config` chooses: which of the server's metrics there are, and their quantiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from actorserve.config import parse_bool
from actorserve.errors import ConfigError


class MetricsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Which latencies are shown, and in which form; quantiles as ranks from 0 to 1."""

    counter_latencies: bool = True
    histogram_latencies: bool = False
    summary_latencies: bool = False
    summary_quantiles: tuple[float, ...] = (0.5, 0.9, 0.95, 0.99, 0.999)


def _quantiles(text: str) -> tuple[float, ...]:
    """Read RANK:ERROR pairs with commas between; the errors are not needed (see Summary)."""
    ranks = []
    for part in text.strip("\"'").split(","):
        rank, _, error = part.partition(":")
        try:
            ranks.append(float(rank))
            float(error or 0)
        except ValueError:
            ranks.append(-1.0)
        if not 0 <= ranks[-1] <= 1:
            raise ValueError(f"expected RANK:ERROR,RANK:ERROR… with ranks from 0 to 1, got {text}")
    return tuple(ranks)


_KEYS: dict[str, Callable[[str], Any]] = {
    "counter_latencies": parse_bool,
    "histogram_latencies": parse_bool,
    "summary_latencies": parse_bool,
    "summary_quantiles": _quantiles,
}


def parse_metrics_config(entries: Sequence[str]) -> MetricsSettings:
    """Read KEY=VALUE entries. Raises ConfigError for an unknown key or a value that is none."""
    values: dict[str, Any] = {}
    for entry in entries:
        key, equals, text = entry.partition("=")
        if not equals:
            raise ConfigError(f"--metrics-config={entry}: expected KEY=VALUE")
        if key not in _KEYS:
            raise ConfigError(
                f"--metrics-config={entry}: unknown key '{key}', expected one of {', '.join(_KEYS)}"
            )
        try:
            values[key] = _KEYS[key](text)
        except ValueError as error:
            raise ConfigError(f"--metrics-config={entry}: {error}") from None
    return MetricsSettings(**values)
