# SPDX-License-Identifier: Apache-2.0
"""The Python environment of a model's stubs: the server's own, a directory, or an archive.

    EXECUTION_ENV_PATH ─┬─ directory ────────────────────────────► its bin/python
                        └─ archive ─► unpacked by the Spawner ───► the folder's bin/python

Directories are used as they are; an archive is unpacked once for all models that name it, and
again when it has changed (process/environment_store.py).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from actorserve.actors.disk import on_disk
from actorserve.errors import BootError, ConfigError
from actorserve.runtime.child import Spawner, SpawnSpec, UnpackedFolder, is_archive

STUB_ENTRY = "actorserve.actors.stub:main"
_PARAMETER = "EXECUTION_ENV_PATH"


class ExecutionEnvironment(msgspec.Struct, frozen=True):
    """What a stub runs in; `python` None is the server's own interpreter."""

    python: str | None = None
    unpacked: UnpackedFolder | None = None

    def spec(self, name: str) -> SpawnSpec:
        """Say how a stub of this name is made; the spec holds on to an unpacked folder."""
        return SpawnSpec(STUB_ENTRY, name, python=self.python, unpacked=self.unpacked)


async def prepare_environment(spawner: Spawner, path: str) -> ExecutionEnvironment:
    """Make an environment ready for stubs; "" is the server's own. Cancellable.

    Raises ConfigError for a path that holds none, BootError for an archive that cannot be
    unpacked; both name the path.
    """
    place = await on_disk(lambda: check_environment(path))
    if place is None or place.is_dir():
        return ExecutionEnvironment(None if place is None else str(place / "bin" / "python"))
    try:
        unpacked = await spawner.unpacked(place)
    except BootError as error:
        raise BootError(f"{_PARAMETER} '{path}': {error.message}") from None
    return ExecutionEnvironment(str(unpacked.path / "bin" / "python"), unpacked)


def check_environment(path: str) -> Path | None:
    """Check what can be checked without unpacking anything; None for the server's own.

    Raises ConfigError.
    """
    if not path:
        return None
    place = Path(path)
    try:
        if not place.exists():
            raise ConfigError(
                f"{_PARAMETER} '{path}' does not exist: expected the directory of a Python "
                "environment, or an archive of one"
            )
        if place.is_dir():
            if not (place / "bin" / "python").exists():
                raise ConfigError(
                    f"{_PARAMETER} '{path}': there is no bin/python; expected the directory of a "
                    "Python environment, or an archive of one"
                )
        elif not place.is_file() or not is_archive(place):
            raise ConfigError(
                f"{_PARAMETER} '{path}': it is neither a directory nor a tar archive (.tar, "
                ".tar.gz, .tgz, .tar.bz2 or .tar.xz), or a damaged one"
            )
    except OSError as error:
        raise ConfigError(f"{_PARAMETER} '{path}': {error.strerror}") from None
    return place
