# SPDX-License-Identifier: Apache-2.0
"""Processes by descriptor: a pidfd names one process for ever, where a pid may be used again.

Interpreters that were built against old kernel headers (conda's) lack os.pidfd_open; there the
system calls are made through ctypes. Their numbers are the same on all machines that Python
supports. No function here waits, and none but `reap` takes anybody's exit status.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import signal
import struct

_SYS_PIDFD_SEND_SIGNAL = 424
_SYS_PIDFD_OPEN = 434
_TO_GROUP = 1 << 2  # PIDFD_SIGNAL_PROCESS_GROUP, Linux 6.9

# PIDFD_GET_INFO, Linux 6.15 for exits: struct pidfd_info is a u64 mask first, an i32 exit code last
_INFO_BYTES = 64
_GET_INFO = 3 << 30 | _INFO_BYTES << 16 | 0xFF << 8 | 11
_INFO_EXIT = 1 << 3


def open_pidfd(pid: int) -> int:
    """Open the pidfd of a process that cannot be reaped meanwhile; close-on-exec.

    Raise OSError: ESRCH for nobody, EMFILE without room, ENOSYS before Linux 5.3.
    """
    opener = getattr(os, "pidfd_open", None)
    return int(opener(pid)) if opener is not None else _syscall(_SYS_PIDFD_OPEN, pid, 0)


def send_signal(pidfd: int, signo: int) -> bool:
    """Signal the process; False if it is dead or not ours to signal any more."""
    try:
        _send(pidfd, signo, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def kill_group(pidfd: int, pid: int) -> None:
    """Kill the process group that the process `pid` of `pidfd` leads, alive or dead.

    Never hits a stranger: the kernel finds the group by the pidfd. Kernels before 6.9 cannot;
    there the group's number is used while it provably belongs to nobody else.
    """
    try:
        _send(pidfd, signal.SIGKILL, _TO_GROUP)
    except (ProcessLookupError, PermissionError):
        return
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        _kill_group_by_number(pidfd, pid)


def _kill_group_by_number(pidfd: int, pid: int) -> None:
    # A number in use as a pid after our process died and was reaped may be a stranger's; while
    # no process has it, a group of that number can only be what is left of ours.
    if is_dead(pidfd) and os.path.exists(f"/proc/{pid}"):  # noqa: PTH110 (no pathlib for one call)
        return
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def is_dead(pidfd: int) -> bool:
    """Whether the process has ended, reaped or not."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def reap(pidfd: int) -> int | None:
    """Take the wait status of a dead process that is our own child, else None.

    A child of a zygote is ours when the zygote died and this process is PID 1 or a subreaper.
    """
    kind = getattr(os, "P_PIDFD", 3)
    try:
        result = os.waitid(kind, pidfd, os.WEXITED | os.WNOHANG)
    except OSError:
        return None
    if result is None:
        return None
    if result.si_code == os.CLD_EXITED:
        return result.si_status << 8
    return result.si_status | (0x80 if result.si_code == os.CLD_DUMPED else 0)


def exit_status(pidfd: int) -> int | None:
    """Ask the kernel for the wait status of a process that somebody else reaped, else None."""
    info = bytearray(_INFO_BYTES)
    struct.pack_into("<Q", info, 0, _INFO_EXIT)
    try:
        fcntl.ioctl(pidfd, _GET_INFO, info)
    except OSError:
        return None
    (mask,) = struct.unpack_from("<Q", info)
    (status,) = struct.unpack_from("<i", info, _INFO_BYTES - 4)
    return status if mask & _INFO_EXIT else None


def _send(pidfd: int, signo: int, flags: int) -> None:
    sender = getattr(signal, "pidfd_send_signal", None)
    if sender is not None:
        sender(pidfd, signo, None, flags)
    else:
        _syscall(_SYS_PIDFD_SEND_SIGNAL, pidfd, signo, None, flags)


def _syscall(number: int, *arguments: int | None) -> int:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    result = int(libc.syscall(number, *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    if number == _SYS_PIDFD_OPEN:
        os.set_inheritable(result, False)
    return result
