# SPDX-License-Identifier: Apache-2.0
"""Dynamic batching as clients see it: batches, timeouts, limits, priorities, order; real stubs.

The model of these tests stops at gates: a request whose value has a pipe of that name ends when
the test says so. Nothing depends on how fast anything is.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actorserve import Supervisor
from actorserve.actors.scheduler import SchedulerStats
from actorserve.clock import monotonic_s
from actorserve.config import Settings
from actorserve.errors import Unavailable
from actorserve.triton.inference import InferRequest, InferResponse, InferTensor
from tests.server.harness import write_model

EXPIRED = "Request timeout expired"
FULL = "Exceeds maximum queue size"

GATED = """
class TritonPythonModel:
    def initialize(self, args):
        self.gates = json.loads(args["model_config"])["parameters"]["gates"]["string_value"]
        self.batches = 0

    def execute(self, requests):
        self.batches += 1
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            gate = f"{self.gates}/{int(x[0, 0])}"
            if os.path.exists(gate):
                open(gate + ".begun", "w").close()
                with open(gate, "rb", buffering=0) as pipe:
                    pipe.read(1)
            y = np.array([[self.batches, len(requests)]] * len(x), np.float32)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", y)]))
        return answers
"""
CONFIG = """\
backend: "python"
max_batch_size: %d
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 2 ] } ]
parameters { key: "gates" value: { string_value: "%s" } }
dynamic_batching { %s }
instance_group [ { count: %d } ]
"""


class Gates:
    """Pipes that requests wait at."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pipes: dict[int, int] = {}

    def add(self, *numbers: int) -> None:
        """Make gates; they are shut."""
        for number in numbers:
            os.mkfifo(self.folder / str(number))
            self._pipes[number] = os.open(self.folder / str(number), os.O_RDWR | os.O_CLOEXEC)

    def is_reached(self, number: int) -> bool:
        """Whether a stub has begun the request and waits at the gate."""
        return (self.folder / f"{number}.begun").exists()

    def open(self, number: int) -> None:
        """Let one request through."""
        os.write(self._pipes[number], b"!")

    def close(self) -> None:
        """Let go of the pipes."""
        for pipe in self._pipes.values():
            os.close(pipe)


class Asked:
    """One request and what was heard of it."""

    def __init__(self, number: int, ended: list[int]) -> None:
        self.number = number
        self.response: InferResponse | None = None
        self.factory: Any = None
        self._ended = ended

    def hear(self, response: InferResponse) -> None:
        """Take the answer."""
        assert self.response is None, "answered twice"
        self.response = response
        self._ended.append(self.number)

    @property
    def error(self) -> str:
        """The error's text; "" for an answer without one, or none yet."""
        error = None if self.response is None else self.response.error
        return "" if error is None else error.message

    @property
    def batch(self) -> tuple[int, int]:
        """Which batch of its stub it was in, and how many requests that had."""
        assert self.response is not None and self.response.error is None, self.error
        number, size = np.frombuffer(self.response.outputs[0].data, np.float32)[:2]
        return int(number), int(size)


class World:
    """An embedded server with the model, and who was answered in which order."""

    def __init__(self, server: Supervisor, gates: Gates) -> None:
        self.server = server
        self.gates = gates
        self.ended: list[int] = []

    def ask(self, number: int, *, rows: int = 1, priority: int = 0, timeout_us: int = 0) -> Asked:
        """Submit a request; its value is its number."""
        asked = Asked(number, self.ended)
        body = np.full((rows, 1), number, np.float32)
        tensor = InferTensor("INPUT0", "FP32", body.shape, body.tobytes())
        request = InferRequest("model", [tensor], priority=priority, timeout_us=timeout_us)
        asked.factory = self.server.submit(request, asked.hear)
        return asked

    @property
    def stats(self) -> SchedulerStats:
        """The scheduler's counts."""
        return self.server.stats().models[0].versions[0].scheduler

    async def until(self, condition: Callable[[], object], timeout_s: float = 20) -> None:
        """Let the loop turn until the condition holds."""
        loop = asyncio.get_running_loop()
        deadline_s = monotonic_s() + timeout_s
        while not condition():
            assert monotonic_s() < deadline_s, f"not within {timeout_s:g} s: {self.stats}"
            await asyncio.wait([loop.create_future()], timeout=0.005)

    async def all_ended(self, *asked: Asked) -> None:
        """Wait for the answers."""
        await self.until(lambda: all(each.response for each in asked))


