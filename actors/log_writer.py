# SPDX-License-Identifier: Apache-2.0
"""Write lines to a stream that may block, without ever blocking whoever writes.

    any thread ── write ──► bounded queue ──► writer thread ──► stderr, a pipe, a file

A pipe that nobody reads, a terminal that is stopped, a full disk: lines are lost then, and
counted, but the server serves on. The number of lost lines is written as soon as there is room.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import TextIO

MOST_LINES = 10_000
FLUSH_S = 1.0


class LogWriter:
    """One stream and its thread, which ends with `close` or with the process."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lines: queue.Queue[str | None] = queue.Queue(MOST_LINES)
        self._lost = 0
        self._thread = threading.Thread(target=self._run, name="actorserve-log", daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        """Queue a line (without its end); lose it where too many wait already."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._lost += 1

    def close(self) -> None:
        """Write what waits, for FLUSH_S at most: a stream that takes nothing cannot be waited for.

        Idempotent; lines that come later are lost.
        """
        try:
            self._lines.put(None, timeout=FLUSH_S)
        except queue.Full:
            return
        self._thread.join(FLUSH_S)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            self._put(line)
            if self._lost and self._lines.empty():
                lost, self._lost = self._lost, 0
                self._put(f"({lost} lines were lost here, because nobody took them)")

    def _put(self, line: str) -> None:
        """Write a line; one that the stream does not take (it is closed, or full) is gone."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(line + "\n")
            self._stream.flush()
