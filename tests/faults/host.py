# SPDX-License-Identifier: Apache-2.0
"""Processes that are put into a bad place: hosts that embed a server, and servers themselves."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.server.harness import Server

HOST_HEAD = """\
import asyncio, ctypes, gc, json, os, signal, subprocess, sys, threading
import numpy as np
from actorserve import Supervisor
from actorserve.config import Settings

REPOSITORY, CRASHES = sys.argv[1:3]
X = np.ones(4, np.float32)

def say(**facts):
    print(json.dumps(facts), flush=True)

def new_server(**settings):
    settings.setdefault("restart_backoff_s", (0.0, 0.0))
    return Supervisor(REPOSITORY, Settings(crash_dir=CRASHES, **settings))

async def ask(server, model="bystander"):
    outputs = await server.infer(model, {"INPUT0": X}, timeout_s=20)
    assert np.array_equal(outputs["OUTPUT0"], X)

async def pause(for_s):
    await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=for_s)
"""


class Host:
    """An application that embeds a server: a Python program that says JSON lines."""

    def __init__(
        self, folder: Path, repository: Path, program: str, prefix: Sequence[str] = ()
    ) -> None:
        path = folder / "host.py"
        path.write_text(HOST_HEAD + program)
        self.errors = folder / "host.log"
        with self.errors.open("wb") as stream:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, str(path), str(repository), str(folder / "crashes")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
            )

    def hear(self) -> dict[str, Any]:
        """Return what it says next; fails with its stderr where it ends instead."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            raise AssertionError(f"the host ended with {code}:\n{self.errors.read_text()}")
        facts: dict[str, Any] = json.loads(line)
        return facts

    def kill(self) -> None:
        """SIGKILL it."""
        self.process.kill()
        self.process.wait()

    def wait(self, timeout_s: float = 20) -> int:
        """Return its exit code; what it wrote to stderr is shown where that is not 0."""
        code = self.process.wait(timeout_s)
        if code:
            print(self.errors.read_text(), file=sys.stderr)
        return code

    def close(self) -> None:
        """End it, if it still runs."""
        if self.process.poll() is None:
            self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@contextlib.contextmanager
def launched(
    folder: Path,
    repository: Path,
    *flags: str,
    prefix: Sequence[str] = (),
    output: int | None = None,
    wait: bool = True,
) -> Iterator[Server]:
    """Run `prefix actorserve start`, killed at the end; `output` takes the log, else a file."""
    ready, log = folder / "ready.json", folder / "server.log"
    command = [*prefix, sys.executable, "-m", "actorserve", "start", str(repository)]
    command += ["--http-port", "0", "--metrics-port", "0", "--ready-file", str(ready)]
    command += ["--crash-dir", str(folder / "crashes"), "--restart-backoff-s", "0:0.2", *flags]
    with log.open("wb") as stream:
        target = stream if output is None else output
        process = subprocess.Popen(command, stdout=target, stderr=target)
    try:
        server = Server(process, ready, log)
        if wait:
            server.wait_ready()
        yield server
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def namespace(*kinds: str) -> list[str]:
    """Return the command that runs another in new namespaces; skips the test where none may."""
    unshare = shutil.which("unshare") or "unshare"
    for user in ([], ["--user", "--map-root-user"]):
        command = [unshare, *user, *kinds]
        with contextlib.suppress(OSError):
            if not subprocess.run([*command, "true"], check=False).returncode:
                return command
    pytest.skip(f"this machine lets nobody make a namespace (unshare {' '.join(kinds)})")


def with_mounts(script: str) -> list[str]:
    """Return the command that runs another where a shell script has changed the mounts."""
    shell = f'set -e\n{script}\nexec "$@"'
    return [*namespace("--mount"), "sh", "-c", shell, "sh"]


def with_shm(options: str) -> list[str]:
    """Return the command that runs another with a /dev/shm of its own: mount options of a tmpfs."""
    return with_mounts(f"mount -t tmpfs -o {options} tmpfs /dev/shm")
