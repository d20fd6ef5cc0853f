# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for what an actor has around it: memory that counts, a desk, a node, instances."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from actorserve.actors.ordered_responses import OrderedFactory, OrderedScheduler
from actorserve.actors.request_parameters import parameters_text
from actorserve.actors.response_factory import ResponseFactory
from actorserve.actors.scheduler import Scheduler
from actorserve.clock import monotonic_s
from actorserve.errors import ActorserveError, ProtocolError
from actorserve.ids import Serial
from actorserve.state.batching import BatchPolicy
from actorserve.state.lifecycle import State
from actorserve.state.statistics import VersionStatistics
from actorserve.triton.inference import InferRequest, InferResponse
from actorserve.wire.messages import Handle, WireResponse, WireTensor

NUMBERS = Serial()


class FakeExchange:
    """Counts holds instead of bytes; a handle with offset 666 is a false one."""

    devices = None

    def __init__(self) -> None:
        self.held: list[int] = []
        self.dropped: list[int] = []
        self.received: list[int] = []
        self.discarded: list[int] = []

    def drop(self, handle: Handle) -> None:
        self.dropped.append(handle.block)

    def drop_tensor(self, tensor: WireTensor) -> None:
        if isinstance(tensor.data, Handle):
            self.drop(tensor.data)

    def receive(self, peer: Any, handle: Handle) -> memoryview:
        if handle.offset == 666:
            raise ProtocolError("a false handle")
        self.received.append(handle.block)
        return memoryview(b"\0" * handle.nbytes)

    def discard(self, peer: Any, tensors: list[WireTensor]) -> None:
        self.discarded += [t.data.block for t in tensors if isinstance(t.data, Handle)]


class FakePlace:
    """A stub that notes what a factory tells it."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self.credited: list[int] = []
        self.lifted: list[int] = []

    def tell_cancelled(self, factory: ResponseFactory) -> None:
        self.told.append(factory.key)

    def extend_credit(self, factory: ResponseFactory) -> None:
        self.credited.append(factory.taken)

    def lift_credit(self, factory: ResponseFactory) -> None:
        self.lifted.append(factory.key)


class FakePeer:
    """The end of a stub's channel, as far as a response names it."""

    arena = 2


class FakeDesk:
    """A scheduler that notes what it is told."""

    def __init__(self, retries: int = 0) -> None:
        self.retries = retries
        self.counts = VersionStatistics()
        self.removed: list[int] = []
        self.finished: list[int] = []

    def remove(self, factory: ResponseFactory) -> None:
        self.removed.append(factory.key)

    def ended(self, factory: ResponseFactory) -> None:
        self.finished.append(factory.key)


class Made:
    """A response factory and what came of it."""

    def __init__(
        self,
        exchange: FakeExchange,
        desk: Any,
        *,
        on_response: Any = None,
        factory_class: type[ResponseFactory] = ResponseFactory,
        **fields: Any,
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
        self.place = FakePlace()
        self.factory = factory_class(
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

    def dispatch(self, slot: int = 0) -> Any:
        """Send it to a stub that notes what it is told."""
        return self.factory.dispatch(self.place, slot)

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


class FakeInstance:
    """An instance that notes its batches and answers them when it is told to."""

    def __init__(self, name: str = "i", most: int = 1) -> None:
        self.name = name
        self.most = most
        self.state = State.RUNNING
        self.reason = "as it is"
        self.start_due_s: float | None = None
        self.has_called = False
        self.batches: list[list[Any]] = []
        self.begun: list[list[Any]] = []
        self.place = FakePlace()

    @property
    def is_running(self) -> bool:
        return self.state is State.RUNNING

    @property
    def room(self) -> int:
        return self.most - len(self.batches) if self.is_running else 0

    @property
    def could_run_next(self) -> bool:
        return self.is_running and self.has_called and len(self.batches) == 1

    def dispatch(self, factories: list[Any]) -> None:
        live = [each for each in factories if each.dispatch(self.place, 0) is not None]
        if live:
            self.batches.append(live)
            self.begun.append([each.key for each in live])

    def finish(self) -> None:
        """Answer the oldest batch."""
        for factory in self.batches.pop(0):
            factory.respond(WireResponse(factory.key), FakePeer())

    def die(self, error: ActorserveError) -> list[Any]:
        """Lose everything it has; returns what is to be queued again."""
        batches, self.batches = self.batches, []
        return [each for batch in batches for each in batch if each.lose_stub(error)]


class World:
    """A scheduler with its instances."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, exchange: Any, policy: BatchPolicy, *most: int
    ) -> None:
        self.exchange = exchange
        is_ordered = policy.preserve_ordering
        self._factory = OrderedFactory if is_ordered else ResponseFactory
        self.scheduler = (OrderedScheduler if is_ordered else Scheduler)(
            FakeNode(loop),  # type: ignore[arg-type]
            "model 'm' version 1",
            policy,
        )
        self.instances = [FakeInstance(f"i{n}", each) for n, each in enumerate(most)]
        self.changes = 0
        self.scheduler.employ(self.instances, self._on_change)  # type: ignore[arg-type]

    def _on_change(self) -> None:
        self.changes += 1

    def submit(self, **fields: Any) -> Made:
        """Submit one request."""
        fields.setdefault("arrival_s", monotonic_s())
        made = Made(self.exchange, self.scheduler, factory_class=self._factory, **fields)
        self.scheduler.submit(made.factory)
        return made

    def finish(self, instance: FakeInstance) -> None:
        """Let an instance end its oldest batch."""
        instance.finish()
        self.scheduler.has_room()

    def set_state(self, instance: FakeInstance, state: State, due_s: float | None = None) -> None:
        """Change an instance's state and say so."""
        instance.state, instance.start_due_s = state, due_s
        self.scheduler.instance_changed(instance)  # type: ignore[arg-type]


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


@pytest.fixture
def make(loop, exchange):
    """Return `make(policy, *room of each instance)`."""
    worlds: list[World] = []

    def make(policy: BatchPolicy | None = None, *most: int) -> World:
        world = World(loop, exchange, policy or BatchPolicy(), *(most or (1,)))
        worlds.append(world)
        return world

    yield make
    for world in worlds:
        world.scheduler.close()
