# SPDX-License-Identifier: Apache-2.0
"""Models that call each other and send many responses, and a server of them."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from actorserve import Supervisor
from actorserve.clock import monotonic_s
from actorserve.config import Settings
from tests.server.harness import IDENTITY_CONFIG, write_model

DECOUPLED = "model_transaction_policy { decoupled: true }\n"

HEAD = """
import asyncio

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def read(request):
    return pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()


def answer(array, **more):
    return pb_utils.InferenceResponse(
        [pb_utils.Tensor("OUTPUT0", np.asarray(array, np.float32))], **more
    )


def call(model, array, **more):
    more.setdefault("requested_output_names", ["OUTPUT0"])
    return pb_utils.InferenceRequest(
        model_name=model,
        inputs=[pb_utils.Tensor("INPUT0", np.asarray(array, np.float32))],
        **more,
    )


def value(response):
    if response.has_error():
        raise RuntimeError(response.error().message())
    return response.output_tensors()[0].as_numpy()


def passed_on(response):
    if response.has_error():
        return pb_utils.InferenceResponse(error=response.error())
    return pb_utils.InferenceResponse(response.output_tensors())


class TritonPythonModel:
"""

DOUBLE = """
def execute(self, requests):
    return [answer(read(request) * 2) for request in requests]
"""

COUNT = """
def execute(self, requests):
    for request in requests:
        sender = request.get_response_sender()
        for number in range(int(read(request)[0])):
            sender.send(answer([number]))
        sender.send(flags=FINAL)
"""
"""Decoupled: 0, 1, … and a bare end."""

COUNT_ASYNC = """
async def execute(self, requests):
    async def one(request):
        sender = request.get_response_sender()
        for number in range(int(read(request)[0])):
            await asyncio.sleep(0)
            sender.send(answer([number]))
        sender.send(flags=FINAL)
    await asyncio.gather(*[one(request) for request in requests])
"""


def write(
    repository: Path,
    name: str,
    body: str,
    *,
    decoupled: bool = False,
    instances: int = 1,
    config: str = "",
) -> None:
    """Write a model with these methods and module-level names of HEAD."""
    text = IDENTITY_CONFIG + config + (DECOUPLED if decoupled else "")
    if instances > 1:
        text += f"instance_group [ {{ count: {instances} kind: KIND_CPU }} ]\n"
    methods, _, functions = body.partition("# module level\n")
    write_model(repository, name, HEAD + textwrap.indent(methods, "    ") + functions, text)


def serve(repository: Path, test: Callable[[Supervisor], Awaitable[Any]], **settings: Any) -> Any:
    """Run a test against an embedded server; afterwards no block is held by anybody."""
    settings.setdefault("crash_dir", str(repository.parent / "crashes"))

    async def main() -> Any:
        async with Supervisor(repository, Settings(**settings)) as server:
            assert server.failures == {}
            result = await test(server)
            await until(lambda: server.stats().exchange.held_blocks == 0)
            return result

    return asyncio.run(main())


async def until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    """Let the loop turn until a condition holds."""
    deadline_s = monotonic_s() + timeout_s
    while not condition():
        assert monotonic_s() < deadline_s, "it never came true"
        await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=0.01)


async def ask(server: Supervisor, model: str, *values: float, **more: Any) -> list[float]:
    """Run one inference on these numbers."""
    outputs = await server.infer(model, {"INPUT0": np.array(values, np.float32)}, **more)
    return [float(each) for each in outputs["OUTPUT0"]]


async def listen(server: Supervisor, model: str, *values: float, **more: Any) -> list[float]:
    """Run one streamed inference; returns the first number of each response."""
    inputs = {"INPUT0": np.array(values, np.float32)}
    return [float(each["OUTPUT0"][0]) async for each in server.stream(model, inputs, **more)]
