# SPDX-License-Identifier: Apache-2.0
"""What comes back once: awaited in an event loop, or taken in a thread.

What always holds: an Answer has exactly one outcome, the first that anybody gives it; everything
that comes later is told so and dropped.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Generic, Protocol, TypeVar, cast

from actorserve.clock import monotonic_s
from actorserve.errors import ActorserveError, Cancelled, DeadlineExceeded
from actorserve.runtime.waiting import Blocker, Waiting, limit_of

R = TypeVar("R")


class Owner(Protocol):
    """What an answer belongs to."""

    @property
    def door(self) -> Blocker:
        """Where it comes from."""

    def describe(self) -> str:
        """Say what was wanted, for people."""

    def given_up(self) -> None:
        """Hear that nobody waits any more."""


class Answer(Waiting, Generic[R]):
    """The answer to an `ask`, or the end of an order: `await answer`, or `answer.result()`."""

    __slots__ = ("__weakref__", "_error", "_is_over", "_owner", "_token", "_value", "deadline_s")

    def __init__(self, owner: Owner, deadline_s: float | None = None) -> None:
        super().__init__()
        self.deadline_s = deadline_s
        self._owner: Owner | None = owner  # until it is over: each knows the other
        self._token = [True]  # whoever pops it gives the outcome
        self._is_over = False
        self._value: R | None = None
        self._error: ActorserveError | None = None

    # --- for whoever waits -----------------------------------------------------------------------

    def __await__(self) -> Generator[Any, None, R]:
        """Wait in an event loop, of any kind and in any thread."""
        while not self._is_over:
            try:
                if not (yield from self.wait_in_loop(self._left_s())) and self._is_late():
                    self._expire()
            except BaseException:  # the waiting task was cancelled
                self.cancel()
                raise
        return self.outcome()

    def result(self, timeout_s: float | None = None) -> R:
        """Wait in a thread and return the value, or raise the error.

        Raises DeadlineExceeded after `timeout_s` seconds, in which case one may wait again.
        """
        timeout_s = limit_of(timeout_s)
        end_s = None if timeout_s is None else monotonic_s() + timeout_s
        while not self._is_over:
            owner = self._owner
            if owner is None:
                continue  # it is being settled this moment
            limit_s = _sooner(self._left_s(), None if end_s is None else end_s - monotonic_s())
            if owner.door.block(self, limit_s):
                break
            if self._is_late():
                self._expire()
            elif end_s is not None and monotonic_s() >= end_s:
                raise DeadlineExceeded(f"{owner.describe()}: nothing came in {timeout_s:g} s")
        return self.outcome()

    def is_over(self) -> bool:
        """Whether there is an outcome."""
        return self._is_over

    def has_failed(self) -> bool:
        """Whether the outcome is an error."""
        return self._error is not None

    def cancel(self) -> bool:
        """Give it up: the outcome is Cancelled, unless there is one already."""
        return self._end_early(Cancelled("the wait for the answer was cancelled"))

    # --- for whoever answers ---------------------------------------------------------------------

    def settle(self, value: R) -> bool:
        """Give the value; False if there is an outcome already. From any thread."""
        try:
            self._token.pop()
        except IndexError:
            return False
        self._value = value
        self._finish()
        return True

    def fail(self, error: ActorserveError) -> bool:
        """Give the error; False if there is an outcome already. From any thread."""
        try:
            self._token.pop()
        except IndexError:
            return False
        self._error = error
        self._finish()
        return True

    def sever(self, error: ActorserveError) -> None:
        """Give the error in a forked child, where whoever waited is not: nobody is woken."""
        if self._token:
            self._token.clear()
            self._waiters.clear()
            self._error = error
            self._owner = None
            self._is_over = True

    def has_news(self) -> bool:
        """See Waiting."""
        return self._is_over

    # --- inside ----------------------------------------------------------------------------------

    def _finish(self) -> None:
        self._is_over = True
        self._owner = None
        self.tell()

    def _left_s(self) -> float | None:
        return None if self.deadline_s is None else max(0.0, self.deadline_s - monotonic_s())

    def _is_late(self) -> bool:
        return self.deadline_s is not None and monotonic_s() >= self.deadline_s

    def _expire(self) -> None:
        owner = self._owner
        what = owner.describe() if owner is not None else ""
        self._end_early(DeadlineExceeded(f"{what}: no answer in time"))

    def _end_early(self, error: ActorserveError) -> bool:
        owner = self._owner
        if not self.fail(error):
            return False
        if owner is not None:
            owner.given_up()
        return True

    def outcome(self) -> R:
        """Return the value or raise the error of an answer that is over."""
        if self._error is not None:
            raise self._error.with_traceback(None)
        return cast(R, self._value)


def _sooner(one_s: float | None, other_s: float | None) -> float | None:
    if one_s is None or other_s is None:
        return one_s if other_s is None else max(0.0, other_s)
    return max(0.0, min(one_s, other_s))
