# SPDX-License-Identifier: Apache-2.0
"""What a model's coroutines may wait for: a client that gives up, and one that reads on."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from actorserve.actors.reply import Reply
from actorserve.triton.flow import drained, on_cancel
from actorserve.triton.request import InferenceRequest
from tests.unit.actors.reply_world import FINAL, World, answer


@pytest.fixture
def world() -> World:
    """Return the replies of a decoupled model."""
    return World()


def request_of(reply: Reply) -> InferenceRequest:
    """Return a request with this way back."""
    return InferenceRequest._received([], "", 0, [], "{}", 0, 0, reply)


def test_a_cancel_is_told_once(world):
    """To the request that it is of, and to no other."""
    told: list[str] = []
    with (
        on_cancel(request_of(world.reply(1)), lambda: told.append("one")),
        on_cancel(request_of(world.reply(2)), lambda: told.append("two")),
    ):
        world.replies.cancel_told([2, 3])
        world.replies.cancel_told([2])
    assert told == ["two"]


def test_nothing_is_told_after_the_block(world):
    """And nothing is kept of it."""
    told: list[str] = []
    with on_cancel(request_of(world.reply(1)), lambda: told.append("one")):
        pass
    world.replies.cancel_told([1])
    assert told == []
    assert world.replies._on_cancel == {}


def test_what_is_cancelled_already_is_told_at_once(world):
    """The word on the page may have come before anybody waited."""
    told: list[str] = []
    with on_cancel(request_of(world.reply(1, slot=7)), lambda: told.append("one")):
        assert told == ["one"]


def test_without_a_backlog_nobody_waits(world):
    """Neither before anything is sent nor while credit lasts."""
    sender = world.reply().sender()

    async def main() -> None:
        await drained(sender)
        sender.send(answer(1))
        await drained(sender)

    asyncio.run(main())
    assert world.values == [1]


def test_a_coroutine_waits_until_all_has_gone(world):
    """Told by whichever thread hears of credit; others of the loop go on meanwhile."""
    world.end.page.total = 1
    sender = world.reply().sender()
    steps: list[Any] = []

    async def main() -> None:
        for number in range(3):
            sender.send(answer(number))
        waiting = asyncio.ensure_future(drained(sender))
        await asyncio.sleep(0)
        steps.append(waiting.done())
        thread = threading.Thread(target=world.grant, args=(2,))
        thread.start()
        thread.join()
        await asyncio.sleep(0)
        steps.append(waiting.done())
        thread = threading.Thread(target=world.grant, args=(3,))
        thread.start()
        await asyncio.wait_for(waiting, 20)
        thread.join()

    asyncio.run(main())
    assert steps == [False, False]
    assert world.values == [0, 1, 2]


def test_a_loop_that_is_gone_is_no_mistake(world):
    """Credit that comes later only sends."""
    world.end.page.total = 0
    sender = world.reply().sender()

    async def main() -> None:
        sender.send(answer(1))
        task = asyncio.ensure_future(drained(sender))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(main())
    world.grant(1)
    assert world.values == [1]
    sender.send(flags=FINAL)
