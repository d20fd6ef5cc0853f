# SPDX-License-Identifier: Apache-2.0
"""The HTTP door of a whole server: health from real state, metadata, bodies both ways, errors."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import os
import socket
import threading
import zlib

import numpy as np
import pytest

import actorserve
from actorserve import Supervisor
from actorserve.config import Settings
from tests.conftest import wait_until
from tests.server.harness import EXAMPLES, IDENTITY, IDENTITY_CONFIG, binary_body, write_model

WAITS = """
class TritonPythonModel:
    def initialize(self, args):
        while not os.path.exists(os.environ["GO"]):
            time.sleep(0.005)
"""
ADD = {
    "inputs": [
        {"name": "INPUT0", "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4]},
        {"name": "INPUT1", "datatype": "FP32", "shape": [4], "data": [1, 1, 1, 1]},
    ]
}
ADD_URL = "/v2/models/add_sub/infer"
SUM = [2.0, 3.0, 4.0, 5.0]


@pytest.fixture(scope="module")
def server(start_shared):
    """Return a server of the examples."""
    return start_shared(EXAMPLES, flags=["--id=test server", "--http-max-input-size=100000"])


@pytest.fixture
def connection(server):
    """Return a connection that is kept alive."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=30)
    yield connection
    connection.close()


# --- health --------------------------------------------------------------------------------------


def test_health_during_load_and_after(start_server, repository, tmp_path):
    """Live at once; ready only when every instance of every model is initialized."""
    write_model(repository, "quick")
    source = WAITS + IDENTITY.partition("class TritonPythonModel:\n")[2]
    write_model(repository, "slow", source, IDENTITY_CONFIG + "instance_group [ { count: 2 } ]")
    go = tmp_path / "go"
    server = start_server(repository, wait=False, env={"GO": str(go)})
    server.wait_log("successfully loaded 'quick'")
    server.wait_listening()
    assert server.call("GET", "/v2/health/live") == (200, b"")
    assert server.call("GET", "/v2/health/ready") == (503, b"")
    assert server.call("GET", "/v2/models/quick/ready")[0] == 200
    assert server.call("GET", "/v2/models/slow/ready")[0] == 400
    assert server.infer("quick", {"INPUT0": ("FP32", [1], [1])})[0] == 200
    status, error = server.infer("slow", {"INPUT0": ("FP32", [1], [1])})
    assert status == 503
    assert "model 'slow' is not ready: the server is loading its models" in str(error)
    assert not server.ready_file.exists()
    go.touch()
    server.wait_ready()
    assert server.call("GET", "/v2/health/ready") == (200, b"")
    assert server.infer("slow", {"INPUT0": ("FP32", [1], [1])})[0] == 200


def test_lax_readiness_is_that_of_the_first_loads(repository, tmp_path, monkeypatch):
    """--strict-readiness=false says ready once all were tried, also where one has failed."""
    write_model(repository, "broken", "raise ValueError")
    write_model(repository, "slow", WAITS)
    go = tmp_path / "go"
    monkeypatch.setenv("GO", str(go))

    async def main() -> None:
        server = Supervisor(repository, Settings(strict_readiness=False, crash_dir=str(tmp_path)))
        assert not server.is_ready()
        await server.open()
        assert not server.is_ready()
        loading = asyncio.ensure_future(server.load_models())
        go.touch()
        await loading
        assert set(server.failures) == {"broken"}
        assert server.is_ready()
        await server.stop()
        assert not server.is_ready()

    asyncio.run(main())


def test_ready_is_false_while_a_stub_is_missing(start_server):
    """A killed stub: 503 until it is back, then 200; requests to other models go on."""
    server = start_server(EXAMPLES, flags=["--restart-backoff-s=0.5:1"])
    os.kill(server.stubs()["add_sub_0_0"], 9)
    wait_until(lambda: server.call("GET", "/v2/health/ready")[0] == 503)
    assert server.call("GET", "/v2/models/add_sub/ready")[0] == 400
    assert server.call("GET", "/v2/models/tokenizer/ready")[0] == 200
    assert server.infer("tokenizer", {"TEXT": ("BYTES", [1, 1], ["a"])})[0] == 200
    wait_until(lambda: server.call("GET", "/v2/health/ready")[0] == 200)
    assert server.call("POST", ADD_URL, ADD)[0] == 200


# --- metadata ------------------------------------------------------------------------------------


def test_the_server_describes_itself(server):
    """Its name is that of --id, its version the package's."""
    assert server.request("GET", "/v2").json == {
        "name": "test server",
        "version": actorserve.__version__,
        "extensions": [
            "binary_tensor_data",
            "logging",
            "model_configuration",
            "model_repository",
            "model_repository(unload_dependents)",
            "parameters",
            "schedule_policy",
            "statistics",
        ],
    }


def test_models_are_described(server):
    """Shapes as clients send them: with the batch in front where the model batches."""
    for url in ("/v2/models/matrix", "/v2/models/matrix/versions/1"):
        assert server.request("GET", url).json == {
            "name": "matrix",
            "versions": ["1"],
            "platform": "python",
            "inputs": [{"name": "X", "datatype": "FP32", "shape": [-1, 64]}],
            "outputs": [{"name": "Y", "datatype": "FP32", "shape": [-1, 64]}],
        }


