# SPDX-License-Identifier: Apache-2.0
"""The import path that the process of an actor gets: what this process found its modules in."""

from __future__ import annotations

import sys
from pathlib import Path


def import_path(python: str | None) -> list[str]:
    """Return the folders; for another interpreter (`python`) without those of this one.

    Packages that are installed here need not fit it: it has its own.
    """
    folders = [str(Path(entry).absolute()) for entry in sys.path if isinstance(entry, str)]
    folders = list(dict.fromkeys(folder for folder in folders if Path(folder).exists()))
    if python is None:
        return folders
    own = {Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix)}
    return [folder for folder in folders if not _is_below(folder, own)]


def _is_below(folder: str, prefixes: set[Path]) -> bool:
    path = Path(folder).resolve()
    return "site-packages" in path.parts or any(
        prefix in (path, *path.parents) for prefix in prefixes
    )
