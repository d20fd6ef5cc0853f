# SPDX-License-Identifier: Apache-2.0
"""What runs an actor, whatever the place: one message after the other, answers, streams, the end.

                     source.take ─► receive ─► reply, item …, fail
    grants of readers ─► resume a stream
    told to end │ ended itself │ crashed ─► the last hook │ no hook ─► owner.on_ended

LoopEngine does it in an event loop, ThreadEngine in a thread that may block. What always holds:
one message at a time; a stream is taken up to the point where its reader has no credit left, then
the actor serves others, and takes it up again when there is some.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import sys
import traceback
from collections import deque
from typing import Any, NoReturn, Protocol

from actorserve.errors import ActorDied, ActorserveError, ActorStopped, InvalidArgument
from actorserve.runtime.call import ASK, STREAM, TELL, Work
from actorserve.runtime.failure import crash_reason, cut, is_crash, of_user_code
from actorserve.runtime.life import Life
from actorserve.runtime.stream import WINDOW

_log = logging.getLogger("actorserve")
_engine: contextvars.ContextVar[Engine | None] = contextvars.ContextVar("engine", default=None)


def actor_at_work() -> int:
    """Return the id of the actor whose message, or hook, this code belongs to; 0 for none.

    That actor goes on only when this code does: waiting for its end here would never end.
    """
    engine = _engine.get()
    return engine.actor if engine is not None and engine.is_here() else 0


class Source(Protocol):
    """Where the messages come from."""

    def take(self) -> Work | None:
        """Return the next message, None if there is none now."""


class EngineOwner(Protocol):
    """Who hears of the actor's life; called in the engine's thread."""

    def on_started(self) -> None:
        """The first hook has returned."""

    def on_start_failed(self, reason: str, error: BaseException) -> None:
        """The constructor or the first hook raised."""

    def on_ended(self, reason: str, is_normal: bool) -> None:
        """The actor is no more."""

    def on_idle(self) -> None:
        """There is nothing to do now."""


class Running:
    """A stream that has begun: its iterator and how many items may be sent.

    `is_cut` says that its generator was told, in the middle of a wait, that nobody reads.
    """

    __slots__ = ("credit", "is_cut", "iterator")

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator
        self.credit = WINDOW
        self.is_cut = False


class Engine:
    """What both engines share. `handled` and `failed` count messages."""

    def __init__(self, life: Life, source: Source, owner: EngineOwner) -> None:
        self.handled = 0
        self.failed = 0
        self._life = life
        self._source = source
        self._owner = owner
        self._grants: deque[tuple[Work, int]] = deque()
        self._streams: dict[Work, Running] = {}
        self._current: Work | None = None
        self._is_resting = False  # it has found nothing to take, and has not looked since
        self._is_ending = False
        self._end_reason = ""
        self._is_over = False
        self._pid = os.getpid()
        self.actor = life.context.ref.id
        self._context = contextvars.Context()  # the actor's own, and nobody's who wakes it
        self._context.run(_engine.set, self)

    # --- from any thread -------------------------------------------------------------------------

    def wake(self) -> None:
        """Look again: there is a message, a grant or an order."""
        raise NotImplementedError

    def is_here(self) -> bool:
        """Whether what runs in this thread, and in this task, is what the actor waits for."""
        raise NotImplementedError

    def grant(self, call: Work, count: int) -> None:
        """Let a stream go on."""
        self._grants.append((call, count))
        self.wake()

    def revoke(self, call: Work) -> None:
        """Hear that nobody waits for a call; a stream's generator is closed."""
        if call.kind == STREAM:
            self.grant(call, 0)

    def end(self, reason: str) -> None:
        """End after the message in hand, with the last hook."""
        self._end_reason = self._end_reason or reason
        self._is_ending = True
        self.wake()

    def is_idle(self) -> bool:
        """Whether no message is in hand and no stream open."""
        return self._is_resting and not self._streams and not self._grants

    @property
    def is_over(self) -> bool:
        """Whether it has ended, or been given up."""
        return self._is_over

    # --- one message -----------------------------------------------------------------------------

    def _settle(self, call: Work, result: Any) -> bool:
        """Answer with what receive returned; True if that is a stream, which has to be run."""
        if call.kind == STREAM:
            if hasattr(result, "__next__") or hasattr(result, "__anext__"):
                self._streams[call] = Running(result)
                return True
            self.handled += 1
            call.item(result)
            call.end()
        elif hasattr(result, "__next__") or hasattr(result, "__anext__"):
            self.handled += 1
            self._refuse_iterator(call, result)
        else:
            self.handled += 1
            if call.kind == ASK:
                call.reply(result)
        return False

    def _refuse_iterator(self, call: Work, iterator: Any) -> None:
        if hasattr(iterator, "close"):
            iterator.close()
        text = f"{self._life.name!r} answers {call.what} with a stream: use stream(), not ask()"
        if call.kind == TELL:
            _log.error("%s", text)
        call.fail(InvalidArgument(text))

    def _raised(self, call: Work, error: BaseException) -> str:
        """Answer with what receive raised; the reason for the end, if that is one."""
        if os.getpid() != self._pid:
            end_fork(error)
        self.handled += 1
        self.failed += 1
        where = f"{self._life.name!r} failed on {call.what}"
        if is_crash(error):
            reason = crash_reason(error)
            _log.error("%s: %s", where, reason, exc_info=error)
            call.fail(self._lost(reason))
            return reason
        if call.kind == TELL:
            _log.error("%s", where, exc_info=error)
        call.fail(of_user_code(error, where))
        return ""

    def _lost(self, reason: str) -> ActorserveError:
        return died(self._life.name, reason)

    def _forget(self, call: Work) -> None:
        """Drop a stream that nobody reads any more."""
        running = self._streams.pop(call, None)
        if running is not None:
            self.handled += 1
            close = getattr(running.iterator, "close", None)
            if close is not None:
                try:
                    close()
                except Exception as error:
                    cut(error)
                    _log.error("closing a stream of %r failed", self._life.name, exc_info=error)

    # --- the end ---------------------------------------------------------------------------------

    def abandon(self, error: ActorserveError) -> None:
        """Give up whatever it does: fail what it has begun, hear nothing of it any more."""
        self._is_over = True
        self._fail_open(error)

    def _fail_open(self, error: ActorserveError) -> None:
        current, self._current = self._current, None
        streams, self._streams = list(self._streams), {}
        for call in ([current] if current is not None else []) + streams:
            call.fail(error)

    def _leave(self, reason: str, *, is_normal: bool) -> None:
        if not self._is_over:
            self._is_over = True
            lose = stopped if is_normal else died
            self._fail_open(lose(self._life.name, reason))
            self._owner.on_ended(reason, is_normal)


def end_fork(error: BaseException | None = None) -> NoReturn:
    """End a process that user code has forked and that came back here: the actor is its parent's.

    At once, without tidying up: loops, rings and descriptors are the parent's as well.
    """
    code = 0
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        traceback.print_exception(type(error), error, error.__traceback__)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code & 0xFF)


def died(name: str, reason: str) -> ActorserveError:
    """Return the error for a message that was in hand when its actor died."""
    return ActorDied(f"actor {name!r} died while it had the message: {reason}")


def stopped(name: str, reason: str) -> ActorStopped:
    """Return the error for a message that comes too late."""
    return ActorStopped(f"actor {name!r} is not there any more: {reason}")
