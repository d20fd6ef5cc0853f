# SPDX-License-Identifier: Apache-2.0
"""Deaths around loads and unloads, of models that load models too: each load has one end."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import tempfile
from pathlib import Path

import numpy as np
import pytest

from actorserve.errors import ActorserveError, InvalidArgument, Unavailable
from tests.faults.harness import CONFIG, MODEL_HEAD, Harness, stub_pids, write_model

EXPLICIT = {"model_control_mode": "explicit", "load_model": ("*",)}

LOADER = """
class TritonPythonModel:
    def execute(self, requests):
        arrays = tensors(requests)
        with open(os.environ["BEGUN"], "a") as file:
            file.write("1 ")
        pb_utils.load_model("slow")
        return answers(arrays)
"""

SLOW = """
class TritonPythonModel:
    def initialize(self, args):
        with open(os.environ["BEGUN"], "a") as file:
            file.write("2 ")
        if os.path.exists(os.environ["BEGUN"] + ".slow"):
            wait_for_file(os.environ["GO"])
    def execute(self, requests):
        return answers(tensors(requests))
"""


@pytest.fixture
def models(repository, gate):
    """Write a model that loads another one, which takes its time when it is told to."""
    write_model(repository, "loader", LOADER)
    write_model(repository, "slow", SLOW)
    return Path(str(gate.begun) + ".slow")


def test_row_77_a_caller_that_dies_while_it_waits_for_a_load_ends_nothing(serve, models, gate):
    """Its request has one error, the load goes on, and its heir can load again."""

    async def test(harness: Harness) -> None:
        models.touch()
        gate.begun.write_text("")
        task = harness.submit("loader", [1.0])
        await harness.until(lambda: gate.executed() == [1, 2])
        pid = harness.kill("loader")
        assert isinstance(await task, Unavailable)
        gate.go.touch()
        await harness.until(lambda: harness.model("slow").state == "READY")
        await harness.until_restarted("loader", pid)
        assert await harness.outcome("loader", [2.0]) == [2.0]
        assert await harness.outcome("slow", [3.0]) == [3.0]

    serve(test, **EXPLICIT)


def test_row_77_a_model_that_dies_while_it_is_loaded_by_another(serve, models, gate):
    """It is started again as at any load, and the caller's load succeeds."""

    async def test(harness: Harness) -> None:
        models.touch()
        gate.begun.write_text("")
        task = harness.submit("loader", [1.0])
        await harness.until(lambda: gate.executed() == [1, 2])
        await harness.until(lambda: harness.model("slow").state == "LOADING")
        os.kill(harness.instance("slow").pid, signal.SIGKILL)
        await harness.until(lambda: gate.executed() == [1, 2, 2])
        gate.go.touch()
        assert await task == [1.0]
        assert await harness.outcome("slow", [3.0]) == [3.0]

    serve(test, **EXPLICIT)


def test_row_77_caller_and_callee_die_at_once(serve, models, gate):
    """Nothing hangs, and both are there again."""

    async def test(harness: Harness) -> None:
        models.touch()
        gate.begun.write_text("")
        task = harness.submit("loader", [1.0])
        await harness.until(lambda: gate.executed() == [1, 2])
        os.kill(harness.instance("slow").pid, signal.SIGKILL)
        pid = harness.kill("loader")
        assert isinstance(await task, Unavailable)
        gate.go.touch()
        await harness.until(lambda: harness.model("slow").state == "READY")
        await harness.until_restarted("loader", pid)

    serve(test, **EXPLICIT)


def test_row_33_old_stubs_that_die_during_a_reload_change_nothing(serve, models, gate):
    """The new version comes up beside a dead one, whose requests have one error each."""

    async def test(harness: Harness) -> None:
        old = harness.instance("slow").pid
        models.touch()
        loading = asyncio.ensure_future(harness.server.load("slow"))
        await harness.until(lambda: harness.model("slow").state == "LOADING")
        await harness.until(lambda: harness.instance("slow").pid not in (0, old))
        os.kill(old, signal.SIGKILL)
        gate.go.touch()
        await loading
        assert await harness.outcome("slow", [3.0]) == [3.0]
        assert len(harness.instances("slow")) == 1

    serve(test, **EXPLICIT)


