# SPDX-License-Identifier: Apache-2.0
"""Interpreters of other environments: what they are started with.

Such a child must find this package and nothing else of ours: not our site-packages, whose
compiled modules are for another Python. It gets a private folder as PYTHONPATH that holds only a
link to the package.

A supervisor that is killed cannot remove its folder. So each holds a `flock` on its own, and
whoever makes the next one removes those that nobody holds; pids prove nothing here, as other
containers may share the place.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from actorserve.errors import BootError, InvalidArgument

_PREFIX = "actorserve-path-"
_PACKAGE = Path(__file__).resolve().parent.parent
_OURS_ALONE = (b"PYTHONHOME", b"PYTHONPATH", b"VIRTUAL_ENV", b"CONDA_PREFIX")


class PackageFolder:
    """A folder that holds a link to this package; made on first use, gone after `close()`."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._lock_fd = -1

    def path(self) -> Path:
        """Return the folder; raise OSError where temporary files cannot be made."""
        if self._path is None:
            _remove_abandoned(Path(tempfile.gettempdir()))
            # Locked before it gets the name that sweepers look for.
            fresh = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}"))
            self._lock_fd = os.open(fresh, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._lock_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            self._path = fresh.rename(fresh.with_name(fresh.name[1:]))
            (self._path / "actorserve").symlink_to(_PACKAGE, target_is_directory=True)
        return self._path

    def close(self) -> None:
        """Remove the folder. Idempotent."""
        path, self._path = self._path, None
        if path is not None:
            shutil.rmtree(path, ignore_errors=True)
        self.disown()

    def disown(self) -> None:
        """Forget the folder without removing it, in a process that was forked from its owner."""
        self._path = None
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)


def _remove_abandoned(place: Path) -> None:
    for folder in place.glob(f"{_PREFIX}*"):
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            if os.fstat(fd).st_uid == os.getuid():
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            pass  # its owner lives
        finally:
            os.close(fd)


def check_interpreter(python: str) -> None:
    """Raise BootError unless `python` is the absolute path of a program."""
    if not Path(python).is_absolute():
        raise BootError(f"interpreter {python!r}: expected an absolute path")
    if not Path(python).is_file() or not os.access(python, os.X_OK):
        raise BootError(f"interpreter {python!r} does not exist or may not be executed")


def child_environment(extra: Mapping[str, str]) -> dict[bytes, bytes]:
    """Return this process's environment as it is now, with `extra` over it.

    Raises InvalidArgument for what no environment can hold.
    """
    return {**os.environb, **_encoded(extra)}


def foreign_environment(python: str, extra: Mapping[str, str], folder: Path) -> dict[bytes, bytes]:
    """Return the environment for the interpreter `python`, with `extra` over it.

    What names our own interpreter's places is left out; a venv or a conda environment around
    `python` is named, and stands first in PATH, as its activation would do it.
    """
    given = _encoded(extra)
    environment = {key: value for key, value in os.environb.items() if key not in _OURS_ALONE}
    prefix = Path(python).parent.parent
    if (prefix / "pyvenv.cfg").exists():
        environment[b"VIRTUAL_ENV"] = os.fsencode(prefix)
    elif (prefix / "conda-meta").is_dir():
        environment[b"CONDA_PREFIX"] = os.fsencode(prefix)
    paths = [os.fsencode(prefix / "bin"), environment.get(b"PATH", b"")]
    environment[b"PATH"] = b":".join(filter(None, paths))
    environment.update(given)
    paths = [os.fsencode(folder), given.get(b"PYTHONPATH", b"")]
    environment[b"PYTHONPATH"] = b":".join(filter(None, paths))
    return environment


def _encoded(extra: Mapping[str, str]) -> dict[bytes, bytes]:
    for key, value in extra.items():
        if not key or "=" in key or "\0" in key or "\0" in value:
            raise InvalidArgument(f"environment variable {key!r}: no name or value of that kind")
    return {os.fsencode(key): os.fsencode(value) for key, value in extra.items()}
