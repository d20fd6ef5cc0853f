# SPDX-License-Identifier: Apache-2.0
"""Row 40a: a model forks its stub; the children own nothing of it, and go with it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from tests.faults.harness import Harness, marked_processes, write_model

POOL = """
import multiprocessing

def double(array):
    return array * 2

class TritonPythonModel:
    def initialize(self, args):
        self.kept = None
    def execute(self, requests):
        arrays = tensors(requests)
        with multiprocessing.get_context("{method}").Pool(2) as pool:
            doubled = pool.map(double, arrays + arrays)
        self.kept = arrays  # alive while the workers' copies die
        return answers(doubled[: len(arrays)])
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_row_40a_a_pool_in_execute_leaves_its_parents_memory_alone(serve, repository, method):
    """Workers get arrays of leased blocks and end; the parent's blocks stay whole."""
    write_model(repository, "model", POOL.format(method=method))

    async def test(harness: Harness) -> None:
        pid = harness.instance("model").pid
        for n in range(2 if method != "fork" else 5):
            x = np.full(50_000, n, np.float32)
            assert np.array_equal(await harness.infer("model", x), 2 * x)
        assert harness.instance("model").pid == pid
        await harness.server.unload("model")

    serve(test)


FORK = """
import gc

class TritonPythonModel:
    def initialize(self, args):
        {initialize}
        self.kept = []
    def execute(self, requests):
        with open(os.environ["EXECUTIONS"], "a") as file:
            print(os.getpid(), file=file)
        arrays = tensors(requests)
        self.kept.append(arrays[0])
        if arrays[0][0] < 0:
            pid = os.fork()
            if pid == 0:
                {child}
            os.waitpid(pid, 0)
        elif arrays[0][0] > 100:
            self.kept.clear()
        return answers([array + 1 for array in arrays])
    def finalize(self):
        {finalize}
"""


@pytest.fixture
def executions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file in which each execute leaves its process's pid."""
    path = tmp_path / "executions"
    monkeypatch.setenv("EXECUTIONS", str(path))
    return path


@pytest.mark.parametrize(
    "child",
    [
        "os._exit(0)",
        "sys.exit(0)",
        "sys.exit('cannot')",
        "raise ValueError('in the child')",
        "return answers(arrays)",
        "return None",
        "del requests, arrays, self.kept; gc.collect(); os._exit(0)",
        "pb_utils.Logger.log_info('from the child'); os._exit(0)",
        "os.kill(os.getpid(), signal.SIGKILL)",
        "os.execv('/bin/true', ['true'])",
    ],
)
def test_row_40a_a_fork_in_execute_owns_nothing_of_the_channel(
    serve, repository, executions, child
):
    """Whatever the child does, also to come back from execute: it is no second stub."""
    write_model(repository, "model", FORK.format(child=child, initialize="pass", finalize="pass"))

    async def test(harness: Harness) -> None:
        pid = harness.instance("model").pid
        x = np.zeros(20_000, np.float32)
        for _ in range(3):
            # Quick work is sent ahead, so that at the fork batches wait in the stub itself.
            for _ in range(40):
                await harness.infer("model", [0.0])
            x[0] = -1
            assert (
                await asyncio.gather(*[harness.outcome("model", [-1.0]) for _ in range(8)])
                == [[0.0]] * 8
            )
            got = await asyncio.gather(*[harness.infer("model", x) for _ in range(8)])
            assert all(np.array_equal(each, x + 1) for each in got)
            del got
        stats = harness.instance("model")
        assert stats.pid == pid
        assert stats.executed_batches == 3 * 56
        assert executions.read_text().split() == [str(pid)] * 3 * 56
        assert len([name for name in marked_processes().values() if name == "model_0_0"]) == 1
        await harness.infer("model", np.full(20_000, 101, np.float32))
        await harness.infer("model", [101.0])

    serve(test)


@pytest.mark.parametrize("child", ["return", "sys.exit(0)", "raise ValueError('in the child')"])
@pytest.mark.parametrize("hook", ["initialize", "finalize"])
def test_row_40a_a_fork_that_comes_back_from_another_hook_ends(
    serve, repository, executions, hook, child
):
    """The child of a fork in initialize or finalize is no second stub."""
    forking = f"""
        if os.fork() == 0:
            {child}
        os.wait()
"""
    hooks = {"initialize": "pass", "finalize": "pass", hook: forking}
    write_model(repository, "model", FORK.format(child="os._exit(0)", **hooks))

    async def test(harness: Harness) -> None:
        assert await harness.outcome("model", [1.0]) == [2.0]
        assert harness.instance("model").restarts == 0
        assert list(marked_processes().values()).count("model_0_0") == 1
        await asyncio.wait_for(harness.server.unload("model"), 10)
        assert "model_0_0" not in marked_processes().values()

    serve(test, auto_complete_config=False)


def test_row_40a_a_forked_child_that_stays_goes_with_its_stub(serve, repository):
    """A worker that a model forked and never ended is gone after the unload, and after a kill."""
    body = """
class TritonPythonModel:
    def initialize(self, args):
        if os.fork() == 0:
            while True:
                signal.pause()
    def execute(self, requests):
        return answers(tensors(requests))
"""
    write_model(repository, "model", body)

    def count() -> int:
        return list(marked_processes().values()).count("model_0_0")

    async def test(harness: Harness) -> None:
        assert count() == 2
        pid = harness.kill("model")
        await harness.until_restarted("model", pid)
        await harness.until(lambda: count() == 2)
        assert await harness.outcome("model", [1.0]) == [1.0]
        await asyncio.wait_for(harness.server.unload("model"), 10)
        await harness.until(lambda: count() == 0)

    serve(test, auto_complete_config=False)
