# SPDX-License-Identifier: Apache-2.0
"""The zygote: a warm interpreter that forks every child of one Spawner.

    python -c "… from actorserve.process.zygote import main; main()" LINK GUARD PIDFD [MODULE …]

It has imported numpy, msgspec and the modules named, runs one Python thread in a session of its
own, and holds no state that its death could lose: its children serve on, and the Spawner starts
another. What holds here:

* A child lives only when the supervisor knows it: it waits at its boot socket until the supervisor
  has its pid and pidfd (child.py), so a zygote that dies in between leaves nobody behind.
* The pidfd of a child is opened before the child can be reaped, and its group is killed before it
  is reaped, so that neither can ever name a stranger.
* When the link ends or the supervisor's pidfd fires, all children and their groups are killed at
  once, dead ones' groups too. While it imports, which may take any time, the guard kills the
  zygote; afterwards it must live to do this, so the guard only continues it if it was stopped.

What is imported here, every child has at once; `process.boot` is imported for them alone.
"""

from __future__ import annotations

import errno
import faulthandler
import gc
import importlib
import os
import select
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from actorserve import fault
from actorserve.fault import fault_point
from actorserve.process import boot, child, guard, pidfd
from actorserve.process.packet import Packet, PeerGone, close_all, receive_packet, send_packet
from actorserve.wire.boot import (
    ChildExited,
    ChildSpawned,
    KillChild,
    SpawnChild,
    SpawnFailed,
    Spilled,
    ZygoteUp,
    decode_to_zygote,
)
from actorserve.wire.codec import encode
from actorserve.wire.messages import Message

FOR_CHILDREN = (boot,)

SPAWN_FDS = 3
"""The descriptors of SpawnChild: boot socket, stdout, stderr."""


def main() -> NoReturn:
    """Run the zygote of the arguments; in each child, run that child. Never returns."""
    child.catch_stop_signals()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a host that ignores it would cost us statuses
    link_fd, guard_fd, supervisor_pidfd = (int(number) for number in sys.argv[1:4])
    for fd in (link_fd, guard_fd, supervisor_pidfd):
        if fd >= 0:
            os.set_inheritable(fd, False)
    guards = guard.arm(guard_fd, whole_group=False)
    child.show_name("actor-zygote")
    faulthandler.enable(2, all_threads=True)
    child.switch_off_core_dumps()
    fault.arm(os.environ.get(fault.VARIABLE))
    failures = _import_all(("numpy.random", *sys.argv[4:]))
    fault_point("zygote.imported")
    link = socket.socket(fileno=link_fd)
    zygote = Zygote(link, guards, guard_fd, supervisor_pidfd)
    guard.only_wake(guards)
    importlib.invalidate_caches()  # its first call imports modules, better here than in children
    gc.collect()
    gc.freeze()  # else the collector of each child would touch, and so copy, every page
    child.run_forked(zygote.serve(failures))


def _import_all(modules: Sequence[str]) -> list[str]:
    """Import what can be imported; a module that cannot will fail in the child that needs it."""
    failures = []
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            failures.append(f"{module}: {type(error).__name__}: {error}")
    return failures


class _Kid(NamedTuple):
    number: int
    pid: int


