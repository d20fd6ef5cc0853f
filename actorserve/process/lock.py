# SPDX-License-Identifier: Apache-2.0
"""The health mutex: proof that a stub is the one that lives behind a health page.

A record lock on an anonymous file that is used for nothing else. The stub takes it once, after
its fork, for life; the kernel frees it the moment the stub is dead, whoever killed it. The
supervisor only asks who holds it and never takes it, so nobody can ever wait for it.

A file of its own, because a record lock is lost as soon as its process closes *any* descriptor
of the locked file, even a duplicate (and mmap makes duplicates). A forked child of the stub does
not hold it.
"""

from __future__ import annotations

import fcntl
import os
import struct
import tempfile

from actorserve.errors import Unavailable

_FLOCK = struct.Struct("@hhqqi")  # struct flock: type, whence, start, length, pid


class HealthLock:
    """One end of the mutex; `fd` is its only descriptor here and must never be duplicated."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def create(cls) -> HealthLock:
        """Make a mutex that nobody holds, in the supervisor."""
        if hasattr(os, "memfd_create"):
            return cls(os.memfd_create("actorserve-health", os.MFD_CLOEXEC))
        with tempfile.TemporaryFile() as file:
            return cls(os.dup(file.fileno()))

    @classmethod
    def attach(cls, fd: int) -> HealthLock:
        """Use a received descriptor, which this object owns from here on."""
        return cls(fd)

    def take(self) -> None:
        """Take the mutex for the rest of this process's life; Unavailable if another holds it."""
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Unavailable(
                f"the health mutex is held by process {self.holder()} already"
            ) from None

    def holder(self) -> int | None:
        """Return the pid of the process that holds the mutex, None for nobody.

        A process never sees its own lock. A holder in a pid namespace that is invisible from
        here is 0.
        """
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(self.fd, fcntl.F_GETLK, asked))
        return None if kind == fcntl.F_UNLCK else pid

    def close(self) -> None:
        """Close the descriptor; frees the mutex if this process held it. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
