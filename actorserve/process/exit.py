# SPDX-License-Identifier: Apache-2.0
"""How a process ended, in numbers and in words."""

from __future__ import annotations

import os
import signal as signals

import msgspec


class Exit(msgspec.Struct, frozen=True):
    """The end of a child. `status` is the wait status as waitpid gives it; None is unknown.

    Unknown is legal: a zygote that died cannot say how its children end.
    """

    status: int | None

    @property
    def code(self) -> int | None:
        """The exit code of a process that ended by itself."""
        if self.status is None or not os.WIFEXITED(self.status):
            return None
        return os.WEXITSTATUS(self.status)

    @property
    def signal(self) -> int | None:
        """The number of the signal that killed the process."""
        if self.status is None or not os.WIFSIGNALED(self.status):
            return None
        return os.WTERMSIG(self.status)

    def describe(self) -> str:
        """Say it in words that fit behind a process's name: "killed by SIGSEGV"."""
        if self.signal is not None:
            hint = " (perhaps out of memory)" if self.signal == signals.SIGKILL else ""
            return f"killed by {signal_name(self.signal)}{hint}"
        if self.code is not None:
            return f"exited with code {self.code}"
        return "exit status unknown"

    def as_refusal(self, python: str | None) -> str | None:
        """Return why a child that has said nothing cannot be started; None where it may be tried.

        `python` is the interpreter of another environment that was to run it. A kill may pass; one
        that ends by itself before it has run a line of ours will do so again.
        """
        if python is None or self.code is None:
            return None
        return (
            f"interpreter {python!r} {self.describe()} before it had run anything: expected a "
            "Python of 3.10 or newer that works; what it has printed is in the log"
        )


def signal_name(signo: int) -> str:
    """Return "SIGTERM" for 15, and "signal 40" for what has no name."""
    try:
        return signals.Signals(signo).name
    except ValueError:
        return f"signal {signo}"
