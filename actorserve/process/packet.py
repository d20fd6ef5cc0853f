# SPDX-License-Identifier: Apache-2.0
"""One packet with its descriptors over an AF_UNIX SOCK_SEQPACKET socket.

`socket.send_fds` and `recv_fds` are not used: before Python 3.12 they ignore their flags, so that
received descriptors would leak into every program that the process starts (no CLOEXEC), and a
descriptor that got lost because this process has no room for it would go unnoticed.
"""

from __future__ import annotations

import array
import errno
import os
import socket
from collections.abc import Sequence
from typing import NamedTuple

from actorserve.errors import ProtocolError, ResourceExhausted, TooLarge, Unavailable
from actorserve.wire.boot import PACKET_BYTES

MAX_FDS = 64
_SOCKET_BUFFER_BYTES = 4 * PACKET_BYTES


class PeerGone(Unavailable):
    """The process at the other end is gone, or closed its end."""


class Packet(NamedTuple):
    """What one receive yields. `lost_fds`: descriptors were sent that did not fit in here."""

    data: bytes
    fds: list[int]
    lost_fds: bool


def packet_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected, non-blocking ends; raise ResourceExhausted without descriptors."""
    try:
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    except OSError as error:
        raise exhausted(error, "a socket pair") from error
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
    return pair


def send_packet(sock: socket.socket, data: bytes, fds: Sequence[int] = ()) -> bool:
    """Send one packet; False when the peer's queue is full.

    Raise PeerGone when nobody will ever read it, TooLarge for more than a packet holds, and
    ResourceExhausted when too many descriptors are on their way already.
    """
    if len(data) > PACKET_BYTES or len(fds) > MAX_FDS:
        raise TooLarge(
            f"a packet of {len(data)} bytes and {len(fds)} descriptors; "
            f"at most {PACKET_BYTES} and {MAX_FDS} fit"
        )
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    try:
        sock.sendmsg([data], rights, socket.MSG_NOSIGNAL)
    except BlockingIOError:
        return False
    except (ConnectionError, BrokenPipeError):
        raise PeerGone("the peer closed its end of the socket") from None
    except OSError as error:
        if error.errno in (errno.EMSGSIZE, errno.ENOBUFS, errno.ETOOMANYREFS, errno.ENOMEM):
            raise exhausted(error, f"a packet of {len(data)} bytes") from error
        raise
    return True


def receive_packet(sock: socket.socket) -> Packet | None:
    """Take one packet off a non-blocking socket, None when there is none.

    The end of file raises PeerGone, after the last packet. A packet that was cut raises
    ProtocolError. Descriptors come close-on-exec and belong to the caller.
    """
    try:
        data, rights, flags = _receive(sock)
    except BlockingIOError:
        return None
    fds = _descriptors(rights)
    if flags & socket.MSG_TRUNC:
        close_all(fds)
        raise ProtocolError(f"a packet of more than {PACKET_BYTES} bytes")
    if not data:
        close_all(fds)
        raise PeerGone("the peer is gone (end of file)")
    return Packet(data, fds, bool(flags & socket.MSG_CTRUNC))


def _receive(sock: socket.socket) -> tuple[bytes, list[tuple[int, int, bytes]], int]:
    room = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)
    try:
        return sock.recvmsg(PACKET_BYTES, room, socket.MSG_CMSG_CLOEXEC)[:3]
    except ConnectionError:
        # A peer that ended with unread packets resets the connection. The kernel says so once,
        # before what the peer had sent, which is still there.
        return sock.recvmsg(PACKET_BYTES, room, socket.MSG_CMSG_CLOEXEC)[:3]


def _descriptors(rights: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in rights:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds.tolist()


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors, whatever state they are in."""
    for fd in fds:
        try:
            os.close(fd)
        except OSError:
            pass


def exhausted(error: OSError, what: str) -> ResourceExhausted:
    """Say what could not be had, and which limit to look at."""
    hint = {
        errno.EMFILE: "; raise this process's limit of open files (ulimit -n)",
        errno.ENFILE: "; the machine's table of open files is full",
    }.get(error.errno or 0, "")
    return ResourceExhausted(f"no room for {what}: {error.strerror}{hint}")