def test_a_configuration_is_the_protocol_s_json(server):
    """Enums by name, what was left out filled in."""
    config = server.request("GET", "/v2/models/matrix/config").json
    assert config["name"] == "matrix"
    assert config["backend"] == "python"
    assert config["max_batch_size"] == 32
    assert config["version_policy"] == {"latest": {"num_versions": 1}}
    assert config["input"][0]["data_type"] == "TYPE_FP32"
    assert config["instance_group"][0]["kind"] == "KIND_CPU"
    assert config["instance_group"][0]["count"] == 2
    assert config["dynamic_batching"]["preferred_batch_size"] == [8, 16]


# --- bodies --------------------------------------------------------------------------------------


def test_a_json_response_has_exactly_the_protocol_s_members(server):
    """And its head says what it is."""
    reply = server.request("POST", ADD_URL, ADD | {"outputs": [{"name": "OUTPUT0"}]})
    assert reply.json == {
        "model_name": "add_sub",
        "model_version": "1",
        "outputs": [{"name": "OUTPUT0", "datatype": "FP32", "shape": [4], "data": SUM}],
    }
    assert reply.headers["content-type"] == "application/json"
    assert int(reply.headers["content-length"]) == len(reply.body)
    assert "server" not in reply.headers


def test_a_binary_response_has_its_blocks_behind_the_document(server):
    """The head names the document's size; a block's size stands in its output."""
    a = np.arange(4, dtype=np.float32)
    body, headers = binary_body({"INPUT0": ("FP32", a), "INPUT1": ("FP32", a)})
    reply = server.request("POST", ADD_URL, body, headers)
    assert reply.headers["content-type"] == "application/octet-stream"
    assert [each["parameters"] for each in reply.json["outputs"]] == [{"binary_data_size": 16}] * 2
    assert np.array_equal(reply.outputs["OUTPUT0"], 2 * a)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_bodies_are_compressed_both_ways(server, encoding):
    """JSON and binary, where the client says and asks so."""
    pack = gzip.compress if encoding == "gzip" else zlib.compress
    unpack = gzip.decompress if encoding == "gzip" else zlib.decompress
    headers = {"Content-Encoding": encoding, "Accept-Encoding": encoding}
    reply = server.request("POST", ADD_URL, pack(json.dumps(ADD).encode()), headers)
    assert reply.headers["content-encoding"] == encoding
    assert json.loads(unpack(reply.body))["outputs"][0]["data"] == SUM
    x = np.ones((32, 64), np.float32)
    body, more = binary_body({"X": ("FP32", x)})
    reply = server.request("POST", "/v2/models/matrix/infer", pack(body), headers | more)
    reply.body = unpack(reply.body)
    assert reply.outputs["Y"].shape == (32, 64)


def test_a_chunked_body_is_read(server):
    """A body whose length nobody says in front."""
    data = json.dumps(ADD).encode()
    connection = http.client.HTTPConnection(server.host, server.port, timeout=30)
    pieces = iter([data[:10], data[10:50], data[50:]])
    connection.request("POST", ADD_URL, pieces, encode_chunked=True)
    assert json.loads(connection.getresponse().read())["outputs"][0]["data"] == SUM
    connection.close()


# --- connections ---------------------------------------------------------------------------------


def test_a_connection_serves_many_requests(connection):
    """Kept alive through answers, errors and other endpoints."""
    for _ in range(3):
        for method, url, body, status in [
            ("POST", ADD_URL, json.dumps(ADD), 200),
            ("POST", ADD_URL, "{", 400),
            ("GET", "/v2/health/ready", None, 200),
            ("POST", "/v2/models/nobody/infer", json.dumps(ADD), 404),
            ("GET", "/nowhere", None, 404),
            ("PUT", "/v2", b"x" * 1000, 405),
        ]:
            connection.request(method, url, body)
            response = connection.getresponse()
            response.read()
            assert response.status == status, url
            assert connection.sock is not None, url


def test_pipelined_requests_are_answered_in_order(server):
    """Twenty requests in one write: twenty answers, each with its id."""
    with socket.create_connection((server.host, server.port), timeout=30) as sock:
        requests = []
        for number in range(20):
            body = json.dumps(ADD | {"id": str(number)}).encode()
            head = f"POST {ADD_URL} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            requests.append(head.encode() + body)
        sock.sendall(b"".join(requests))
        with sock.makefile("rb") as stream:
            for number in range(20):
                assert stream.readline() == b"HTTP/1.1 200 OK\r\n"
                headers = http.client.parse_headers(stream)
                document = json.loads(stream.read(int(headers["content-length"])))
                assert document["id"] == str(number)


