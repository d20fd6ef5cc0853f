# SPDX-License-Identifier: Apache-2.0
"""What comes with a load request instead of what the repository holds, and where it is kept.

    config, "file:1/model.py" ─► read_override ─► Override ─► PrivateFolders ─► a model directory

Files lie in a folder of this server's own under the temporary directory: removed with the versions
that were loaded from it, at the server's end, or by the next server after a kill. Who owns a
folder is told by a lock (flock) and never by a process id.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import logging
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import msgspec

from actorserve.actors.disk import on_disk
from actorserve.errors import ConfigError, InvalidArgument, ResourceExhausted
from actorserve.forking import sever_after_fork
from actorserve.triton.config_json import model_config_from_json
from actorserve.triton.model_config import ModelConfig

PREFIX = "actorserve-models-"
FILE_KEY = "file:"
Body = bytes | bytearray | memoryview

_log = logging.getLogger("actorserve")


class Override(msgspec.Struct, frozen=True):
    """A configuration, and perhaps all files of the model's directory, by relative path."""

    config: ModelConfig
    files: dict[str, Body]


def read_override(name: str, config: str, files: Mapping[str, Body]) -> Override | None:
    """Read what came with the request to load `name`. Raises InvalidArgument; None for nothing."""
    placed: dict[str, Body] = {}
    for key, body in files.items():
        if not key.startswith(FILE_KEY):
            raise InvalidArgument(f"Unrecognized load parameter '{key}' with type 'BYTES'")
        placed[_relative(key[len(FILE_KEY) :])] = body
    for path in placed:
        for parent in PurePosixPath(path).parents:
            if str(parent) in placed:
                raise InvalidArgument(f"'{FILE_KEY}{parent}' is a file and a folder at once")
    if not config:
        if placed:
            raise InvalidArgument(
                f"failed to load '{name}': files need the model's configuration with them, "
                "as the parameter 'config'"
            )
        return None
    try:
        return Override(model_config_from_json(config, "config"), placed)
    except ConfigError as error:
        raise InvalidArgument(f"Invalid config override: {error.message}") from None


def _relative(text: str) -> str:
    """Return a path that stays below the model's directory. Raises InvalidArgument."""
    parts = text.split("/")
    is_bad = any(part in ("", ".", "..") for part in parts) or "\0" in text or "\\" in text
    if is_bad or len(text.encode("utf-8", "surrogatepass")) > 1024:
        raise InvalidArgument(
            f"'{FILE_KEY}{text[:100]}': expected a relative path such as '{FILE_KEY}1/model.py'"
        )
    return text


class PrivateFolders:
    """The model directories of one server's overrides. Belongs to its loop."""

    def __init__(self) -> None:
        self._root: Path | None = None
        self._fd = -1
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        sever_after_fork(self)

    async def write(self, name: str, files: Mapping[str, Body]) -> Path:
        """Write a model directory. Raises ResourceExhausted where the disk is full."""
        number = next(self._numbers)
        work = asyncio.ensure_future(on_disk(lambda: self._write(number, name, files)))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait([work])
            if not work.cancelled() and work.exception() is None:
                await self.remove(work.result())
            raise

    def _write(self, number: int, name: str, files: Mapping[str, Body]) -> Path:
        try:
            path = self._own_root() / str(number) / name
            path.mkdir(parents=True)
            for relative, body in files.items():
                file = path / relative
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(body)
        except OSError as error:
            if self._root is not None:
                shutil.rmtree(self._root / str(number), ignore_errors=True)
            raise ResourceExhausted(
                f"cannot keep the files of model '{name}': {error.strerror} ('{error.filename}')"
            ) from None
        return path

    def _own_root(self) -> Path:
        with self._lock:
            while self._root is None:
                root = Path(tempfile.mkdtemp(prefix=PREFIX))
                fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                if _is_taken(root, fd):
                    self._root, self._fd = root, fd
                else:  # somebody's sweep came between
                    os.close(fd)
            return self._root

    async def remove(self, path: Path) -> None:
        """Remove a directory that `write` has made."""
        await on_disk(lambda: shutil.rmtree(path.parent, ignore_errors=True))

    async def close(self) -> None:
        """Remove everything; idempotent."""
        root, self._root = self._root, None
        if root is not None:
            await on_disk(lambda: shutil.rmtree(root, ignore_errors=True))
            os.close(self._fd)
            self._fd = -1

    def sever(self) -> None:
        """Own nothing, in a child that the host forked."""
        self._root = None
        self._lock = threading.Lock()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _is_taken(root: Path, fd: int) -> bool:
    """Lock a folder; False where somebody else has it, or it is gone."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(fd), os.lstat(root))
    except OSError:
        return False


def sweep() -> list[str]:
    """Remove the folders of servers that are gone; returns their names. Never raises."""
    removed = []
    with contextlib.suppress(OSError):
        for path in sorted(Path(tempfile.gettempdir()).glob(PREFIX + "*")):
            if _remove_orphan(path):
                _log.info("removed what a server that was killed has left: '%s'", path)
                removed.append(path.name)
    return removed


def _remove_orphan(path: Path) -> bool:
    try:
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            return False
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if not _is_taken(path, fd):
            return False
        shutil.rmtree(path, ignore_errors=True)
        return True
    finally:
        os.close(fd)
