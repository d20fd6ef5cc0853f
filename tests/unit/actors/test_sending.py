# SPDX-License-Identifier: Apache-2.0
"""Credit of one sender: who waits, what is kept, and in which order it goes; no process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from actorserve.actors import sending
from actorserve.triton.error import TritonModelException
from actorserve.wire.messages import WireResponse
from tests.conftest import wait_until
from tests.unit.actors.reply_world import FINAL, World, answer


@pytest.fixture
def world() -> World:
    """Return the replies of a decoupled model."""
    return World()


class InThread(threading.Thread):
    """A function in a thread."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.function = function
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.function()
        except BaseException as error:
            self.error = error

    def finish(self) -> None:
        """Wait for its end."""
        self.join(20)
        assert not self.is_alive()


def waits(world: World, sent: int) -> None:
    """Wait until a sender waits, having sent so many."""
    wait_until(lambda: world.end.page.wanting and len(world.end.sent) == sent)


def test_a_thread_waits_for_credit(world):
    """And sends exactly as much as is granted."""
    world.end.page.total = 3
    sender = world.reply().sender()
    thread = InThread(lambda: [sender.send(answer(n)) for n in range(10)])
    waits(world, 3)
    world.grant(5)
    waits(world, 5)
    world.grant(100)
    thread.finish()
    assert world.values == list(range(10))
    assert world.end.page.wanting == 0


def test_threads_that_share_a_sender_wait_in_line(world):
    """The later one's response comes after the earlier one's; all go on together."""
    world.end.page.total = 0
    sender = world.reply().sender()
    threads = []
    for number in range(4):
        threads.append(InThread(lambda number=number: sender.send(answer(number))))
        wait_until(lambda: len(sender._reply._sending._waiting) == len(threads))
    world.grant(4)
    for thread in threads:
        thread.finish()
    assert world.values == [0, 1, 2, 3]


def test_the_end_needs_no_credit_but_its_turn(world):
    """A bare end goes at once; behind something that waits it waits too."""
    world.end.page.total = 0
    world.reply(1).sender().send(flags=FINAL)
    assert world.values == [[""]]
    reply = world.reply(2)
    sender = reply.sender()
    thread = InThread(lambda: (sender.send(answer(1)), sender.send(flags=FINAL)))
    waits(world, 1)
    assert not reply.is_done
    world.grant(1, 2)
    thread.finish()
    assert world.values == [[""], 1, [""]]
    assert reply.is_done


def test_a_failure_does_not_wait_for_a_sender_that_waits(world):
    """It takes its place in line, and the waiting thread goes on when the client reads."""
    world.end.page.total = 1
    reply = world.reply()
    sender = reply.sender()
    thread = InThread(lambda: [sender.send(answer(n)) for n in range(5)])
    waits(world, 1)
    reply.fail("in the middle")
    assert world.values == [0]
    assert not reply.is_done
    world.grant(2)
    thread.finish()
    assert world.values == [0, 1, ["in the middle"]]
    assert isinstance(thread.error, TritonModelException)


def test_on_a_thread_with_a_loop_responses_are_kept(world, monkeypatch):
    """Not without bound: beyond it the thread waits after all."""
    monkeypatch.setattr(sending, "MOST_KEPT", 10)
    world.end.page.total = 2
    sender = world.reply().sender()

    async def main(count: int) -> None:
        for number in range(count):
            sender.send(answer(number))

    asyncio.run(main(12))
    assert world.values == [0, 1]
    thread = InThread(lambda: asyncio.run(main(1)))
    wait_until(lambda: sender._reply._sending._waiting)
    world.grant(3)
    thread.finish()
    world.grant(100)
    assert world.values == [*range(12), 0]


def test_large_responses_are_kept_up_to_their_bytes(world, monkeypatch):
    """Their memory is taken, so a few are enough."""
    monkeypatch.setattr(sending, "MOST_KEPT_BYTES", 100_000)
    world.end.page.total = 0
    sender = world.reply().sender()

    async def main() -> None:
        for _ in range(3):
            sender.send(answer(1, nbytes=40_000))

    thread = InThread(lambda: asyncio.run(main()))
    wait_until(lambda: sender._reply._sending._waiting)
    assert world.end.placed == 3
    world.grant(3)
    thread.finish()
    assert len(world.end.sent) == 3


