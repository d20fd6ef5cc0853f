# SPDX-License-Identifier: Apache-2.0
"""What to start, and one start that has no answer yet.

An `Order` owns the descriptors of its child-to-be until a `Child` does. It can be sent to one
zygote after the other, each time with a new boot socket: what a zygote that died made of it finds
the end of file on the old one, and ends.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from actorserve.errors import ActorserveError, InvalidArgument, ResourceExhausted, Unavailable
from actorserve.process.boot import BootSocket
from actorserve.process.environment import (
    PackageFolder,
    UnpackedFolder,
    check_interpreter,
    child_environment,
    foreign_environment,
)
from actorserve.process.exit import Exit
from actorserve.process.packet import close_all, exhausted
from actorserve.process.watch import Child
from actorserve.wire.boot import SpawnChild, SpawnFailed


class SpawnSpec(msgspec.Struct):
    """What to start.

    `entry` is "module:function", called with a BootSocket in the child. `python` is the absolute
    path of another interpreter; with None the child is forked from the zygote, so that what
    libraries read from the environment when they are loaded (the thread counts of BLAS) is the
    host's; name `sys.executable` for a fresh interpreter. `env` goes over the host's environment
    of this moment, `sys_path` in front of the child's own path, and `cwd` "" is the host's.
    `unpacked` is the archive that `python` comes from, which stays as long as the spec does.
    """

    entry: str
    name: str
    python: str | None = None
    env: dict[str, str] = {}
    cwd: str = ""
    sys_path: list[str] = []
    unpacked: UnpackedFolder | None = None


def spawn_request(number: int, spec: SpawnSpec, folder: PackageFolder) -> SpawnChild:
    """Turn a spec into the zygote's message.

    Raises InvalidArgument for what cannot be, BootError for an interpreter that is not there,
    ResourceExhausted when the private folder for it cannot be made.
    """
    try:
        return _request(number, spec, folder)
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"spawn {spec.name!r}: {error.object!r} cannot be encoded ({error.reason})"
        ) from None


def _request(number: int, spec: SpawnSpec, folder: PackageFolder) -> SpawnChild:
    for text in (spec.name, spec.entry):
        text.encode()
    module, _, function = spec.entry.partition(":")
    if not (module and function and spec.name):
        raise InvalidArgument(
            f"spawn {spec.name!r}: expected a name and an entry 'module:function', "
            f"not {spec.entry!r}"
        )
    if spec.python is None:
        python = None
        environment = child_environment(spec.env)
    else:
        check_interpreter(spec.python)
        python = os.fsencode(spec.python)
        try:
            environment = foreign_environment(spec.python, spec.env, folder.path())
        except OSError as error:
            raise exhausted(error, "the private folder of a foreign interpreter") from error
    return SpawnChild(
        number=number,
        name=spec.name,
        entry=spec.entry,
        python=python,
        environment=environment,
        cwd=os.fsencode(spec.cwd or _own_folder()),
        sys_path=[os.fsencode(path) for path in spec.sys_path],
    )


def _own_folder() -> str:
    try:
        return str(Path.cwd())
    except FileNotFoundError:  # somebody removed it under the host
        return "/"


def spawn_error(name: str, message: SpawnFailed) -> ActorserveError:
    """Return the error of a child that the zygote could not make."""
    if message.errno in (errno.EMFILE, errno.ENFILE):
        return ResourceExhausted(f"{name}: the zygote has no room for descriptors (ulimit -n)")
    return Unavailable(f"{name}: no process could be made: {message.reason}")


class Order:
    """One spawn on its way; `future` gets the Child or the error."""

    def __init__(
        self,
        request: SpawnChild,
        future: asyncio.Future[Child],
        on_exit: Callable[[Exit], None],
        on_output: Callable[[str, str], None],
    ) -> None:
        self.number = request.number
        self.name = request.name
        self.request = request
        self.future = future
        self.zygotes_lost = 0
        self.is_sent = False  # to the zygote of the moment
        self._on_exit = on_exit
        self._on_output = on_output
        self._boot, self._theirs = BootSocket.pair(request.name)
        self._pipes: list[int] = []
        try:
            for _ in range(2):
                self._pipes += os.pipe()
        except OSError as error:
            self.close()
            raise exhausted(error, f"the output pipes of {request.name}") from error

    def renew(self) -> None:
        """Get ready for another zygote; raise ResourceExhausted without descriptors."""
        self.is_sent = False
        self._boot.close()
        self._theirs.close()
        self._boot, self._theirs = BootSocket.pair(self.name)

    def child_fds(self) -> list[int]:
        """What the child gets: boot socket, stdout, stderr."""
        return [self._theirs.fileno(), self._pipes[1], self._pipes[3]]

    def fulfil(
        self,
        loop: asyncio.AbstractEventLoop,
        pid: int,
        child_pidfd: int,
        log: Callable[[int, str], None],
    ) -> Child:
        """Let the child start, make the Child of our ends, and resolve the future with it."""
        self._boot.admit()
        out_r, out_w, err_r, err_w = self._pipes
        self._pipes = []
        self._theirs.close()
        close_all((out_w, err_w))
        child = Child(
            loop,
            number=self.number,
            pid=pid,
            child_pidfd=child_pidfd,
            boot=self._boot,
            outputs=(out_r, err_r),
            on_exit=self._on_exit,
            on_output=self._on_output,
            log=log,
        )
        self.future.set_result(child)
        return child

    def close(self) -> None:
        """Close everything; a child that got the other ends sees its peer gone. Idempotent."""
        self._boot.close()
        self._theirs.close()
        pipes, self._pipes = self._pipes, []
        close_all(pipes)
