# SPDX-License-Identifier: Apache-2.0
"""The server inside somebody else's program: arrays in and out, any loop, nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actorserve import Supervisor
from actorserve.config import Settings
from actorserve.errors import (
    ConfigError,
    InternalError,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from actorserve.shm.segment import Segment
from actorserve.triton.inference import InferRequest, InferTensor
from tests.server.harness import IDENTITY, IDENTITY_CONFIG, write_model

BYTES_CONFIG = IDENTITY_CONFIG.replace("TYPE_FP32", "TYPE_STRING")
TWO_CONFIG = """\
backend: "python"
input [
  { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] },
  { name: "INPUT1" data_type: TYPE_FP32 dims: [ -1 ] }
]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""
COUNTS = """
class TritonPythonModel:
    def execute(self, requests):
        n = np.full((1, 1), len(requests), np.float32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", n)]) for _ in requests]
"""

Test = Callable[[Supervisor], Awaitable[None]]


@pytest.fixture
def serve(repository: Path, tmp_path: Path) -> Callable[..., None]:
    """Return `serve(test, **settings)`: run it against an embedded server of the repository.

    Afterwards no block is held by anybody.
    """

    def run(test: Test, **settings: Any) -> None:
        settings.setdefault("crash_dir", str(tmp_path / "crashes"))

        async def main() -> None:
            async with Supervisor(repository, Settings(**settings)) as server:
                await test(server)
                await until(lambda: is_idle(server))

        asyncio.run(main())

    return run


async def until(condition: Callable[[], object], timeout_s: float = 10) -> None:
    """Let the loop turn until the condition holds."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    while not condition():
        assert loop.time() < deadline_s, f"not within {timeout_s:g} s"
        await asyncio.wait([loop.create_future()], timeout=0.005)


def is_idle(server: Supervisor) -> bool:
    """Whether nothing of the shared memory is in use."""
    gc.collect()
    exchange = server.stats().exchange
    return exchange.held_blocks == exchange.live_views == exchange.arena.used_bytes == 0


def ones(count: int = 1) -> dict[str, np.ndarray]:
    """Return inputs."""
    return {"INPUT0": np.ones(count, np.float32)}


# --- arrays --------------------------------------------------------------------------------------


def test_inputs_are_arrays_or_what_numpy_makes_of_them(serve, repository):
    """Lists in the model's type, other byte orders, strides, scalars' shapes."""
    write_model(repository, "model")
    write_model(repository, "words", IDENTITY, BYTES_CONFIG)

    async def test(server: Supervisor) -> None:
        base = np.arange(6, dtype=np.float32)
        for value in (base, base.astype(">f4"), np.repeat(base, 2)[::2], memoryview(base)):
            outputs = await server.infer("model", {"INPUT0": value})
            assert outputs["OUTPUT0"].tolist() == base.tolist()
            assert outputs["OUTPUT0"].dtype == np.float32
        for words in (["a", "ü"], np.array(["a", "ü"]), np.array([b"a", "ü".encode()], object)):
            outputs = await server.infer("words", {"INPUT0": words})
            assert outputs["OUTPUT0"].tolist() == [b"a", "ü".encode()]

    serve(test)


def test_outputs_are_read_only_arrays(serve, repository):
    """Small ones of their own, large ones views that live as long as they are referenced."""
    write_model(repository, "model")

    async def test(server: Supervisor) -> None:
        kept = []
        for count in (1, 1024, 1025, 100_000, 3_000_000):
            for start in range(3):
                x = np.arange(start, start + count, dtype=np.float32)
                kept.append((await server.infer("model", {"INPUT0": x}))["OUTPUT0"])
        assert not any(output.flags.writeable for output in kept)
        for number, output in enumerate(kept):
            first = number % 3
            assert np.array_equal(output, np.arange(first, first + len(output)))
        del kept, output

    serve(test)


WRONG_INPUTS: list[tuple[dict[str, Any], str]] = [
    ({}, "expected 1 inputs but got 0 inputs"),
    ({"X": [1.0]}, "unexpected inference input 'X'"),
    ({"INPUT0": np.ones(1)}, "data-type is 'FP64', but model 'model' expects 'FP32'"),
    ({"INPUT0": np.ones((1, 1), np.float32)}, "unexpected shape for input 'INPUT0'"),
    ({"INPUT0": np.ones(1, complex)}, "input 'INPUT0'"),
    ({"INPUT0": np.array([1, None])}, "INPUT0"),
    ({"INPUT0": np.zeros(1, "datetime64[s]")}, "input 'INPUT0'"),
]


def test_wrong_inputs_are_the_caller_s_mistake(serve, repository):
    """InvalidArgument with what is wrong; nothing is kept of them, large ones included."""
    write_model(repository, "model")

    async def test(server: Supervisor) -> None:
        for inputs, text in WRONG_INPUTS:
            with pytest.raises(InvalidArgument) as caught:
                await server.infer("model", inputs)
            assert text in caught.value.message
            with pytest.raises(InvalidArgument):
                await server.infer("model", {"BIG": np.ones(50_000, np.float32), **inputs})

    serve(test)


def test_what_is_not_there_is_not_found(serve, repository):
    """Models, versions, outputs."""
    write_model(repository, "model")

    async def test(server: Supervisor) -> None:
        with pytest.raises(NotFound, match="'nobody' is not found"):
            await server.infer("nobody", ones(50_000))
        with pytest.raises(NotFound, match="version 4 is not found"):
            await server.infer("model", ones(), version="4")
        with pytest.raises(InvalidArgument, match="unexpected inference output 'X'"):
            await server.infer("model", ones(), outputs=["X"])

    serve(test)


def test_texts_and_numbers_that_cannot_travel_are_refused(serve, repository):
    """At once, as the caller's mistake; the server still drains (the fixture stops it)."""
    write_model(repository, "model")

    async def test(server: Supervisor) -> None:
        wrong: list[dict[str, Any]] = [
            {"request_id": "\ud800"},
            {"parameters": {"a": "\ud800"}},
            {"parameters": {"\ud800": "a"}},
            {"parameters": {"a": object()}},
        ]
        for fields in wrong:
            with pytest.raises(InvalidArgument, match="id or parameters cannot be sent"):
                await server.infer("model", ones(50_000), **fields)
        with pytest.raises(InvalidArgument, match="do not fit into one message"):
            await server.infer("model", ones(), parameters={"a": "x" * 600_000})
        scheduler = server.stats().models[0].versions[0].scheduler
        assert (scheduler.queued, scheduler.in_flight) == (0, 0)

    serve(test)