def test_row_33_instances_that_die_while_their_number_changes(serve, repository):
    """Old ones are restarted, new ones are tried again, and the number is right in the end."""
    write_model(repository, "model", count=2)

    def count(number: int) -> None:
        text = CONFIG.format(max_batch=0, count=number, extra="")
        (repository / "model" / "config.pbtxt").write_text(text)

    async def test(harness: Harness) -> None:
        for number in (4, 1, 3, 2, 5, 1):
            count(number)
            kept = {each.name: each.pid for each in harness.instances("model")}
            loading = asyncio.ensure_future(harness.server.load("model"))
            os.kill(max(stub_pids()), signal.SIGKILL)
            try:
                await asyncio.wait_for(loading, 20)
            except ActorserveError as error:
                pytest.fail(f"{number}: {error}")
            await harness.until(
                lambda: all(each.state == "RUNNING" for each in harness.instances("model"))
            )
            assert len(harness.instances("model")) == number
            assert await harness.outcome("model", [1.0]) == [1.0]
            assert kept
        await harness.until(lambda: len(stub_pids()) == 2)

    serve(test, **EXPLICIT)


def test_row_34_an_unload_ends_a_model_whose_stub_is_about_to_be_restarted(serve, repository):
    """It stays unloaded, and so does one that is unloaded while an instance is added."""
    write_model(repository, "model", count=2)

    async def test(harness: Harness) -> None:
        for each in harness.instances("model"):
            os.kill(each.pid, signal.SIGKILL)
        await asyncio.wait_for(harness.server.unload("model"), 10)
        text = CONFIG.format(max_batch=0, count=3, extra="")
        await harness.server.load("model")
        (repository / "model" / "config.pbtxt").write_text(text)
        loading = asyncio.ensure_future(harness.server.load("model"))
        await harness.until(lambda: len(stub_pids()) > 3)
        await asyncio.wait_for(harness.server.unload("model"), 10)
        with pytest.raises(Unavailable, match="unloaded before it had loaded"):
            await loading
        await harness.until(lambda: len(stub_pids()) == 1)
        assert harness.model("model").state == "UNAVAILABLE"

    serve(test, **EXPLICIT)


def test_row_32_all_die_while_everything_is_reloaded_under_load(serve, repository):
    """Clients, reloads, unloads and kills at once: one outcome each, and then all is well."""
    for name in ("a", "b"):
        write_model(repository, name, count=2)

    async def test(harness: Harness) -> None:
        outcomes: list[object] = []
        is_over = False

        async def client(name: str) -> None:
            while not is_over:
                outcomes.append(await harness.outcome(name, [1.0] * 2000))
                await asyncio.sleep(0)  # a refusal comes at once

        clients = [asyncio.ensure_future(client(name)) for name in "aabb"]
        for turn in range(6):
            work = [harness.server.load("a"), harness.server.load("b")]
            if turn % 2:
                work += [harness.server.unload("b"), harness.server.load("b")]
            loading = asyncio.gather(*work, return_exceptions=True)
            for pid in stub_pids():
                os.kill(pid, signal.SIGKILL)
            results = await asyncio.wait_for(loading, 20)
            assert all(x is None or isinstance(x, ActorserveError) for x in results), results
        is_over = True
        await asyncio.wait_for(asyncio.gather(*clients), 20)
        assert all(isinstance(x, (list, ActorserveError)) for x in outcomes)
        for name in "ab":
            await harness.server.load(name)
            assert await harness.outcome(name, [2.0]) == [2.0]
        await harness.until(harness.server.is_ready)
        await harness.until(lambda: len(stub_pids()) == 5)

    serve(test, **EXPLICIT)


