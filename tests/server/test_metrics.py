# SPDX-License-Identifier: Apache-2.0
"""The server's own metrics: right over failures, restarts, reloads, calls and streams."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actorserve import Supervisor
from actorserve.config import Settings
from actorserve.errors import ActorserveError, ConfigError
from tests.conftest import wait_until
from tests.server.harness import IDENTITY_CONFIG, Launcher, parameter, write_model
from tests.server.scrape import Scrape, of_model, read, scrape

Test = Callable[[Supervisor], Awaitable[None]]

BATCHED_CONFIG = IDENTITY_CONFIG + "max_batch_size: 8\n"
DYNAMIC = "dynamic_batching { max_queue_delay_microseconds: 1000000 preferred_batch_size: [ 4 ] }\n"
DECOUPLED_CONFIG = IDENTITY_CONFIG + "model_transaction_policy { decoupled: true }\n"

FICKLE = """
class TritonPythonModel:
    def execute(self, requests):
        what = int(pb_utils.get_input_tensor_by_name(requests[0], "INPUT0").as_numpy().flat[0])
        if what == 1:
            raise ValueError("as told")
        if what == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if what == 3:
            error = pb_utils.TritonError("no more", pb_utils.TritonError.CANCELLED)
            return [pb_utils.InferenceResponse(error=error) for _ in requests]
        arrays = [pb_utils.get_input_tensor_by_name(r, "INPUT0").as_numpy() for r in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", x)]) for x in arrays]
"""

STREAM = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            sender = request.get_response_sender()
            for n in range(int(x.flat[0])):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", x)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

CALLER = """
class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "INPUT0")
            call = pb_utils.InferenceRequest(
                model_name="fickle", requested_output_names=["OUTPUT0"], inputs=[x]
            )
            response = call.exec()
            if response.has_error():
                answers.append(pb_utils.InferenceResponse(error=response.error()))
            else:
                answers.append(pb_utils.InferenceResponse(response.output_tensors()))
        return answers
"""


@pytest.fixture
def serve(repository: Path, tmp_path: Path) -> Callable[..., None]:
    """Return `serve(test, **settings)`: run it against an embedded server of the repository."""

    def run(test: Test, **settings: Any) -> None:
        settings.setdefault("crash_dir", str(tmp_path / "crashes"))

        async def main() -> None:
            async with Supervisor(repository, Settings(**settings)) as server:
                assert not server.failures
                await test(server)

        asyncio.run(main())

    return run


def f32(values: Any) -> Any:
    """Return an array in the models' data type."""
    return np.array(values, np.float32)


def counts(found: Scrape, model: str) -> tuple[float, ...]:
    """Return successes, inferences, executions and the failures by reason."""
    return (
        of_model(found, model, "nv_inference_request_success"),
        of_model(found, model, "nv_inference_count"),
        of_model(found, model, "nv_inference_exec_count"),
        *[
            of_model(found, model, "nv_inference_request_failure", reason=reason)
            for reason in ("REJECTED", "CANCELED", "BACKEND", "OTHER")
        ],
    )


async def fails(work: Awaitable[Any]) -> None:
    """Await what has to fail."""
    with pytest.raises(ActorserveError):
        await work


# --- counters ------------------------------------------------------------------------------------


def test_everything_is_there_from_the_start_at_zero(repository: Path, serve: Any) -> None:
    """All reasons of failures, too; so a dashboard needs no first failure."""
    write_model(repository, "fickle", FICKLE)

    async def test(server: Supervisor) -> None:
        found = read(server)
        assert counts(found, "fickle") == (0, 0, 0, 0, 0, 0, 0)
        for name in ("request", "queue", "compute_input", "compute_infer", "compute_output"):
            assert of_model(found, "fickle", f"nv_inference_{name}_duration_us") == 0
        assert of_model(found, "fickle", "nv_inference_pending_request_count") == 0
        assert of_model(found, "fickle", "nv_model_load_duration_secs") > 0
        assert of_model(found, "fickle", "actorserve_stubs", state="RUNNING") == 1
        assert of_model(found, "fickle", "actorserve_stubs", state="BACKOFF") == 0
        assert of_model(found, "fickle", "actorserve_stub_restarts_total") == 0
        assert 0 <= found["nv_cpu_utilization"] <= 1
        assert 0 < found["nv_cpu_memory_used_bytes"] <= found["nv_cpu_memory_total_bytes"]
        assert "actorserve_arena_used_bytes" in found
        assert not any("summary" in name or "histogram" in name for name in found)

    serve(test)


