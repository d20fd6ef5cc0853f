# SPDX-License-Identifier: Apache-2.0
"""Whether a stub's model says that it is ready (its optional `is_ready`), seen from the supervisor.

    probes ─► check ─► AskReady ─► (the stub's readiness_hook.py) ─► SaidReady ─► all that wait
                 └─ no longer than CHECK_LIMIT_S, and at once where the stub is gone or stopped

At most one check of a stub is under way: probes that come meanwhile share its result, and those
that come when it is overdue are told so at once. A reason is logged when it is new, and repeated
now and then, never once per probe.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from actorserve.actors.readiness_hook import CHECK_LIMIT_S, TIMED_OUT
from actorserve.clock import monotonic_s
from actorserve.wire.codec import encode
from actorserve.wire.messages import AskReady, Handle, SaidReady

SAME_REASON_S = 60.0
ANY_REASON_S = 5.0
"""A reason that holds on is logged again after SAME_REASON_S, a new one after ANY_REASON_S."""

_log = logging.getLogger("actorserve")


class ReadinessStats(msgspec.Struct, frozen=True):
    """What one stub was asked, and what it said; `is_asked` while a check is under way."""

    has_hook: bool
    checks: int
    refusals: int
    is_asked: bool


class _End(Protocol):
    """The channel to the stub."""

    def send_with_handles(
        self,
        data: bytes,
        handles: Sequence[Handle],
        *,
        on_control: bool = False,
        is_bounded: bool = True,
    ) -> None:
        """Send an encoded message; nothing where the stub is gone."""


class Readiness:
    """The checks of one incarnation. Belongs to the supervisor's loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        end: _End,
        name: str,
        is_stopped: Callable[[], bool],
        limit_s: float = CHECK_LIMIT_S,
    ) -> None:
        """`is_stopped` tells of a stub that could not answer, for the state of its process."""
        self.has_hook = False
        self._loop = loop
        self._end = end
        self._name = name
        self._is_stopped = is_stopped
        self._limit_s = limit_s
        self._checks = 0
        self._refusals = 0
        self._is_asked = False
        self._is_overdue = False
        self._is_closed = False
        self._answer: asyncio.Future[bool] = loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._known = False
        self._known_s = float("-inf")
        self._is_told = False  # the last word in the log is that it is not ready
        self._reason = ""
        self._reason_s = float("-inf")
        self._why = ""

    @property
    def is_asked(self) -> bool:
        """Whether the hook has been asked and has not answered: user code may be running."""
        return self._is_asked

    @property
    def refusal(self) -> str:
        """Why the model is not ready by its last word; "" while that is yes."""
        return self._why if not self._known else ""

    async def check(self, max_age_s: float = 0.0) -> bool:
        """Whether the model is ready by its own word, at most `max_age_s` old. Never raises."""
        if self._is_closed:
            return False
        if not self.has_hook:
            return True
        if not self._is_asked:
            if monotonic_s() - self._known_s <= max_age_s:
                return self._known
            if self._is_stopped():
                self._refuse(f"Stub process '{self._name}' is not healthy.")
                return False
            self._ask()
        if self._is_overdue:
            return False
        # Whoever asks may go away; the others wait on.
        return await asyncio.shield(self._answer)

    def take(self, message: SaidReady) -> None:
        """Take the stub's word; one that comes too late only ends the check."""
        if not self._is_asked or message.number != self._checks:
            return
        self._is_asked = False
        if self._is_overdue:
            self._is_overdue = False
        elif message.is_ready:
            self._accept()
        else:
            self._refuse(message.problem)

    def close(self) -> None:
        """Answer all that wait, and whoever comes: the stub ends. Idempotent."""
        self._is_closed = True
        self._settle(False)

    def stats(self) -> ReadinessStats:
        """Return the counts."""
        return ReadinessStats(self.has_hook, self._checks, self._refusals, self._is_asked)

    # --- one check -------------------------------------------------------------------------------

    def _ask(self) -> None:
        self._checks += 1
        self._is_asked = True
        self._answer = self._loop.create_future()
        self._timer = self._loop.call_later(self._limit_s, self._on_late)
        # Not bounded: there is never more than this one.
        question = encode(AskReady(self._checks))
        self._end.send_with_handles(question, [], on_control=True, is_bounded=False)

    def _on_late(self) -> None:
        self._timer = None
        self._is_overdue = True
        self._refuse(TIMED_OUT)

    def _settle(self, verdict: bool) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._known, self._known_s = verdict, monotonic_s()
        if not self._answer.done():
            self._answer.set_result(verdict)

    def _accept(self) -> None:
        if self._is_told:
            _log.info("Model '%s' is ready again", self._name)
            self._is_told = False
        self._why = ""
        self._settle(True)

    def _refuse(self, problem: str) -> None:
        """Answer no, and log why where that is news; "" is the hook's own no."""
        self._refusals += 1
        self._why = f"not ready: {problem or 'its is_ready says no'}"
        reason = f": {problem}" if problem else " (user-defined check failed)."
        now_s = monotonic_s()
        is_known = self._is_told and reason == self._reason
        if now_s - self._reason_s >= (SAME_REASON_S if is_known else ANY_REASON_S):
            self._is_told, self._reason, self._reason_s = True, reason, now_s
            _log.warning("Model '%s' is not ready%s", self._name, reason)
        self._settle(False)