# --- memory --------------------------------------------------------------------------------------


def test_a_request_without_memory_is_refused_and_keeps_nothing(serve, repository, monkeypatch):
    """Its bodies are bytes, as JSON's are: the first found room, the second did not."""
    write_model(repository, "model", IDENTITY, TWO_CONFIG)

    async def test(server: Supervisor) -> None:
        await server.grow(1000)

        def full(nbytes: int) -> Segment:
            raise ResourceExhausted("shared memory is full")

        with monkeypatch.context() as patch:
            patch.setattr(Segment, "create", full)
            big = np.ones(3_000_000, np.float32)
            tensors = [
                InferTensor("INPUT0", "FP32", (20_000,), bytes(80_000)),
                InferTensor("INPUT1", "FP32", big.shape, big.tobytes()),
            ]
            with pytest.raises(ResourceExhausted, match="shared memory is full"):
                server.submit(InferRequest("model", tensors), lambda response: None)
        await until(lambda: is_idle(server))
        outputs = await server.infer("model", {**ones(20_000), "INPUT1": big})
        assert len(outputs["OUTPUT0"]) == 20_000
        del outputs

    serve(test)


def test_a_model_without_memory_fails_its_request_only(serve, repository):
    """The stub goes on, and has leaked nothing: the same again, many times."""
    body = """
import gc
from actorserve.errors import ResourceExhausted
from actorserve.shm.arena import Arena
class TritonPythonModel:
    def initialize(self, args):
        (self.arena,) = [each for each in gc.get_objects() if isinstance(each, Arena)]
        self.allocate = self.arena.allocate

    def scarce(self, nbytes):
        if self.arena.stats().blocks:
            raise ResourceExhausted("no room in the arena")
        return self.allocate(nbytes)

    def execute(self, requests):
        assert self.arena.stats().blocks == 0, "blocks of an earlier response were left"
        x = pb_utils.get_input_tensor_by_name(requests[0], "INPUT0").as_numpy()
        self.arena.allocate = self.scarce if x[0] else self.allocate
        outputs = [pb_utils.Tensor(f"OUTPUT{n}", np.ones(500_000, np.float32)) for n in range(2)]
        return [pb_utils.InferenceResponse(outputs)]
"""
    config = IDENTITY_CONFIG.replace(
        "output [ ", 'output [ { name: "OUTPUT1" data_type: TYPE_FP32 dims: [ -1 ] }, '
    )
    write_model(repository, "model", body, config)

    async def test(server: Supervisor) -> None:
        for _ in range(5):
            with pytest.raises(ResourceExhausted, match="no room in the arena"):
                await server.infer("model", ones())
        outputs = await server.infer("model", {"INPUT0": np.zeros(1, np.float32)})
        assert len(outputs) == 2
        assert server.stats().models[0].versions[0].instances[0].restarts == 0

    serve(test)


