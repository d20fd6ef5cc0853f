# SPDX-License-Identifier: Apache-2.0
"""What an executor tells of its engine: statistics of iterations, cache events, ended requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from actorserve.actors.generation.executor_base import ExecutorBase
from actorserve.actors.generation.registry import Finished
from actorserve.actors.generation.wait import end_s_of, left_s_of, wait_async, wait_here
from actorserve.errors import Unavailable, WaitTimeout
from actorserve.state.event_ring import Replay

if TYPE_CHECKING:
    from actorserve.actors.generation.group import GroupStats


class ExecutorReading(ExecutorBase):
    """The methods of GenerationExecutor for those who watch it."""

    def get_stats(self, timeout: float | None = None) -> str:
        """Wait for the snapshot of the next iteration that nobody read, and return it as JSON."""
        end_s = end_s_of(timeout)
        while wait_here(self._registry.snapshots, left_s_of(end_s)):
            if (text := self._take_snapshot()) is not None:
                return text
        raise WaitTimeout(f"no iteration in {timeout:g} s")

    async def aget_stats(self, timeout: float | None = None) -> str:
        """As `get_stats`, in an event loop."""
        end_s = end_s_of(timeout)
        while await wait_async(self._registry.snapshots, left_s_of(end_s)):
            if (text := self._take_snapshot()) is not None:
                return text
        raise WaitTimeout(f"no iteration in {timeout:g} s")

    def latest_stats(self) -> dict[str, Any] | None:
        """Return the snapshot of the last iteration; None before the first."""
        return self._registry.snapshots.latest

    def group_stats(self) -> GroupStats | None:
        """Return what the ranks are and do; None before they are started, and in a thread."""
        return None

    def kv_events(self, since: int = 0) -> Replay:
        """Return the events of the key-value cache from the number `since` on."""
        return self._registry.kv_ring.since(since)

    def on_kv_event(self, listener: Callable[[int, list[Any]], object]) -> Callable[[], None]:
        """Have `listener(first number, events)` called, in a thread of the executor's.

        Returns what ends that. What a listener raises is counted, no more.
        """
        listeners = self._registry.kv_listeners
        listeners.append(listener)

        def stop() -> None:
            if listener in listeners:
                listeners.remove(listener)

        return stop

    def on_finished(self, listener: Callable[[Finished], object] | None) -> None:
        """Have a listener called with each request that ended, in a thread of the executor's."""
        self._registry.on_finished = listener

    def _take_snapshot(self) -> str | None:
        snapshots = self._registry.snapshots
        text = snapshots.take()
        if text is None and snapshots.is_over:
            raise self._registry.error or Unavailable("the executor is shut down")
        return text