def test_failures_have_their_reasons(repository: Path, serve: Any) -> None:
    """A model's exception or CANCELLED, a dead stub, a bad request: each where it belongs."""
    write_model(repository, "fickle", FICKLE)

    async def test(server: Supervisor) -> None:
        await server.infer("fickle", {"INPUT0": f32([0.0])})
        await fails(server.infer("fickle", {"INPUT0": f32([1.0])}))
        assert counts(read(server), "fickle") == (1, 1, 2, 0, 0, 1, 0)
        await fails(server.infer("fickle", {"INPUT0": f32([3.0])}))
        assert counts(read(server), "fickle") == (1, 1, 3, 0, 1, 1, 0)
        await fails(server.infer("fickle", {"NO": f32([1.0])}))
        assert counts(read(server), "fickle") == (1, 1, 3, 0, 1, 1, 1)
        await fails(server.infer("fickle", {"INPUT0": f32([2.0])}))
        await server.infer("fickle", {"INPUT0": f32([0.0])})
        # What the dead stub never finished is no execution that anybody could time.
        assert counts(read(server), "fickle") == (2, 2, 4, 0, 1, 2, 1)
        found = read(server)
        assert of_model(found, "fickle", "actorserve_stub_restarts_total") == 1
        await fails(server.infer("unknown", {"INPUT0": f32([0.0])}))
        assert not any("unknown" in name for name in read(server))

    serve(test)


def test_a_full_queue_and_a_late_request_are_rejections(repository: Path, serve: Any) -> None:
    """Whether they are refused at once or after a while."""
    policy = "default_queue_policy { max_queue_size: 1 default_timeout_microseconds: 200000 }"
    dynamic = DYNAMIC.replace("}", policy + " }")
    write_model(repository, "batched", FICKLE, BATCHED_CONFIG + dynamic)

    async def test(server: Supervisor) -> None:
        waiting = asyncio.ensure_future(server.infer("batched", {"INPUT0": f32([[0.0]])}))
        await asyncio.wait([waiting], timeout=0.01)
        assert of_model(read(server), "batched", "nv_inference_pending_request_count") == 1
        await fails(server.infer("batched", {"INPUT0": f32([[0.0]])}))
        assert counts(read(server), "batched") == (0, 0, 0, 1, 0, 0, 0)
        await fails(waiting)
        assert counts(read(server), "batched") == (0, 0, 0, 2, 0, 0, 0)
        assert of_model(read(server), "batched", "nv_inference_pending_request_count") == 0

    serve(test)


