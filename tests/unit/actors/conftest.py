# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for what an actor has around it: memory that counts, a desk, a node, instances."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from actorserve.actors.response_factory import ResponseFactory, parameters_text
from actorserve.clock import monotonic_s
from actorserve.errors import ProtocolError
from actorserve.ids import Serial
from actorserve.triton.inference import InferRequest, InferResponse
from actorserve.wire.messages import Handle, WireTensor

NUMBERS = Serial()


class FakeExchange:
    """Counts holds instead of bytes; a handle with offset 666 is a false one."""

    def __init__(self) -> None:
        self.held: list[int] = []
        self.dropped: list[int] = []
        self.received: list[int] = []
        self.discarded: list[int] = []

    def drop(self, handle: Handle) -> None:
        self.dropped.append(handle.block)

    def receive(self, peer: Any, handle: Handle) -> memoryview:
        if handle.offset == 666:
            raise ProtocolError("a false handle")
        self.received.append(handle.block)
        return memoryview(b"\0" * handle.nbytes)

    def discard(self, peer: Any, tensors: list[WireTensor]) -> None:
        self.discarded += [t.data.block for t in tensors if isinstance(t.data, Handle)]


class FakeDesk:
    """A scheduler that notes what it is told."""

    def __init__(self, retries: int = 0) -> None:
        self.retries = retries
        self.removed: list[int] = []
        self.told: list[int] = []
        self.finished: list[int] = []

    def remove(self, factory: ResponseFactory) -> None:
        self.removed.append(factory.key)

    def tell_cancelled(self, factory: ResponseFactory) -> None:
        self.told.append(factory.key)

    def ended(self, factory: ResponseFactory) -> None:
        self.finished.append(factory.key)


class Made:
    """A response factory and what came of it."""

    def __init__(
        self, exchange: FakeExchange, desk: Any, *, on_response: Any = None, **fields: Any
    ) -> None:
        self.responses: list[InferResponse] = []
        number = NUMBERS.next()
        arrival_s = fields.pop("arrival_s", 0.0)
        rows, signature = fields.pop("rows", 1), fields.pop("signature", None)
        parameters = fields.pop("parameters", {})
        request = InferRequest("model", [], id=f"r{number}", parameters=parameters, **fields)
        inputs = [
            WireTensor("A", 11, (2000,), Handle(1, number, 0, 0, 8000)),
            WireTensor("B", 11, (1,), b"\0\0\0\0"),
        ]
        self.factory = ResponseFactory(
            number,
            request,
            "3",
            inputs,
            ["OUT"],
            parameters_text(request),
            rows,
            signature,
            arrival_s,
            exchange,  # type: ignore[arg-type]
            desk,
            on_response or self.responses.append,
        )

    @property
    def key(self) -> int:
        """The request's number."""
        return self.factory.key

    @property
    def finals(self) -> list[InferResponse]:
        """The responses that say that they are the last."""
        return [response for response in self.responses if response.final]

    @property
    def outcome(self) -> str:
        """How it ended: "ok", the error's text, or "" while it has not."""
        if not self.finals:
            return ""
        error = self.finals[0].error
        return "ok" if error is None else error.message


class FakeNode:
    """A loop, and nothing else that a scheduler would use."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop


@pytest.fixture
def exchange() -> FakeExchange:
    """Return memory that counts."""
    return FakeExchange()


@pytest.fixture
def desk() -> FakeDesk:
    """Return a desk."""
    return FakeDesk()


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Return an event loop that is not running."""
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture
def turn(loop: asyncio.AbstractEventLoop) -> Callable[..., None]:
    """Return `turn(seconds, until)`: let the loop run that long, or until a condition holds."""

    def run(seconds: float = 0.0, until: Callable[[], object] = lambda: False) -> None:
        async def wait() -> None:
            deadline_s = monotonic_s() + seconds
            while True:
                await asyncio.wait([loop.create_future()], timeout=min(seconds, 0.01))
                if until() or monotonic_s() >= deadline_s:
                    return

        loop.run_until_complete(wait())

    return run
