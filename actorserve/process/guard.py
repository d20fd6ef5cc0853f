# SPDX-License-Identifier: Apache-2.0
"""The guard: the kernel kills a child as soon as its supervisor is gone.

The supervisor alone holds the write end of a pipe. A child opens the read end again and asks for
a signal on input, with SIGKILL as that signal: when the last write end closes, the kernel sends
it. That needs no thread, no interpreter lock and no living parent, so it works while C code
blocks everything. Owner and signal belong to the open file description, hence the second open,
one for each owner.

May import only the standard library: children of foreign interpreters use it before they know
what else they have.
"""

from __future__ import annotations

import fcntl
import os
import signal

_F_SETSIG = getattr(fcntl, "F_SETSIG", 10)


def arm(read_fd: int, *, whole_group: bool) -> list[int]:
    """Have this process killed when the pipe's last write end closes; return what to keep open.

    With `whole_group`, everything in the group that this process leads dies too, so that a
    model's own children do not outlive the supervisor. If the write end is closed already, this
    call does not return. Raises OSError where /proc is missing.
    """
    owners = [os.getpid(), -os.getpgrp()] if whole_group else [os.getpid()]
    guards = [_armed(read_fd, owner) for owner in owners]
    # Between the fork and the line above nobody would have told us.
    try:
        gone = os.read(guards[0], 1) == b""
    except BlockingIOError:
        gone = False
    if gone:
        os.kill(os.getpid(), signal.SIGKILL)
    return guards


def only_wake(guards: list[int]) -> None:
    """Have the armed guards send SIGCONT instead: go on, and look what happened.

    For a process that always looks, and has to tidy up when its supervisor is gone.
    """
    for fd in guards:
        fcntl.fcntl(fd, _F_SETSIG, signal.SIGCONT)


def _armed(read_fd: int, owner: int) -> int:
    guard = os.open(f"/proc/self/fd/{read_fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.fcntl(guard, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(guard, fcntl.F_SETOWN, owner)
    fcntl.fcntl(guard, fcntl.F_SETFL, fcntl.fcntl(guard, fcntl.F_GETFL) | os.O_ASYNC)
    return guard
