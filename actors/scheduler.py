# SPDX-License-Identifier: Apache-2.0
"""The scheduler of one model version: who runs next, where, and who has waited too long.

    submit ──► queue (pure) ──► the instance with the most room ──► stub
                ▲   └── deadlines ──► errors
                └────── requeue ◄── a stub died before it began them

A plain object in the supervisor's loop. One timer serves both the queue's deadlines and batches
that wait for company.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from actorserve.actors.instance import Instance
from actorserve.actors.node import Node
from actorserve.actors.response_factory import ResponseFactory
from actorserve.clock import monotonic_s
from actorserve.errors import Unavailable
from actorserve.state.backlog import EXPIRED_MESSAGE
from actorserve.state.batching import Batch, BatchPolicy, BatchQueue, WaitUntil
from actorserve.state.lifecycle import State
from actorserve.state.plain_queue import PlainQueue, queue_for
from actorserve.state.statistics import Reason, VersionStatistics

WAIT_FOR_RESTART_S = 1.0
"""A request waits for a stub that is due within this time; else it is refused at once."""


class SchedulerStats(msgspec.Struct, frozen=True):
    """Counts since the load: every accepted request is pending, running, or ended once."""

    queued: int
    in_flight: int
    accepted: int
    succeeded: int
    failed: int
    batches: int
    held: int = 0  # responses that wait for those of earlier requests


class Scheduler:
    """Queue and dispatch the requests of one version."""

    def __init__(
        self,
        node: Node,
        name: str,
        config: BatchPolicy,
        retries: int = 0,
        counts: VersionStatistics | None = None,
    ) -> None:
        """`counts` is what its version counts, over all its loads."""
        self.retries = retries
        self.counts = counts or VersionStatistics()
        self._node = node
        self._name = name
        self._queue: BatchQueue[ResponseFactory] | PlainQueue[ResponseFactory] = queue_for(config)
        self._instances: Sequence[Instance] = ()
        self._on_change: Callable[[], None] = lambda: None
        self._pending: dict[int, ResponseFactory] = {}
        self._drained: list[asyncio.Future[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due_s = float("inf")
        self._is_running = False
        self._accepted = self._failed = self._succeeded = self._batches = 0

    def employ(self, instances: Sequence[Instance], on_change: Callable[[], None]) -> None:
        """Take the instances that do the work; `on_change` is told of each change of state."""
        self._instances = instances
        self._on_change = on_change

    # --- requests --------------------------------------------------------------------------------

    def check_available(self) -> None:
        """Raise Unavailable where no stub is there, and none is due soon."""
        soonest_s = float("inf")
        for instance in self._instances:
            if instance.is_running:
                return
            due_s = instance.start_due_s
            if due_s is not None and due_s < soonest_s:
                soonest_s = due_s
        if soonest_s <= WAIT_FOR_RESTART_S:
            return
        reason = next((each.reason for each in self._instances), "there is no instance")
        raise Unavailable(
            f"{self._name} has no stub that could take the request: {reason}",
            None if soonest_s == float("inf") else soonest_s,
        )

    def submit(self, factory: ResponseFactory) -> None:
        """Accept a request and dispatch what can be. Raises Unavailable where the queue is full."""
        queue = self._queue
        if not queue.count and queue.is_immediate:
            instance = self._roomiest()
            if instance is not None:
                self._accept(factory)
                self._batches += 1
                instance.dispatch([factory])
                return
        queue.add(factory)
        self._accept(factory)
        self._run()

    def _accept(self, factory: ResponseFactory) -> None:
        self._accepted += 1
        self._pending[factory.key] = factory

    def requeue(self, factories: list[ResponseFactory], *, is_alone: bool = False) -> None:
        """Put requests back to the front: no stub has begun them, or they may be tried again."""
        self._queue.put_back(factories, is_alone=is_alone)
        self._run()

    def remove(self, factory: ResponseFactory) -> None:
        """Take a queued request out."""
        self._queue.remove(factory.key)

    def ended(self, factory: ResponseFactory) -> None:
        """Count the end of a request, and wake who waits for the last one."""
        self._pending.pop(factory.key, None)
        now_s = monotonic_s()
        arrival_s = factory.arrival_s
        if factory.has_failed:
            self._failed += 1
            self.counts.failed(factory.reason, now_s - arrival_s)
        else:
            self._succeeded += 1
            timing = factory.timing
            factory.lacks_timing = timing is None
            self.counts.succeeded(factory.rows, arrival_s, factory.dispatched_s, timing, now_s)
        if not self._pending and self._drained:
            waiters, self._drained = self._drained, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    @property
    def pending(self) -> int:
        """How many accepted requests have no end yet."""
        return len(self._pending)

    async def drained(self) -> None:
        """Wait until no accepted request is without its end."""
        if self._pending:
            waiter = self._node.loop.create_future()
            self._drained.append(waiter)
            await waiter

    def fail_all(self, error: Unavailable) -> None:
        """End every accepted request now, wherever it is."""
        for factory in list(self._pending.values()):
            factory.expire(error)

    # --- instances -------------------------------------------------------------------------------

    def instance_changed(self, instance: Instance) -> None:
        """Hear that an instance came, went or was given up."""
        self._on_change()
        if instance.is_running:
            self._run()
        elif self._pending and all(each.state is State.FATAL for each in self._instances):
            self.fail_all(Unavailable(f"{self._name} has no stub any more: {instance.reason}"))

    def has_room(self) -> None:
        """Hear that an instance has room again."""
        if self._queue.count:
            self._run()

    def _roomiest(self) -> Instance | None:
        """Return the running instance with the most room, or None where none has any."""
        best, most = None, 0
        for instance in self._instances:
            room = instance.room
            if room > most:
                best, most = instance, room
        return self._ahead() if best is None else best

    def _ahead(self) -> Instance | None:
        """Return the only instance, if it calls other models and can have its next request now.

        Else it would sleep between two requests. What another model asks is not sent ahead: it
        has to be seen that it waits, in a circle perhaps, for whoever runs before it.
        """
        if len(self._instances) != 1 or not self._instances[0].could_run_next:
            return None  # most models end here, at every batch: the cheap questions come first
        queue = self._queue
        first = next(iter(queue), None) if isinstance(queue, PlainQueue) else None
        return None if first is None or first.is_call else self._instances[0]

    def _run(self) -> None:
        """Dispatch whatever can be; a dispatch that comes back here is left to the outer one."""
        if self._is_running:
            return
        self._is_running = True
        queue, is_timed = self._queue, self._queue.is_timed
        until: WaitUntil | None = None
        try:
            if is_timed:
                self._expire()
            while queue.count:
                instance = self._roomiest()
                if instance is None:
                    break
                found = queue.next(monotonic_s() if is_timed else 0.0)
                if not isinstance(found, Batch):
                    until = found
                    break
                self._batches += 1
                instance.dispatch(found.items)
            if is_timed:
                self._wait(until)
        finally:
            self._is_running = False

    def _expire(self) -> None:
        for factory in self._queue.expire(monotonic_s()):
            factory.reason = Reason.REJECTED
            factory.fail(Unavailable(EXPIRED_MESSAGE))

    def _wait(self, until: WaitUntil | None) -> None:
        """Arm the timer for the next deadline, or for a batch that waits for company."""
        due_s = self._queue.next_deadline_s()
        if until is not None and (due_s is None or until.at_s < due_s):
            due_s = until.at_s
        if due_s == self._timer_due_s:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_due_s = float("inf") if due_s is None else due_s
        if due_s is not None:
            delay_s = max(0.0, due_s - monotonic_s())
            self._timer = self._node.loop.call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._timer_due_s = float("inf")
        self._run()

    def close(self) -> None:
        """Drop the timer; the version is gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def stats(self) -> SchedulerStats:
        """Return the counts."""
        return SchedulerStats(
            self._queue.count,
            len(self._pending) - self._queue.count,
            self._accepted,
            self._succeeded,
            self._failed,
            self._batches,
        )
