# SPDX-License-Identifier: Apache-2.0
"""The lines of a model's Logger on their way out of its stub: never waiting, never many.

    any thread, finalizers too ─► write ─► quota ─► up lane, if there is room at once
                                                └► a short queue ─► the next line, or a beat

A line that was written is in shared memory when `write` returns, so that it outlives a kill;
only while the lane is full, or in use by the very thread that is interrupted, does it wait here.
What is beyond the quota or the queue is counted, and one line says so. A process that the model has
forked writes to stderr.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections import deque

from actorserve.clock import monotonic_s
from actorserve.runtime.child import PeerGone
from actorserve.runtime.stub_end import StubEnd
from actorserve.state.line_quota import LINES_PER_S, LineQuota
from actorserve.triton.failure import plain_text
from actorserve.triton.logger import LogLevel, write_to_stderr
from actorserve.wire.codec import encode
from actorserve.wire.messages import LogRecord

MOST_WAITING = 512
MOST_LARGE = 32
LARGE_BYTES = 4096
"""How many lines may wait, and how many when the next one is large."""


class StubLog:
    """See the module's head. Takes no lock that it would wait for."""

    def __init__(self, end: StubEnd) -> None:
        self._end = end
        self._quotas = {level: LineQuota() for level in LogLevel}
        self._waiting: deque[bytes] = deque()
        self._sending = threading.Lock()

    def write(self, level: LogLevel, file: str, line: int, message: str) -> None:
        """Send a line, or count it; a triton.logger.Sink."""
        if self._end.is_severed:
            write_to_stderr(level, file, line, message)
            return
        quota = self._quotas[level]
        if not quota.admit(1, monotonic_s()):
            return
        data = _encoded(level, file, line, message)
        waiting = self._waiting
        if len(waiting) >= (MOST_WAITING if len(data) <= LARGE_BYTES else MOST_LARGE):
            quota.refused += 1
            return
        waiting.append(data)
        self.flush()
        if len(waiting) == 1:
            self._end.wake_control()

    def flush(self) -> None:
        """Send what there is room for now."""
        if not self._sending.acquire(blocking=False):
            return  # who has it, sends this line too
        try:
            waiting = self._waiting
            while waiting and self._end.try_send_encoded(waiting[0]):
                waiting.popleft()
        finally:
            self._sending.release()

    def tick(self) -> None:
        """Send what waits, and say how much was left out. Control thread."""
        if self._waiting:
            self.flush()
        for level, quota in self._quotas.items():
            if quota.refused:
                self._tell(level, quota)

    def _tell(self, level: LogLevel, quota: LineQuota, *, is_last: bool = False) -> None:
        refused = quota.take_refused(math.inf if is_last else monotonic_s())
        if refused:
            text = (
                f"{refused} lines of level {level.name} were left out here: no more than "
                f"{LINES_PER_S:.0f} a second are taken"
            )
            self._waiting.append(_encoded(level, "Logger", 0, text))
            if not is_last:
                self.flush()

    def drain(self) -> None:
        """Send everything, waiting for room: the process ends."""
        if self._end.is_severed:
            return  # a fork's copy; its lock may be held for ever
        for level, quota in self._quotas.items():
            self._tell(level, quota, is_last=True)
        with self._sending, contextlib.suppress(PeerGone):
            while self._waiting:
                self._end.send_encoded(self._waiting.popleft())


def _encoded(level: LogLevel, file: str, line: int, message: str) -> bytes:
    try:
        return encode(LogRecord(level, file, line, message))
    except UnicodeEncodeError:
        return encode(LogRecord(level, plain_text(file), line, plain_text(message)))
