# SPDX-License-Identifier: Apache-2.0
"""Tests of the doorbell, as an eventfd and as the pipe that stands in for one."""

from __future__ import annotations

import os
import socket
import time

import pytest

from actorserve.errors import ProtocolError
from actorserve.shm.doorbell import Doorbell, wait_for


@pytest.fixture(params=["eventfd", "pipe"])
def bell(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Make a doorbell of each kind."""
    if request.param == "pipe":
        monkeypatch.delattr(os, "eventfd", raising=False)
    elif not hasattr(os, "eventfd"):
        pytest.skip("this Python has no os.eventfd")
    bell = Doorbell.create()
    yield bell
    bell.close()


def _is_rung(bell: Doorbell) -> bool:
    return wait_for([bell.fileno()], [], 0.0) == {bell.fileno()}


def test_ring_makes_it_readable_until_cleared(bell: Doorbell) -> None:
    """The descriptor is readable from the ring to the clear and not otherwise."""
    assert not _is_rung(bell)
    bell.ring()
    assert _is_rung(bell)
    assert _is_rung(bell)
    bell.clear()
    assert not _is_rung(bell)


def test_one_clear_takes_every_ring(bell: Doorbell) -> None:
    """Rings add up, so that a consumer wakes once for many."""
    for _ in range(100):
        bell.ring()
    bell.clear()
    assert not _is_rung(bell)


def test_clear_of_a_silent_bell_does_nothing(bell: Doorbell) -> None:
    """Clearing without a ring neither blocks nor raises."""
    bell.clear()
    assert not _is_rung(bell)


def test_ringing_never_blocks(bell: Doorbell) -> None:
    """A bell that nobody clears can be rung more often than its buffer holds."""
    for _ in range(20_000):
        bell.ring()
    assert _is_rung(bell)


def test_peer_that_attaches_rings_the_same_bell(bell: Doorbell, fork) -> None:
    """Descriptors that travelled ring the bell they came from."""

    def peer() -> None:
        theirs = Doorbell.attach([os.dup(fd) for fd in bell.fds])
        theirs.ring()
        theirs.close()

    assert fork(peer).wait() == 0
    assert _is_rung(bell)


def test_attached_descriptors_are_made_safe(bell: Doorbell) -> None:
    """Received descriptors become close-on-exec, which a receive does not make them."""
    fds = [os.dup(fd) for fd in bell.fds]
    for fd in fds:
        os.set_inheritable(fd, True)
    attached = Doorbell.attach(fds)
    assert [os.get_inheritable(fd) for fd in attached.fds] == [False] * len(fds)
    attached.close()


@pytest.mark.parametrize("count", [0, 3])
def test_attach_refuses_a_wrong_number_of_descriptors(count: int) -> None:
    """Zero or three descriptors are no bell, and those that came are closed."""
    fds = [os.dup(0) for _ in range(count)]
    with pytest.raises(ProtocolError, match=f"not {count}"):
        Doorbell.attach(fds)


def test_attach_refuses_a_descriptor_that_is_not_open() -> None:
    """A closed descriptor is the peer's lie and not an OSError."""
    fd = os.dup(0)
    os.close(fd)
    with pytest.raises(ProtocolError, match="broken"):
        Doorbell.attach([fd])


def test_close_twice_is_harmless(bell: Doorbell) -> None:
    """The second close leaves descriptors alone that others have got meanwhile."""
    numbers = bell.fds
    bell.close()
    reader, writer = os.pipe()
    bell.close()
    assert bell.fds == ()
    assert {reader, writer} & set(numbers)
    os.fstat(reader)
    os.fstat(writer)
    os.close(reader)
    os.close(writer)


def test_wait_ends_at_its_deadline(bell: Doorbell) -> None:
    """A wait for nothing returns the empty set, not before its time."""
    started = time.monotonic()
    assert wait_for([bell.fileno()], [], 0.02) == set()
    assert time.monotonic() - started >= 0.019


def test_wait_ignores_what_can_be_read_on_a_hangup_descriptor(bell: Doorbell) -> None:
    """A message on the boot socket does not wake a stub that waits for work; its end does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.send(b"unread")
    assert wait_for([bell.fileno()], [ours.fileno()], 0.01) == set()
    theirs.close()
    assert wait_for([bell.fileno()], [ours.fileno()], 10.0) == {ours.fileno()}
    bell.ring()
    assert wait_for([bell.fileno()], [ours.fileno()], 10.0) == {ours.fileno(), bell.fileno()}
    ours.close()


def test_wait_sees_a_peer_that_died_with_mail_unread() -> None:
    """The kernel says ECONNRESET instead of end of file then; it is a hang-up too."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.send(b"never read")
    theirs.close()
    assert wait_for([], [ours.fileno()], 10.0) == {ours.fileno()}
    ours.close()


def test_wait_on_a_closed_descriptor_is_an_error() -> None:
    """A descriptor that is not open would otherwise spin its caller."""
    fd = os.dup(0)
    os.close(fd)
    with pytest.raises(OSError, match="not open"):
        wait_for([fd], [], 1.0)
