# SPDX-License-Identifier: Apache-2.0
"""Every request in flight, by its number, and where each output goes.

    submit ─► add ─►  feeds  ◄─ deliver (a batch: one look, one wake a waiting loop)
                        ▲
                     fail_all (the engine died: everybody at once, and whoever comes later)

It holds no executor and no transport, so that a thread which delivers keeps neither alive.
What always holds: a feed leaves the table exactly once, by whoever pops it, and that one gives
its outcome.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from actorserve.actors.generation.engine import RequestError
from actorserve.actors.generation.feed import Feed
from actorserve.actors.generation.snapshots import Snapshots
from actorserve.actors.generation.text import StopWatch
from actorserve.actors.generation.wake import Wake, take, wake_all
from actorserve.clock import monotonic_s
from actorserve.errors import ActorserveError, Cancelled, EngineDeadError, WaitTimeout
from actorserve.forking import sever_after_fork
from actorserve.runtime.answer import Answer
from actorserve.runtime.waiting import Waiting
from actorserve.state.event_ring import EventRing
from actorserve.wire.generation import EngineInfo, Output

_FAILED = ("error", "cancelled", "timeout")


class Finished(msgspec.Struct, frozen=True):
    """How one request went, for metrics. Times in seconds; `first_s` from submit to first output.

    `finish` is the engine's word for it, or the name of the error's class.
    """

    id: int
    finish: str
    prompt_tokens: int
    tokens: int
    first_s: float
    total_s: float


class Gate(Waiting):
    """Something that happens once."""

    __slots__ = ("is_open",)

    def __init__(self) -> None:
        super().__init__()
        self.is_open = False

    def open(self) -> None:
        """Let everybody through, now and later."""
        self.is_open = True
        self.tell()

    def has_news(self) -> bool:
        """See Waiting."""
        return self.is_open


class Room(Waiting):
    """Room for one more request."""

    __slots__ = ("_registry",)

    def __init__(self, registry: Registry) -> None:
        super().__init__()
        self._registry = registry

    def has_news(self) -> bool:
        """See Waiting."""
        registry = self._registry
        return registry.error is not None or len(registry.feeds) < registry.max_in_flight

    @property
    def is_wanted(self) -> bool:
        """Whether anybody waits."""
        return bool(self._waiters)


class Registry:
    """The requests in flight of one executor."""

    def __init__(self, max_in_flight: int, stats_kept: int, kv_events_kept: int) -> None:
        self.max_in_flight = max_in_flight
        self.feeds: dict[int, Feed] = {}
        self.calls: dict[int, Answer[Any]] = {}
        self.error: ActorserveError | None = None  # why nobody is served; set before they hear it
        self.info: EngineInfo | None = None
        self.ready = Gate()  # loaded, or dead
        self.gone = Gate()  # the transport has ended
        self.room = Room(self)
        self.snapshots = Snapshots(stats_kept)
        self.kv_ring = EventRing(kv_events_kept)
        self.kv_listeners: list[Callable[[int, list[Any]], object]] = []
        self.on_finished: Callable[[Finished], object] | None = None
        self.submitted = self.finished = self.failed = 0
        self.outputs = self.late_outputs = self.listener_errors = 0
        self._pid = os.getpid()
        sever_after_fork(self)

    # --- requests --------------------------------------------------------------------------------

    def add(self, feed: Feed) -> None:
        """Enter a request, before anything is sent. Raises the error of a dead engine."""
        self.feeds[feed.id] = feed
        self.submitted += 1
        if self.error is not None and self.feeds.pop(feed.id, None) is not None:
            raise self.error.with_traceback(None)  # it died in between: nothing is left behind

    def deliver(self, outputs: Iterable[Output]) -> list[int]:
        """Give outputs to their requests; return the ids of those that are to be ended now."""
        feeds = self.feeds
        now_s = monotonic_s()
        wakes: list[Wake] = []
        stopped: list[int] = []
        count = late = 0
        for output in outputs:
            feed = feeds.get(output.id)
            if feed is None:
                late += 1
                continue
            ends = output.final
            if feed.watch is not None:
                watched = self._watched(feed, feed.watch, output)
                if watched is None:
                    continue
                output = watched
                if output.final and not ends:
                    if feeds.pop(feed.id, None) is None:
                        late += 1  # somebody gave it its outcome just now
                        continue
                    stopped.append(feed.id)  # back in the table until the engine has ended it
                elif not ends and feed.watch.wants_abort():
                    stopped.append(feed.id)
            if ends and not self._remove(feed):
                late += 1
                continue
            count += 1
            feed.tokens += len(output.tokens)
            if feed.first_s == 0.0:
                feed.first_s = now_s
            inbox = feed.inbox
            inbox.append(output)
            if output.finish is not None:
                feed.unfinished.discard(output.seq)
            if output.final:
                self._end_with(feed, output, now_s)
                if not ends:
                    self._keep(feed)
                take(feed.end_waiters, wakes)
            elif len(inbox) > feed.fold_at:
                feed.fold()
            if feed.step_waiters:
                take(feed.step_waiters, wakes)
        self.outputs += count
        self.late_outputs += late
        if wakes:
            wake_all(wakes)
        return stopped

    def _keep(self, feed: Feed) -> None:
        """Have a request that has its outcome count as in flight, until the engine ends it."""
        self.feeds[feed.id] = feed
        if self.error is not None:  # it never will
            self._remove(feed)

    def end(self, feed: Feed, error: ActorserveError) -> bool:
        """End one request with an error; False if it has an outcome already."""
        if feed.is_ended or self.feeds.pop(feed.id, None) is None:
            return False
        wakes: list[Wake] = []
        self._fail(feed, error, wakes)
        wake_all(wakes)
        return True

    def end_by_id(self, number: int, error: ActorserveError) -> bool:
        """End one request with an error; False if there is none."""
        feed = self.feeds.get(number)
        return feed is not None and self.end(feed, error)

    def fail_all(self, error: ActorserveError) -> None:
        """End everything with an error, and refuse whatever comes later.

        The first error stays, unless a restart was to come after it: whoever waits for that waits
        on, until it is there or given up.
        """
        if self.error is None or _is_passing(self.error):
            if _is_passing(error):
                self.ready.is_open = False  # before anybody hears it, and waits for the next life
            self.error = error
        wakes: list[Wake] = []
        feeds = self.feeds
        while feeds:
            try:
                _, feed = feeds.popitem()
            except KeyError:  # somebody was quicker
                break
            self._fail(feed, error, wakes)
        for number in list(self.calls):
            answer = self.calls.pop(number, None)
            if answer is not None:
                answer.fail(error)
        wake_all(wakes)
        self.room.tell()
        if not _is_passing(self.error):
            self.ready.open()
        self.snapshots.end()

    def revive(self) -> None:
        """Serve again, after a restart."""
        self.snapshots.is_over = False
        self.error = None
        self.ready.open()

    def sever(self) -> None:
        """In a forked child: nobody will ever answer here."""
        self.error = EngineDeadError("this process was forked from the one that it belongs to")
        for feed in list(self.feeds.values()):
            feed.error = self.error
            feed.is_ended = True
        for answer in list(self.calls.values()):
            answer.sever(self.error)
        self.feeds.clear()
        self.calls.clear()
        self.snapshots.is_over = True
        self.ready.is_open = self.gone.is_open = True

    def _watched(self, feed: Feed, watch: StopWatch, output: Output) -> Output | None:
        """Return what counts of an output of a request that texts may stop; None for nothing."""
        if feed.is_ended:  # by such a text: the engine's own end comes only now
            if output.final:
                self._remove(feed)
            return None
        try:
            return watch.look(output)
        except Exception as error:  # a tokenizer's mistake is the end of one request only
            text = f"its tokens are no text: {type(error).__name__}: {error}"
            return Output(feed.id, output.seq, finish="error", final=True, error=text)

    def _remove(self, feed: Feed) -> bool:
        if self.feeds.pop(feed.id, None) is None:
            return False
        if self.room.is_wanted:
            self.room.tell()
        return True

    def _end_with(self, feed: Feed, output: Output, now_s: float) -> None:
        """Give a feed its outcome; the output lies in its inbox already."""
        feed.finish = output.finish
        feed.last_s = now_s
        if output.error is not None or output.finish in _FAILED:
            feed.error = error_of(output)
        elif feed.unfinished:
            feed.error = _incomplete(feed)
        feed.is_ended = True
        self._finish(feed)

    def _fail(self, feed: Feed, error: ActorserveError, wakes: list[Wake]) -> None:
        if feed.is_ended:
            return
        feed.error = error
        feed.last_s = monotonic_s()
        feed.is_ended = True
        self._finish(feed)
        take(feed.end_waiters, wakes)
        take(feed.step_waiters, wakes)
        if self.room.is_wanted:
            self.room.tell()

    def _finish(self, feed: Feed) -> None:
        self.finished += 1
        if feed.error is not None:
            self.failed += 1
        if self.on_finished is None:
            return
        finish = feed.finish or type(feed.error).__name__
        first_s = feed.first_s - feed.submitted_s if feed.first_s else 0.0
        self._tell_listener(
            self.on_finished,
            Finished(
                feed.id,
                finish,
                feed.prompt_tokens,
                feed.tokens,
                first_s,
                feed.last_s - feed.submitted_s,
            ),
        )

    # --- calls, statistics, events ---------------------------------------------------------------

    def call_ended(self, number: int, result: Any, error: str | None) -> None:
        """Give a call its answer; one that was given up is dropped."""
        answer = self.calls.pop(number, None)
        if answer is None:
            return
        if error is None:
            answer.settle(result)
        else:
            answer.fail(RequestError(error))

    def take_stats(self, snapshots: Sequence[dict[str, Any]], dropped: int) -> None:
        """Take snapshots of iterations."""
        self.snapshots.add(snapshots, dropped)

    def take_kv_events(self, first: int, events: list[Any]) -> None:
        """Take events of the key-value cache."""
        self.kv_ring.add(first, events)
        for listener in tuple(self.kv_listeners):  # one may leave meanwhile
            self._tell_listener(listener, first, events)

    def _tell_listener(self, listener: Callable[..., object], *args: Any) -> None:
        """Call somebody else's function: what it raises must not end a delivery."""
        try:
            listener(*args)
        except Exception:
            self.listener_errors += 1


def error_of(output: Output) -> ActorserveError:
    """Return the error of a request that ended with this final output."""
    if output.finish == "cancelled":
        return Cancelled(output.error or "the request was cancelled")
    if output.finish == "timeout":
        return WaitTimeout("the request's time was over before it was finished")
    return RequestError(output.error or "the engine ended the request with an error")


def _incomplete(feed: Feed) -> RequestError:
    """Return the error of a request whose engine said its end, and not that of all sequences."""
    left = ", ".join(map(str, sorted(feed.unfinished)))
    return RequestError(f"the engine ended the request without an end of its sequences: {left}")


def _is_passing(error: ActorserveError) -> bool:
    """Whether a restart comes after it."""
    return isinstance(error, EngineDeadError) and error.retry_after_s is not None
