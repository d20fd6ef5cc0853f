# SPDX-License-Identifier: Apache-2.0
"""Lines from a child's stdout or stderr pipe.

Whatever a child writes comes out as text lines of bounded length; what it wrote last, without a
newline, comes out at the end. A reader never waits: a pipe that a grandchild keeps open does not
hold anybody up.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

MAX_LINE_BYTES = 16 << 10
"""A longer line is delivered in pieces."""

_READ_BYTES = 64 << 10
_DRAIN_READS = 32


class LineReader:
    """Read one pipe in a loop; owns the descriptor and closes it in `end()`."""

    def __init__(self, fd: int, deliver: Callable[[str], None]) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._deliver = deliver
        self._rest = b""
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
            if not self._read():  # empty, or the end of file
                break
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
        if self._read() is False:
            self.end()

    def _forget_loop(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None and not loop.is_closed():
            loop.remove_reader(self._fd)

    def _read(self) -> bool | None:
        """Take one piece; False at the end of file, None when nothing is there."""
        if self._fd < 0:  # closed by what a line led to
            return None
        try:
            data = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if not data:
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._deliver_pieces(line)
        while len(self._rest) > MAX_LINE_BYTES:
            piece, self._rest = _cut(self._rest)
            self._deliver(_text(piece))
        return True

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
