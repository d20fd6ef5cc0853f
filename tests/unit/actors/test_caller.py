# SPDX-License-Identifier: Apache-2.0
"""Who waits for a call's answer: threads, coroutines, forked children; a switchboard that notes."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from actorserve.actors.caller import REPORT_EVERY, AwaitedCall, RelayedCall, WaitedCall
from actorserve.triton.error import TritonModelException
from actorserve.triton.response import InferenceResponse
from actorserve.triton.response_iterator import ResponseIterator
from actorserve.wire.messages import CallResponded, WireResponse
from tests.conftest import wait_until


class Lane:
    """The main thread's lane: what it brings, one message at each reading."""

    def __init__(self) -> None:
        self.coming: deque[Callable[[], None]] = deque()
        self.is_severed = False
        self.waits = 0

    def take_in(self) -> None:
        pass

    def wait(self, is_there: Callable[[], bool]) -> None:
        self.waits += 1
        assert not is_there()
        self.coming.popleft()()


class Switchboard:
    """The stub's calls, as one of them sees it."""

    def __init__(self) -> None:
        self.end = Lane()
        self.main_loop = None
        self.main = threading.get_ident()
        self.noted: list[tuple[Any, ...]] = []

    def after_main_wait(self) -> None:
        self.noted.append(("waited",))

    def is_on_main(self) -> bool:
        return threading.get_ident() == self.main

    def next_number(self) -> int:
        return 5

    def response(self, wire: WireResponse) -> InferenceResponse:
        return InferenceResponse(parameters={"n": wire.id})

    def with_bodies(self, wire: WireResponse) -> WireResponse:
        return wire

    def taken(self, number: int, count: int) -> None:
        self.noted.append(("taken", number, count))

    def cancel(self, number: int) -> None:
        self.noted.append(("cancel", number))

    def move(self, number: int) -> None:
        self.noted.append(("move", number))

    def drop(self, number: int) -> None:
        self.noted.append(("drop", number))


def wire(number: int, *, final: bool = False) -> WireResponse:
    """Return a response."""
    return WireResponse(number, [], None, "{}", final)


def number_of(response: InferenceResponse | None) -> str:
    """Return what `wire` has put in."""
    return response.parameters().replace(" ", "") if response is not None else "none"


@pytest.fixture
def calls() -> Switchboard:
    """Return a switchboard."""
    return Switchboard()


def test_a_thread_takes_responses_as_they_come(calls):
    """To the last one; then there are none."""
    call = WaitedCall(calls, on_control=True)
    found: list[str] = []
    thread = threading.Thread(target=lambda: [found.append(number_of(call.next())) for _ in "1234"])
    thread.start()
    for number in (1, 2):
        call.put(wire(number))
    call.put(wire(3, final=True))
    thread.join(20)
    assert found == ['{"n":1}', '{"n":2}', '{"n":3}', "none"]


def test_the_main_thread_reads_its_lane_meanwhile(calls):
    """And says afterwards that it has read what is others' too."""
    call = WaitedCall(calls, on_control=False)
    calls.end.coming += [lambda: None, lambda: call.put(wire(1, final=True))]
    assert number_of(call.next()) == '{"n":1}'
    assert calls.end.waits == 2
    assert calls.noted == [("waited",)]


def test_another_thread_has_the_call_moved_once(calls):
    """What is there already needs no lane."""
    call = WaitedCall(calls, on_control=False)
    call.put(wire(1))
    found: list[str] = []
    thread = threading.Thread(target=lambda: [found.append(number_of(call.next())) for _ in "123"])
    thread.start()
    wait_until(lambda: calls.noted)
    assert found == ['{"n":1}']
    call.put(wire(2))
    call.put(wire(3, final=True))
    thread.join(20)
    assert calls.noted == [("move", 5)]
    assert len(found) == 3


def test_the_supervisor_hears_now_and_then_how_many_were_taken(calls):
    """Short streams are never reported."""
    call = WaitedCall(calls, on_control=True)
    for number in range(2 * REPORT_EVERY + 10):
        call.put(wire(number))
    for _ in range(2 * REPORT_EVERY + 10):
        call.next()
    assert calls.noted == [("taken", 5, REPORT_EVERY)] * 2


def test_an_iterator_drops_what_has_no_end(calls):
    """By its own end; after the last response there is nothing to drop."""
    iterator = ResponseIterator._over(WaitedCall(calls, on_control=True))
    del iterator
    assert calls.noted == [("drop", 5)]
    call = WaitedCall(calls, on_control=True)
    call.put(wire(1, final=True))
    iterator = ResponseIterator._over(call)
    assert len(list(iterator)) == 1
    iterator.cancel()
    del iterator, call
    assert calls.noted == [("drop", 5)]


def test_a_forked_child_reads_nothing_of_its_parent(calls):
    """Its lanes are the parent's: reading them would take what that waits for."""
    for on_control in (True, False):
        call = WaitedCall(calls, on_control=on_control)
        calls.end.is_severed = True
        with pytest.raises(TritonModelException, match="not to a fork of it"):
            call.next()
        calls.end.is_severed = False


def test_a_coroutine_is_answered_in_its_own_loop(calls):
    """Whichever thread reads the answer."""

    async def main() -> None:
        for is_own in (True, False):
            call = AwaitedCall(calls, asyncio.get_running_loop())
            assert call.on_control
            if is_own:
                call.put(wire(1, final=True))
            else:
                threading.Thread(target=call.put, args=(wire(1, final=True),)).start()
            assert number_of(await call.future) == '{"n":1}'

    asyncio.run(main())
    assert calls.noted == []


def test_a_call_of_the_stub_s_own_loop_is_read_there(calls):
    """It needs no other thread."""

    async def main() -> None:
        calls.main_loop = asyncio.get_running_loop()
        assert not AwaitedCall(calls, asyncio.get_running_loop()).on_control

    asyncio.run(main())


def test_a_cancelled_future_drops_its_call(calls):
    """An answer that comes all the same is let go."""

    async def main() -> None:
        call = AwaitedCall(calls, asyncio.get_running_loop())
        call.future.cancel()
        await asyncio.sleep(0)
        assert calls.noted == [("drop", 5)]
        call.put(wire(1, final=True))

    asyncio.run(main())


def test_an_answer_for_a_closed_loop_is_let_go(calls):
    """Nobody is left who could hear of it."""
    loop = asyncio.new_event_loop()
    calls_of_thread: list[AwaitedCall] = []

    async def main() -> None:
        calls_of_thread.append(AwaitedCall(calls, loop))

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    thread.join(20)
    loop.close()
    calls_of_thread[0].put(wire(1, final=True))


def test_a_child_s_answer_is_sent_on(calls):
    """With its bodies, once."""
    sent: list[CallResponded] = []
    RelayedCall(calls, sent.append).put(wire(1, final=True))
    assert [each.responses[0].id for each in sent] == [1]