def test_who_goes_away_has_cancelled(repository: Path, serve: Any) -> None:
    """In the queue, and while the stub works on it."""
    write_model(repository, "batched", FICKLE, BATCHED_CONFIG + DYNAMIC)
    write_model(repository, "stream", STREAM, DECOUPLED_CONFIG)

    async def test(server: Supervisor) -> None:
        waiting = asyncio.ensure_future(server.infer("batched", {"INPUT0": f32([[0.0]])}))
        await asyncio.wait([waiting], timeout=0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert counts(read(server), "batched") == (0, 0, 0, 0, 1, 0, 0)
        stream = server.stream("stream", {"INPUT0": f32([5000.0])})
        await stream.__anext__()
        await stream.aclose()
        assert counts(read(server), "stream")[3:] == (0, 1, 0, 0)

    serve(test)


def test_batches_and_rows_are_told_apart(repository: Path, serve: Any) -> None:
    """Requests, rows and executions are three numbers; each request has its batch's time."""
    write_model(repository, "batched", FICKLE, BATCHED_CONFIG + DYNAMIC)

    async def test(server: Supervisor) -> None:
        await asyncio.gather(
            server.infer("batched", {"INPUT0": f32([[0.0], [0.0]])}),
            server.infer("batched", {"INPUT0": f32([[0.0]])}),
            server.infer("batched", {"INPUT0": f32([[0.0]])}),
        )
        found = read(server)
        assert counts(found, "batched") == (3, 4, 1, 0, 0, 0, 0)
        (stats,) = server.model_statistics("batched")
        assert [each.batch_size for each in stats.batch_stats] == [4]
        (batch,) = stats.batch_stats
        infer = stats.inference_stats
        assert infer.compute_infer.count == 3
        assert infer.compute_infer.ns == 3 * batch.compute_infer.ns > 0
        assert infer.success.ns >= infer.queue.ns + infer.compute_infer.ns > 0
        assert of_model(found, "batched", "nv_inference_compute_infer_duration_us") == (
            infer.compute_infer.ns // 1000
        )

    serve(test)


def test_calls_of_models_are_requests_of_the_target(repository: Path, serve: Any) -> None:
    """The caller's time includes the wait."""
    write_model(repository, "fickle", FICKLE)
    write_model(repository, "caller", CALLER)

    async def test(server: Supervisor) -> None:
        await server.infer("caller", {"INPUT0": f32([0.0])})
        await fails(server.infer("caller", {"INPUT0": f32([1.0])}))
        found = read(server)
        assert counts(found, "fickle") == (1, 1, 2, 0, 0, 1, 0)
        assert counts(found, "caller") == (1, 1, 2, 0, 0, 1, 0)
        inner = of_model(found, "fickle", "nv_inference_request_duration_us")
        assert of_model(found, "caller", "nv_inference_compute_infer_duration_us") > inner

    serve(test)


def test_counters_go_on_over_retries_and_reloads(repository: Path, serve: Any) -> None:
    """A counter never goes back; what is retried is counted when it ends."""
    write_model(repository, "fickle", FICKLE, IDENTITY_CONFIG + parameter("RETRY_ON_STUB_DEATH", 1))

    async def test(server: Supervisor) -> None:
        await fails(server.infer("fickle", {"INPUT0": f32([2.0])}))  # it kills two
        await server.infer("fickle", {"INPUT0": f32([0.0])})
        before = counts(read(server), "fickle")
        assert before == (1, 1, 1, 0, 0, 1, 0)
        write_model(repository, "fickle", FICKLE + "\n# another\n")
        await server.load("fickle")
        assert counts(read(server), "fickle") == before
        await server.infer("fickle", {"INPUT0": f32([0.0])})
        found = read(server)
        assert counts(found, "fickle") == (2, 2, 2, 0, 0, 1, 0)
        assert of_model(found, "fickle", "actorserve_stub_restarts_total") == 2
        await server.unload("fickle")
        assert not any("fickle" in name for name in read(server))
        await server.load("fickle")
        assert counts(read(server), "fickle") == (2, 2, 2, 0, 0, 1, 0)

    serve(test, model_control_mode="explicit", load_model=("fickle",), restart_backoff_s=(0.0, 0.0))


def test_tags_of_a_model_are_labels(repository: Path, serve: Any) -> None:
    """Beside its name and version."""
    tags = 'metric_tags { key: "team" value: "a" }\n'
    write_model(repository, "fickle", FICKLE, IDENTITY_CONFIG + tags, (1, 3))

    async def test(server: Supervisor) -> None:
        found = read(server)
        assert of_model(found, "fickle", "nv_inference_count", 3, team="a") == 0

    serve(test)


# --- latencies -----------------------------------------------------------------------------------


def test_streams_have_a_histogram_of_first_responses(repository: Path, serve: Any) -> None:
    """Where it is asked for, and of decoupled models alone; with their own buckets."""
    own = (
        "model_metrics { metric_control { metric_identifier { family: "
        '"nv_inference_first_response_histogram_ms" } '
        "histogram_options { buckets: [ 1000000 ] } } }"
    )
    write_model(repository, "stream", STREAM, DECOUPLED_CONFIG)
    write_model(repository, "own", STREAM, DECOUPLED_CONFIG + own)
    write_model(repository, "fickle", FICKLE)

    async def test(server: Supervisor) -> None:
        for model in ("stream", "own"):
            async for _ in server.stream(model, {"INPUT0": f32([3.0])}):
                pass
        await server.infer("fickle", {"INPUT0": f32([0.0])})
        found = read(server)
        name = "nv_inference_first_response_histogram_ms"
        bounds = [key.partition('le="')[2].partition('"')[0] for key in found if f"{name}_b" in key]
        assert sorted(bounds) == sorted(["100", "500", "2000", "5000", "+Inf", "1000000", "+Inf"])
        assert of_model(found, "stream", f"{name}_count") == 1
        assert of_model(found, "own", f"{name}_bucket", le="1000000") == 1
        assert of_model(found, "stream", f"{name}_sum") > 0
        assert not any("fickle" in key and name in key for key in found)

    serve(test, metrics_config=("histogram_latencies=true",))


def test_summaries_and_counters_of_latencies_are_chosen(repository: Path, serve: Any) -> None:
    """Quantiles where they are asked for, no counters where they are not wanted."""
    write_model(repository, "fickle", FICKLE)

    async def test(server: Supervisor) -> None:
        for _ in range(5):
            await server.infer("fickle", {"INPUT0": f32([0.0])})
        found = read(server)
        for name in ("request", "queue", "compute_input", "compute_infer", "compute_output"):
            name = f"nv_inference_{name}_summary_us"
            assert of_model(found, "fickle", f"{name}_count") == 5
            low = of_model(found, "fickle", name, quantile="0.5")
            assert 0 <= low <= of_model(found, "fickle", name, quantile="0.9")
        request = of_model(found, "fickle", "nv_inference_request_summary_us_sum")
        assert request >= of_model(found, "fickle", "nv_inference_compute_infer_summary_us_sum") > 0
        assert not any("duration_us" in name for name in found)
        assert not any('quantile="0.99"' in name for name in found)
        assert "nv_cpu_utilization" not in found

    options = ("summary_latencies=true", "counter_latencies=no", "summary_quantiles=0.5:0.05,0.9:1")
    serve(test, metrics_config=options, allow_cpu_metrics=False)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("summary", "expected KEY=VALUE"),
        ("summary=true", "unknown key 'summary', expected one of counter_latencies"),
        ("summary_latencies=maybe", "expected true or false"),
        ("summary_quantiles=2:0", "expected RANK:ERROR"),
        ("summary_quantiles=a", "expected RANK:ERROR"),
    ],
)
def test_a_choice_that_cannot_be_is_an_error(repository: Path, entry: str, reason: str) -> None:
    """Before anything starts."""

    async def main() -> None:
        with pytest.raises(ConfigError, match=reason):
            await Supervisor(repository, Settings(metrics_config=(entry,))).start()

    asyncio.run(main())


