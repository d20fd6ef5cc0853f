# SPDX-License-Identifier: Apache-2.0
"""A piece of shared memory that has no name and travels by descriptor.

    create() ──► name ─ unlink ─ fallocate ──► Segment(fd) ── SCM_RIGHTS ──► attach(fd)

What always holds: the pages are reserved before anyone writes (a full /dev/shm is an error here
and not a SIGBUS later), the name is gone before `create` returns, and no resource tracker ever
hears of it. A mapping lives as long as the last view of it, whatever `close` was told.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import stat
import sys
import threading
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np

from actorserve.errors import ConfigError, ProtocolError, ResourceExhausted, Unsupported

SHM_FOLDER = "/dev/shm"
NAME_PREFIX = "actorserve-"
PAGE_BYTES = mmap.PAGESIZE
SMALLEST_FOLDER_BYTES = 64 << 20
"""A /dev/shm below this size is not used: memfd has the machine's whole memory."""

_FOLDER_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_ROOM = (*_FOLDER_FULL, errno.ENOMEM, errno.EFBIG)
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_NO_FOLDER = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS)

_chosen: str | None = None
_choosing = threading.Lock()


def backend() -> str:
    """Return where segments come from, "shm" or "memfd": chosen once for this process.

    memfd if /dev/shm is missing, not writable or smaller than 64 MiB, else /dev/shm.
    `ACTORSERVE_SHM` overrides the choice; ConfigError if it holds anything else.
    """
    global _chosen
    if _chosen is None:
        with _choosing:
            if _chosen is None:
                _chosen = _choose(os.environ.get("ACTORSERVE_SHM", ""), SHM_FOLDER)
    return _chosen


def _choose(override: str, folder: str) -> str:
    if override:
        if override not in ("shm", "memfd"):
            raise ConfigError(f"ACTORSERVE_SHM is {override!r}; expected 'shm' or 'memfd'")
        return override
    try:
        usage = os.statvfs(folder)
    except OSError:
        return "memfd"
    large_enough = usage.f_blocks * usage.f_frsize >= SMALLEST_FOLDER_BYTES
    return "shm" if large_enough and os.access(folder, os.W_OK | os.X_OK) else "memfd"


class _NamedMemory(SharedMemory):
    """A named segment that is never registered with the resource tracker.

    The tracker would be a process of 11 MiB per creator, and it would unlink what others use.
    """

    _name: str
    _fd: int
    _mmap: mmap.mmap | None
    _buf: memoryview | None
    _size: int

    if sys.version_info >= (3, 13):

        def __init__(self, name: str, nbytes: int) -> None:
            super().__init__(name=name, create=True, size=nbytes, track=False)

    else:

        def __init__(self, name: str, nbytes: int) -> None:
            # The base class cannot create without registering before 3.13, so these are its
            # steps without that one; `close` and `__del__` stay its own.
            flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open(f"{SHM_FOLDER}/{name}", flags, 0o600)
            self._name = "/" + name
            try:
                os.ftruncate(self._fd, nbytes)
                self._size = nbytes
                self._mmap = mmap.mmap(self._fd, nbytes)
                self._buf = memoryview(self._mmap)
            except BaseException:
                self.unlink()
                raise

    def unlink(self) -> None:
        """Remove the name; a name that is gone already (a janitor's work) is fine."""
        Path(SHM_FOLDER + self._name).unlink(missing_ok=True)

    def duplicate(self) -> int:
        """Return another descriptor of the memory, for the caller to close."""
        return os.dup(self._fd)


def _open_named(nbytes: int) -> int:
    """Create, unlink and reserve a segment in /dev/shm; return its descriptor."""
    memory = _NamedMemory(NAME_PREFIX + secrets.token_hex(12), nbytes)
    try:
        fd = memory.duplicate()
        try:
            try:
                # For the janitor, while the name exists. Should it have been quicker, it is
                # about to remove the name, which is what happens here next anyway.
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                pass
            # Before the pages are reserved, which takes milliseconds: whoever is killed in there
            # would leave the name behind.
            memory.unlink()
            os.posix_fallocate(fd, 0, nbytes)
        except BaseException:
            os.close(fd)
            raise
        return fd
    finally:
        memory.unlink()
        memory.close()


