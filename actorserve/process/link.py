# SPDX-License-Identifier: Apache-2.0
"""One zygote process as its Spawner sees it: the Popen, its pidfd, the link and its output.

Lives in the Spawner's loop. Nothing here waits: starting takes the few milliseconds of a fork and
exec, the rest arrives as `on_message` and, exactly once and last, `on_gone`. The process is
reaped by its own pid, after its pidfd said that it is dead; no other child of this process is
ever waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from actorserve.errors import BootError, ProtocolError
from actorserve.process import pidfd
from actorserve.process.exit import Exit
from actorserve.process.output import LineReader
from actorserve.process.packet import (
    Packet,
    PeerGone,
    close_all,
    exhausted,
    packet_pair,
    receive_packet,
    send_packet,
)
from actorserve.wire.boot import PACKET_BYTES, FromZygote, Spilled, ZygoteUp, decode_from_zygote
from actorserve.wire.codec import encode
from actorserve.wire.messages import Message

START_TIMEOUT_S = 60.0
_KILL_WAIT_S = 1.0
_PATH = "ACTORSERVE_ZYGOTE_PATH"
_PROGRAM = (
    f"import os, sys; sys.path[:] = os.environ.pop('{_PATH}').splitlines(); "
    "from actorserve.process.zygote import main; main()"
)
_PACKAGE_PARENT = str(Path(__file__).resolve().parent.parent.parent)


class ZygoteLink:
    """A running zygote; creating one starts it. Raises OSError, ResourceExhausted or BootError."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        guard_fd: int,
        supervisor_pidfd: int,
        preload: Sequence[str],
        on_message: Callable[[ZygoteLink, FromZygote, Packet], None],
        on_gone: Callable[[ZygoteLink, Exit], None],
        log: Callable[[int, str], None],
    ) -> None:
        self.is_up = False
        self.is_gone = False
        self._loop = loop
        self._on_message = on_message
        self._on_gone = on_gone
        self._log = log
        self._outgoing: deque[tuple[bytes, list[int]]] = deque()
        self._popen, self._sock, output_fd = _start(guard_fd, supervisor_pidfd, preload)
        self.pid = self._popen.pid
        self._output = LineReader(output_fd, lambda line: log(1, f"zygote {self.pid}: {line}"))
        try:
            self._pidfd = pidfd.open_pidfd(self.pid)
        except OSError:
            self._abort()
            raise
        loop.add_reader(self._sock.fileno(), self._on_readable)
        loop.add_reader(self._pidfd, self._on_death)
        self._output.begin(loop)
        self._timer = loop.call_later(START_TIMEOUT_S, self._on_start_timeout)

    # --- what the Spawner does with it ---

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send now, or queue it with copies of `fds`; a dead zygote takes it and says nothing.

        Raises ResourceExhausted when the copies or an anonymous file cannot be had.
        """
        if self._sock.fileno() < 0:  # ended; on_gone is on its way
            return
        data = encode(message)
        spilled: list[int] = []
        if len(data) > PACKET_BYTES:
            spilled = [_spill(data)]
            data, fds = encode(Spilled(len(data))), [*spilled, *fds]
        try:
            if self._outgoing or not send_packet(self._sock, data, fds):
                self._queue(data, fds)
        except PeerGone:
            pass  # as above
        finally:
            close_all(spilled)

    def kill(self) -> None:
        """Kill the zygote alone; its children serve on, and `on_gone` follows."""
        pidfd.send_signal(self._pidfd, signal.SIGKILL)

    def is_stopped(self) -> bool:
        """Whether the process is in state T; a debugger's `t` does not count."""
        try:
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)
        except (psutil.Error, OSError):
            return False

    def hang_up(self) -> None:
        """End the link: the zygote kills its children and ends, and `on_gone` follows."""
        self._close_socket()

    def close(self) -> None:
        """Kill and reap at once, without `on_gone`, also when the loop is gone. Idempotent."""
        if self.is_gone:
            return
        self.kill()
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        poll.poll(_KILL_WAIT_S * 1000)
        self._leave()

    def disown(self) -> None:
        """Close this process's copies alone, in a fork of the owner."""
        self.is_gone = True
        self._popen.returncode = 0  # not this process's child: nothing to warn of
        self._sock.close()
        self._output.disown()
        close_all([self._pidfd])

    # --- what the loop calls ---

    def _on_readable(self) -> None:
        try:
            while self._sock.fileno() >= 0:
                packet = receive_packet(self._sock)
                if packet is None:
                    return
                self._take(packet)
        except PeerGone:
            self._close_socket()
            self.kill()  # a zygote without a link is of no use
        except ProtocolError as error:
            self._log(2, f"zygote {self.pid}: {error.message}; killing it")
            self.kill()

    def _take(self, packet: Packet) -> None:
        try:
            message = decode_from_zygote(packet.data)
        except ProtocolError:
            close_all(packet.fds)
            raise
        if isinstance(message, ZygoteUp):
            self.is_up = True
            self._timer.cancel()
        self._on_message(self, message, packet)

    def _on_death(self) -> None:
        self._on_readable()  # what it sent before it died still counts
        exit_ = self._leave()
        self._on_gone(self, exit_)

    def _on_start_timeout(self) -> None:
        self._log(2, f"zygote {self.pid} did not come up in {START_TIMEOUT_S:g} s; killing it")
        self.kill()

    def _queue(self, data: bytes, fds: Sequence[int]) -> None:
        copies: list[int] = []
        try:
            copies.extend(os.dup(fd) for fd in fds)
        except OSError as error:
            close_all(copies)
            raise exhausted(error, "a spawn that waits for the zygote") from error
        if not self._outgoing:
            self._loop.add_writer(self._sock.fileno(), self._on_writable)
        self._outgoing.append((data, copies))

    def _on_writable(self) -> None:
        try:
            while self._outgoing:
                data, fds = self._outgoing[0]
                if not send_packet(self._sock, data, fds):
                    return
                close_all(fds)
                self._outgoing.popleft()
            self._loop.remove_writer(self._sock.fileno())
        except PeerGone:
            self._close_socket()

    # --- the end ---

    def _leave(self) -> Exit:
        """Reap the dead process, close everything, and return how it ended."""
        self.is_gone = True
        self._timer.cancel()
        self._close_socket()
        if not self._loop.is_closed():
            self._loop.remove_reader(self._pidfd)
        self._output.end()
        os.close(self._pidfd)
        return Exit(_status(self._popen.poll()))

    def _close_socket(self) -> None:
        if self._sock.fileno() < 0:
            return
        if not self._loop.is_closed():
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        while self._outgoing:
            close_all(self._outgoing.popleft()[1])

    def _abort(self) -> None:
        self.is_gone = True
        self._popen.kill()
        self._popen.wait()  # SIGKILL before its first line of code: microseconds
        self._output.close()
        self._sock.close()


