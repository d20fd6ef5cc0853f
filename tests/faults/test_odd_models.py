# SPDX-License-Identifier: Apache-2.0
"""What a model does to its arrays and objects hurts its own request and nobody else's."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from actorserve import Supervisor
from actorserve.errors import Code, Unavailable
from tests.faults.harness import Harness, write_model

KEEPER = """
KEPT = {}
class TritonPythonModel:
    def execute(self, requests):
        arrays = tensors(requests)
        if arrays[0].size == 1:
            KEPT.pop("x")[:] = 666
            return answers(arrays)
        KEPT["x"] = arrays[0]
        return answers(arrays)
"""


def test_an_answer_that_was_given_cannot_be_changed(serve, repository):
    """A model that returns its input, keeps it and writes into it later changes only its copy."""
    write_model(repository, "model", KEEPER)

    async def test(harness: Harness) -> None:
        first = await harness.infer("model", np.ones(100_000))
        await harness.infer("model", [0.0])
        assert np.array_equal(first, np.ones(100_000, np.float32))
        del first

    serve(test)


def test_an_input_that_is_returned_is_not_copied(serve, repository):
    """Pass-through stays without a copy where the model keeps nothing: no block of its own."""
    write_model(repository, "model")

    async def test(harness: Harness) -> None:
        before = harness.server.stats().exchange.arena.allocations
        outputs = await harness.infer("model", np.ones(100_000))
        stats = harness.server.stats().exchange
        assert stats.arena.allocations == before + 1
        assert stats.arena.used_bytes >= 400_000  # the view that we hold lies in our own arena
        del outputs

    serve(test)


@pytest.mark.parametrize(
    "answer",
    [
        "pb_utils.InferenceResponse([pb_utils.Tensor('OUTPUT0', Odd(arrays[0]))])",
        "type('R', (pb_utils.InferenceResponse,), {'__init__': lambda self: None})()",
        "pb_utils.InferenceResponse([Bare()])",
        "pb_utils.InferenceResponse(error=Error('x'))",
        "resized()",
    ],
)
def test_an_odd_answer_is_its_own_request_s_error(serve, repository, answer):
    """Its neighbours in the batch are answered, and the stub lives on."""
    write_model(
        repository,
        "model",
        f"""
class Odd(np.ndarray):
    def __new__(cls, a): return np.asarray(a).view(cls)
    def tobytes(self, *a): raise ValueError("odd")
    def reshape(self, *a): raise ValueError("odd")
class Bare(pb_utils.Tensor):
    def __init__(self): pass
class Error(pb_utils.TritonError):
    def message(self): raise ValueError("odd")
def resized():
    a = np.ones(6, np.float32)
    t = pb_utils.Tensor("OUTPUT0", a)
    a.resize(3, refcheck=False)
    return pb_utils.InferenceResponse([t])
class TritonPythonModel:
    def execute(self, requests):
        found = []
        for request in requests:
            arrays = tensors([request])
            odd = arrays[0].flat[0] < 0
            found.append({answer} if odd else answers(arrays)[0])
        return found
""",
        max_batch=8,
        extra="dynamic_batching { preferred_batch_size: [ 4 ] "
        "max_queue_delay_microseconds: 2000000 }",
    )

    async def test(harness: Harness) -> None:
        pid = harness.instance("model").pid
        values = [[[1.0]], [[-1.0]], [[2.0]], [[3.0]]]
        outcomes = await asyncio.gather(*[harness.submit("model", each) for each in values])
        assert [each for number, each in enumerate(outcomes) if number != 1] == [
            [[1.0]],
            [[2.0]],
            [[3.0]],
        ]
        odd = outcomes[1]
        # A subclass of arrays is sent as the plain array that it is.
        assert odd == [[-1.0]] or odd.code in (Code.INTERNAL, Code.INVALID_ARG), odd
        assert harness.instance("model").pid == pid

    serve(test)


def test_a_model_s_clock_is_its_own(serve, repository):
    """Patching the time module does not make a healthy stub look hung."""
    write_model(
        repository,
        "model",
        """
class TritonPythonModel:
    def initialize(self, args):
        time.monotonic_ns = lambda: 0
        time.monotonic = lambda: "never"
    def execute(self, requests):
        return answers(tensors(requests))
""",
        extra='parameters { key: "EXECUTE_TIMEOUT_S" value: { string_value: "5" } }',
    )

    async def test(harness: Harness) -> None:
        pid = harness.instance("model").pid
        for n in range(20):
            assert await harness.outcome("model", [float(n)]) == [float(n)]
        assert harness.instance("model").pid == pid

    serve(test)


def test_two_starts_at_once_are_one(repository):
    """The second of two concurrent starts is refused, and nothing of it stays."""

    async def main() -> None:
        server = Supervisor(repository)
        results = await asyncio.gather(server.start(), server.start(), return_exceptions=True)
        assert [type(each) for each in results] == [type(None), Unavailable]
        await server.stop()

    asyncio.run(main())
