# SPDX-License-Identifier: Apache-2.0
"""The models of examples/pipeline_repository do what they show; examples/burst.py counts right."""

from __future__ import annotations

import asyncio
import http.client
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from actorserve import Supervisor
from actorserve.config import Settings
from actorserve.errors import InvalidArgument
from tests.conftest import wait_until
from tests.server.calling_models import DECOUPLED, HEAD, until
from tests.server.harness import write_model
from tests.server.scrape import scrape

EXAMPLES = Path(__file__).parents[2] / "examples"
PIPELINES = EXAMPLES / "pipeline_repository"
MODELS = [path.name for path in sorted(PIPELINES.iterdir()) if path.is_dir()]
TEXTS = ["Listen", " SILENT ", "pure noise"]


@pytest.fixture(scope="module")
def server(start_shared):
    """Return a server of the pipelines."""
    flags = ["--model-control-mode", "explicit"]
    for name in MODELS:
        flags += ["--load-model", name]
    return start_shared(PIPELINES, flags=flags)


def embed(test) -> None:
    """Run a test against an embedded server of the pipelines; no block is held afterwards."""

    async def main() -> None:
        settings = Settings(model_control_mode="explicit", load_model=tuple(MODELS))
        async with Supervisor(PIPELINES, settings) as server:
            assert server.failures == {}
            await test(server)
            await until(lambda: server.stats().exchange.held_blocks == 0)

    asyncio.run(main())


def text_of(outputs, name: str) -> str:
    """Return the one text of an output."""
    return outputs[name][0].decode()


# --- embedded ------------------------------------------------------------------------------------


def test_the_pipeline_passes_tensors_and_errors_on():
    """Clean and embed, one after the other; the error of the second is that of the request."""

    async def test(server: Supervisor) -> None:
        vector = (await server.infer("pipeline", {"TEXT": ["  A b  B "]}))["VECTOR"]
        expected = np.zeros(26, np.float32)
        expected[:2] = np.array([1, 2], np.float32) / np.sqrt(np.float32(5))
        np.testing.assert_allclose(vector, expected, rtol=1e-6)
        with pytest.raises(InvalidArgument, match="^the text has no letters$"):
            await server.infer("pipeline", {"TEXT": ["1 2 3"]})
        with pytest.raises(InvalidArgument, match="the text has no letters"):
            await server.infer("compare", {"TEXTS": ["some", "123", "more"]})

    embed(test)


def test_many_texts_are_compared_at_once():
    """Anagrams are the same, whatever the case; many requests do not mix."""

    async def test(server: Supervisor) -> None:
        answers = await asyncio.gather(
            *[server.infer("compare", {"TEXTS": [*TEXTS, *["x" * (n + 1)] * n]}) for n in range(8)]
        )
        for n, answer in enumerate(answers):
            alike = answer["ALIKE"]
            assert alike.shape == (3 + n, 3 + n)
            np.testing.assert_allclose(np.diag(alike), 1, rtol=1e-5)
            assert alike[0, 1] == pytest.approx(1, rel=1e-5)
            assert alike[0, 2] < 0.7

    embed(test)


def test_words_come_one_by_one_and_many_streams_at_once():
    """The same prompt gives the same words; a stream that is left is written no further."""

    async def test(server: Supervisor) -> None:
        async def words(prompt: str, count: int) -> list[str]:
            inputs = {"PROMPT": [prompt], "COUNT": [count]}
            return [text_of(each, "WORD") async for each in server.stream("words", inputs)]

        streams = await asyncio.gather(*[words(f"prompt {n % 4}", 20) for n in range(16)])
        assert all(len(stream) == 20 for stream in streams)
        assert streams[:4] * 4 == streams
        assert len({tuple(stream) for stream in streams}) == 4
        sentence = text_of(await server.infer("sentence", {"PROMPT": ["prompt 0"]}), "TEXT")
        assert sentence == " ".join(streams[0][:7])
        assert sentence.endswith(".")
        await until(lambda: in_flight(server, "words") == 0)

    embed(test)


