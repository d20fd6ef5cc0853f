# SPDX-License-Identifier: Apache-2.0
"""A child that unpacks one archive of a Python environment and ends.

    Unpack (the open archive) ─► its working directory ─► checks ─► conda-unpack ─► Unpack
                                       └────────┴─► BootFailed

A process of its own, so that the supervisor's loop never competes with it for the interpreter's
lock, a kill ends it at any moment, and the death of the supervisor does, too. Lines that it
prints are warnings.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

from actorserve.errors import ActorserveError, BootError
from actorserve.fault import fault_point
from actorserve.process.archive import ArchiveError, unpack
from actorserve.process.boot import BootSocket
from actorserve.wire.messages import BootFailed, Unpack

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SAID_LINES = 5


def main(boot: BootSocket) -> None:
    """Unpack what the first message brings; the child's entry function. Exit code 1: it failed."""
    message, fds = boot.recv(None)
    if not isinstance(message, Unpack) or len(fds) != 1:
        raise SystemExit(f"expected Unpack with the archive, got {type(message).__name__}")
    try:
        unpack_environment(fds[0], Path.cwd())
        boot.send(Unpack())
    except ActorserveError as error:
        boot.send(BootFailed(error.message))
        raise SystemExit(1) from None


def unpack_environment(archive_fd: int, folder: Path) -> None:
    """Unpack an environment, check that it is one, and fit it to its folder. Raises BootError."""
    try:
        with open(archive_fd, "rb") as file:
            unpack(file, folder)
        fault_point("unpacker.unpacked")
        _check(folder)
    except ArchiveError as error:
        raise BootError(str(error)) from None
    except OSError as error:
        reason = f"it cannot be unpacked in '{folder.parent}': {error.strerror}"
        if error.errno in _FULL:
            reason += "; make room there, or name another place in TMPDIR"
        raise BootError(reason) from None
    _fit(folder)


def _check(folder: Path) -> None:
    """Raise ArchiveError unless this looks like an environment."""
    activate = folder / "bin" / "activate"
    if not activate.exists():
        text = (
            f"Path {activate} does not exist. The Python environment should contain an 'activate' "
            "script."
        )
        inner = [entry.name for entry in folder.iterdir() if (entry / "bin").is_dir()]
        if inner:
            text += f" (The archive holds the folder '{inner[0]}': pack what is in that folder.)"
        raise ArchiveError(text)
    python = folder / "bin" / "python"
    if not python.is_file():
        raise ArchiveError("there is no bin/python in it")
    if not os.access(python, os.X_OK):
        raise ArchiveError(
            f"its bin/python may not be executed in '{folder.parent}': is the file system mounted "
            "noexec? TMPDIR names another"
        )


def _fit(folder: Path) -> None:
    """Run conda-unpack, once, which writes the folder's path into the files that name the old one.

    The interpreter itself runs without; so a failure is a warning.
    """
    script = folder / "bin" / "conda-unpack"
    if not script.is_file():
        return
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONHOME", "PYTHONPATH")}
    try:
        done = subprocess.run(
            [folder / "bin" / "python", script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            check=False,
        )
    except OSError as error:
        print(f"bin/conda-unpack could not be run: {error.strerror}")
        return
    if done.returncode:
        said = done.stdout.decode(errors="backslashreplace").splitlines()[-_SAID_LINES:]
        print(f"bin/conda-unpack failed with code {done.returncode}: {' | '.join(said)}")
    sys.stdout.flush()
