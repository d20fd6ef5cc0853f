# SPDX-License-Identifier: Apache-2.0
"""A command on a terminal of its own, typed at and read as a person would."""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import pytest

from actorserve.clock import monotonic_s

CTRL_C = "\x03"
TIMEOUT_S = 20.0


def _take_terminal() -> None:
    """Make standard input the terminal that controls this (new) session."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """A process whose standard streams are one terminal, which controls it (Ctrl-C works)."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        rows: int = 24,
        columns: int = 120,
    ) -> None:
        self._fd, inside = os.openpty()
        fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        unwanted = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")
        kept = {name: value for name, value in os.environ.items() if name not in unwanted}
        self.process = subprocess.Popen(
            command,
            stdin=inside,
            stdout=inside,
            stderr=inside,
            env={**kept, "TERM": "xterm", **(env or {})},
            cwd=cwd,
            start_new_session=True,
            preexec_fn=_take_terminal,  # noqa: PLW1509 (one system call)
        )
        os.close(inside)
        self.text = ""

    def __enter__(self) -> Terminal:
        """Begin."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the process."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._fd)

    def type(self, text: str) -> None:
        """Type on the keyboard."""
        os.write(self._fd, text.encode())

    def read_until(self, wanted: str, timeout_s: float = TIMEOUT_S) -> str:
        """Read until a text has come; returns what came since the last call, up to its end."""
        deadline_s = monotonic_s() + timeout_s
        while wanted not in self.text:
            if not self._read(deadline_s):
                pytest.fail(f"no {wanted!r} on the terminal, but: {self.text!r}")
        before, _, self.text = self.text.partition(wanted)
        return before + wanted

    def read_all(self, timeout_s: float = TIMEOUT_S) -> tuple[int, str]:
        """Read until the process ends; returns its exit code and what is left."""
        deadline_s = monotonic_s() + timeout_s
        while self._read(deadline_s):
            pass
        return self.process.wait(timeout_s), self.text

    def _read(self, deadline_s: float) -> bool:
        """Read a piece; False where the process is gone or it got too late."""
        left_s = deadline_s - monotonic_s()
        if left_s <= 0 or not select.select([self._fd], [], [], left_s)[0]:
            return False
        try:
            piece = os.read(self._fd, 1 << 16)
        except OSError:  # what a terminal says when nobody is on its other side
            return False
        self.text += piece.decode(errors="replace")
        return bool(piece)
