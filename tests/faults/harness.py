# SPDX-License-Identifier: Apache-2.0
"""Models to hurt, and what a fault test does with an embedded server."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actorserve import Supervisor
from actorserve.actors.instance import InstanceStats
from actorserve.actors.model import ModelStats
from actorserve.actors.scheduler import SchedulerStats
from actorserve.clock import monotonic_s
from actorserve.errors import ActorserveError

MODEL_HEAD = """\
import ctypes, os, signal, subprocess, sys, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

def tensors(requests):
    return [pb_utils.get_input_tensor_by_name(r, "INPUT0").as_numpy() for r in requests]

def answers(arrays):
    return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", a)]) for a in arrays]

def wait_for_file(path):
    while not os.path.exists(path):
        time.sleep(0.005)
"""

CONFIG = """\
backend: "python"
max_batch_size: {max_batch}
input [ {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }} ]
output [ {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }} ]
instance_group [ {{ count: {count} kind: KIND_CPU }} ]
{extra}
"""

IDENTITY = """
class TritonPythonModel:
    def execute(self, requests):
        return answers(tensors(requests))
"""


def parameter(name: str, value: object) -> str:
    """Return a parameter in config.pbtxt's words."""
    return f'parameters {{ key: "{name}" value: {{ string_value: "{value}" }} }}\n'


def write_model(
    repository: Path,
    name: str,
    body: str = IDENTITY,
    *,
    count: int = 1,
    max_batch: int = 0,
    extra: str = "",
) -> None:
    """Write a model with this source; MODEL_HEAD goes in front."""
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(MODEL_HEAD + body)
    config = CONFIG.format(max_batch=max_batch, count=count, extra=extra)
    (repository / name / "config.pbtxt").write_text(config)


DIE = "os.kill(os.getpid(), signal.SIGKILL)"
PLACES = {
    "importing": "note(); {code}\nclass TritonPythonModel:\n    pass",
    "initializing": """
class TritonPythonModel:
    def initialize(self, args):
        note(); {code}
""",
    "completing the configuration": """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        note(); {code}
""",
}
"""Models that do something at one moment of their loading, which they note before."""


def write_noting_model(repository: Path, body: str, **how: Any) -> None:
    """Write a model whose source may call `note()`."""
    head = (
        'def note():\n    with open(os.environ["NOTES"], "a") as file:\n        file.write("x")\n'
    )
    write_model(repository, "model", f"{head}\n{body}", **how)


TAG = "ACTORSERVE_TEST_TAG"
"""Set by a fixture: whatever a test starts carries it, orphans of a dead zygote too."""


def marked_processes() -> dict[int, str]:
    """Return all that lives of what this test started, by pid, with the names that ps shows."""
    tag = f"{TAG}={os.environ[TAG]}".encode()
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if tag in (path / "environ").read_bytes().split(b"\0"):
                found[int(path.name)] = (path / "comm").read_text().strip()
        except OSError:
            continue
    return found


def stub_pids() -> list[int]:
    """Return the pids of all stubs that live, by their names."""
    names = marked_processes().items()
    return sorted(pid for pid, name in names if re.search(r"_\d+_\d+$", name))


class Gate:
    """Files between a test and its models: what was begun, may go on, and was told of its end."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go, self.told = (folder / name for name in ("BEGUN", "GO", "TOLD"))
        self.begun.touch()
        for path in (self.begun, self.go, self.told):
            monkeypatch.setenv(path.name, str(path))

    def executed(self) -> list[int]:
        """Return the first elements of what was executed, in order."""
        return [int(word) for word in self.begun.read_text().split()]


class Harness:
    """What a fault test does with a server."""

    def __init__(self, server: Supervisor) -> None:
        self.server = server

    async def infer(self, model: str, values: Any, timeout_s: float = 20) -> np.ndarray:
        """Infer and return the one output."""
        x = np.asarray(values, np.float32)
        outputs = await self.server.infer(model, {"INPUT0": x}, timeout_s=timeout_s)
        return outputs["OUTPUT0"]

    async def outcome(self, model: str, values: Any, timeout_s: float = 20) -> Any:
        """Infer and return the output as a list, or the error."""
        try:
            return (await self.infer(model, values, timeout_s)).tolist()
        except ActorserveError as error:
            return error

    def submit(self, model: str, values: Any) -> asyncio.Task[Any]:
        """Start an inference; its outcome is the task's result."""
        return asyncio.ensure_future(self.outcome(model, values))

    def model(self, model: str) -> ModelStats:
        """Return how a model stands."""
        return next(each for each in self.server.stats().models if each.name == model)

    def scheduler(self, model: str) -> SchedulerStats:
        """Return the counts of a model's scheduler."""
        return self.model(model).versions[0].scheduler

    def instances(self, model: str) -> tuple[InstanceStats, ...]:
        """Return a model's instances."""
        return self.model(model).versions[0].instances

    def instance(self, model: str) -> InstanceStats:
        """Return a model's first instance."""
        return self.instances(model)[0]

    def kill(self, model: str, number: int = signal.SIGKILL) -> int:
        """Signal a model's first stub; returns its pid."""
        pid = self.instance(model).pid
        os.kill(pid, number)
        return pid

    async def until(self, condition: Callable[[], object], timeout_s: float = 10) -> None:
        """Wait for a condition while the loop turns."""
        deadline_s = monotonic_s() + timeout_s
        while not condition():
            assert monotonic_s() < deadline_s, f"not within {timeout_s:g} s"
            await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=0.005)

    async def holds(self, condition: Callable[[], object], for_s: float) -> bool:
        """Return whether a condition stays true for a while; the loop turns meanwhile."""
        deadline_s = monotonic_s() + for_s
        while monotonic_s() < deadline_s:
            if not condition():
                return False
            await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=0.005)
        return True

    @property
    def zygote_pid(self) -> int:
        """Return the pid of the zygote, 0 while none is up."""
        return self.server._node.spawner.stats().zygote_pid or 0

    async def until_restarted(self, model: str, pid: int, timeout_s: float = 10) -> None:
        """Wait until the stub that was `pid` has a running successor."""

        def is_back() -> bool:
            each = self.instance(model)
            return each.state == "RUNNING" and each.pid not in (0, pid)

        await self.until(is_back, timeout_s)
