# SPDX-License-Identifier: Apache-2.0
"""Run an actor in a thread that may block: no event loop, no async code."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from actorserve.runtime.answer import Answer
from actorserve.runtime.call import Work
from actorserve.runtime.engine import Engine, EngineOwner, Running, Source
from actorserve.runtime.failure import cut, start_reason
from actorserve.runtime.life import Life

_log = logging.getLogger("actorserve")


class BlockingSource(Source, Protocol):
    """A source that its thread can sleep on."""

    def sleep(self, has_news: Callable[[], bool]) -> None:
        """Sleep until there may be something to take, or somebody rings.

        Not at all if `has_news` says so after the source has begun to listen.
        """

    def ring(self) -> None:
        """End the sleep. From any thread."""


class ThreadEngine(Engine):
    """The life of an actor in one thread: `run` is all of it."""

    def __init__(self, life: Life, source: BlockingSource, owner: EngineOwner) -> None:
        super().__init__(life, source, owner)
        self._blocking = source
        self._thread = 0  # known when it runs

    def wake(self) -> None:
        """See Engine."""
        self._blocking.ring()

    def is_here(self) -> bool:
        """See Engine."""
        return threading.get_ident() == self._thread

    def run(self) -> None:
        """Start, serve, end."""
        self._thread = threading.get_ident()
        self._context.run(self._live)

    def _live(self) -> None:
        try:
            self._refuse_awaitable(self._life.begin())
        except BaseException as error:
            cut(error)
            self._is_over = True
            self._owner.on_start_failed(start_reason(error), error)
            return
        self._owner.on_started()
        while not self._is_over:
            if self._grants:
                self._resume(*self._grants.popleft())
            elif self._is_ending:
                self._finish()
            else:
                call = self._source.take()
                if call is not None:
                    self._run(call)
                    call = None  # nothing may outlive its message here
                else:
                    self._is_resting = True
                    self._owner.on_idle()
                    self._blocking.sleep(self._has_news)
                    self._is_resting = False

    def _has_news(self) -> bool:
        return bool(self._grants) or self._is_ending or self._is_over

    def _run(self, call: Work) -> None:
        """Do one message, the first items of its stream included."""
        self._current = call
        call.runner = self
        try:
            message = call.message()
            result = self._life.receive(message)
            if isinstance(result, Answer):  # passed on from another actor
                result = result.result()
            self._refuse_awaitable(result)
            if not self._is_over and self._settle(call, result):
                self._advance(call, self._streams[call])
        except BaseException as error:
            cut(error)
            self._end_if_crashed(self._raised(call, error))
        finally:
            self._current = None

    def _resume(self, call: Work, count: int) -> None:
        running = self._streams.get(call)
        if running is None:
            return
        running.credit += count
        self._current = call
        try:
            self._advance(call, running)
        except BaseException as error:
            cut(error)
            self._streams.pop(call, None)
            self._end_if_crashed(self._raised(call, error))
        finally:
            self._current = None

    def _advance(self, call: Work, running: Running) -> None:
        """Send items as far as there is credit; what the generator raises passes."""
        iterator = running.iterator
        if not hasattr(iterator, "__next__"):
            raise TypeError("an async generator needs an event loop: make `receive` async too")
        while running.credit > 0 and not call.is_over and not self._is_over:
            try:
                item = next(iterator)
            except StopIteration:
                self._streams.pop(call, None)
                self.handled += 1
                call.end()
                return
            except BaseException:
                self._streams.pop(call, None)
                raise
            running.credit -= 1
            call.item(item)
        if call.is_over:
            self._forget(call)

    def _refuse_awaitable(self, result: object) -> None:
        if hasattr(result, "__await__"):
            close = getattr(result, "close", None)
            if close is not None:
                close()
            raise TypeError(
                f"{self._life.kind.__name__} returned an awaitable from a plain function: "
                "write `async def`"
            )

    def _end_if_crashed(self, reason: str) -> None:
        if reason:
            self._leave(reason, is_normal=False)

    def _finish(self) -> None:
        try:
            self._life.finish()
        except BaseException as error:
            cut(error)
            _log.error("stopping of %r failed", self._life.name, exc_info=error)
        self._leave(self._end_reason, is_normal=True)