def test_kept_responses_go_before_the_end_that_a_finalizer_gives(world):
    """The sender was dropped, what it has kept was not."""
    world.end.page.total = 1

    async def main() -> None:
        sender = world.reply().sender()
        for number in range(3):
            sender.send(answer(number))

    asyncio.run(main())
    world.replies.reap()
    assert world.values == [0]
    world.grant(100)
    *numbers, (last,) = world.values
    assert numbers == [0, 1, 2]
    assert "was dropped" in last
    assert not world.replies._waiting


def test_credit_that_comes_while_somebody_sends_is_not_lost(world):
    """The control thread finds the lock taken, and whoever has it looks afterwards."""
    world.end.page.total = 0

    async def main() -> None:
        reply = world.reply()
        sender = reply.sender()
        sender.send(answer(1))
        with reply._sending.lock:
            granting = InThread(lambda: world.grant(5))
            granting.finish()
            assert world.values == []
        sender.send(answer(2))

    asyncio.run(main())
    assert world.values[:2] == [1, 2]


def test_a_slot_that_has_a_new_owner_is_left_alone(world):
    """The announcement is taken back before the end goes: then the slot may be another's."""
    world.end.page.total = 1

    async def main() -> None:
        sender = world.reply().sender()
        sender.send(answer(1))
        sender.send(answer(2))
        sender.send(answer(3), FINAL)

    asyncio.run(main())

    def reuse(response: WireResponse) -> None:
        if response.final:
            assert world.end.page.wanting == 0
            world.end.page.wanting = 99

    world.end.on_send = reuse
    world.grant(100)
    assert world.values == [1, 2, [3]]
    assert world.end.page.wanting == 99


def test_a_sending_within_a_sending_waits_for_its_turn(world):
    """As finalizers and signal handlers do it, on the same thread; nobody waits for himself."""
    world.end.page.total = 2
    reply = world.reply()
    sender = reply.sender()
    inner = iter([10, 11])

    def within(response: WireResponse) -> None:
        number = next(inner, None)
        if number is not None:
            sender.send(answer(number))

    world.end.on_send = within
    sender.send(answer(1))
    assert world.values == [1, 10]
    world.grant(100)
    assert world.values == [1, 10, 11]


def test_a_garbage_collection_within_a_sending_finalizes_another(world):
    """Its end is only noted."""
    others = [world.reply(2)]
    others[0].sender().send(answer(5))

    def collect(response: WireResponse) -> None:
        others.clear()

    world.end.on_send = collect
    world.reply().sender().send(flags=FINAL)
    assert world.end.woken == 1
    world.end.on_send = lambda response: None
    world.replies.reap()
    assert world.values[:2] == [5, [""]]
    assert "was dropped" in world.values[2][0]


class _GrantedInside:
    """A sender's lock, as if credit came each time that it has just been taken."""

    def __init__(self, lock: Any, grant: Callable[[], None]) -> None:
        self._lock = lock
        self._grant = grant
        self._is_owned = lock._is_owned
        self.acquire = lock.acquire
        self.release = lock.release

    def __enter__(self) -> None:
        self._lock.acquire()
        InThread(self._grant).finish()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@pytest.mark.parametrize("who", ["when_drained", "answered", "fail"])
def test_credit_that_finds_the_lock_held_is_used_by_its_holder(world, who):
    """Whoever brings it does not wait for the lock, so its holder has to look again."""
    world.end.page.total = 0
    reply = world.reply()
    sender = reply.sender()
    sending_of = reply._sending
    with sending_of.lock:
        place = sending_of.put(WireResponse(reply.wire.id, [], final=False))
    sending_of.leave(place)
    assert world.end.sent == []
    sending_of.is_over = who != "when_drained"
    sending_of.lock = _GrantedInside(sending_of.lock, lambda: world.grant(1000))
    if who == "when_drained":
        sending_of.when_drained(lambda: None)
    elif who == "answered":
        reply.answered()
    else:
        reply.fail("x")
    assert len(world.end.sent) == 1
    del sender