def test_clients_side_by_side_get_their_own_answers(server):
    """Eight connections, fifty requests each."""
    wrong: list[object] = []

    def ask(seed: int) -> None:
        connection = http.client.HTTPConnection(server.host, server.port, timeout=30)
        for number in range(50):
            value = seed * 1000 + number
            connection.request(
                "POST",
                "/v2/models/async_double/infer" if number % 10 == 0 else ADD_URL,
                json.dumps(_double(value) if number % 10 == 0 else _add(value)),
            )
            document = json.loads(connection.getresponse().read())
            if document["outputs"][0]["data"][0] != 2 * value:
                wrong.append(document)
        connection.close()

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def _add(value: int) -> dict[str, object]:
    tensor = {"datatype": "FP32", "shape": [4], "data": [value] * 4}
    return {"inputs": [{"name": f"INPUT{n}", **tensor} for n in range(2)]}


def _double(value: int) -> dict[str, object]:
    return {"inputs": [{"name": "INPUT", "datatype": "INT64", "shape": [1], "data": [value]}]}


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "text"),
    [
        ("GET", "/", None, 404, "Not Found"),
        ("GET", "/v2/nothing", None, 404, "Not Found"),
        ("GET", "/v2/models/add_sub/nothing", None, 404, "Not Found"),
        ("GET", "/v2/models/add_sub/versions/x", None, 404, "Not Found"),
        ("DELETE", "/v2/models/add_sub", None, 405, "Method Not Allowed"),
        ("GET", ADD_URL, None, 405, "Method Not Allowed"),
        ("POST", "/v2/health/ready", b"", 405, "Method Not Allowed"),
        ("GET", "/v2/models/nobody", None, 404, "'nobody' is not found"),
        ("GET", "/v2/models/nobody/config", None, 404, "'nobody' is not found"),
        ("GET", "/v2/models/nobody/ready", None, 400, "Model version not ready"),
        ("GET", "/v2/models/add_sub/versions/7", None, 404, "'add_sub' version 7 is not found"),
        ("GET", "/v2/models/add_sub/versions/7/ready", None, 400, "Model version not ready"),
        ("GET", "/v2/models/..%2f..%2fetc/config", None, 400, "must not be '.' or '..'"),
        ("POST", ADD_URL, b"", 400, "failed to parse the request JSON"),
        ("POST", ADD_URL, b"{", 400, "failed to parse the request JSON"),
        ("POST", ADD_URL, b"[]", 400, "Unable to parse the request JSON"),
        ("POST", ADD_URL, b"{}", 400, "missing required field `inputs`"),
        ("POST", "/v2/models/nobody/infer", ADD, 404, "'nobody' is not found"),
        ("POST", "/v2/models/add_sub/versions/9/infer", ADD, 404, "version 9 is not found"),
    ],
)
def test_errors_are_one_json_object(server, method, path, body, status, text):
    """Status, content type and a text that says what is wrong."""
    reply = server.request(method, path, body)
    assert reply.status == status
    assert reply.headers["content-type"] == "application/json"
    assert text in reply.error


def test_a_method_that_is_not_allowed_names_those_that_are(server):
    """405 with Allow."""
    assert server.request("GET", ADD_URL).headers["allow"] == "POST"
    assert server.request("POST", "/v2", b"").headers["allow"] == "GET, HEAD"


def test_bodies_beyond_the_limit_are_refused(server):
    """--http-max-input-size counts for what is sent, and for what it unpacks to."""
    reply = server.request("POST", ADD_URL, b"x" * 100_001)
    assert reply.status == 413
    assert "100000 bytes" in reply.error
    bomb = gzip.compress(b" " * 10_000_000)
    reply = server.request("POST", ADD_URL, bomb, {"Content-Encoding": "gzip"})
    assert reply.status == 413
    assert server.request("POST", ADD_URL, ADD).status == 200


def test_an_unknown_content_encoding_is_415(server):
    """The text names those that are known."""
    reply = server.request("POST", ADD_URL, b"x", {"Content-Encoding": "br"})
    assert reply.status == 415
    assert "expected gzip or deflate" in reply.error


def test_what_is_no_http_is_400(server):
    """And the connection ends; the server goes on."""
    with socket.create_connection((server.host, server.port), timeout=30) as sock:
        sock.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
        assert sock.recv(4096).startswith(b"HTTP/1.1 400 ")
    assert server.request("POST", ADD_URL, ADD).status == 200


def test_a_client_that_hangs_up_is_no_error(server):
    """A request whose client is gone is cancelled, and the next is served."""
    body = json.dumps(_double(1))
    for _ in range(20):
        connection = http.client.HTTPConnection(server.host, server.port, timeout=30)
        connection.request("POST", "/v2/models/async_double/infer", body)
        connection.close()
    inputs = {"INPUT": ("INT64", [1], [5])}
    assert server.infer("async_double", inputs) == (200, {"OUTPUT": [10]})
    assert "Traceback" not in server.log()


def test_every_interface_may_be_listened_on(start_server, repository):
    """IPv6 and names work, and the ready file has the real address."""
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    server = start_server(repository, flags=["--host=::1"])
    assert json.loads(server.ready_file.read_text())["http"]["host"] == "::1"
    server.wait_log(f"Ready: http://[::1]:{server.port} ")
    assert server.call("GET", "/v2/health/ready")[0] == 200