class Zygote:
    """The loop over the link, the supervisor's pidfd and the children's pidfds."""

    def __init__(
        self, link: socket.socket, guards: list[int], guard_fd: int, supervisor_pidfd: int
    ) -> None:
        link.setblocking(False)
        self._link = link
        self._guards = guards
        self._guard_fd = guard_fd
        self._supervisor_pidfd = supervisor_pidfd
        self._kids: dict[int, _Kid] = {}  # by pidfd
        self._epoll = select.epoll()
        self._epoll.register(link.fileno(), select.EPOLLIN)
        if supervisor_pidfd >= 0:
            self._epoll.register(supervisor_pidfd, select.EPOLLIN)

    def serve(self, failures: list[str]) -> child.Birth:
        """Serve until the end; returns only in a forked child, with what that child is to be."""
        self._send(ZygoteUp(os.getpid(), failures))
        while True:
            for fd, _ in self._epoll.poll():
                if fd == self._link.fileno():
                    birth = self._on_link()
                    if birth is not None:
                        return birth
                elif fd == self._supervisor_pidfd:
                    self._end()
                elif fd in self._kids:
                    self._on_death(fd)

    # --- the link ---

    def _on_link(self) -> child.Birth | None:
        """Take one message; the result is not None in a forked child only."""
        try:
            packet = receive_packet(self._link)
        except PeerGone:
            self._end()
        if packet is None:
            return None
        message = decode_to_zygote(packet.data)
        if isinstance(message, Spilled) and packet.fds:
            message = decode_to_zygote(_unspilled(packet.fds.pop(0), message.nbytes))
        if isinstance(message, SpawnChild):
            return self._on_spawn(message, packet)
        if isinstance(message, KillChild):
            self._kill([kid for kid in self._kids.values() if kid.number == message.number])
        close_all(packet.fds)
        return None

    def _on_spawn(self, order: SpawnChild, packet: Packet) -> child.Birth | None:
        try:
            if packet.lost_fds or len(packet.fds) != SPAWN_FDS:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            if self._fork(order.number):
                close_all(packet.fds)
                return None
        except OSError as error:
            close_all(packet.fds)
            self._send(SpawnFailed(order.number, error.errno or 0, str(error.strerror)))
            return None
        boot_fd, stdout_fd, stderr_fd = packet.fds
        return child.Birth(
            *(order.name, order.entry, order.python),
            *(order.environment, order.cwd, order.sys_path),
            *(boot_fd, stdout_fd, stderr_fd, self._guard_fd, self._supervisor_pidfd),
        )

    def _send(self, message: Message, fds: Sequence[int] = ()) -> None:
        try:
            while not send_packet(self._link, encode(message), fds):
                # Only a supervisor that stands still lets the queue fill; its end wakes us too.
                poll = select.poll()
                poll.register(self._link.fileno(), select.POLLOUT)
                poll.poll()
        except PeerGone:
            self._end()

    # --- children ---

    def _fork(self, number: int) -> int:
        """Fork; the child's pid, and 0 in the child. Raises OSError with nothing left behind."""
        pid = _fork_quietly()
        if pid == 0:
            self._let_go()
            return 0
        fault_point("zygote.forked")
        self._report_birth(number, pid)
        fault_point("zygote.reported")
        return pid

    def _report_birth(self, number: int, pid: int) -> None:
        try:
            kid_pidfd = pidfd.open_pidfd(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        self._kids[kid_pidfd] = _Kid(number, pid)
        self._epoll.register(kid_pidfd, select.EPOLLIN)
        self._send(ChildSpawned(number, pid), (kid_pidfd,))

    def _let_go(self) -> None:
        """In the child: close all that is the zygote's."""
        try:
            self._link.close()
            self._epoll.close()
            close_all((*self._kids, *self._guards))
            self._kids.clear()
        except BaseException:  # whatever it is, this process must not go on as a second zygote
            traceback.print_exc()
            os._exit(1)

    def _on_death(self, kid_pidfd: int) -> None:
        kid = self._kids.pop(kid_pidfd)
        self._epoll.unregister(kid_pidfd)
        self._kill([kid])
        os.close(kid_pidfd)
        _, status = os.waitpid(kid.pid, 0)
        self._send(ChildExited(kid.number, status))

    def _kill(self, kids: Sequence[_Kid]) -> None:
        """Kill children that are not reaped yet, and their groups."""
        for kid in kids:
            for kill in (os.killpg, os.kill):  # a child that was just forked leads no group yet
                try:
                    kill(kid.pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    pass

    def _end(self) -> NoReturn:
        self._kill(list(self._kids.values()))
        os._exit(0)


def _unspilled(fd: int, nbytes: int) -> bytes:
    with open(fd, "rb") as file:
        return os.pread(file.fileno(), nbytes, 0)


def _fork_quietly() -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python 3.12 and later warn of other threads; those of BLAS mind forks by themselves.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()
