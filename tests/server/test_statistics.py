# SPDX-License-Identifier: Apache-2.0
"""The statistics API."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from actorserve import Supervisor
from actorserve.config import Settings
from actorserve.errors import InvalidArgument
from tests.server.harness import IDENTITY_CONFIG, Launcher, Server, write_model
from tests.server.test_metrics import BATCHED_CONFIG, DECOUPLED_CONFIG, FICKLE, STREAM, f32

POLICY = "version_policy { all {} }\n"


@pytest.fixture(scope="module")
def server(start_shared: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Server:
    """Return a server with a model of two versions, and another one."""
    repository = tmp_path_factory.mktemp("repository")
    write_model(repository, "two", FICKLE, BATCHED_CONFIG + POLICY, (1, 2))
    write_model(repository, "stats", FICKLE)
    write_model(repository, "broken", "raise ValueError", IDENTITY_CONFIG)
    return start_shared(repository, "--exit-on-error=false")


def stats(server: Server, path: str) -> list[Any]:
    """Return the statistics under a path."""
    reply = server.request("GET", f"/v2/models/{path}")
    assert reply.status == 200, reply.body
    assert reply.headers["content-type"] == "application/json"
    assert set(reply.json) == {"model_stats"}
    return list(reply.json["model_stats"])


def test_what_was_asked_of_a_version_is_counted_there(server: Server) -> None:
    """Each version has its own counts; without a version all that serve are told."""
    before_ms = time.time() * 1000
    assert server.infer("two/versions/1", {"INPUT0": ("FP32", [2, 1], [0, 0])})[0] == 200
    assert server.infer("two/versions/1", {"INPUT0": ("FP32", [1, 1], [0])})[0] == 200
    assert server.infer("two/versions/1", {"INPUT0": ("FP32", [1, 1], [1])})[0] == 500
    first, second = stats(server, "two/stats")
    assert (first["name"], first["version"], second["version"]) == ("two", "1", "2")
    assert (first["inference_count"], first["execution_count"]) == (3, 3)
    assert before_ms - 1000 < first["last_inference"] < time.time() * 1000 + 1000
    infer = first["inference_stats"]
    assert [infer[name]["count"] for name in ("success", "fail", "queue")] == [2, 1, 2]
    assert [infer[f"compute_{name}"]["count"] for name in ("input", "infer", "output")] == [2] * 3
    assert infer["cache_hit"] == infer["cache_miss"] == {"count": 0, "ns": 0}
    assert infer["success"]["ns"] >= infer["queue"]["ns"] + infer["compute_infer"]["ns"] > 0
    assert infer["fail"]["ns"] > 0
    assert [each["batch_size"] for each in first["batch_stats"]] == [1, 2]
    assert [each["compute_infer"]["count"] for each in first["batch_stats"]] == [2, 1]
    assert first["response_stats"] == {}
    (memory,) = first["memory_usage"]
    assert (memory["type"], memory["id"]) == ("CPU", 0)
    assert memory["byte_size"] > 1 << 20
    assert (second["inference_count"], second["last_inference"]) == (0, 0)
    assert stats(server, "two/versions/2/stats") == [
        {**second, "memory_usage": second["memory_usage"]}
    ]


def test_all_models_are_told_at_once(server: Server) -> None:
    """Those that serve; a model that is called `stats` is told under its own path."""
    assert [(each["name"], each["version"]) for each in stats(server, "stats")] == [
        ("stats", "1"),
        ("two", "1"),
        ("two", "2"),
    ]
    assert [each["name"] for each in stats(server, "stats/stats")] == ["stats"]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("nope", "requested model 'nope' is not available"),
        ("broken", "requested model 'broken' is not available"),
        ("two/versions/9", "requested model 'two' version 9 is not available"),
    ],
)
def test_what_does_not_serve_has_none(server: Server, path: str, text: str) -> None:
    """As the real server says it."""
    reply = server.request("GET", f"/v2/models/{path}/stats")
    assert (reply.status, reply.error) == (400, text)


def test_statistics_are_an_extension(server: Server) -> None:
    """Clients look for its name; only GET is offered."""
    assert "statistics" in server.request("GET", "/v2").json["extensions"]
    assert server.request("POST", "/v2/models/two/stats").status == 405


def test_an_embedded_server_tells_them_too(repository: Path, tmp_path: Path) -> None:
    """As objects: in `stats()`, and with the memory of the stubs in `model_statistics`."""
    write_model(repository, "stream", STREAM, DECOUPLED_CONFIG)

    async def main() -> None:
        settings = Settings(crash_dir=str(tmp_path / "crashes"))
        async with Supervisor(repository, settings) as server:
            for count in (2, 0, 3):
                async for _ in server.stream("stream", {"INPUT0": f32([float(count)])}):
                    pass
            (model,) = server.stats().models
            counted = model.versions[0].statistics
            (found,) = server.model_statistics("stream", "1")
            assert found.memory_usage[0].byte_size > 0
            assert counted.memory_usage == ()
            assert counted.inference_stats == found.inference_stats
            assert found.inference_stats.success.count == 3
            assert found.inference_stats.compute_infer.ns > 0
            responses = found.response_stats
            assert [(i, each.success.count) for i, each in responses.items()] == [
                ("0", 2),
                ("1", 2),
                ("2", 1),
                ("3", 0),
            ]
            assert [each.empty_response.count for each in responses.values()] == [1, 0, 1, 1]
            assert responses["0"].success.ns > 0
            with pytest.raises(InvalidArgument):
                server.model_statistics("nope")

    asyncio.run(main())