# --- the pages -----------------------------------------------------------------------------------


def test_metrics_are_served_on_two_ports(start_server: Launcher, repository: Path) -> None:
    """On a port of their own, which has nothing else, and on that of everything else."""
    write_model(repository, "fickle", FICKLE)
    server = start_server(repository)
    server.infer("fickle", {"INPUT0": ("FP32", [1], [0])})
    for port in (server.port, server.metrics_port):
        assert counts(scrape(server, port), "fickle") == (1, 1, 1, 0, 0, 0, 0)
    own = server.metrics_port
    for path in ("/", "/v2", "/v2/health/ready", "/v2/models/fickle", "/v2/actorserve/status"):
        assert server.request("GET", path, port=own).status == 404
    body = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": [0]}]}
    assert server.request("POST", "/v2/models/fickle/infer", body, port=own).status == 404
    assert server.request("POST", "/metrics", port=own).status == 405
    assert server.request("POST", "/metrics").status == 405
    assert server.request("HEAD", "/metrics", port=own).status == 200


def test_metrics_are_there_while_models_load_and_after_deaths(
    start_server: Launcher, repository: Path
) -> None:
    """Whoever scrapes sees the stub's states and its restart."""
    write_model(repository, "fickle", FICKLE)
    server = start_server(repository)
    os.kill(next(iter(server.stubs().values())), signal.SIGKILL)
    wait_until(
        lambda: of_model(scrape(server), "fickle", "actorserve_stub_restarts_total") == 1, 30
    )
    wait_until(
        lambda: of_model(scrape(server), "fickle", "actorserve_stubs", state="RUNNING") == 1, 30
    )
    server.infer("fickle", {"INPUT0": ("FP32", [1], [0])})
    assert counts(scrape(server), "fickle") == (1, 1, 1, 0, 0, 0, 0)


def test_metrics_can_be_turned_off(start_server: Launcher, repository: Path) -> None:
    """Then neither port has them, and the second is not bound."""
    server = start_server(repository, "--allow-metrics=false")
    assert server.metrics_port == 0
    assert server.request("GET", "/metrics").status == 404


def test_a_metrics_port_in_use_is_named(start_server: Launcher, repository: Path) -> None:
    """With its flag; nothing is started."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = start_server(repository, "--metrics-port", str(port), wait=False)
        assert server.wait() == 2
    assert f"cannot listen on 127.0.0.1:{port} (--metrics-port): Address already in" in server.log()


def test_the_metrics_port_may_have_an_address_of_its_own(
    start_server: Launcher, repository: Path
) -> None:
    """Whatever --host is."""
    server = start_server(repository, "--metrics-address", "127.0.0.2")
    with socket.create_connection(("127.0.0.2", server.metrics_port), timeout=10) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 200 OK")
