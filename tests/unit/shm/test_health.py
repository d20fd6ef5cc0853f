# SPDX-License-Identifier: Apache-2.0
"""Tests of the health page: two processes, single-writer words, no question asked."""

from __future__ import annotations

import os

import pytest

from actorserve.errors import ProtocolError
from actorserve.shm.health import HealthPage, HealthStats
from actorserve.shm.segment import Segment


@pytest.fixture
def page():
    """Make the supervisor's page."""
    page = HealthPage.create(cancel_slots=16)
    yield page
    page.close()


def _attach(page: HealthPage) -> HealthPage:
    return HealthPage.attach(Segment.attach(os.dup(page.segment.fd), page.segment.nbytes))


def test_fresh_page_says_that_nothing_happened(page: HealthPage) -> None:
    """Before the stub writes, everything is 0."""
    assert page.stats() == HealthStats(beats=0, beat_ns=0, phase=0, batch=0, batch_start_ns=0)


def test_supervisor_reads_what_the_stub_writes(page: HealthPage, fork) -> None:
    """Beats, phase and batch come over from another process."""

    def stub() -> None:
        theirs = _attach(page)
        theirs.enter_phase(4)
        for now_ns in (10, 20, 30):
            theirs.beat(now_ns)
        theirs.begin_batch(7, 25)

    assert fork(stub).wait() == 0
    assert page.stats() == HealthStats(beats=3, beat_ns=30, phase=4, batch=7, batch_start_ns=25)


def test_batch_ends(page: HealthPage) -> None:
    """Between batches nothing is in execution."""
    stub = _attach(page)
    stub.begin_batch(1, 100)
    assert page.batch() == (1, 100)
    stub.end_batch()
    assert page.batch() == (0, 0)
    stub.close()


def test_batch_and_its_start_belong_together(page: HealthPage, fork) -> None:
    """A reader never sees the number of one batch with the start of another."""

    def stub() -> None:
        theirs = _attach(page)
        for batch in range(1, 100_000):
            theirs.begin_batch(batch, batch * 1000)
        theirs.end_batch()

    child = fork(stub)
    seen = 0
    while os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        batch, start_ns = page.batch()
        assert start_ns == batch * 1000
        seen += batch > 0
    assert child.wait() == 0
    assert seen


def test_stub_reads_cancellation_locally(page: HealthPage) -> None:
    """A cancelled request is seen by slot and id; the slot's next request is not cancelled."""
    stub = _attach(page)
    assert not stub.is_cancelled(5, 123)
    page.cancel(5, 123)
    assert stub.is_cancelled(5, 123)
    assert not stub.is_cancelled(5, 124)
    assert not stub.is_cancelled(4, 123)
    page.cancel(5, (1 << 63) - 1)
    assert stub.is_cancelled(5, (1 << 63) - 1)
    assert not stub.is_cancelled(5, 123)
    stub.close()


def test_no_request_has_the_id_zero(page: HealthPage) -> None:
    """An empty slot cancels nobody."""
    assert not page.is_cancelled(0, 0)


@pytest.mark.parametrize("slot", [-1, 16, 1 << 40])
def test_slots_outside_the_page_are_refused(page: HealthPage, slot: int) -> None:
    """A slot that is not there would be another word."""
    with pytest.raises(ValueError, match="0 to 15"):
        page.cancel(slot, 1)
    with pytest.raises(ValueError, match="0 to 15"):
        page.is_cancelled(slot, 1)


def test_every_slot_has_its_own_word(page: HealthPage) -> None:
    """Cancelling in all slots touches no other word of the page."""
    for slot in range(16):
        page.cancel(slot, slot + 1)
    assert all(page.is_cancelled(slot, slot + 1) for slot in range(16))
    assert page.stats() == HealthStats(beats=0, beat_ns=0, phase=0, batch=0, batch_start_ns=0)


def test_sizes_that_cannot_be_are_refused() -> None:
    """A page needs at least one slot and not millions."""
    for slots in (0, -1, 1 << 30):
        with pytest.raises(ValueError, match="slots"):
            HealthPage.create(slots)


@pytest.mark.parametrize(
    ("word", "value", "text"),
    [
        (0, 0, "no health page"),
        (0, 1 << 63, "no health page"),
        (1, 0, "cannot lie"),
        (1, 1000, "cannot lie"),
        (1, (1 << 64) - 1, "cannot lie"),
    ],
)
def test_attach_refuses_lies(page: HealthPage, word: int, value: int, text: str) -> None:
    """A wrong magic or size is refused before any other word is read."""
    page.segment.buffer.cast("Q")[word] = value
    segment = Segment.attach(os.dup(page.segment.fd))
    with pytest.raises(ProtocolError, match=text):
        HealthPage.attach(segment)
    segment.close()


def test_attach_refuses_a_segment_that_is_too_small() -> None:
    """A file of a few bytes holds no page."""
    fd = os.memfd_create("small")
    os.ftruncate(fd, 24)
    segment = Segment.attach(fd)
    with pytest.raises(ProtocolError, match="24 bytes"):
        HealthPage.attach(segment)
    segment.close()


def test_closed_page_raises(page: HealthPage) -> None:
    """After close, twice, no word can be touched."""
    stub = _attach(page)
    stub.close()
    stub.close()
    with pytest.raises(ValueError):
        stub.beat(1)


# --- credit --------------------------------------------------------------------------------------


def test_granted_credit_is_seen_by_the_stub(page: HealthPage, fork) -> None:
    """Each slot has its own total, and nobody waits at first."""
    assert not page.grant(0, 11, 64)
    assert not page.grant(15, 12, 7)

    def stub() -> None:
        theirs = _attach(page)
        assert [theirs.granted(slot) for slot in (0, 1, 15)] == [64, 0, 7]

    assert fork(stub).wait() == 0


def test_a_grant_says_whether_the_sender_waits(page: HealthPage) -> None:
    """From its announcement until it takes that back; of this request only."""
    stub = _attach(page)
    page.grant(3, 11, 2)
    assert stub.want_credit(3, 11) == 2
    assert page.grant(3, 11, 4)
    assert page.grant(3, 11, 6)
    assert stub.granted(3) == 6
    stub.stop_wanting_credit(3)
    assert not page.grant(3, 11, 8)
    stub.want_credit(3, 11)
    assert not page.grant(3, 12, 1), "another request has the slot now"
    assert stub.want_credit(3, 12) == 1
    assert page.grant(3, 12, 2)
    stub.close()


def test_a_grant_and_an_announcement_never_miss_each_other(page: HealthPage, fork) -> None:
    """Whoever is later sees the other's word: a sender that sleeps is always told."""
    count = 20_000
    told, told_by = os.pipe()

    def stub() -> None:
        theirs = _attach(page)
        gone = 0
        while gone < count:
            if theirs.granted(5) > gone or theirs.want_credit(5, 9) > gone:
                gone += 1
                continue
            os.read(told, 1)
        theirs.stop_wanting_credit(5)

    child = fork(stub)
    for total in range(1, count + 1):
        if page.grant(5, 9, total):
            os.write(told_by, b"x")
    assert child.wait() == 0
    os.close(told)
    os.close(told_by)


@pytest.mark.parametrize("slot", [-1, 16])
def test_slots_outside_the_page_have_no_credit(page: HealthPage, slot: int) -> None:
    """They are refused by name."""
    for use in (lambda: page.grant(slot, 1, 1), lambda: page.want_credit(slot, 1)):
        with pytest.raises(ValueError, match="a cancel slot is 0 to 15"):
            use()
