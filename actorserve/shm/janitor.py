# SPDX-License-Identifier: Apache-2.0
"""Remove the names that killed processes left in /dev/shm.

A segment has a name for microseconds, between its creation and its unlinking, and a process that
is killed just then leaves it behind. What nobody holds by `flock` is such a leftover. Process ids
are never asked: other containers share /dev/shm, and theirs mean nothing here.
"""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from actorserve.shm.segment import NAME_PREFIX, SHM_FOLDER


def sweep(folder: str = SHM_FOLDER) -> list[str]:
    """Remove every segment's name that no living process holds; return the names removed.

    Never raises for what it finds: names that vanish meanwhile, belong to other users or are no
    plain files are left alone, and a folder that cannot be read has none.
    """
    try:
        paths = sorted(Path(folder).iterdir())
    except OSError:
        return []
    return [
        path.name for path in paths if path.name.startswith(NAME_PREFIX) and _remove_orphan(path)
    ]


def _remove_orphan(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return False
        # Whoever made it holds a shared lock, and so do all that have the descriptor from it.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(status, path.lstat()):
            return False  # another file has the name by now
        path.unlink()
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