def test_row_41_a_killed_server_leaves_no_stub_of_a_brought_model(
    start_server, repository, tmp_path, monkeypatch
):
    """Stubs end with it, and its folder with the next server."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    flags = ["--model-control-mode=explicit"]
    server = start_server(repository, *flags)
    body = MODEL_HEAD + "class TritonPythonModel:\n    def execute(self, requests): pass\n"
    parameters = {
        "config": json.dumps({"backend": "python", "instance_group": [{"count": 1}]}),
        "file:1/model.py": base64.b64encode(body.encode()).decode(),
    }
    path = "/v2/repository/models/new/load"
    assert server.call("POST", path, {"parameters": parameters}) == (200, b"")
    assert len(stub_pids()) == 1
    server.process.kill()
    server.process.wait()
    server = start_server(repository, *flags)
    assert server.stop() == 0
    assert stub_pids() == []
    assert list(folder.iterdir()) == []


def test_large_files_of_a_dead_caller_are_given_back(serve, repository, gate, tmp_path):
    """What it had lent for the load is returned with the load's end."""
    body = """
CONFIG = '{"backend": "python", "parameters": {}}'
CODE = b"import os, time\\nclass TritonPythonModel:\\n    def initialize(self, args):\\n" \
    b"        while not os.path.exists(os.environ['GO']): time.sleep(0.005)\\n" \
    b"    def execute(self, requests): pass\\n"
class TritonPythonModel:
    def execute(self, requests):
        files = {"file:1/model.py": CODE, "file:1/weights": bytes(20_000_000)}
        with open(os.environ["BEGUN"], "a") as file:
            file.write("1 ")
        pb_utils.load_model("new", CONFIG, files)
        return answers(tensors(requests))
"""
    write_model(repository, "loader", body)

    async def test(harness: Harness) -> None:
        task = harness.submit("loader", [1.0])
        names = [each.name for each in harness.server.stats().models]
        await harness.until(lambda: "new" in [each.name for each in harness.server.stats().models])
        assert "new" not in names
        pid = harness.kill("loader")
        assert isinstance(await task, Unavailable)
        gate.go.touch()
        await harness.until(lambda: harness.model("new").state == "READY")
        await harness.until_restarted("loader", pid)
        await harness.server.unload("new")

    serve(test, **EXPLICIT)


def test_a_load_that_is_given_up_is_ended(serve, models, gate):
    """Where nobody else waits for it; where somebody does, it goes on."""

    async def test(harness: Harness) -> None:
        models.touch()
        gate.begun.write_text("")
        loading = asyncio.ensure_future(harness.server.load("slow"))
        await harness.until(lambda: gate.executed() == [2])
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        await harness.until(lambda: harness.model("slow").state == "READY")
        await harness.until(lambda: len(stub_pids()) == 3)
        both = [asyncio.ensure_future(harness.server.load("slow")) for _ in range(3)]
        await harness.until(lambda: gate.executed() == [2, 2])
        both[1].cancel()
        gate.go.touch()
        results = await asyncio.gather(*both, return_exceptions=True)
        assert [type(each) for each in results] == [
            type(None),
            asyncio.CancelledError,
            type(None),
        ]
        assert await harness.outcome("slow", [3.0]) == [3.0]

    serve(test, **EXPLICIT)


def test_apps_load_what_they_bring(serve, repository):
    """Configuration and files by keyword, the index, and errors of the one tree."""

    async def test(harness: Harness) -> None:
        server = harness.server
        write_model(repository, "later")
        config = json.dumps(
            {
                "backend": "python",
                "input": [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [-1]}],
                "output": [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [-1]}],
            }
        )
        body = (repository / "bystander" / "1" / "model.py").read_bytes()
        await server.load("new", config=config, files={"file:1/model.py": body})
        assert await harness.outcome("new", [1.0]) == [1.0]
        index = {each.name: each.state for each in await server.repository_index()}
        assert index == {"bystander": "READY", "later": "", "new": "READY"}
        ready = [each.name for each in await server.repository_index(ready=True)]
        assert ready == ["bystander", "new"]
        with pytest.raises(InvalidArgument, match="Invalid config override"):
            await server.load("new", config="{")
        await server.unload("new", unload_dependents=True)
        assert not list(Path(tempfile.gettempdir()).glob("actorserve-models-*/*"))
        assert np.isfinite((await harness.infer("bystander", [1.0]))[0])

    serve(test)
