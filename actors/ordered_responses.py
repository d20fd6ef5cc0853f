# SPDX-License-Identifier: Apache-2.0
"""A model with `preserve_ordering`: responses leave in the order in which the requests came in.

    OrderedFactory ── each response ──► Ordering (pure) ── whose turn it is ──► on_response
          │                                ▲
          └── rejected, cancelled, late ───┘  leaves the order, and is told at once

A request keeps its place from its acceptance to its final response, in the queue, at a stub, and
queued again after a stub's death. The errors of a model and of a dead stub are responses and take
their turn. What the server itself refuses or ends (a timeout, a cancelled request, the end of the
server) is told at once, and holds nobody back.

Only models that ask for it have these classes: they cost the others nothing.
"""

from __future__ import annotations

from actorserve.actors.instance import Instance
from actorserve.actors.node import Node
from actorserve.actors.response_factory import ResponseFactory
from actorserve.actors.scheduler import Scheduler, SchedulerStats
from actorserve.errors import ActorserveError
from actorserve.state.batching import BatchPolicy
from actorserve.state.ordering import Ordering
from actorserve.state.request import QUEUED
from actorserve.state.statistics import VersionStatistics
from actorserve.triton.inference import InferResponse


class OrderedFactory(ResponseFactory):
    """A request whose responses wait for their turn; see the module's head."""

    __slots__ = ()

    _desk: OrderedScheduler

    def _deliver(self, response: InferResponse) -> None:
        if not self._desk.hold(self, response):
            super()._deliver(response)
        elif not response.final:
            self._desk.release()

    def hand_out(self, response: InferResponse) -> None:
        """Hand on a response that need not wait; with the last one the request has ended."""
        super()._deliver(response)
        if response.final:
            self._desk.ended(self)

    def _end(self) -> None:
        self._drop_inputs()
        if self._desk.has_turn(self):
            self._desk.release()
        else:
            self._desk.ended(self)

    # --- ends that take no turn ------------------------------------------------------------------

    def fail(self, error: ActorserveError) -> None:
        """End with an error: of a stub in its turn, of the queue at once."""
        if self.state != QUEUED:
            super().fail(error)
            return
        self._desk.leave(self)
        super().fail(error)
        self._desk.release()

    def expire(self, error: ActorserveError) -> None:
        """End with an error now, whatever a stub does; an answer that still waits is dropped."""
        has_answer = self._has_answer
        self._desk.leave(self)
        if has_answer:
            self.hand_out(self._failure(error))
        else:
            super().expire(error)
        self._desk.release()

    def cancel(self) -> None:
        """Cancel: whatever there is of an answer, or comes yet, waits for nobody any more."""
        for response in self._desk.leave(self):
            self.hand_out(response)
        super().cancel()
        self._desk.release()

    def disconnect(self) -> None:
        """Cancel without an answer: nobody is left to hear one."""
        has_answer = self._has_answer
        self._desk.leave(self)
        if has_answer:
            self._desk.ended(self)
        else:
            super().disconnect()
        self._desk.release()

    @property
    def _has_answer(self) -> bool:
        """Whether nothing but its turn is missing."""
        return self._desk.is_done(self)


class OrderedScheduler(Scheduler):
    """A scheduler whose requests are OrderedFactories."""

    def __init__(
        self,
        node: Node,
        name: str,
        config: BatchPolicy,
        retries: int = 0,
        counts: VersionStatistics | None = None,
    ) -> None:
        super().__init__(node, name, config, retries, counts)
        self._order: Ordering[tuple[OrderedFactory, InferResponse]] = Ordering()
        self._is_releasing = self._is_paused = False

    def _accept(self, factory: ResponseFactory) -> None:
        super()._accept(factory)
        self._order.enqueue(factory.key)

    def _roomiest(self) -> Instance | None:
        """Return no instance while too much is held for a request that a stub works on."""
        order = self._order
        if order.is_full:
            first = order.first
            if first is not None and self._pending[first].state != QUEUED:
                self._is_paused = True
                return None
        return super()._roomiest()

    # --- the order -------------------------------------------------------------------------------

    def has_turn(self, factory: OrderedFactory) -> bool:
        """Whether a request has its place in the order."""
        return factory.key in self._order

    def is_done(self, factory: OrderedFactory) -> bool:
        """Whether a request has its final response, and the response waits for its turn."""
        return self._order.is_done(factory.key)

    def hold(self, factory: OrderedFactory, response: InferResponse) -> bool:
        """Keep a response until `release` finds its turn; False where it need not wait."""
        order = self._order
        key = factory.key
        if key not in order:
            return False
        nbytes = 0 if order.first == key else _nbytes(response)
        order.put(key, (factory, response), is_final=response.final, nbytes=nbytes)
        return True

    def release(self) -> None:
        """Hand out what may leave now, one by one: whoever hears one may end others.

        Then go on with work that was not begun because too much was held.
        """
        if self._is_releasing:
            return
        order = self._order
        self._is_releasing = True
        try:
            while (due := order.take()) is not None:
                due[0].hand_out(due[1])
        finally:
            self._is_releasing = False
        if self._is_paused:
            self._is_paused = False
            self.has_room()

    def leave(self, factory: OrderedFactory) -> list[InferResponse]:
        """Take a request out of the order; returns what was held of it. `release` comes next."""
        return [response for _, response in self._order.leave(factory.key)]

    def stats(self) -> SchedulerStats:
        """Return the counts."""
        stats = super().stats()
        return SchedulerStats(
            stats.queued,
            stats.in_flight,
            stats.accepted,
            stats.succeeded,
            stats.failed,
            stats.batches,
            self._order.stats().held,
        )


def _nbytes(response: InferResponse) -> int:
    """Return how much memory a response keeps from being used again."""
    bodies = [tensor.data for tensor in response.outputs]
    return sum(body.nbytes for body in bodies if isinstance(body, memoryview))
