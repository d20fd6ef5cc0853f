# SPDX-License-Identifier: Apache-2.0
"""Models that work on an emulated device, and a server of them."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from actorserve import Supervisor
from actorserve.clock import monotonic_s
from actorserve.config import Settings
from actorserve.errors import ActorserveError
from tests.server.harness import parameter, write_model

HEAD = """
import json
from actorserve.triton.device_tensor import current_pool

def read(request, name="INPUT0"):
    return pb_utils.get_input_tensor_by_name(request, name)

def respond(*tensors):
    return pb_utils.InferenceResponse(list(tensors))

def named(name, tensor):
    return pb_utils.Tensor.from_dlpack(name, tensor)

def on_device(array, name="OUTPUT0"):
    return pb_utils.empty_device(array.shape, array.dtype, name).copy_from(array)

def call(model, *tensors, memory=None, outputs=("OUTPUT0",), **more):
    if memory is not None:
        more["preferred_memory"] = pb_utils.PreferredMemory(*memory)
    made = pb_utils.InferenceRequest(
        model_name=model, inputs=list(tensors), requested_output_names=list(outputs), **more
    )
    response = made.exec()
    if response.has_error():
        raise pb_utils.TritonModelException(response.error().message())
    return response

def output(response, name="OUTPUT0"):
    return pb_utils.get_output_tensor_by_name(response, name)

def host(tensor):
    return tensor.as_numpy() if tensor.is_cpu() else tensor.copy_to_numpy()

def counters():
    pool = current_pool()
    if pool is None:
        return {"device": ""}
    c, s = pool.driver.counters(), pool.stats()
    return {
        "copies": c.copies_in + c.copies_out + c.copies_within,
        "in": c.copies_in, "out": c.copies_out, "within": c.copies_within,
        "created": c.created, "imported": c.imported, "retired": c.closed,
        "device": pool.uuid, "used": s.used_bytes, "views": s.views, "lent": s.lent, "owed": s.owed,
    }

def told(value):
    return pb_utils.Tensor("TEXT", np.array([json.dumps(value)], object))

GPU, CPU = pb_utils.TRITONSERVER_MEMORY_GPU, pb_utils.TRITONSERVER_MEMORY_CPU

class TritonPythonModel:
    def initialize(self, args):
        self.args = args
        self.kept = []

    def execute(self, requests):
        return [self.respond_to(request) for request in requests]

    def respond_to(self, request):
        if request.requested_output_names() == {"TEXT"}:
            return respond(told({**counters(), **self.told()}))
        return self.answer(request)

    def told(self):
        return {}

    def answer(self, request):
"""
"""The body of `answer` is to follow, indented by eight; `request` is what it gets.

Whoever wants nothing but TEXT is told the counters of the driver and the pool.
"""

CONFIG = """\
backend: "python"
input [ {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] optional: true }} ]
input [ {{ name: "TEXTS" data_type: TYPE_STRING dims: [ -1 ] optional: true }} ]
output [ {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }} ]
output [ {{ name: "OUTPUT1" data_type: TYPE_FP32 dims: [ -1 ] }} ]
output [ {{ name: "TEXT" data_type: TYPE_STRING dims: [ -1 ] }} ]
{group}
{extra}
"""

ON_CPU = "instance_group [ { kind: KIND_CPU } ]"
KEEPS = parameter("FORCE_CPU_ONLY_INPUT_TENSORS", "no")

IDENTITY = """
return respond(named("OUTPUT0", read(request)))
"""


def write(
    repository: Path, name: str, answer: str, *, group: str = "", extra: str = KEEPS, head: str = ""
) -> None:
    """Write a model whose `answer(self, request)` has this body; `head` is module code."""
    body = "".join(f"        {line}\n" for line in answer.strip("\n").split("\n"))
    source = HEAD.replace("class TritonPythonModel:", head + "\nclass TritonPythonModel:")
    write_model(repository, name, source + body, CONFIG.format(group=group, extra=extra))


class Served:
    """A running server of such models."""

    def __init__(self, server: Supervisor) -> None:
        self.server = server

    async def infer(self, model: str, array: Any = None, **more: Any) -> dict[str, np.ndarray]:
        """Infer; returns the outputs."""
        inputs = {} if array is None else {"INPUT0": np.asarray(array, np.float32)}
        return await self.server.infer(model, inputs, timeout_s=60, **more)

    async def outcome(self, model: str, array: Any = None) -> Any:
        """Return the first output as a list, or the error."""
        try:
            outputs = await self.infer(model, array, outputs=["OUTPUT0"])
            return outputs["OUTPUT0"].tolist()
        except ActorserveError as error:
            return error

    async def tell(self, model: str, array: Any = None) -> Any:
        """Return what a model has told."""
        outputs = await self.infer(model, array, outputs=["TEXT"])
        return json.loads(outputs["TEXT"][0])

    def instance(self, model: str) -> Any:
        """Return how a model's first instance stands."""
        models = self.server.stats().models
        return next(each for each in models if each.name == model).versions[0].instances[0]

    async def until(self, condition: Callable[[], Any], timeout_s: float = 15) -> None:
        """Wait for a condition, or for a coroutine's that is true, while the loop turns."""
        deadline_s = monotonic_s() + timeout_s
        while True:
            value = condition()
            if asyncio.iscoroutine(value):
                value = await value
            if value:
                return
            assert monotonic_s() < deadline_s, f"not within {timeout_s:g} s: {self.devices}"
            await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=0.01)

    @property
    def devices(self) -> Any:
        """Return the counts of device memory."""
        return self.server.stats().devices

    async def until_nothing_is_held(self) -> None:
        """Wait until no reference is held, lent or in quarantine."""
        gc.collect()

        def is_free() -> bool:
            stats = self.devices
            return stats.held == stats.lent == stats.blocks == stats.quarantined == 0

        await self.until(is_free)


def serve(
    repository: Path,
    test: Callable[[Served], Awaitable[None]],
    tmp_path: Path,
    *,
    is_free_after: bool = True,
    **settings: Any,
) -> None:
    """Run `test(served)` against a server; afterwards no memory may be held."""
    settings.setdefault("device_driver", "emulated")
    settings.setdefault("device_slab_bytes", 16 << 20)
    settings.setdefault("restart_backoff_s", (0.0, 0.0))
    settings.setdefault("crash_dir", str(tmp_path / "crashes"))

    async def main() -> None:
        server = Supervisor(repository, Settings(**settings))
        async with server:
            assert not server.failures, server.failures
            served = Served(server)
            await test(served)
            if is_free_after and server.stats().devices is not None:
                await served.until_nothing_is_held()
                await served.until(lambda: server.stats().exchange.held_blocks == 0)

    asyncio.run(main())
