# SPDX-License-Identifier: Apache-2.0
"""Interpreters of other environments: what they are started with.

Such a child must find this package and nothing else of ours: not our site-packages, whose
compiled modules are for another Python. It gets a private folder as PYTHONPATH that holds only a
link to the package.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from actorserve.errors import BootError, InvalidArgument
from actorserve.process.private_folder import PrivateFolder

_PREFIX = "actorserve-path-"
_PACKAGE = Path(__file__).resolve().parent.parent
_OURS_ALONE = (b"PYTHONHOME", b"PYTHONPATH", b"VIRTUAL_ENV", b"CONDA_PREFIX")
_SYSTEM = (Path("/"), Path("/usr"), Path("/usr/local"))


class PackageFolder(PrivateFolder):
    """A folder that holds a link to this package; made on first use, gone after `close()`."""

    def __init__(self) -> None:
        super().__init__(_PREFIX)

    def _fill(self, path: Path) -> None:
        (path / "actorserve").symlink_to(_PACKAGE, target_is_directory=True)


class UnpackedFolder:
    """An unpacked archive; its folder is there as long as this object is held somewhere."""

    __slots__ = ("__weakref__", "path")

    def __init__(self, path: Path) -> None:
        self.path = path


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
    `python` is named, and stands first in PATH, as its activation would do it. Its libraries
    stand first in LD_LIBRARY_PATH, but for those of the system, which need no naming.
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
    if prefix not in _SYSTEM and (prefix / "lib").is_dir():
        paths = [os.fsencode(prefix / "lib"), environment.get(b"LD_LIBRARY_PATH", b"")]
        environment[b"LD_LIBRARY_PATH"] = b":".join(filter(None, paths))
    environment.update(given)
    paths = [os.fsencode(folder), given.get(b"PYTHONPATH", b"")]
    environment[b"PYTHONPATH"] = b":".join(filter(None, paths))
    return environment


def _encoded(extra: Mapping[str, str]) -> dict[bytes, bytes]:
    for key, value in extra.items():
        if not key or "=" in key or "\0" in key or "\0" in value:
            raise InvalidArgument(f"environment variable {key!r}: no name or value of that kind")
    return {os.fsencode(key): os.fsencode(value) for key, value in extra.items()}
