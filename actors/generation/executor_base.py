# SPDX-License-Identifier: Apache-2.0
"""What every executor has, whatever runs the engine: its tables, its end, and its transport.

    client ─► submit ─► _send(Submit) ─► transport ─► pump ─► engine
    result ◄─ feed ◄─── deliver(outputs) ◄───────────────────┘

A subclass of GenerationExecutor is a transport: it implements `_send`, `_kill` and `_join`, and
calls `loaded`, `deliver`, `fail_all`, `gone` and what else stands under "for transports". What
always holds: nothing here refers back to the executor, but results that somebody has, so that
one which everybody forgot is collected at once, and ends its transport.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from actorserve.actors.generation.adapters import AdapterDesk
from actorserve.actors.generation.calls import CallDesk
from actorserve.actors.generation.engine import EngineInfo, Tokenizer
from actorserve.actors.generation.feed import Feed
from actorserve.actors.generation.registry import Registry
from actorserve.actors.generation.spec import ExecutorConfig
from actorserve.actors.generation.wait import wait_async, wait_here
from actorserve.errors import ActorserveError, Cancelled, Unavailable
from actorserve.ids import Ids
from actorserve.wire.generation import Abort, Call, Close, GenRequest, Output, Submit

Sendable = Submit | Abort | Call | Close

CLOSE_S = 5.0
"""How long a shutdown without drain waits before it uses force."""
LOOK_S = 0.5
"""How long it waits before it looks whether waiting on makes sense."""
AT_EXIT_S = 2.0
"""As long, when the interpreter ends."""


class ExecutorStats(msgspec.Struct, frozen=True):
    """What an executor has done, and has in flight."""

    in_flight: int
    submitted: int
    finished: int
    failed: int
    outputs: int
    late_outputs: int
    calls: int
    snapshots_dropped: int
    kv_events: int
    listener_errors: int


class ExecutorBase:
    """See the module's head."""

    def __init__(self, config: ExecutorConfig, tokenizer: Tokenizer | None = None) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self._registry = Registry(config.max_in_flight, config.stats_kept, config.kv_events_kept)
        self._ids = Ids()
        registry, send = self._registry, _sender(self)
        self._calls = calls = CallDesk(registry, send)
        self._adapters = AdapterDesk(
            lambda method, args: calls.start(method, args, None),
            lambda requests: _submit_all(requests, registry, send),
            lambda ids: send(Abort(ids)),
            registry.end_by_id,
        )
        self._is_closing = False
        self._shutdown_lock = threading.Lock()
        self._is_shut = False
        _alive.add(self)

    def stats(self) -> ExecutorStats:
        """Return the counts."""
        registry = self._registry
        return ExecutorStats(
            in_flight=len(registry.feeds),
            submitted=registry.submitted,
            finished=registry.finished,
            failed=registry.failed,
            outputs=registry.outputs,
            late_outputs=registry.late_outputs,
            calls=len(registry.calls),
            snapshots_dropped=registry.snapshots.dropped,
            kv_events=registry.kv_ring.next,
            listener_errors=registry.listener_errors,
        )

    # --- the end ---------------------------------------------------------------------------------

    def shutdown(self, drain: bool = False, timeout: float | None = None) -> None:
        """End: with `drain` what was submitted is finished first, else it fails. Idempotent.

        Returns within `timeout` seconds (by default the config's) and a few more, whatever the
        engine does. May be called from any thread, within a loop too.
        """
        limit_s = self._begin_shutdown(drain, timeout)
        if not self._is_shut and self._may_wait():
            first_s = limit_s if drain else min(limit_s, LOOK_S)
            gone = self._registry.gone
            if not wait_here(gone, first_s) and limit_s > first_s and self._is_ending():
                wait_here(gone, limit_s - first_s)
        self._end_shutdown()

    async def ashutdown(self, drain: bool = False, timeout: float | None = None) -> None:
        """As `shutdown`, without blocking the loop meanwhile."""
        limit_s = self._begin_shutdown(drain, timeout)
        if not self._is_shut:
            first_s = limit_s if drain else min(limit_s, LOOK_S)
            gone = self._registry.gone
            if not await wait_async(gone, first_s) and limit_s > first_s and self._is_ending():
                await wait_async(gone, limit_s - first_s)
        self._end_shutdown()

    def _begin_shutdown(self, drain: bool, timeout: float | None) -> float:
        self._is_closing = True
        if not self._registry.gone.is_open:
            if drain:
                # What waits for an adapter was accepted, too, and has to be sent before.
                self._adapters.when_idle(lambda: self._send(Close(drain=True)))
            else:
                self._send(Close())
        usual_s = self.config.drain_timeout_s if drain else CLOSE_S
        return usual_s if timeout is None else timeout

    def _end_shutdown(self) -> None:
        with self._shutdown_lock:
            if self._is_shut:
                return
            self._is_shut = True
        if not self._registry.gone.is_open:
            self._kill()
        self._registry.fail_all(Unavailable("the executor is shut down"))
        self._join()
        _alive.discard(self)

    def __del__(self) -> None:
        if getattr(self, "_is_closing", True):
            return
        self._is_closing = True  # nobody has a result either, since each holds its executor
        self._send(Close())

    # --- for results -----------------------------------------------------------------------------

    def give_up(self, feed: Feed) -> bool:
        """End a request that nobody wants any more; False if it is over already.

        May run anywhere, in a finalizer too.
        """
        if feed.is_ended:
            return False
        if self._adapters.take_back(feed.id):
            return self._registry.end(feed, Cancelled("the request was cancelled"))
        self._send(Abort([feed.id]))
        return True

    def end_early(self, feed: Feed, error: ActorserveError) -> None:
        """End a request with an error at once, whatever the engine says of it."""
        self._adapters.take_back(feed.id)
        if self._registry.end(feed, error):
            self._send(Abort([feed.id]))

    # --- for transports --------------------------------------------------------------------------

    def _send(self, message: Sendable) -> None:
        """Have a message taken by the pump. Never blocks, never raises; from any thread.

        It may be called by a finalizer, in the middle of itself: append to a deque and wake.
        """
        raise NotImplementedError

    def _kill(self) -> None:
        """End the transport by force: it did not close in time."""

    def _join(self) -> None:
        """Wait for what is left of the transport, shortly; it is closed, or killed."""

    def _is_ending(self) -> bool:
        """Whether the transport has begun to end, so that it is worth waiting for."""
        return True

    def _may_wait(self) -> bool:
        """Whether this thread may wait for the transport's end: not if it is its own."""
        return True

    def loaded(self, info: EngineInfo) -> None:
        """Hear that the engine has loaded, for the first time or again."""
        self._registry.info = info
        self._registry.ready.open()

    def revive(self) -> None:
        """Serve again, with a new engine: what was loaded into the old one is forgotten."""
        self._adapters.forget()
        self._registry.revive()

    def deliver(self, outputs: Iterable[Output]) -> None:
        """Give a batch of outputs to their requests. One thread at a time."""
        stopped = self._registry.deliver(outputs)
        if stopped:
            self._send(Abort(stopped))

    def fail_all(self, error: ActorserveError) -> None:
        """End everything in flight with an error, which also refuses whatever comes later."""
        self._registry.fail_all(error)

    def call_ended(self, number: int, result: Any, error: str | None) -> None:
        """Give a call its answer."""
        self._registry.call_ended(number, result, error)

    def take_stats(self, snapshots: Sequence[dict[str, Any]], dropped: int) -> None:
        """Take snapshots of iterations."""
        self._registry.take_stats(snapshots, dropped)

    def take_kv_events(self, first: int, events: list[Any]) -> None:
        """Take events of the key-value cache."""
        self._registry.take_kv_events(first, events)

    def gone(self) -> None:
        """Hear that the transport has ended."""
        self._registry.gone.open()


def _submit_all(
    requests: list[GenRequest], registry: Registry, send: Callable[[Sendable], None]
) -> None:
    """Send what has waited; what has an outcome by then is nobody's, and ended at once."""
    send(Submit(requests))
    gone = [each.id for each in requests if each.id not in registry.feeds]
    if gone:
        send(Abort(gone))


def _sender(executor: ExecutorBase) -> Callable[[Sendable], None]:
    """Return what sends, without keeping the executor alive."""
    reference = weakref.ref(executor)

    def send(message: Sendable) -> None:
        found = reference()
        if found is not None:
            found._send(message)

    return send


_alive: weakref.WeakSet[ExecutorBase] = weakref.WeakSet()


def _shut_all() -> None:
    """End what nobody ended, before the interpreter takes the threads away."""
    for executor in list(_alive):
        executor.shutdown(timeout=AT_EXIT_S)


atexit.register(_shut_all)
