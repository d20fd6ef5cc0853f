# SPDX-License-Identifier: Apache-2.0
"""Monotonic time. Wall clocks are for people only: no deadline may depend on them."""

from __future__ import annotations

import time

monotonic_s = time.monotonic
monotonic_ns = time.monotonic_ns


def epoch_s() -> float:
    """Return the wall clock's time of the monotonic clock's zero: what people are shown."""
    return time.time() - monotonic_s()


def remaining_s(deadline_s: float | None) -> float | None:
    """Seconds until a monotonic deadline, never negative; None for none."""
    if deadline_s is None:
        return None
    return max(0.0, deadline_s - monotonic_s())
