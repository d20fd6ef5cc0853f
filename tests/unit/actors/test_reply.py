# SPDX-License-Identifier: Apache-2.0
"""The way back of one request in a stub, with a channel's end that only notes: no process."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from actorserve.actors import sending
from actorserve.actors.bodies import Bodies
from actorserve.actors.replies import Replies, thread_errors
from actorserve.actors.reply import Reply
from actorserve.triton.error import TritonModelException
from actorserve.triton.response import InferenceResponse
from actorserve.triton.tensor import Tensor
from actorserve.wire.messages import Handle, Responded, WireRequest, WireResponse, WireTensor
from tests.conftest import wait_until

FINAL = 1
CLOSED = "Response sender has been closed"
decode = msgspec.msgpack.Decoder(Responded).decode


class Page:
    """The credit words of a health page, and who waits."""

    def __init__(self) -> None:
        self.total = 1 << 30
        self.wanting = 0
        self.is_told = True

    def granted(self, slot: int) -> int:
        return self.total

    def want_credit(self, slot: int, request: int) -> int:
        self.wanting = request
        return self.total

    def stop_wanting_credit(self, slot: int) -> None:
        self.wanting = 0

    def is_cancelled(self, slot: int, request: int) -> bool:
        return slot == 7


class End:
    """A stub's channel over a list."""

    arena_id = 2
    max_frame_bytes = 100_000

    def __init__(self) -> None:
        self.page = Page()
        self.is_severed = False
        self.sent: list[WireResponse] = []
        self.on_send: Callable[[WireResponse], None] = lambda response: None
        self.woken = 0
        self.placed = 0

    def send_encoded(self, data: bytes) -> None:
        (response,) = decode(data).responses
        self.on_send(response)
        self.sent.append(response)

    def send(self, message: Any) -> None:
        self.send_encoded(msgspec.msgpack.encode(message))

    def place(self, body: np.ndarray) -> Handle:
        self.placed += 1
        return Handle(2, self.placed, 0, 0, body.nbytes)

    def own(self, handle: Handle) -> Handle:
        return handle

    def forwarded(self, tensors: list[WireTensor]) -> None:
        pass

    def withdraw(self, tensors: list[WireTensor]) -> None:
        pass

    def wake_control(self) -> None:
        self.woken += 1


class World:
    """Replies over one end."""

    def __init__(self, *, decoupled: bool = True) -> None:
        self.end = End()
        bodies = Bodies(self.end, shared_inputs=False)  # type: ignore[arg-type]
        self.replies = Replies(
            self.end,  # type: ignore[arg-type]
            bodies,
            instance="m_0",
            model_path="/m/1/model.py",
            decoupled=decoupled,
        )

    def reply(self, request: int = 1, slot: int = 0) -> Reply:
        """Return the way back of a request."""
        return Reply(self.replies, WireRequest(request, "", [], ["OUT"], cancel_slot=slot))

    def grant(self, total: int, request: int = 1) -> None:
        """Let so many go in all, and tell whoever waits, as the control thread does."""
        self.end.page.total = total
        if self.end.page.wanting == request:
            self.replies.granted([request])

    @property
    def values(self) -> list[Any]:
        """What was sent: numbers, texts of errors, "" for the bare end; a final one in a list."""
        found = []
        for each in self.end.sent:
            value: Any = ""
            if each.error is not None:
                value = each.error.message.rpartition("message: ")[2]
            elif each.outputs:
                data = each.outputs[0].data
                value = len(each.outputs) if isinstance(data, Handle) else int(data[0])
            found.append([value] if each.final else value)
        return found


def answer(number: int, nbytes: int = 1) -> InferenceResponse:
    """Return a response of one number, in so many bytes."""
    return InferenceResponse([Tensor("OUT", np.full(nbytes, number, np.uint8))])


@pytest.fixture
def world() -> World:
    """Return the replies of a decoupled model."""
    return World()


# --- ends ----------------------------------------------------------------------------------------


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


# --- credit --------------------------------------------------------------------------------------


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
