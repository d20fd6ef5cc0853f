# SPDX-License-Identifier: Apache-2.0
"""A doorbell: a descriptor that one process makes readable to wake another.

It is an eventfd, or a non-blocking pipe where Python has no `os.eventfd`. Both are rung and
cleared by plain `os.write` and `os.read`, so that either kind works in any interpreter that gets
it. Rings add up: one `clear` takes them all. Nothing here blocks except `wait_for`.
"""

from __future__ import annotations

import errno
import os
import select
import sys
from collections.abc import Sequence

from actorserve.errors import ProtocolError, ResourceExhausted

_ONE = (1).to_bytes(8, sys.byteorder)  # what an eventfd takes; for a pipe any bytes would do
_CLEAR_BYTES = 65536  # the default capacity of a pipe; an eventfd gives 8 bytes however many asked


class Doorbell:
    """A descriptor that is readable from the first `ring` until the next `clear`.

    `fds` is what a peer needs to have it too: one descriptor (eventfd) or two (pipe: read end,
    write end), all non-blocking and close-on-exec.
    """

    __slots__ = ("_read_fd", "_write_fd", "fds")

    def __init__(self, fds: Sequence[int]) -> None:
        """Take descriptors over; use `create` or `attach`, which check them."""
        self.fds = tuple(fds)
        self._read_fd = self.fds[0]
        self._write_fd = self.fds[-1]

    @classmethod
    def create(cls) -> Doorbell:
        """Make a new doorbell; ResourceExhausted if no descriptor is left."""
        try:
            if hasattr(os, "eventfd"):
                return cls((os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC),))
            return cls(os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC))
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise ResourceExhausted(
                    "cannot create a doorbell: no file descriptors left; raise the limit "
                    "(`ulimit -n`)"
                ) from error
            raise

    @classmethod
    def attach(cls, fds: Sequence[int]) -> Doorbell:
        """Take over the descriptors that a peer sent, also when this fails.

        ProtocolError if there are not one or two, or if they are not open.
        """
        try:
            if len(fds) not in (1, 2):
                raise ProtocolError(f"a doorbell has one or two descriptors, not {len(fds)}")
            for fd in fds:
                os.set_inheritable(fd, False)
                os.set_blocking(fd, False)
        except (OSError, ProtocolError) as error:
            _close_all(fds)
            if isinstance(error, ProtocolError):
                raise
            raise ProtocolError(f"a doorbell's descriptor is broken: {error.strerror}") from error
        return cls(fds)

    def fileno(self) -> int:
        """Return the descriptor to wait on; it is readable when the bell was rung."""
        return self._read_fd

    def ring(self) -> None:
        """Make the bell readable, for whoever waits on it; a bell that is full is rung already."""
        try:
            os.write(self._write_fd, _ONE)
        except BlockingIOError:
            pass

    def clear(self) -> None:
        """Take all rings so far; a bell that was not rung stays as it is."""
        try:
            os.read(self._read_fd, _CLEAR_BYTES)
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Close the descriptors; idempotent. Ringing a closed bell is an OSError."""
        fds, self.fds = self.fds, ()
        self._read_fd = self._write_fd = -1
        _close_all(fds)

    def __del__(self) -> None:
        self.close()


LONGEST_S = 1e6
"""The longest wait with a limit: poll's own is a C int of milliseconds."""


def wait_for(
    fds_readable: Sequence[int], fds_hangup: Sequence[int], timeout_s: float | None
) -> set[int]:
    """Wait until a descriptor is readable or a peer has hung up; return those that are.

    The first kind counts when it can be read (or is broken), the second only when its other end
    is gone, whatever lies in it unread. An empty set means that `timeout_s` has passed, or
    LONGEST_S; None waits for ever. OSError(EBADF) for a descriptor that is not open.
    """
    poll = select.poll()
    for fd in fds_hangup:
        poll.register(fd, 0)
    for fd in fds_readable:
        poll.register(fd, select.POLLIN)
    ready = set()
    limit_ms = None if timeout_s is None else max(0.0, min(timeout_s, LONGEST_S) * 1000)
    for fd, events in poll.poll(limit_ms):
        if events & select.POLLNVAL:
            raise OSError(errno.EBADF, f"cannot wait on descriptor {fd}: it is not open")
        ready.add(fd)
    return ready


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        try:
            os.close(fd)
        except OSError:
            pass