Test = Callable[[World], Awaitable[None]]


@pytest.fixture
def gates(tmp_path):
    """Return gates; there is none yet."""
    folder = tmp_path / "gates"
    folder.mkdir()
    gates = Gates(folder)
    yield gates
    gates.close()


@pytest.fixture
def serve(repository, tmp_path, gates) -> Callable[..., None]:
    """Return `serve(test, batching, size, instances)`: run it against an embedded server."""

    def run(test: Test, batching: str = "", size: int = 4, instances: int = 1) -> None:
        config = CONFIG % (size, gates.folder, batching, instances)
        write_model(repository, "model", GATED, config)

        async def main() -> None:
            async with Supervisor(repository, Settings(crash_dir=str(tmp_path))) as server:
                assert server.failures == {}
                world = World(server, gates)
                await test(world)
                assert world.stats.in_flight == world.stats.queued == world.stats.held == 0

        asyncio.run(main())

    return run


# --- batches -------------------------------------------------------------------------------------


def test_what_waits_goes_together(serve):
    """As many rows as a batch may have; a request that does not fit starts the next one."""

    async def test(world: World) -> None:
        world.gates.add(0)
        first = world.ask(0)
        others = [world.ask(1), world.ask(2, rows=2), world.ask(3, rows=2), world.ask(4)]
        world.gates.open(0)
        await world.all_ended(first, *others)
        assert [each.batch for each in (first, *others)] == [(1, 1), (2, 2), (2, 2), (3, 2), (3, 2)]

    serve(test)


def test_a_preferred_size_does_not_wait_for_the_delay(serve):
    """Three requests make one; the fourth would wait for a minute, and is cancelled."""

    async def test(world: World) -> None:
        asked = [world.ask(number) for number in range(4)]
        await world.all_ended(*asked[:3])
        assert [each.batch for each in asked[:3]] == [(1, 3)] * 3
        asked[3].factory.cancel()
        assert asked[3].error == "the request was cancelled"

    serve(test, "preferred_batch_size: 3 max_queue_delay_microseconds: 60000000", size=8)


def test_after_the_delay_a_batch_goes_as_it_is(serve):
    """Not before, and with all that came meanwhile."""

    async def test(world: World) -> None:
        began_s = monotonic_s()
        asked = [world.ask(1), world.ask(2)]
        await world.all_ended(*asked)
        assert monotonic_s() - began_s >= 0.1
        assert [each.batch for each in asked] == [(1, 2)] * 2

    serve(test, "max_queue_delay_microseconds: 100000")


# --- timeouts and limits -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "timeout_us"),
    [
        ("default_timeout_microseconds: 50000", 0),
        ("default_timeout_microseconds: 60000000 allow_timeout_override: true", 50_000),
        ("allow_timeout_override: true", 50_000),
    ],
)
def test_a_timeout_is_told_when_it_is_due(serve, policy, timeout_us):
    """The only instance is busy until after that."""

    async def test(world: World) -> None:
        world.gates.add(0)
        busy, late = world.ask(0), world.ask(1, timeout_us=timeout_us)
        await world.all_ended(late)
        assert late.error == EXPIRED
        assert isinstance(late.response and late.response.error, Unavailable)
        assert busy.response is None
        world.gates.open(0)
        await world.all_ended(busy)
        assert world.stats.batches == 1

    serve(test, f"default_queue_policy {{ {policy} }}")


