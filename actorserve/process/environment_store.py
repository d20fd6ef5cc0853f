# SPDX-License-Identifier: Apache-2.0
"""The unpacked archives of one Spawner: each unpacked once, as long as it does not change.

    folder(archive) ─► known and unchanged? ─► its UnpackedFolder
                          └─► one job ─► a child (unpacker.py) ─► a new folder ─┘

An archive is known by its real path, time, size and inode. One that changed is unpacked anew
beside the old one, which stays until nobody holds its UnpackedFolder any more. All of it lies in
one private folder, which goes with the Spawner, or is swept by the next one.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import shutil
import stat
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from actorserve.clock import monotonic_s
from actorserve.errors import ActorserveError, BootError, Unavailable
from actorserve.process.environment import UnpackedFolder
from actorserve.process.exit import Exit
from actorserve.process.order import SpawnSpec
from actorserve.process.packet import exhausted
from actorserve.process.private_folder import PrivateFolder, is_any, sweep
from actorserve.process.watch import Child
from actorserve.wire.messages import Unpack

PREFIX = "actorserve-env-"
ENTRY = "actorserve.process.unpacker:main"

Spawn = Callable[[SpawnSpec, Callable[[Exit], None], Callable[[str, str], None]], Awaitable[Child]]


class _Identity(msgspec.Struct, frozen=True):
    """What an archive was when it was looked at; it is another one when any of this differs."""

    path: Path
    device: int
    inode: int
    nbytes: int
    changed_ns: int


class _Job:
    """One unpacking, and how many wait for it."""

    def __init__(self, identity: _Identity, task: asyncio.Task[UnpackedFolder]) -> None:
        self.identity = identity
        self.task = task
        self.waiters = 0

    @property
    def has_failed(self) -> bool:
        """Whether it came to nothing."""
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)


class EnvironmentStoreStats(msgspec.Struct, frozen=True):
    """`unpacked` counts since the start; `folders` are there now, the superseded ones too."""

    unpacked: int
    unpacking: int
    folders: int


class EnvironmentStore:
    """Unpack archives for one Spawner, in its loop."""

    def __init__(self, log: Callable[[int, str], None]) -> None:
        self._log = log
        self._folder = PrivateFolder(PREFIX)
        self._jobs: dict[Path, _Job] = {}
        self._folders: dict[int, tuple[Path, weakref.ref[UnpackedFolder]]] = {}
        self._removals: set[asyncio.Future[None]] = set()
        self._number = self._unpacked = 0

    async def sweep(self) -> None:
        """Remove what killed processes left. Looks at one folder, where they left nothing."""
        if is_any(PREFIX):
            for path in await asyncio.get_running_loop().run_in_executor(None, sweep, PREFIX):
                self._log(0, f"removed {path}, which a dead process had left")

    async def folder(self, archive: Path, spawn: Spawn) -> UnpackedFolder:
        """Return the archive's folder, unpacking it first where that was not done yet.

        Cancellable; the work ends with the last who waits for it. Raises BootError for what
        cannot be unpacked, ResourceExhausted or Unavailable where no process can be made.
        """
        identity = await asyncio.get_running_loop().run_in_executor(None, _identity, archive)
        job = self._jobs.get(identity.path)
        if job is None or job.identity != identity or job.has_failed or not _is_whole(job):
            task = asyncio.ensure_future(self._unpack(identity, spawn))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            job = self._jobs[identity.path] = _Job(identity, task)
        return await self._wait(job)

    async def _wait(self, job: _Job) -> UnpackedFolder:
        """Wait for a job; the last one who gives up ends it. Nobody joins one that has failed."""
        job.waiters += 1
        try:
            return await asyncio.shield(job.task)
        except asyncio.CancelledError:
            if job.task.cancelled():
                raise Unavailable("the server is stopping") from None
            raise
        finally:
            job.waiters -= 1
            is_given_up = not job.waiters and job.task.cancel()
            if (is_given_up or job.has_failed) and self._jobs.get(job.identity.path) is job:
                del self._jobs[job.identity.path]

    # --- one unpacking ---------------------------------------------------------------------------

    async def _unpack(self, identity: _Identity, spawn: Spawn) -> UnpackedFolder:
        """Unpack into a new folder. Where that fails, or is cancelled, nothing is left."""
        began_s = monotonic_s()
        path = self._make_folder(identity)
        self._log(0, f"unpacking '{identity.path}' to '{path}'")
        try:
            await self._run(identity, path, spawn)
        except BaseException:
            self._remove(path)
            raise
        self._unpacked += 1
        self._log(0, f"unpacked '{identity.path}' in {monotonic_s() - began_s:.1f} s")
        return self._keep(path)

    def _make_folder(self, identity: _Identity) -> Path:
        self._number += 1
        stem = re.sub(r"[^A-Za-z0-9_-]", "_", identity.path.name.partition(".")[0])[:40]
        try:
            path = self._folder.path() / f"{self._number}-{stem}"
            path.mkdir(mode=0o700)
        except OSError as error:
            raise exhausted(error, "the private folder of unpacked environments") from error
        return path

    async def _run(self, identity: _Identity, path: Path, spawn: Spawn) -> None:
        """Let a child do it. Raises BootError with the child's reason."""
        ended: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        child: Child | None = None

        def on_exit(end: Exit) -> None:
            assert child is not None
            if not ended.done():
                ended.set_result(_reason(child, end))

        def on_output(stream: str, line: str) -> None:
            self._log(1, f"'{identity.path}': {line}")

        archive_fd = _open(identity)
        try:
            spec = SpawnSpec(ENTRY, "actorserve-unpack", cwd=str(path))
            child = await spawn(spec, on_exit, on_output)
            try:
                child.boot.send(Unpack(), (archive_fd,))
            except (ActorserveError, OSError):
                pass  # It died already; its exit is on the way.
            reason = await _end(child, ended)
            if reason is None and _changed(identity, archive_fd):
                reason = "it was written to while it was unpacked; load the model again"
        finally:
            os.close(archive_fd)
        if reason is not None:
            raise BootError(reason)

    # --- what becomes of the folders -------------------------------------------------------------

    def _keep(self, path: Path) -> UnpackedFolder:
        """Hand the folder out; it is removed when nobody has it any more."""
        number = self._number = self._number + 1
        loop = asyncio.get_running_loop()

        def on_unused(_dead: object) -> None:
            # May run in a garbage collection, anywhere.
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._on_unused, number)

        folder = UnpackedFolder(path)
        self._folders[number] = (path, weakref.ref(folder, on_unused))
        return folder

    def _on_unused(self, number: int) -> None:
        found = self._folders.pop(number, None)
        if found is not None:
            self._remove(found[0])

    def _remove(self, path: Path) -> None:
        """Remove a folder, in another thread."""
        removal = asyncio.get_running_loop().run_in_executor(None, _remove_all, path)
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)

    async def close(self) -> None:
        """Remove everything, in another thread where there is much to remove. Idempotent."""
        for job in self._jobs.values():
            job.task.cancel()
        self._jobs.clear()
        self._folders.clear()
        if self._removals:
            await asyncio.wait(self._removals)
        if self._folder.is_there:
            await asyncio.get_running_loop().run_in_executor(None, self._folder.close)

    def close_now(self) -> None:
        """Remove everything at once, also without a loop. Idempotent."""
        self._jobs.clear()
        self._folders.clear()
        self._folder.close()

    def disown(self) -> None:
        """Forget everything, in a process that was forked from the owner."""
        self._jobs.clear()
        self._folders.clear()
        self._folder.disown()

    def stats(self) -> EnvironmentStoreStats:
        """Count what was unpacked."""
        unpacking = sum(not job.task.done() for job in self._jobs.values())
        return EnvironmentStoreStats(self._unpacked, unpacking, len(self._folders))