def _open_memfd(nbytes: int) -> int:
    """Create and reserve an anonymous file; return its descriptor."""
    if not hasattr(os, "memfd_create"):
        raise Unsupported(
            f"{SHM_FOLDER} cannot be used and this Python has no os.memfd_create; "
            "mount a tmpfs of at least 64 MiB there, or use a Python built for glibc 2.27 or later"
        )
    fd = os.memfd_create("actorserve", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        if hasattr(fcntl, "F_ADD_SEALS"):
            # No peer can cut the file shorter, which would be a SIGBUS for everyone else.
            size_seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, size_seals)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_memory(nbytes: int) -> None:
    """Refuse what the machine cannot give now.

    A memfd knows no limit: reserving more than there is would not fail but wake the kernel's
    killer, who looks for a victim elsewhere, because pages that nobody maps are on nobody's bill.
    """
    try:
        import psutil
    except ModuleNotFoundError:
        return  # a stub in an environment of its own needs numpy and msgspec only
    available_bytes = psutil.virtual_memory().available
    if nbytes > available_bytes:
        raise ResourceExhausted(
            f"cannot reserve {nbytes} bytes of shared memory: the machine has "
            f"{available_bytes} bytes available"
        )


def _refused(error: OSError, nbytes: int, where: str) -> Exception:
    """Say in our terms why the system gave no memory; an unexpected error stays what it is."""
    if error.errno in _NO_DESCRIPTORS:
        return ResourceExhausted(
            f"cannot create a segment of {nbytes} bytes: this process or machine has no file "
            "descriptors left; raise the limit (`ulimit -n`)"
        )
    if where == "shm" and error.errno in _FOLDER_FULL:
        return ResourceExhausted(
            f"cannot reserve {nbytes} bytes of shared memory: {SHM_FOLDER} is full "
            f"({_free_text()}); enlarge it (docker: `--shm-size`) or set ACTORSERVE_SHM=memfd"
        )
    if where == "shm" and error.errno in _NO_FOLDER:
        return ConfigError(
            f"cannot create shared memory in {SHM_FOLDER}: {error.strerror}; "
            "mount a writable tmpfs there or set ACTORSERVE_SHM=memfd"
        )
    if error.errno in _NO_ROOM:
        return ResourceExhausted(
            f"cannot reserve {nbytes} bytes of shared memory ({where}): {error.strerror}; "
            "give the machine or container more memory"
        )
    return error


def _free_text() -> str:
    try:
        usage = os.statvfs(SHM_FOLDER)
    except OSError:
        return "size unknown"
    size = usage.f_frsize
    return f"{usage.f_bavail * size} of {usage.f_blocks * size} bytes free"


def _map(fd: int, nbytes: int) -> mmap.mmap:
    if sys.version_info >= (3, 13):
        return mmap.mmap(fd, nbytes, trackfd=False)
    return mmap.mmap(fd, nbytes)  # keeps a descriptor of its own until it is unmapped


