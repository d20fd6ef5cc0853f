# SPDX-License-Identifier: Apache-2.0
"""Calls of an engine's methods: a number each, and one answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from actorserve.actors.generation.registry import Registry
from actorserve.clock import monotonic_s
from actorserve.errors import DeadlineExceeded, WaitTimeout
from actorserve.ids import Serial
from actorserve.runtime.answer import Answer
from actorserve.runtime.waiting import Waiting, limit_of
from actorserve.wire.generation import Call


class CallDesk:
    """Start calls; `send` takes a Call to the pump."""

    def __init__(self, registry: Registry, send: Callable[[Call], None]) -> None:
        self._registry = registry
        self._send = send
        self._numbers = Serial()

    def start(self, method: str, args: list[Any], timeout_s: float | None) -> Answer[Any]:
        """Call a method on every rank. Raises the error of a dead engine."""
        registry = self._registry
        limit_s = limit_of(timeout_s, "timeout")
        deadline_s = None if limit_s is None else monotonic_s() + limit_s
        number = self._numbers.next()
        answer: Answer[Any] = Answer(_Owner(registry, number, method), deadline_s)
        registry.calls[number] = answer
        if registry.error is not None and registry.calls.pop(number, None) is not None:
            raise registry.error.with_traceback(None)
        self._send(Call(number, method, args, deadline_s or 0.0))
        return answer


def result_of(answer: Answer[Any], timeout: float | None = None) -> Any:
    """Wait in this thread for an answer. Raises WaitTimeout when it, or the wait, took too long."""
    try:
        return answer.result(limit_of(timeout, "timeout"))
    except DeadlineExceeded as error:
        raise WaitTimeout(error.message) from None


async def awaited(answer: Answer[Any]) -> Any:
    """Wait in this event loop for an answer, as `result_of`."""
    try:
        return await answer
    except DeadlineExceeded as error:
        raise WaitTimeout(error.message) from None


class _Owner:
    """What a call's answer belongs to."""

    def __init__(self, registry: Registry, number: int, method: str) -> None:
        self._registry = registry
        self._number = number
        self._method = method

    @property
    def door(self) -> _Owner:
        return self

    def block(self, waiting: Waiting, timeout_s: float | None) -> bool:
        """Wait in any thread."""
        return waiting.wait_in_thread(timeout_s)

    def describe(self) -> str:
        """Say what was wanted."""
        return f"the engine's call {self._method!r}"

    def given_up(self) -> None:
        """Forget it: an answer that comes now is nobody's."""
        self._registry.calls.pop(self._number, None)
