# SPDX-License-Identifier: Apache-2.0
"""Crash files: the last words of a stub that died, for whoever has to find out why.

One text file a death, at most KEEP of them; the oldest go first. Writing one may fail (a full or
read-only disk): that is logged and changes nothing else.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
from pathlib import Path

from actorserve.config import default_crash_dir

KEEP = 50
_OWN_NAME = re.compile(r"\d{8}T\d{6}-[\w.-]+-\d+\.txt")  # nothing else is ever removed
_log = logging.getLogger("actorserve")


class CrashStore:
    """A directory of crash files, made when the first one is written."""

    def __init__(self, directory: str = "") -> None:
        self.directory = Path(directory) if directory else default_crash_dir()

    def write(self, instance: str, pid: int, reason: str, lines: Sequence[str]) -> Path | None:
        """Keep the last output of a dead stub; returns the file, or None where that failed."""
        stamp = time.strftime("%Y%m%dT%H%M%S")
        name = re.sub(r"[^\w.-]", "_", instance)[:100]
        path = self.directory / f"{stamp}-{name}-{pid}.txt"
        head = f"instance: {instance}\npid: {pid}\nend: {reason}\n\n"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            path.write_text(head + "\n".join(lines) + "\n", encoding="utf-8", errors="replace")
            self._remove_old()
        except OSError as error:
            _log.warning("cannot keep a crash file in '%s': %s", self.directory, error.strerror)
            return None
        return path

    def _remove_old(self) -> None:
        own = [path for path in self.directory.iterdir() if _OWN_NAME.fullmatch(path.name)]
        files = sorted(own, key=lambda path: path.stat().st_mtime_ns)
        for path in files[:-KEEP]:
            path.unlink(missing_ok=True)