def _identity(archive: Path) -> _Identity:
    """Look at an archive. Raises BootError for what is no readable file."""
    try:
        path = Path(os.path.realpath(archive))
        return _identity_of(path, path.stat())
    except OSError as error:
        raise BootError(f"it cannot be read: {error.strerror}") from None


def _identity_of(path: Path, status: os.stat_result) -> _Identity:
    if not stat.S_ISREG(status.st_mode):
        raise BootError("it is neither a directory nor a regular file")
    return _Identity(path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def _open(identity: _Identity) -> int:
    """Open an archive, if it is still the same. Raises BootError or ResourceExhausted."""
    try:
        fd = os.open(identity.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise exhausted(error, f"opening '{identity.path}'") from error
        raise BootError(f"it cannot be read: {error.strerror}") from None
    if _changed(identity, fd):
        os.close(fd)
        raise BootError("it is being replaced just now; load the model again")
    return fd


def _changed(identity: _Identity, fd: int) -> bool:
    return _identity_of(identity.path, os.fstat(fd)) != identity


def _is_whole(job: _Job) -> bool:
    """Whether the folder of a job, if it is done, is still what it was: nobody emptied it."""
    return not job.task.done() or (job.task.result().path / "bin" / "python").exists()


async def _end(child: Child, ended: asyncio.Future[str | None]) -> str | None:
    """Wait for the child's end; a cancelled wait is over only when the child is."""
    try:
        return await asyncio.shield(ended)
    except asyncio.CancelledError:
        child.kill_group()
        await ended
        raise


def _reason(child: Child, end: Exit) -> str | None:
    """Return why a child that ended has failed, in its own words if it left any; None: it has not.

    What it said counts and not its exit status, which may be unknown.
    """
    try:
        if child.boot.recv_nowait() is not None:
            return None
    except BootError as error:
        return error.message
    except ActorserveError:
        pass  # it said nothing
    return f"the process that unpacked it {_was(end)}"


def _was(end: Exit) -> str:
    words = end.describe()
    return f"was {words}" if end.signal is not None else words


def _remove_all(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
