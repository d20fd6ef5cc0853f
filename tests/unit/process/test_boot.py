# SPDX-License-Identifier: Apache-2.0
"""The boot socket: messages with descriptors, ends, limits and forks."""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import threading

import pytest

from actorserve.errors import (
    BootError,
    DeadlineExceeded,
    ProtocolError,
    ResourceExhausted,
    TooLarge,
)
from actorserve.process.boot import BootSocket, PeerGone
from actorserve.wire.codec import encode
from actorserve.wire.messages import Attached, BootFailed, MapSegment

MESSAGE = MapSegment(arena=1, segment=2, nbytes=3)


@pytest.fixture
def pair():
    """A supervisor's and a child's end."""
    ours, theirs = BootSocket.pair("probe_0_0")
    child = BootSocket(theirs, name="probe_0_0")
    yield ours, child
    ours.close()
    child.close()


def test_message_and_descriptors_arrive_together(pair):
    """What was sent with a message comes with it, close-on-exec, and the sender keeps its own."""
    ours, child = pair
    read_fd, write_fd = os.pipe()
    ours.send(MESSAGE, [write_fd])
    message, fds = child.recv(1)
    assert message == MESSAGE
    assert not os.get_inheritable(fds[0])
    os.write(fds[0], b"a")
    os.write(write_fd, b"b")
    assert os.read(read_fd, 9) == b"ab"
    for fd in (read_fd, write_fd, *fds):
        os.close(fd)
    assert ours.stats().fds_sent == child.stats().fds_received == 1


def test_recv_waits_no_longer_than_told(pair):
    """Silence ends in DeadlineExceeded, and recv_nowait says None."""
    assert pair[1].recv_nowait() is None
    with pytest.raises(DeadlineExceeded):
        pair[1].recv(0.01)


def test_recv_wakes_up_for_a_message(pair):
    """A message that comes during the wait ends it."""
    ours, child = pair
    timer = threading.Timer(0.05, ours.send, (MESSAGE,))
    timer.start()
    assert child.recv(10)[0] == MESSAGE
    timer.join()


def test_end_of_file_comes_after_the_last_message(pair):
    """What was sent before the peer hung up is read first."""
    ours, child = pair
    ours.send(MESSAGE)
    assert not child.is_peer_gone()
    ours.close()
    assert child.is_peer_gone()
    assert child.recv(1)[0] == MESSAGE
    for _ in range(2):
        with pytest.raises(PeerGone):
            child.recv(1)


def test_reset_counts_as_end_of_file_and_loses_nothing(pair):
    """A peer that ends with unread messages resets the connection; its last words still come."""
    ours, child = pair
    ours.send(MESSAGE)
    child.send(MESSAGE)
    child.close()
    assert ours.recv(1)[0] == MESSAGE
    with pytest.raises(PeerGone):
        ours.recv(1)
    with pytest.raises(PeerGone):
        ours.send(MESSAGE)


def test_full_socket_does_not_block(pair):
    """A peer that does not read costs an error that says so, and messages flow again later."""
    ours, child = pair
    with pytest.raises(ResourceExhausted, match=r"probe_0_0 is full"):
        for _ in range(100_000):
            ours.send(MESSAGE)
    while child.recv_nowait() is not None:
        pass
    ours.send(MESSAGE)
    assert child.recv(1)[0] == MESSAGE


def test_oversized_message_is_refused(pair):
    """A message over 64 KiB never leaves."""
    with pytest.raises(TooLarge, match="65536"):
        pair[0].send(Attached(protocol=1, python="x" * 70_000, pid=1))


@pytest.mark.parametrize("data", [b"\xff", b"garbage", b"\x91\x20", encode(MESSAGE)[:-1]])
def test_garbage_is_a_protocol_error_and_leaks_nothing(pair, data):
    """Bytes that are no message raise ProtocolError; descriptors that came along are closed."""
    ours, child = pair
    read_fd, write_fd = os.pipe()
    socket.send_fds(ours._sock, [data], [write_fd])
    os.close(write_fd)
    with pytest.raises(ProtocolError):
        child.recv(1)
    assert os.read(read_fd, 1) == b""
    os.close(read_fd)


def test_refusal_of_the_child_is_raised(pair):
    """BootFailed from the child becomes a BootError with its reason and traceback."""
    ours, child = pair
    child.send(BootFailed(reason="no numpy here", traceback="Traceback: ..."))
    with pytest.raises(BootError, match=r"no numpy here\nTraceback"):
        ours.recv(1)


def test_descriptors_without_room_are_an_error(pair):
    """A process at its limit of open files learns that descriptors got lost."""
    ours, child = pair
    ours.send(MESSAGE, [0, 0, 0])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        with pytest.raises(ResourceExhausted, match="ulimit -n"):
            child.recv(1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_closed_end_is_gone_for_its_owner_too(pair):
    """After close, everything but close and stats raises PeerGone."""
    child = pair[1]
    child.close()
    child.close()
    assert child.is_peer_gone()
    assert child.stats().received == 0
    for call in (lambda: child.send(MESSAGE), lambda: child.recv(1), child.fileno):
        with pytest.raises(PeerGone):
            call()


def test_death_of_the_supervisor_ends_a_wait(kit):
    """Its pidfd ends a wait even while something else keeps the socket open."""
    ours, theirs = BootSocket.pair()
    pid = kit.forked(lambda: select.select([], [], [], 0.05))
    child = BootSocket(theirs, supervisor_pidfd=os.pidfd_open(pid))
    assert len(child.watch_fds()) == 2
    with pytest.raises(PeerGone, match="supervisor"):
        child.recv(10)
    assert child.is_peer_gone()
    os.waitpid(pid, 0)
    ours.close()
    child.close()
    assert child.supervisor_pidfd is None


def test_fork_severs_the_socket(pair, kit):
    """A forked process cannot use its parent's boot socket, nor keep it open."""
    ours, child = pair

    def body() -> None:
        with pytest.raises(PeerGone):
            child.send(MESSAGE)
        signal.pause()

    pid = kit.forked(body)
    ours.send(MESSAGE)
    assert child.recv(1)[0] == MESSAGE
    child.close()
    poll = select.poll()
    poll.register(ours, select.POLLRDHUP)
    assert poll.poll(5000), "the fork keeps the socket open"
    os.kill(pid, 9)
    assert os.waitpid(pid, 0)[1] == 9