class Segment:
    """A piece of shared memory that travels by descriptor.

    `fd` is open (and close-on-exec) until `close_fd` or `close`, then -1. `buffer` is the whole
    mapping, writable; `mapping` is the mmap below it, whose slices are bytes. Give up a segment
    by dropping every view and calling `close`, in any order.
    """

    __slots__ = ("__weakref__", "buffer", "fd", "mapping", "nbytes")

    fd: int
    nbytes: int
    buffer: memoryview
    mapping: mmap.mmap | None

    def __init__(self, fd: int, nbytes: int) -> None:
        """Map a descriptor and take it over, also when that fails; see `create` and `attach`."""
        self.fd = fd
        self.nbytes = nbytes
        self.mapping = None
        self.buffer = memoryview(b"")
        try:
            self.mapping = _map(fd, nbytes)
        except BaseException:
            self.close_fd()
            raise
        self.buffer = memoryview(self.mapping)

    @classmethod
    def create(cls, nbytes: int) -> Segment:
        """Make a new segment of at least `nbytes`, rounded up to whole pages, zeroed, reserved.

        ResourceExhausted if there is no room or no descriptor for it.
        """
        if nbytes <= 0:
            raise ValueError(f"a segment needs at least 1 byte, not {nbytes}")
        nbytes = (nbytes + PAGE_BYTES - 1) & -PAGE_BYTES
        where = backend()
        try:
            _check_memory(nbytes)
            fd = _open_named(nbytes) if where == "shm" else _open_memfd(nbytes)
            return cls(fd, nbytes)
        except OSError as error:
            raise _refused(error, nbytes, where) from error

    @classmethod
    def attach(cls, fd: int, nbytes: int | None = None) -> Segment:
        """Map a descriptor that came from a peer and take it over, also when this fails.

        ProtocolError if it is no plain file, is empty, cannot be mapped for writing, or is not
        `nbytes` long (if given).
        """
        try:
            size_bytes = _checked_size(fd, nbytes)
        except BaseException:
            _close_quietly(fd)
            raise
        try:
            return cls(fd, size_bytes)
        except OSError as error:
            if error.errno in _NO_ROOM or error.errno in _NO_DESCRIPTORS:
                raise ResourceExhausted(
                    f"cannot map a segment of {size_bytes} bytes: {error.strerror}"
                ) from error
            raise ProtocolError(f"cannot map descriptor {fd}: {error.strerror}") from error

    @property
    def address(self) -> int:
        """Where the first byte lies in this process."""
        address: int = np.frombuffer(self.buffer, np.uint8).__array_interface__["data"][0]
        return address

    def punch(self, offset: int, nbytes: int) -> None:
        """Give the whole pages inside the range back to the system; they read as zeros.

        Call `refill` before anyone writes there again. ValueError outside the segment.
        """
        self._check_range(offset, nbytes)
        start = (offset + PAGE_BYTES - 1) & -PAGE_BYTES
        end = (offset + nbytes) & -PAGE_BYTES
        if self.mapping is not None and start < end:
            self.mapping.madvise(mmap.MADV_REMOVE, start, end - start)

    def refill(self, offset: int, nbytes: int) -> None:
        """Reserve the pages of the range again; ResourceExhausted if there is no room.

        Needs the descriptor. ValueError outside the segment.
        """
        self._check_range(offset, nbytes)
        if nbytes == 0:
            return
        try:
            os.posix_fallocate(self.fd, offset, nbytes)
        except OSError as error:
            raise _refused(error, nbytes, backend()) from error

    def _check_range(self, offset: int, nbytes: int) -> None:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(
                f"bytes {offset} to {offset + nbytes} lie outside a segment of {self.nbytes} bytes"
            )

    def close_fd(self) -> None:
        """Close the descriptor and keep the mapping; idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        """Close the descriptor and let the mapping go, once its last view is gone; idempotent."""
        self.close_fd()
        # Never mmap.close(): an array made by np.ndarray(buffer=...) refers to the mmap without
        # holding a buffer export, so that closing succeeds and the array's next use is a SIGSEGV.
        # Whoever drops the last reference unmaps.
        self.buffer = memoryview(b"")
        self.mapping = None

    def __del__(self) -> None:
        # Only the descriptor: mmap and memoryview look after themselves.
        self.close_fd()


def _checked_size(fd: int, nbytes: int | None) -> int:
    """Return the size of a peer's descriptor; ProtocolError if it is not what was announced."""
    try:
        os.set_inheritable(fd, False)
        status = os.fstat(fd)
    except OSError as error:
        raise ProtocolError(f"descriptor {fd} cannot be used: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode) or status.st_size == 0:
        raise ProtocolError(f"descriptor {fd} is no segment of shared memory")
    if nbytes is not None and status.st_size != nbytes:
        raise ProtocolError(f"a segment has {status.st_size} bytes where its sender said {nbytes}")
    return status.st_size


def _close_quietly(fd: int) -> None:
    try:
        os.close(fd)
    except OSError:
        pass