def test_a_request_s_own_timeout_counts_only_where_it_is_allowed(serve):
    """Nor does it where it is longer than the default."""

    async def test(world: World) -> None:
        world.gates.add(0)
        asked = [world.ask(0), world.ask(1, timeout_us=1)]
        world.gates.open(0)
        await world.all_ended(*asked)
        assert [each.error for each in asked] == ["", ""]

    serve(test, "default_queue_policy { default_timeout_microseconds: 60000000 }")


def test_delayed_requests_go_behind_the_others(serve):
    """timeout_action DELAY: nothing is rejected, and whatever is in time goes first."""

    async def test(world: World) -> None:
        world.gates.add(0)
        busy = world.ask(0)
        late, later, fresh = world.ask(1, timeout_us=1), world.ask(2, timeout_us=2), world.ask(3)
        world.gates.open(0)
        await world.all_ended(busy, late, later, fresh)
        assert [each.batch[0] for each in (busy, fresh, late, later)] == [1, 2, 3, 4]

    serve(
        test,
        "default_queue_policy { timeout_action: DELAY allow_timeout_override: true }",
        size=1,
    )


def test_a_full_queue_refuses(serve):
    """Only what waits counts; those who wait are not touched."""

    async def test(world: World) -> None:
        world.gates.add(0)
        asked = [world.ask(number) for number in range(3)]
        with pytest.raises(Unavailable, match=FULL):
            world.ask(3)
        world.gates.open(0)
        await world.all_ended(*asked)
        assert [each.error for each in asked] == [""] * 3

    serve(test, "default_queue_policy { max_queue_size: 2 }")


def test_priorities_go_first_and_have_policies_of_their_own(serve):
    """1 is the highest; 0, and what is beyond the levels, is the default."""

    async def test(world: World) -> None:
        world.gates.add(0)
        busy = world.ask(0)
        asked = [world.ask(n, priority=n) for n in (3, 2)] + [
            world.ask(4),
            world.ask(5, priority=9),
        ]
        asked.append(world.ask(1, priority=1))
        with pytest.raises(Unavailable, match=FULL):
            world.ask(6, priority=1)
        late = world.ask(7, priority=3, timeout_us=50_000)
        await world.all_ended(late)
        assert late.error == EXPIRED
        world.gates.open(0)
        await world.all_ended(busy, *asked)
        order = sorted((busy, *asked), key=lambda each: each.batch[0])
        assert [each.number for each in order] == [0, 1, 2, 4, 5, 3]

    serve(
        test,
        "priority_levels: 3 default_priority_level: 2"
        " priority_queue_policy { key: 1 value { max_queue_size: 1 } }"
        " priority_queue_policy { key: 3 value { allow_timeout_override: true } }",
        size=1,
    )


def test_policies_of_levels_that_are_not_there_do_nothing(serve):
    """The model serves without priorities, as the reference server does it."""

    async def test(world: World) -> None:
        asked = [world.ask(number, priority=1) for number in range(3)]
        await world.all_ended(*asked)
        assert [each.error for each in asked] == [""] * 3

    serve(test, "priority_queue_policy { key: 1 value { max_queue_size: 1 } }", size=1)


