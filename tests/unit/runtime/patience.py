# SPDX-License-Identifier: Apache-2.0
"""Waiting in a loop for what nobody announces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from actorserve.clock import monotonic_s

PATIENCE_S = 30.0


async def until(done: Callable[[], object]) -> None:
    """Return as soon as it holds; fail after PATIENCE_S seconds."""
    deadline_s = monotonic_s() + PATIENCE_S
    while not done():
        assert monotonic_s() < deadline_s, "did not happen"
        await asyncio.sleep(0.005)
