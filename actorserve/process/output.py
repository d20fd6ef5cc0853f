# SPDX-License-Identifier: Apache-2.0
"""Lines from a child's stdout or stderr pipe.

Whatever a child writes comes out as text lines of bounded length; what it wrote last, without a
newline, comes out at the end. A reader never waits: a pipe that a grandchild keeps open does not
hold anybody up.

    pipe ─► split ─► quota ─┬─► deliver
                            └─► skipped: counted, the last of it kept ─► a second later, or the end

A child that prints more than anybody could read does not take the loop's time: what is beyond its
quota is read and let go, and its writes are never held up. One line says how many were left out,
and those before the next ones, or before its end, are delivered again.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from actorserve.clock import monotonic_s
from actorserve.state.line_quota import NOTICE_S, LineQuota

MAX_LINE_BYTES = 16 << 10
"""A longer line is delivered in pieces."""

LAST_LINES = 200
"""How many of the skipped lines are delivered at the end; a tenth of it when a flood goes on."""

_READ_BYTES = 4 << 10  # a piece is some lines, or the loop would be held up by them
_SKIM_BYTES = 64 << 10
_KEPT_BYTES = 64 << 10
_DRAIN_READS = 32


class LineReader:
    """Read one pipe in a loop; owns the descriptor and closes it in `end()`."""

    def __init__(self, fd: int, deliver: Callable[[str], None]) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._deliver = deliver
        self._rest = b""
        self._quota = LineQuota()
        self._skipped = 0
        self._kept = b""  # the last of what was skipped
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Deliver lines from the loop's own thread as they come."""
        self._loop = loop
        loop.add_reader(self._fd, self._on_readable)

    def end(self) -> None:
        """Deliver what is in the pipe now and the unfinished line, and close. Idempotent."""
        if self._fd < 0:
            return
        for _ in range(_DRAIN_READS):  # bounded: a grandchild may write as fast as we read
            if not self._read(_SKIM_BYTES):  # empty, or the end of file
                break
        self._catch_up(LAST_LINES)
        if self._rest:
            rest, self._rest = self._rest, b""
            self._deliver(_text(rest))
        self.close()

    def close(self) -> None:
        """Close without another word. Idempotent; usable when the loop is gone."""
        self._forget_loop()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def disown(self) -> None:
        """Close this process's copy alone, in a fork of the owner: its loop is not ours."""
        self._loop = None
        self.close()

    def _on_readable(self) -> None:
        if self._read(_SKIM_BYTES if self._skipped else _READ_BYTES) is False:
            self.end()

    def _forget_loop(self) -> None:
        loop, self._loop = self._loop, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if loop is not None and not loop.is_closed():
            loop.remove_reader(self._fd)

    def _read(self, nbytes: int) -> bool | None:
        """Take one piece; False at the end of file, None when nothing is there."""
        if self._fd < 0:  # closed by what a line led to
            return None
        try:
            data = os.read(self._fd, nbytes)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if not data:
            return False
        data, self._rest = self._rest + data, b""
        count = data.count(b"\n")
        admitted = 0 if self._skipped else self._quota.admit(count, monotonic_s())
        *lines, rest = data.split(b"\n", admitted)
        if admitted < count:
            skipped, _, rest = rest.rpartition(b"\n")
            self._skip(skipped, count - admitted)
        self._rest = rest
        for line in lines:
            self._deliver_pieces(line)
        self._shorten_rest()
        return True

    def _shorten_rest(self) -> None:
        """Let go of a line that is too long before its end has come."""
        while len(self._rest) > MAX_LINE_BYTES:
            piece, self._rest = _cut(self._rest)
            if self._skipped or not self._quota.admit(1, monotonic_s()):
                self._skip(piece, 1)
            else:
                self._deliver(_text(piece))

    # --- floods ----------------------------------------------------------------------------------

    def _skip(self, lines: bytes, count: int) -> None:
        """Leave lines out, for a while."""
        self._skipped += count
        self._kept = b"\n".join((self._kept, lines))[-_KEPT_BYTES:]
        if self._timer is None and self._loop is not None:
            self._timer = self._loop.call_later(NOTICE_S, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._catch_up(LAST_LINES // 10)

    def _catch_up(self, most: int) -> None:
        """Say how many lines were left out, and deliver the last ones; then go on as before."""
        if not self._skipped:
            return
        _, *kept = self._kept.split(b"\n")  # the first is cut, or empty
        kept = kept[-most:]
        left_out = self._skipped - len(kept)
        self._skipped, self._kept = 0, b""
        if left_out > 0:
            self._deliver(f"({left_out} lines were left out here)")
        for line in kept:
            self._deliver_pieces(line)

    def _deliver_pieces(self, line: bytes) -> None:
        while len(line) > MAX_LINE_BYTES:
            piece, line = _cut(line)
            self._deliver(_text(piece))
        self._deliver(_text(line))


def _cut(line: bytes) -> tuple[bytes, bytes]:
    """Cut a long line, between two characters where it is UTF-8."""
    at = MAX_LINE_BYTES
    while at > MAX_LINE_BYTES - 4 and line[at] & 0xC0 == 0x80:
        at -= 1
    return line[:at], line[at:]


def _text(line: bytes) -> str:
    return line.removesuffix(b"\r").decode("utf-8", "backslashreplace")