def test_work_ends_when_nobody_waits():
    """A cancelled task, as an embedding app has it: the next request does not wait for the rest."""

    async def test(server: Supervisor) -> None:
        task = asyncio.ensure_future(server.infer("patient", {"STEPS": [100_000]}))
        await until(lambda: in_flight(server, "patient") == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        outputs = await server.infer("patient", {"STEPS": [2]}, timeout_s=30)
        assert outputs["DONE"].tolist() == [2]

    embed(test)


def in_flight(server: Supervisor, name: str) -> int:
    """Return how many requests a model has at its stubs."""
    model = next(each for each in server.stats().models if each.name == name)
    return model.versions[0].scheduler.in_flight


# --- over HTTP -----------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["compare", "sentence"])
def test_the_readme_s_requests_have_their_answers(server, model):
    """What the folder's README promises is what comes."""
    readme = (PIPELINES / "README.md").read_text()
    shown = re.search(rf"models/{model}/infer -d '(.*?)'\n(\{{.*?\}})\n```", readme, re.DOTALL)
    assert shown is not None
    reply = server.request("POST", f"/v2/models/{model}/infer", shown[1].encode())
    assert reply.json == json.loads(shown[2])


def test_work_ends_when_the_client_closes_its_connection(server):
    """The model says so on its output, which the server logs."""
    tensor = {"name": "STEPS", "datatype": "INT64", "shape": [1], "data": [100_000]}
    body = json.dumps({"inputs": [tensor]})
    for _ in range(20):  # what is cancelled before its model has begun never gets there
        connection = http.client.HTTPConnection(server.host, server.port, timeout=20)
        connection.request("POST", "/v2/models/patient/infer", body)
        wait_until(lambda: status_of(server, "patient")["in_flight"] == 1)
        connection.close()
        wait_until(lambda: status_of(server, "patient")["in_flight"] == 0)
        if "of 100000 steps" in server.log():
            break
    server.wait_log("of 100000 steps")
    status, outputs = server.infer("patient", {"STEPS": ("INT64", [1], [2])})
    assert (status, outputs) == (200, {"DONE": [2]})


def status_of(server, name: str) -> dict:
    """Return a model's counts."""
    models = server.request("GET", "/v2/actorserve/status").json["models"]
    return next(each for each in models if each["name"] == name)["versions"][0]["scheduler"]


def test_a_model_measures_itself(server):
    """The model answers; its figures are where the server shows metrics."""
    for text in ("abc", "ü" * 50):
        status, outputs = server.infer("metered", {"TEXT": ("BYTES", [1], [text])})
        assert (status, outputs) == (200, {"LENGTH": [len(text)]})
    figures = scrape(server)
    assert figures['texts_total{model="metered",script="ascii"}'] == 1
    assert figures['texts_total{model="metered",script="other"}'] == 1
    assert figures['longest_text{model="metered"}'] == 50
    assert figures['text_length_bucket{le="10",model="metered"}'] == 1
    assert figures['text_length_count{model="metered"}'] == 2


# --- bursts --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def burst() -> ModuleType:
    """Return the program as a module."""
    spec = importlib.util.spec_from_file_location("burst_example", EXAMPLES / "burst.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SMALL = ["--clients", "8", "--streams", "4", "32", "--rounds", "3", "1"]
EXPECTED = [["4", "3", "24", "96", "0", "0"], ["32", "1", "8", "256", "0", "0"]]


def table(text: str) -> list[list[str]]:
    """Return the counts of each line."""
    head, *lines = text.strip().splitlines()
    assert head.split()[:6] == ["streams", "rounds", "requests", "complete", "incomplete", "errors"]
    return [line.split()[:6] for line in lines]


def test_a_burst_is_complete_embedded():
    """As a user starts it: every stream is there, exit code 0, the memory of the stubs is shown."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "burst.py"), *SMALL],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert table(done.stdout) == EXPECTED
    assert len(re.findall(r"[0-9.]+ → [0-9.]+ MiB", done.stdout)) == 2


def test_a_burst_is_complete_over_http(server, burst, capsys):
    """The same table from a server elsewhere."""
    assert burst.main(["--http", server.address, *SMALL]) == 0
    assert table(capsys.readouterr().out) == EXPECTED


BROKEN = """
    def execute(self, requests):
        for request in requests:
            length = pb_utils.get_input_tensor_by_name(request, "LENGTH").as_numpy()[0]
            sender = request.get_response_sender()
            for number in range(length - 1):
                sender.send(pb_utils.InferenceResponse(
                    [pb_utils.Tensor("NUMBER", np.array([number], dtype=np.int64))]
                ))
            sender.send(flags=FINAL)
"""
"""A leaf that loses the last response of each stream."""


def test_a_burst_that_lost_a_response_fails(tmp_path, burst, capsys, monkeypatch):
    """Exit code 1, and the table says how many streams were not complete."""
    repository = tmp_path / "repository"
    leaf = (PIPELINES / "leaf" / "config.pbtxt").read_text()
    assert DECOUPLED.strip() in leaf
    write_model(repository, "leaf", HEAD + BROKEN, leaf)
    (repository / "orchestrator").symlink_to(PIPELINES / "orchestrator")
    monkeypatch.setattr(burst, "REPOSITORY", repository)
    assert burst.main(["--clients", "2", "--streams", "3", "--rounds", "1"]) == 1
    assert table(capsys.readouterr().out) == [["3", "1", "2", "0", "6", "0"]]


def test_a_burst_at_nobody_fails(burst, capsys):
    """Each request is an error, and says why."""
    port = "127.0.0.1:9"
    assert burst.main(["--http", port, "--clients", "2", "--streams", "3", "--rounds", "1"]) == 1
    out, err = capsys.readouterr()
    assert table(out) == [["3", "1", "2", "0", "0", "2"]]
    assert "Connection refused" in err