# --- batches -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ragged", "most"), [("", 1), ("allow_ragged_batch: true", 4)])
def test_different_shapes_share_a_batch_where_that_is_allowed(serve, repository, ragged, most):
    """allow_ragged_batch; the model gets a list of requests in any case."""
    config = f"""\
backend: "python"
max_batch_size: 4
input [ {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] {ragged} }} ]
output [ {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 1 ] }} ]
dynamic_batching {{ preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 200000 }}
"""
    write_model(repository, "model", COUNTS, config)

    async def test(server: Supervisor) -> None:
        inputs = [{"INPUT0": np.ones((1, n), np.float32)} for n in (1, 2, 3, 4)]
        answers = await asyncio.gather(*[server.infer("model", each) for each in inputs])
        assert [answer["OUTPUT0"].item() for answer in answers] == [most] * 4

    serve(test)


# --- the embedding program -----------------------------------------------------------------------


def test_two_servers_share_a_loop(repository, tmp_path):
    """Each has its own zygote, stubs and memory."""
    write_model(repository, "model")

    async def one(value: float) -> float:
        async with Supervisor(repository, Settings(crash_dir=str(tmp_path))) as server:
            x = np.full(20_000, value, np.float32)
            return float((await server.infer("model", {"INPUT0": x}))["OUTPUT0"][0])

    async def both() -> list[float]:
        return await asyncio.gather(one(1), one(2))

    assert asyncio.run(both()) == [1, 2]


def test_the_program_keeps_its_signals(repository, tmp_path):
    """No handler is installed, not even for children."""
    write_model(repository, "model")
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP, signal.SIGPIPE)

    async def main() -> None:
        before = [signal.getsignal(number) for number in numbers]
        async with Supervisor(repository, Settings(crash_dir=str(tmp_path))) as server:
            await server.infer("model", ones())
            assert [signal.getsignal(number) for number in numbers] == before
        assert [signal.getsignal(number) for number in numbers] == before

    asyncio.run(main())


def test_bad_settings_are_named_before_anything_starts(repository, tmp_path):
    """ConfigError, NotFound; a stop afterwards is harmless."""

    async def main() -> None:
        server = Supervisor(repository, Settings(backend_config=("python,shm-size=1",)))
        with pytest.raises(ConfigError, match="unknown key 'shm-size'"):
            await server.start()
        await server.stop()
        with pytest.raises(NotFound, match="is not a directory"):
            await Supervisor(tmp_path / "nowhere").start()

    asyncio.run(main())


def test_models_that_fail_do_not_end_the_program(serve, repository):
    """They are in `failures`, and asking them says so; the others serve."""
    write_model(repository, "good")
    write_model(repository, "bad", "raise ValueError('no weights')\n")

    async def test(server: Supervisor) -> None:
        assert list(server.failures) == ["bad"]
        assert server.failures["bad"].startswith("ValueError: no weights")
        assert not server.is_ready()
        assert server.is_model_ready("good")
        assert not server.is_model_ready("bad")
        assert (await server.infer("good", ones()))["OUTPUT0"].tolist() == [1]
        with pytest.raises((NotFound, Unavailable), match="has no available versions"):
            await server.infer("bad", ones())

    serve(test)


def test_a_model_s_own_error_is_raised(serve, repository):
    """With its text; a hundred in a row leave nothing behind."""
    write_model(
        repository,
        "model",
        "class TritonPythonModel:\n"
        "    def execute(self, requests): raise ArithmeticError('too large')\n",
    )

    async def test(server: Supervisor) -> None:
        for _ in range(100):
            with pytest.raises(InternalError, match="ArithmeticError: too large"):
                await server.infer("model", ones(2000))

    serve(test)


def test_stats_count_what_happened(serve, repository):
    """Requests, batches, instances, memory."""
    write_model(repository, "model", IDENTITY, IDENTITY_CONFIG + "instance_group [ {count: 2} ]")

    async def test(server: Supervisor) -> None:
        kept = [await server.infer("model", ones(50_000)) for _ in range(3)]
        stats = server.stats()
        assert (stats.is_live, stats.is_ready) == (True, True)
        (model,) = stats.models
        assert (model.name, model.state, model.reason) == ("model", "READY", "")
        (version,) = model.versions
        assert (version.scheduler.accepted, version.scheduler.succeeded) == (3, 3)
        assert [each.name for each in version.instances] == ["model_0_0", "model_0_1"]
        assert sum(each.executed_batches for each in version.instances) == 3
        assert all(each.state == "RUNNING" and each.pid for each in version.instances)
        assert stats.exchange.live_views == len(kept)
        del kept

    serve(test)
