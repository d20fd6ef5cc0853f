# SPDX-License-Identifier: Apache-2.0
"""What a model's directory looks like from outside, to tell whether it has changed.

Folders count by what is in them, and what an import leaves behind (`__pycache__`) does not count.
Pure reads; a file that vanishes meanwhile is not there.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

Stamp = tuple[int, int, int, int]
"""A file's time of change in ns, size in bytes, inode, and checksum where that is taken."""

_IGNORED = ("__pycache__",)
CHECKED_BYTES = 1 << 20


def stamps(path: Path, *, checked: str = "") -> dict[str, Stamp]:
    """Return the stamp of every file below `path` by its relative path.

    Of the file named `checked` the content counts too. Links are followed, each folder once.
    Raises OSError where the directory itself cannot be read.
    """
    path.stat()
    found: dict[str, Stamp] = {}
    seen: set[tuple[int, int]] = set()
    for walked, folders, files in os.walk(path, followlinks=True):
        folder = Path(walked)
        try:
            status = folder.stat()
        except OSError:
            continue
        key = (status.st_dev, status.st_ino)
        if key in seen:
            folders.clear()
            continue
        seen.add(key)
        folders[:] = sorted(name for name in folders if name not in _IGNORED)
        for name in files:
            file = folder / name
            relative = str(file.relative_to(path))
            try:
                found[relative] = _stamp(file, is_checked=relative == checked)
            except OSError:
                continue
    return found


def _stamp(file: Path, *, is_checked: bool) -> Stamp:
    status = file.stat()
    checksum = 0
    if is_checked and file.is_file():
        with file.open("rb") as stream:
            checksum = zlib.crc32(stream.read(CHECKED_BYTES))
    return (status.st_mtime_ns, status.st_size, status.st_ino, checksum)


def outside_versions(found: dict[str, Stamp], *, config: str) -> tuple[tuple[str, Stamp], ...]:
    """Return the stamps of what all versions share, without the configuration's."""
    return tuple(
        sorted(
            (name, stamp)
            for name, stamp in found.items()
            if name != config and not name.partition(os.sep)[0].isdecimal()
        )
    )


def of_version(found: dict[str, Stamp], version: int) -> tuple[tuple[str, Stamp], ...]:
    """Return the stamps of what belongs to one version."""
    prefix = f"{version}{os.sep}"
    return tuple(sorted(item for item in found.items() if item[0].startswith(prefix)))
