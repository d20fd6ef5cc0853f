# SPDX-License-Identifier: Apache-2.0
"""Folders of one process under the temporary directory, which nobody else may read.

A process that is killed cannot remove its folder. So each holds a `flock` on its own, and others
remove those that nobody holds; pids prove nothing here, as other containers may share the place.
(systemd-tmpfiles, too, leaves alone what is locked so.)
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path


class PrivateFolder:
    """A folder `<prefix>…` of mode 0700; made on first use, gone after `close()`.

    What killed processes left under the same prefix is removed when it is made.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._path: Path | None = None
        self._lock_fd = -1

    @property
    def is_there(self) -> bool:
        """Whether it was made and not closed."""
        return self._path is not None

    def path(self) -> Path:
        """Return the folder; raise OSError where temporary files cannot be made."""
        if self._path is None:
            sweep(self._prefix)
            # Locked before it gets the name that sweepers look for.
            fresh = Path(tempfile.mkdtemp(prefix=f".{self._prefix}"))
            self._lock_fd = os.open(fresh, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._lock_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            self._path = fresh.rename(fresh.with_name(fresh.name[1:]))
            self._fill(self._path)
        return self._path

    def _fill(self, path: Path) -> None:
        """Put into the fresh folder what belongs there from the start."""

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


def is_any(prefix: str) -> bool:
    """Whether there are folders of this prefix, whoever's they are."""
    try:
        return any(Path(tempfile.gettempdir()).glob(f"{prefix}*"))
    except OSError:
        return False  # no folder for temporary files can be written: nobody has left any there


def sweep(prefix: str) -> list[Path]:
    """Remove the folders of this user that nobody holds; returns them. May take long."""
    swept = []
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            if os.fstat(fd).st_uid == os.getuid():
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
                swept.append(folder)
        except OSError:
            pass  # its owner lives
        finally:
            os.close(fd)
    return swept
