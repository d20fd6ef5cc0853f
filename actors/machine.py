# SPDX-License-Identifier: Apache-2.0
"""What the machine says of itself and of processes, looked at when somebody asks."""

from __future__ import annotations

import psutil

from actorserve.state.metrics import Family, Sample


class CpuMetrics:
    """Samples that are at least `interval_s` apart, however often somebody asks."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._sampled_s = float("-inf")
        self._busy_s, self._all_s = _times()
        self._utilization = 0.0
        self._total_bytes = self._used_bytes = 0

    def families(self, now_s: float) -> list[Family]:
        """Return the three of them; the utilization is that since the sample before, 0 to 1."""
        if now_s - self._sampled_s >= self._interval_s:
            self._sample()
            self._sampled_s = now_s
        return [
            _gauge(
                "nv_cpu_utilization",
                "CPU utilization of the machine, 0 to 1",
                self._utilization,
            ),
            _gauge(
                "nv_cpu_memory_total_bytes", "Memory of the machine in bytes", self._total_bytes
            ),
            _gauge(
                "nv_cpu_memory_used_bytes",
                "Memory of the machine in use, in bytes",
                self._used_bytes,
            ),
        ]

    def _sample(self) -> None:
        busy_s, all_s = _times()
        passed_s = all_s - self._all_s
        if passed_s > 0:
            self._utilization = min(1.0, max(0.0, (busy_s - self._busy_s) / passed_s))
        self._busy_s, self._all_s = busy_s, all_s
        memory = psutil.virtual_memory()
        self._total_bytes = memory.total
        self._used_bytes = memory.total - memory.available


def resident_bytes(pid: int) -> int:
    """Return the memory that a process has, with what it shares with others; 0 once it is gone."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def _times() -> tuple[float, float]:
    """Return the processors' busy time and all their time, in seconds since the boot."""
    times = psutil.cpu_times()
    # What guests ran is within the time of users already.
    all_s = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return all_s - times.idle - getattr(times, "iowait", 0.0), all_s


def _gauge(name: str, text: str, value: float) -> Family:
    return Family(name, "gauge", text, [Sample("", (), value)])
