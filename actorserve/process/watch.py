# SPDX-License-Identifier: Apache-2.0
"""One child as its Spawner's owner sees it: signals, samples, output lines and the end.

The pidfd is the authority on death: it fires whatever the zygote does. The zygote's report only
adds the status. A `Child` belongs to its loop's thread, but `signal`, `kill_group` and `sample`
may be called from any thread, before and after the death.
"""

from __future__ import annotations

import asyncio
import os
import signal as signals
import threading
from collections.abc import Callable

import msgspec
import psutil

from actorserve.process import pidfd
from actorserve.process.boot import BootSocket
from actorserve.process.exit import Exit
from actorserve.process.output import LineReader

_STATES = {
    psutil.STATUS_RUNNING: "R",
    psutil.STATUS_SLEEPING: "S",
    psutil.STATUS_IDLE: "S",
    psutil.STATUS_PARKED: "S",
    psutil.STATUS_WAKING: "R",
    psutil.STATUS_DISK_SLEEP: "D",
    psutil.STATUS_STOPPED: "T",
    psutil.STATUS_TRACING_STOP: "t",
    psutil.STATUS_ZOMBIE: "Z",
    psutil.STATUS_DEAD: "X",
}


class ProcessSample(msgspec.Struct, frozen=True):
    """What a process does: R runs, S sleeps, D waits for a disk, T stopped, t traced, Z or X dead.

    `cpu_s` is the CPU time of all its threads so far. "?" is a state that could not be read.
    """

    state: str
    cpu_s: float


class ChildStats(msgspec.Struct, frozen=True):
    """One child in numbers; `status` is None while it lives, and where it is unknown."""

    number: int
    pid: int
    is_alive: bool
    status: int | None
    lines: int


class Child:
    """A living or dead child. Only a Spawner makes one.

    `boot` is the supervisor's end of the boot socket; it is closed as soon as the `on_exit`
    callback has returned, in which its owner can read what is left in it. `exit` is None until
    the death was reported.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        number: int,
        pid: int,
        child_pidfd: int,
        boot: BootSocket,
        outputs: tuple[int, int],
        on_exit: Callable[[Exit], None],
        on_output: Callable[[str, str], None],
        log: Callable[[int, str], None],
    ) -> None:
        self.number = number
        self.pid = pid
        self.name = boot.name
        self.boot = boot
        self.exit: Exit | None = None
        self.reported_status: int | None = None  # the zygote's word, before or after the death
        self._loop = loop
        self._pidfd = child_pidfd
        self._lock = threading.Lock()  # between a signal and the pidfd's close
        self._on_exit = on_exit
        self._on_output = on_output
        self._log = log
        self._lines = 0
        self._cpu_s = 0.0
        self._readers = [
            LineReader(fd, self._deliverer(stream))
            for fd, stream in zip(outputs, ("stdout", "stderr"))
        ]

    def signal(self, signo: int) -> bool:
        """Signal the process; False, and harmless, once it is dead."""
        with self._lock:
            return self._pidfd >= 0 and pidfd.send_signal(self._pidfd, signo)

    def kill_group(self) -> None:
        """Kill the process and everything in the group that it leads."""
        with self._lock:
            if self._pidfd >= 0:
                pidfd.kill_group(self._pidfd, self.pid)
                # It leads no group before its first steps are done.
                pidfd.send_signal(self._pidfd, signals.SIGKILL)

    def sample(self) -> ProcessSample:
        """Look at the process; state "X" and the last known CPU time once it is dead."""
        try:
            process = psutil.Process(self.pid)
            with process.oneshot():
                state = _STATES.get(process.status(), "?")
                times = process.cpu_times()
        except psutil.Error:
            state, times = "X", None
        except OSError:
            state, times = "?", None
        with self._lock:
            if self._pidfd < 0:  # reported dead; the pid may be anybody's by now
                return ProcessSample("X", self._cpu_s)
            if pidfd.is_dead(self._pidfd) and state not in "ZX":
                return ProcessSample("X", self._cpu_s)
        if times is not None:
            self._cpu_s = float(times.user + times.system)
        return ProcessSample(state, self._cpu_s)

    def stats(self) -> ChildStats:
        """Describe this child."""
        status = self.exit.status if self.exit is not None else None
        return ChildStats(self.number, self.pid, self.exit is None, status, self._lines)

    # --- for the Spawner alone ---

    def begin(self, on_death: Callable[[Child], None]) -> None:
        """Watch from now on; `on_death` is called once, from the loop, when the pidfd fires."""
        self._loop.add_reader(self._pidfd, self._on_pidfd, on_death)
        for reader in self._readers:
            reader.begin(self._loop)

    def silence(self) -> None:
        """Drop the callbacks: whoever asked for this child does not want it any more."""
        self._on_exit = lambda _exit: None
        self._on_output = lambda _stream, _line: None

    def last_status(self) -> int | None:
        """The dead child's wait status, where this process or its kernel knows it."""
        status = pidfd.reap(self._pidfd)
        return pidfd.exit_status(self._pidfd) if status is None else status

    def finish(self, status: int | None) -> None:
        """Report the death: the last output first, then `on_exit`; then close everything."""
        self.exit = exit_ = Exit(status)
        try:
            for reader in self._readers:
                reader.end()
            self._call("on_exit", lambda: self._on_exit(exit_))
        finally:
            self.close()

    def close(self) -> None:
        """Close everything without a report. Idempotent; usable when the loop is gone."""
        for reader in self._readers:
            reader.close()
        self.boot.close()
        with self._lock:
            fd, self._pidfd = self._pidfd, -1
        if fd >= 0:
            if not self._loop.is_closed():
                self._loop.remove_reader(fd)
            os.close(fd)

    def disown(self) -> None:
        """Close this process's copies alone, in a fork of the owner."""
        for reader in self._readers:
            reader.disown()
        fd, self._pidfd = self._pidfd, -1
        if fd >= 0:
            os.close(fd)

    def _on_pidfd(self, on_death: Callable[[Child], None]) -> None:
        self._loop.remove_reader(self._pidfd)
        on_death(self)

    def _deliverer(self, stream: str) -> Callable[[str], None]:
        def deliver(line: str) -> None:
            self._lines += 1
            self._call("on_output", lambda: self._on_output(stream, line))

        return deliver

    def _call(self, what: str, callback: Callable[[], None]) -> None:
        """Call user code; its exception must not end what the loop does for others."""
        try:
            callback()
        except Exception as error:
            self._log(2, f"{what} of {self.name} raised {type(error).__name__}: {error}")