def _start(
    guard_fd: int, supervisor_pidfd: int, preload: Sequence[str]
) -> tuple[subprocess.Popen[bytes], socket.socket, int]:
    """Start the process; return it, our end of the link and the read end of its output."""
    with contextlib.ExitStack() as on_error, contextlib.ExitStack() as always:
        ours, theirs = packet_pair()
        on_error.callback(ours.close)
        always.callback(theirs.close)
        try:
            out_r, out_w = os.pipe()
        except OSError as error:
            raise exhausted(error, "the zygote's output pipe") from error
        on_error.callback(os.close, out_r)
        always.callback(os.close, out_w)
        popen = _popen([theirs.fileno(), guard_fd, supervisor_pidfd], preload, out_w)
        on_error.pop_all()
    return popen, ours, out_r


def _popen(fds: list[int], preload: Sequence[str], output_fd: int) -> subprocess.Popen[bytes]:
    if not sys.executable:
        raise BootError("sys.executable is empty: there is no Python to start the zygote with")
    path = [os.path.abspath(entry) for entry in sys.path]  # noqa: PTH100 (keeps symbolic links)
    environment = {**os.environ, _PATH: "\n".join([*path, _PACKAGE_PARENT])}
    # Until the zygote has its handlers, a Ctrl-C or a systemd stop must not hit it: a signal
    # mask passes through fork and exec.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        return subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *map(str, fds), *preload],
            stdin=subprocess.DEVNULL,
            stdout=output_fd,
            stderr=output_fd,
            cwd="/",
            env=environment,
            pass_fds=[fd for fd in fds if fd >= 0],
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _spill(data: bytes) -> int:
    """Put a message that no packet holds into an anonymous file; its descriptor."""
    try:
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("actorserve-message", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
    except OSError as error:
        raise exhausted(error, f"a spawn message of {len(data)} bytes") from error
    return fd


def _status(returncode: int | None) -> int | None:
    if returncode is None:
        return None
    return -returncode if returncode < 0 else returncode << 8
