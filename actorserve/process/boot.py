# SPDX-License-Identifier: Apache-2.0
"""The boot socket: the one road between a supervisor and its child that carries descriptors.

A child's entry function gets exactly one argument, its `BootSocket`, and finds in it all that the
spawn gave it: its name, the road to the supervisor, and what to poll on to learn that the
supervisor is gone (`watch_fds()`: the socket itself, and the supervisor's pidfd where there is
one, because a process that the supervisor's host forked holds sockets open but no process alive).

The socket never blocks a loop: every wait has a time. In a process that its owner forks
(multiprocessing in a model, os.fork in an embedding app) every boot socket is severed: closed,
with every later call a PeerGone, so that it neither answers for its parent nor keeps the peer
from seeing its parent's death.
"""

from __future__ import annotations

import os
import select
import socket
import weakref
from collections.abc import Sequence

import msgspec

from actorserve.clock import monotonic_s, remaining_s
from actorserve.errors import BootError, DeadlineExceeded, ResourceExhausted
from actorserve.process.child import GO
from actorserve.process.packet import (
    Packet,
    PeerGone,
    close_all,
    packet_pair,
    receive_packet,
    send_packet,
)
from actorserve.wire.boot import FromBootSocket, decode_from_boot_socket
from actorserve.wire.codec import encode
from actorserve.wire.messages import BootFailed, Message, OnBootSocket

__all__ = ["BootSocket", "BootSocketStats", "PeerGone"]

Received = tuple[OnBootSocket, list[int]]


class BootSocketStats(msgspec.Struct, frozen=True):
    """Messages and descriptors that passed one end."""

    sent: int
    received: int
    fds_sent: int
    fds_received: int


class BootSocket:
    """One end. At most one thread sends and one receives at a time; callers lock.

    `name` is the instance's name and `supervisor_pidfd` readable once the supervisor is dead;
    the supervisor's own end has neither.
    """

    def __init__(
        self, sock: socket.socket, *, name: str = "", supervisor_pidfd: int | None = None
    ) -> None:
        sock.setblocking(False)
        self.name = name
        self.supervisor_pidfd = supervisor_pidfd
        self._sock = sock
        self._sent = self._received = self._fds_sent = self._fds_received = 0
        _open_sockets.add(self)

    @classmethod
    def pair(cls, name: str = "") -> tuple[BootSocket, socket.socket]:
        """Return the supervisor's end and the plain socket that the child gets."""
        ours, theirs = packet_pair()
        return cls(ours, name=name), theirs

    def admit(self) -> None:
        """Let the child at the other end start: the supervisor's first packet, once."""
        try:
            send_packet(self._living(), GO)
        except PeerGone:
            pass  # it died already; its pidfd tells

    def send(self, message: Message, fds: Sequence[int] = (), timeout_s: float = 0.0) -> None:
        """Send one message with copies of `fds`; the caller keeps its own.

        Wait up to `timeout_s` seconds for room. Raise ResourceExhausted when there is none (the
        peer does not read), PeerGone, or TooLarge for more than 64 KiB or 64 descriptors.
        """
        data = encode(message)
        deadline_s = monotonic_s() + timeout_s
        while not send_packet(self._living(), data, fds):
            if not self._wait(select.POLLOUT, deadline_s):
                raise ResourceExhausted(
                    f"the boot socket of {self.name or 'this process'} is full: "
                    f"its peer took nothing for {timeout_s:g} s"
                )
        self._sent += 1
        self._fds_sent += len(fds)

    def recv(self, timeout_s: float | None) -> Received:
        """Return the next message and its descriptors, which the caller owns from here on.

        Wait up to `timeout_s` seconds (None: as long as it takes), then DeadlineExceeded. The
        death of the peer ends the wait at once. See `recv_nowait` for what else is raised.
        """
        deadline_s = None if timeout_s is None else monotonic_s() + timeout_s
        while True:
            received = self.recv_nowait()
            if received is not None:
                return received
            if not self._wait(select.POLLIN, deadline_s):
                raise DeadlineExceeded(f"nothing came over the boot socket in {timeout_s:g} s")

    def recv_nowait(self) -> Received | None:
        """Return the next message and its descriptors, or None.

        Raise PeerGone at the end, ProtocolError for bytes that are no message, BootError with
        its reason when the child says that it cannot start, ResourceExhausted when this process
        had no room for the descriptors.
        """
        packet = receive_packet(self._living())
        if packet is None:
            return None
        message = _decoded(packet)
        if isinstance(message, BootFailed):
            close_all(packet.fds)
            raise BootError("\n".join(filter(None, (message.reason, message.traceback))))
        if packet.lost_fds:
            close_all(packet.fds)
            raise ResourceExhausted(
                f"descriptors that came with {type(message).__name__} were lost: "
                "this process has too many open files (ulimit -n)"
            )
        self._received += 1
        self._fds_received += len(packet.fds)
        return message, packet.fds

    def watch_fds(self) -> tuple[int, ...]:
        """What to poll on for the peer's death: POLLIN on the pidfd, POLLHUP on the socket.

        Readable input on the socket alone means a message; ask `is_peer_gone()`.
        """
        if self.supervisor_pidfd is None:
            return (self.fileno(),)
        return self.fileno(), self.supervisor_pidfd

    def is_peer_gone(self) -> bool:
        """Whether the peer is dead or closed its end; unread messages may still be there."""
        if self._sock.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(self._sock.fileno(), select.POLLRDHUP)
        if self.supervisor_pidfd is not None:
            poll.register(self.supervisor_pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def fileno(self) -> int:
        """The descriptor, for a loop's `add_reader`; PeerGone after `close()`."""
        return self._living().fileno()

    def close(self) -> None:
        """Hang up; the peer sees the end of file. Idempotent."""
        _open_sockets.discard(self)
        self._sock.close()
        if self.supervisor_pidfd is not None:
            os.close(self.supervisor_pidfd)
            self.supervisor_pidfd = None

    def stats(self) -> BootSocketStats:
        """Count what passed here."""
        return BootSocketStats(self._sent, self._received, self._fds_sent, self._fds_received)

    def _living(self) -> socket.socket:
        if self._sock.fileno() < 0:
            raise PeerGone("this end of the boot socket is closed")
        return self._sock

    def _wait(self, event: int, deadline_s: float | None) -> bool:
        """Sleep until the socket may be worth another try; False once the deadline has passed."""
        poll = select.poll()
        poll.register(self.fileno(), event)
        if self.supervisor_pidfd is not None:
            poll.register(self.supervisor_pidfd, select.POLLIN)
        left_s = remaining_s(deadline_s)
        ready = poll.poll(None if left_s is None else left_s * 1000)
        if any(fd == self.supervisor_pidfd for fd, _ in ready):
            raise PeerGone("the supervisor is gone")
        return bool(ready)


def _decoded(packet: Packet) -> FromBootSocket:
    try:
        return decode_from_boot_socket(packet.data)
    except BaseException:
        close_all(packet.fds)
        raise


_open_sockets: weakref.WeakSet[BootSocket] = weakref.WeakSet()


def _sever_all() -> None:
    for boot in list(_open_sockets):
        boot.close()


os.register_at_fork(after_in_child=_sever_all)
