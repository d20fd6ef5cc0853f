# SPDX-License-Identifier: Apache-2.0
"""The stub's side of `is_ready`: what it may return and raise, and where it runs."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator

import pytest

from actorserve.actors import readiness_hook
from actorserve.actors.readiness_hook import NOT_A_BOOL, TIMED_OUT, ReadinessHook
from actorserve.runtime.child import PeerGone


class FakeEnd:
    """Notes what is said; its supervisor can be gone."""

    is_severed = False

    def __init__(self) -> None:
        self.said: queue.SimpleQueue = queue.SimpleQueue()
        self.is_gone = False

    def send(self, message) -> None:
        self.said.put(message)
        if self.is_gone:
            raise PeerGone("gone")


@pytest.fixture
def ask() -> Iterator:
    """Return `ask(hook, loop)`: what is said of one check."""
    ends: list[tuple[ReadinessHook, FakeEnd]] = []

    def ask(function, loop=None) -> tuple[bool, str]:
        end = FakeEnd()
        hook = ReadinessHook(end, function, "/r/m/1/model.py", loop)
        ends.append((hook, end))
        hook.ask(7)
        said = end.said.get(timeout=20)
        assert said.number == 7
        return said.is_ready, said.problem

    yield ask
    for hook, end in ends:
        # The thread ends when its supervisor is gone.
        end.is_gone = True
        hook._hook = lambda: True
        hook.ask(8)
        assert hook._thread is not None
        hook._thread.join(20)
        if hook._own_loop is not None:
            hook._own_loop.close()


@pytest.fixture
def model_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Return a loop that runs in another thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def returning(value):
    """Return a hook, and the same as a coroutine."""

    async def coroutine():
        await asyncio.sleep(0)
        return value

    return lambda: value, coroutine


def raising(error):
    """Return a hook that raises, and the same as a coroutine."""

    def plain():
        raise error

    async def coroutine():
        raise error

    return plain, coroutine


@pytest.mark.parametrize("has_loop", [False, True])
@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize(
    ("hooks", "is_ready", "problem"),
    [
        (returning(True), True, ""),
        (returning(False), False, ""),
        (returning(1), False, NOT_A_BOOL),
        (returning(None), False, NOT_A_BOOL),
        (raising(ValueError("no luck")), False, "ValueError: no luck"),
        (raising(SystemExit(3)), False, "SystemExit: 3"),
        (raising(KeyboardInterrupt()), False, "KeyboardInterrupt"),
        (raising(asyncio.TimeoutError("mine")), False, "TimeoutError: mine"),
    ],
)
def test_what_a_hook_says(ask, model_loop, has_loop, kind, hooks, is_ready, problem):
    """The same for methods and coroutines, with and without a loop of the model's."""
    said, text = ask(hooks[kind], model_loop if has_loop else None)
    assert said is is_ready
    assert problem in text
    assert model_loop.is_running()


def test_a_coroutine_runs_where_the_model_s_others_do(ask, model_loop):
    """In its loop, where there is one."""
    seen = []

    async def hook():
        seen.append(asyncio.get_running_loop())
        return True

    assert ask(hook, model_loop) == (True, "")
    assert seen == [model_loop]


def test_a_method_runs_in_neither_thread(ask, model_loop):
    """It may block as long as it likes."""
    seen = []

    def hook():
        seen.append(threading.current_thread().name)
        return True

    assert ask(hook, model_loop) == (True, "")
    assert seen == ["actorserve-is-ready"]


@pytest.mark.parametrize("has_loop", [False, True])
def test_a_slow_coroutine_is_cancelled(ask, model_loop, monkeypatch, has_loop):
    """And said of only when it has ended."""
    monkeypatch.setattr(readiness_hook, "CHECK_LIMIT_S", 0.01)
    ended = []

    async def hook():
        try:
            await asyncio.sleep(1e6)
        finally:
            ended.append(True)

    assert ask(hook, model_loop if has_loop else None) == (False, TIMED_OUT)
    assert ended == [True]


def test_a_coroutine_may_cancel_itself(ask):
    """That is no word, either."""

    async def hook():
        raise asyncio.CancelledError

    assert ask(hook) == (False, "is_ready() was cancelled")


def test_a_loop_that_has_ended_runs_nothing(ask):
    """The model is being finalized."""
    loop = asyncio.new_event_loop()
    loop.close()
    assert ask(returning(True)[1], loop) == (False, "its event loop has ended")


def test_a_long_reason_is_cut(ask):
    """It travels in one frame, and is for people."""
    said, text = ask(raising(ValueError("x" * 100_000))[0])
    assert not said
    assert len(text) == readiness_hook.MOST_PROBLEM_CHARS
