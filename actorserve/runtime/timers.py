# SPDX-License-Identifier: Apache-2.0
"""The timers that a child's machine arms (state/lifecycle.Timer), in an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from actorserve.state.lifecycle import ArmTimer, Timer


class Timers:
    """One timer of each kind; `on_due` gets the kind and the incarnation that it was armed for."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, on_due: Callable[[Timer, int], None]
    ) -> None:
        self._loop = loop
        self._on_due = on_due
        self._armed: dict[Timer, asyncio.TimerHandle] = {}

    def arm(self, order: ArmTimer) -> None:
        """Arm a timer, in place of one of its kind."""
        self.cancel(order.kind)
        self._armed[order.kind] = self._loop.call_later(
            order.delay_s, self._fire, order.kind, order.incarnation
        )

    def cancel(self, kind: Timer) -> None:
        """Drop a timer, if it is armed."""
        armed = self._armed.pop(kind, None)
        if armed is not None:
            armed.cancel()

    def _fire(self, kind: Timer, incarnation: int) -> None:
        self._armed.pop(kind, None)
        self._on_due(kind, incarnation)
