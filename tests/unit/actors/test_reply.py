# SPDX-License-Identifier: Apache-2.0
"""The way back of one request in a stub, with a channel's end that only notes: no process."""

from __future__ import annotations

import gc
import threading

import pytest

from actorserve.actors.replies import thread_errors
from actorserve.triton.error import TritonModelException
from tests.unit.actors.reply_world import CLOSED, FINAL, World, answer


@pytest.fixture
def world() -> World:
    """Return the replies of a decoupled model."""
    return World()


def test_responses_go_in_order_and_the_end_is_the_last(world):
    """With the last response, or by itself."""
    first, second = world.reply(1), world.reply(2)
    sender = first.sender()
    for number in range(3):
        sender.send(answer(number))
    sender.send(flags=FINAL)
    second.sender().send(answer(9), FINAL)
    assert world.values == [0, 1, 2, [""], [9]]
    assert first.is_done
    assert second.is_done


def test_a_plain_model_s_first_response_is_the_end():
    """The bare end that may follow is not sent."""
    world = World(decoupled=False)
    reply = world.reply()
    sender = reply.sender()
    with pytest.raises(TritonModelException, match="before sending a response"):
        sender.send(flags=FINAL)
    sender.send(answer(4))
    assert reply.is_done
    sender.send(flags=FINAL)
    with pytest.raises(TritonModelException, match=CLOSED):
        sender.send(flags=FINAL)
    assert world.values == [[4]]


@pytest.mark.parametrize("decoupled", [True, False])
def test_the_batch_s_answer_closes_the_sender(decoupled):
    """Whether it was taken before or is afterwards."""
    world = World(decoupled=decoupled)
    for is_taken in (True, False):
        reply = world.reply()
        sender = reply.sender() if is_taken else None
        assert reply.answered()
        assert reply.is_done
        assert not reply.answered() or sender is None
        with pytest.raises(TritonModelException, match=CLOSED):
            (sender or reply.sender()).send(answer(1))
        assert not reply.fail("too late") or sender is None
    assert world.values == []


def test_a_failure_goes_with_the_batch_unless_there_is_a_sender(world):
    """Then it goes after what that has sent, and only where no end was given."""
    assert world.reply().fail("for the batch")
    reply = world.reply()
    sender = reply.sender()
    sender.send(answer(1))
    assert not reply.fail("for the stream")
    assert not reply.fail("again")
    assert world.values == [1, ["for the stream"]]
    with pytest.raises(TritonModelException, match=CLOSED):
        sender.send(answer(2))
    ended = world.reply(2)
    ended.sender().send(flags=FINAL)
    assert not ended.fail("too late")
    assert world.values[2:] == [[""]]


def test_finalizers_note_and_the_control_thread_ends(world):
    """One that had no sender, one that had, and one of a thread that failed."""
    reply = world.reply(1)
    reply.stay_open()
    del reply
    reply = world.reply(2)
    reply.sender().send(answer(3))
    del reply
    reply = world.reply(3)
    reply.stay_open()
    sender = reply.sender()
    del reply
    assert world.end.woken == 2
    thread_errors.text = "ValueError: mine"
    try:
        del sender
    finally:
        del thread_errors.text
    gc.collect()
    assert world.values == [3]
    world.replies.reap()
    dropped = "the response sender was dropped before the final response was sent"
    assert world.values[1:] == [
        ["execute returned None, and the request was dropped without a response sender"],
        [dropped],
        [f"{dropped}: ValueError: mine"],
    ]
    world.replies.reap()
    assert len(world.values) == 4


def test_what_has_its_end_leaves_nothing_to_finalize(world):
    """Nobody is woken for it."""
    world.reply().answered()
    world.reply().fail("x")
    world.reply().sender().send(flags=FINAL)
    assert world.end.woken == 0


def test_a_forked_child_sends_nothing(world):
    """It is told so, whatever locks its parent's threads held; its finalizers are silent."""
    reply = world.reply()
    sender = reply.sender()
    world.end.is_severed = True
    holder = threading.Thread(target=reply._sending.lock.acquire)
    holder.start()
    holder.join()
    for each in (sender, reply.sender()):
        with pytest.raises(TritonModelException, match="belongs to the process that forked"):
            each.send(answer(1))
    del reply, sender, each
    assert world.end.woken == 0
    assert world.values == []


def test_cancellation_is_read_from_the_page(world):
    """By the request's slot; without one it cannot be told."""
    assert world.reply(slot=7).is_cancelled()
    assert world.reply(slot=7).sender().is_cancelled()
    assert not world.reply(slot=1).is_cancelled()
    assert not world.reply(slot=-1).is_cancelled()


def test_what_is_disowned_ends_and_its_slot_is_not_looked_at(world):
    """What the model still sends goes nowhere, and it is cancelled for good."""
    kept, taken = world.reply(1), world.reply(2, slot=7)
    kept.stay_open()
    sender = taken.sender()
    sender.send(answer(1))
    world.grant(1, 2)
    world.replies.disowned([1, 2, 3])
    assert world.values == [1, ["the client is gone"], ["the client is gone"]]
    late = kept.sender()
    for each in (sender, late):
        each.send(answer(5))
        each.send(flags=FINAL)
        assert each.is_cancelled()
    world.end.page.is_cancelled = None  # type: ignore[assignment]
    assert kept.is_cancelled()
    del sender, late, kept, taken, each
    gc.collect()
    world.replies.reap()
    assert len(world.values) == 3


def test_what_has_ended_is_not_disowned_again(world):
    """The end that it has is on its way."""
    reply = world.reply(1)
    sender = reply.sender()
    sender.send(answer(1), FINAL)
    world.replies.disowned([1])
    assert world.values == [[1]]