def test_policies_over_http(repository, gates, start_server):
    """503 with the text for a full queue and for a timeout; `priority` and `timeout` are heard."""
    batching = """
    priority_levels: 2 default_priority_level: 2
    default_queue_policy { allow_timeout_override: true }
    priority_queue_policy { key: 1 value { max_queue_size: 1 } }
    """
    write_model(repository, "model", GATED, CONFIG % (1, gates.folder, batching, 1))
    gates.add(0)
    server = start_server(repository)
    answers: dict[int, Any] = {}

    def ask(number: int, **parameters: int) -> Any:
        inputs = {"INPUT0": ("FP32", [1, 1], [number])}
        answers[number] = server.infer("model", inputs, parameters=parameters)
        return answers[number]

    def in_thread(number: int, **parameters: int) -> threading.Thread:
        thread = threading.Thread(target=ask, args=(number,), kwargs=parameters)
        thread.start()
        return thread

    def counts() -> Any:
        status = server.call("GET", "/v2/actorserve/status")[1]
        return status["models"][0]["versions"][0]["scheduler"]

    threads = [in_thread(0)]
    _until(lambda: counts()["in_flight"] == 1)
    threads.append(in_thread(1, priority=1))
    _until(lambda: counts()["queued"] == 1)
    assert ask(2, priority=1) == (503, FULL)
    assert ask(3, timeout=1000) == (503, EXPIRED)
    gates.open(0)
    for thread in threads:
        thread.join(20)
    assert [answers[number][0] for number in (0, 1)] == [200, 200]


def _until(condition: Callable[[], object], timeout_s: float = 20) -> None:
    """Ask until the condition holds; each time takes a request."""
    deadline_s = monotonic_s() + timeout_s
    while not condition():
        assert monotonic_s() < deadline_s, f"not within {timeout_s:g} s"


# --- order ---------------------------------------------------------------------------------------


def test_responses_keep_the_order_of_the_requests(serve):
    """Three instances end in reverse order; the clients hear in theirs."""

    async def test(world: World) -> None:
        world.gates.add(0, 1, 2)
        asked = [world.ask(number) for number in range(3)]
        for count, number in ((1, 2), (2, 1)):
            world.gates.open(number)
            await world.until(lambda count=count: world.stats.held == count)
        assert world.ended == []
        world.gates.open(0)
        await world.all_ended(*asked)
        assert world.ended == [0, 1, 2]
        assert [each.batch for each in asked] == [(1, 1)] * 3

    serve(test, "preserve_ordering: true", instances=3)


def test_a_killed_stub_holds_no_response_back(serve):
    """Its request fails, in its turn, and the next ones follow."""

    async def test(world: World) -> None:
        world.gates.add(0, 1, 2)
        asked = [world.ask(number) for number in range(3)]
        world.gates.open(1)
        await world.until(lambda: world.stats.held == 1 and world.gates.is_reached(0))
        instances = world.server.stats().models[0].versions[0].instances
        os.kill(instances[0].pid, signal.SIGKILL)
        await world.all_ended(asked[0], asked[1])
        assert world.ended == [0, 1]
        assert "died while it had the request" in asked[0].error
        assert asked[1].error == ""
        world.gates.open(2)
        await world.all_ended(*asked)

    serve(test, "preserve_ordering: true", instances=3)


def test_ends_that_the_server_gives_hold_no_response_back(serve):
    """Timeouts in the queue, deadlines and cancelled requests are told at once."""

    async def test(world: World) -> None:
        world.gates.add(0, 1)
        asked = [world.ask(number) for number in range(2)]
        asked += [world.ask(2, timeout_us=50_000), world.ask(3)]
        await world.all_ended(asked[2])
        assert asked[2].error == EXPIRED
        asked[3].factory.cancel()
        assert world.ended == [2, 3]
        world.gates.open(1)
        await world.until(lambda: world.stats.held == 1)
        asked[0].factory.disconnect()
        assert world.ended == [2, 3, 1]
        world.gates.open(0)

    serve(
        test,
        "preserve_ordering: true default_queue_policy { allow_timeout_override: true }",
        instances=2,
    )


def test_a_thousand_requests_of_four_instances_keep_their_order(serve):
    """Under load, in batches of all sizes."""

    async def test(world: World) -> None:
        asked = [world.ask(number, rows=1 + number % 3) for number in range(1000)]
        await world.all_ended(*asked)
        assert world.ended == list(range(1000))
        assert [each.error for each in asked] == [""] * 1000

    serve(test, "preserve_ordering: true", instances=4)
