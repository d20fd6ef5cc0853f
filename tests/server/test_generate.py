# SPDX-License-Identifier: Apache-2.0
"""Generate and streams of events of a whole server: whole, in order, at the reader's pace."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import wait_until
from tests.server.harness import IDENTITY, IDENTITY_CONFIG, Server, write_model

STREAM_CONFIG = IDENTITY_CONFIG + "model_transaction_policy { decoupled: true }\n"
FINAL = "flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL"
STREAM_HEAD = f"""
def note(name, text=""):
    part = os.path.join(os.environ["NOTES"], name + ".part")
    with open(part, "w") as file:
        file.write(str(text))
    os.replace(part, part[:-5])

def wait_for(name):
    deadline = time.monotonic() + 50
    while not os.path.exists(os.path.join(os.environ["NOTES"], name)):
        assert time.monotonic() < deadline
        time.sleep(0.005)

def answer(values):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.array(values, np.float32))])

class Streams:
    def execute(self, requests):
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            self.serve(request, int(x[0]), request.get_response_sender())

    def finish(self, sender):
        sender.send({FINAL})
"""
COUNT = """
class TritonPythonModel(Streams):
    def serve(self, request, count, sender):
        for number in range(count):
            sender.send(answer([number]))
        self.finish(sender)
"""
ENDLESS = """
class TritonPythonModel(Streams):
    def serve(self, request, size, sender):
        threading.Thread(target=self.run, args=(request.request_id(), size, sender)).start()

    def run(self, name, size, sender):
        sent = 0
        pause = 0.0 if size > 1 else 0.005
        while not sender.is_cancelled() and time.monotonic() < DEADLINE:
            sender.send(answer([sent] * size))
            sent += 1
            if sent % 16 == 0:
                note("sent-" + name, sent)
            time.sleep(pause)
        note("cancelled-" + name, sent)
        self.finish(sender)
"""
SILENT = """
class TritonPythonModel(Streams):
    def serve(self, request, count, sender):
        name = request.request_id()
        for number in range(count):
            sender.send(answer([number]))
        note("begun-" + name)
        while not sender.is_cancelled():
            if os.path.exists(os.path.join(os.environ["NOTES"], "go-" + name)):
                sender.send(answer([-1]))
                break
            time.sleep(0.002)
        else:
            note("cancelled-" + name)
        self.finish(sender)
"""
DIES = """
class TritonPythonModel(Streams):
    def serve(self, request, count, sender):
        for number in range(count):
            sender.send(answer([number]))
        wait_for("die")
        os.kill(os.getpid(), signal.SIGKILL)
"""
TELLS = """
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse(self.tensors(request)) for request in requests]

    def tensors(self, request):
        text = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()
        told = {
            "shape": text.shape,
            "text": [each.decode() for each in text.ravel()],
            "id": request.request_id(),
            "parameters": json.loads(request.parameters() or "{}"),
            "timeout": request.timeout(),
            "correlation": request.correlation_id(),
            "extra": pb_utils.get_input_tensor_by_name(request, "EXTRA") is not None,
        }
        return [
            pb_utils.Tensor("TOLD", np.array([[json.dumps(told)]], object)),
            pb_utils.Tensor("LENGTHS", np.array([[len(each) for each in text.ravel()]], np.int64)),
        ]
"""
TELLS_CONFIG = """\
backend: "python"
max_batch_size: 4
input [
  { name: "TEXT" data_type: TYPE_STRING dims: [ -1 ] },
  { name: "EXTRA" data_type: TYPE_INT32 dims: [ 2 ] optional: true }
]
output [
  { name: "TOLD" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "LENGTHS" data_type: TYPE_INT64 dims: [ -1 ] }
]
dynamic_batching { priority_levels: 2 default_priority_level: 1 }
"""


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder where the models say what they do."""
    return tmp_path_factory.mktemp("notes")


def write_models(repository: Path) -> Path:
    """Write all models of this module."""
    head = STREAM_HEAD + "DEADLINE = time.monotonic() + 120\n"
    for name, source in {"count": COUNT, "endless": ENDLESS, "silent": SILENT}.items():
        write_model(repository, name, head + source, STREAM_CONFIG)
    write_model(repository, "identity", IDENTITY)
    write_model(repository, "tells", TELLS, TELLS_CONFIG)
    return repository


@pytest.fixture(scope="module")
def server(start_shared: Any, tmp_path_factory: pytest.TempPathFactory, notes: Path) -> Server:
    """Return a server of these models."""
    repository = write_models(tmp_path_factory.mktemp("repository"))
    started: Server = start_shared(repository, env={"NOTES": str(notes)})
    return started


def path_of(model: str, action: str = "generate_stream") -> str:
    """Return a path."""
    return f"/v2/models/{model}/{action}"


class Stream:
    """One stream, read at the test's pace."""

    def __init__(
        self, server: Server, model: str, document: Any, receive_bytes: int | None = None
    ) -> None:
        self.sock = socket.socket()
        if receive_bytes is not None:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.sock.settimeout(30)
        self.sock.connect((server.host, server.port))
        self.ask(model, document)
        self.response: http.client.HTTPResponse | None = None

    def ask(self, model: str, document: Any) -> None:
        """Send a request."""
        body = json.dumps(document).encode()
        head = f"POST {path_of(model)} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        self.sock.sendall(head.encode() + body)
        self.response = None

    def open(self) -> http.client.HTTPResponse:
        """Read the head."""
        if self.response is None:
            self.response = http.client.HTTPResponse(self.sock, method="POST")
            self.response.begin()
        return self.response

    def events(self) -> Iterator[Any]:
        """Yield the documents of the events that are left."""
        response = self.open()
        assert response.status == 200, response.read()
        while line := response.readline():
            assert line.startswith(b"data: ")
            assert response.readline() == b"\n"
            yield json.loads(line[6:])

    def numbers(self) -> list[Any]:
        """Return the outputs of the events that are left."""
        return [event["OUTPUT0"] for event in self.events()]

    def close(self) -> None:
        """Leave."""
        if self.response is not None:
            self.response.close()
        self.sock.close()


@contextlib.contextmanager
def stream(server: Server, model: str, document: Any, **more: Any) -> Iterator[Stream]:
    """Ask for a stream, and leave it in the end."""
    made = Stream(server, model, document, **more)
    try:
        yield made
    finally:
        made.close()


def read_note(notes: Path, name: str) -> int:
    """Return the number that a model has noted, 0 without a note."""
    try:
        return int((notes / name).read_text())
    except FileNotFoundError:
        return 0


# --- what is asked and answered ------------------------------------------------------------------


def test_generate_maps_members_to_tensors_and_parameters(server: Server) -> None:
    """One text in, one text out; everything else is a parameter or has its own meaning."""
    reply = server.request(
        "POST",
        path_of("tells", "generate"),
        {
            "id": "é7",
            "TEXT": ["a", "bücher"],
            "stream": False,
            "sequence_id": 5,
            "parameters": {"temperature": 0.5, "timeout": 1000000, "top_k": 3, "priority": 2},
        },
    )
    assert reply.status == 200
    assert reply.headers["content-type"] == "application/json"
    document = reply.json
    told = json.loads(document.pop("TOLD"))
    assert document == {
        "id": "é7",
        "model_name": "tells",
        "model_version": "1",
        "LENGTHS": [1, 7],
    }
    assert told == {
        "shape": [1, 2],
        "text": ["a", "bücher"],
        "id": "é7",
        "parameters": {"stream": False, "temperature": 0.5, "top_k": 3},
        "timeout": 1000000,
        "correlation": 5,
        "extra": False,
    }
    document = server.request(
        "POST", path_of("tells", "generate"), {"TEXT": "x", "EXTRA": [1, 2]}
    ).json
    assert json.loads(document["TOLD"])["extra"]
    assert document["LENGTHS"] == 1


@pytest.mark.parametrize(
    ("model", "document", "status", "text"),
    [
        ("tells", {}, 400, "missing required input(s) ['TEXT']"),
        ("tells", {"TEXT": "a", "EXTRA": 5}, 400, "The schema can not convert input 'EXTRA'"),
        ("tells", {"TEXT": [["a"], ["b"]]}, 400, "generate takes one request without a batch"),
        ("tells", {"TEXT": 5}, 400, "Unable to parse input 'TEXT'"),
        ("nobody", {"TEXT": 5}, 404, "is not found"),
        ("count", {"INPUT0": 0}, 400, "exactly 1 response"),
        ("count", {"INPUT0": 2}, 400, "exactly 1 response"),
        ("count", {"INPUT0": 2_000}, 400, "exactly 1 response"),
    ],
)
def test_generate_says_what_is_wrong(
    server: Server, model: str, document: Any, status: int, text: str
) -> None:
    """The client's mistakes, and a model that answers with another number of responses."""
    reply = server.request("POST", path_of(model, "generate"), document)
    assert reply.status == status
    assert text in reply.error


def test_a_thousand_events_are_all_there_in_order(server: Server) -> None:
    """And the connection then serves the next one."""
    with stream(server, "count", {"INPUT0": 1000}) as events:
        for count in (1000, 0, 1, 1500):
            if count != 1000:
                events.ask("count", {"INPUT0": count})
            response = events.open()
            assert response.getheader("content-type") == "text/event-stream; charset=utf-8"
            assert response.getheader("transfer-encoding") == "chunked"
            assert events.numbers() == list(range(count))


def test_many_streams_at_once_do_not_mix(server: Server) -> None:
    """Each gets its own events, whole and in order."""

    def read(number: int) -> list[Any]:
        with stream(server, "count", {"INPUT0": 500 + number}) as events:
            return events.numbers()

    with ThreadPoolExecutor(16) as pool:
        for number, seen in enumerate(pool.map(read, range(32))):
            assert seen == list(range(500 + number))


def test_a_plain_model_streams_one_event(server: Server) -> None:
    """The endpoint does not ask what kind of model it is."""
    with stream(server, "identity", {"INPUT0": [1, 2.5]}) as events:
        assert events.numbers() == [[1.0, 2.5]]


def test_events_come_when_they_are_sent(server: Server, notes: Path) -> None:
    """Not when the stream ends."""
    with stream(server, "silent", {"INPUT0": 2, "id": "live"}) as events:
        seen = events.events()
        assert next(seen)["OUTPUT0"] == 0
        assert next(seen)["OUTPUT0"] == 1
        (notes / "go-live").touch()
        assert next(seen)["OUTPUT0"] == -1
        assert next(seen, None) is None


def test_infer_refuses_a_decoupled_model(server: Server) -> None:
    """With the text that clients know."""
    status, text = server.infer("count", {"INPUT0": ("FP32", [1], [1])})
    expected = "HTTP end point doesn't support models with decoupled transaction policy"
    assert (status, text) == (501, expected)


@pytest.mark.parametrize("action", ["generate", "generate_stream"])
def test_only_post_is_allowed(server: Server, action: str) -> None:
    """With the header that says so."""
    for method in ("GET", "HEAD", "PUT"):
        reply = server.request(method, path_of("count", action))
        assert reply.status == 405
        assert reply.headers["allow"] == "POST"


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("how", [(), ("-0",), ("--compressed",), ("-H", "Connection: close")])
def test_curl_reads_a_stream(server: Server, how: tuple[str, ...]) -> None:
    """As everybody tries it first."""
    url = f"http://{server.address}{path_of('count')}"
    command = ["curl", "-sSN", "--fail", *how, url, "-d", '{"INPUT0": 3}']
    done = subprocess.run(command, capture_output=True, timeout=40, check=True)
    expected = [
        f'data: {{"OUTPUT0":{n}.0,"model_name":"count","model_version":"1"}}' for n in range(3)
    ]
    assert done.stdout.decode() == "\n\n".join([*expected, ""])


def test_requests_behind_a_stream_are_answered_after_it(server: Server, notes: Path) -> None:
    """In one connection, in their order."""
    with stream(server, "silent", {"INPUT0": 1, "id": "pipe"}) as events:
        body = json.dumps({"INPUT0": 2}).encode()
        for path in (path_of("count"), path_of("identity", "generate")):
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            events.sock.sendall(head.encode() + body)
        wait_until((notes / "begun-pipe").exists)
        (notes / "go-pipe").touch()
        # One buffered file: what a response object has read ahead would be lost to the next one.
        file = events.sock.makefile("rb")
        chunks = []
        for _ in range(2):
            while file.readline().strip():
                pass
            while size := int(file.readline(), 16):
                chunks.append(file.read(size))
                file.readline()
            file.readline()
        seen = b"".join(chunks).split(b"\n\n")[:-1]
        assert [json.loads(each[6:])["OUTPUT0"] for each in seen] == [0, -1, 0, 1]
        assert b"200 OK" in file.readline()
        file.close()


# --- readers -------------------------------------------------------------------------------------


def test_a_reader_that_stops_holds_up_its_own_sender_only(server: Server, notes: Path) -> None:
    """The sender stands still a window later, memory stays, another stream runs on."""
    supervisor = psutil.Process(server.process.pid)
    with stream(server, "endless", {"INPUT0": 1000, "id": "slow"}, receive_bytes=4096) as slow:
        wait_until(lambda: read_note(notes, "sent-slow") >= 64)
        before_bytes = supervisor.memory_info().rss
        steady = -1
        while steady != (sent := read_note(notes, "sent-slow")):
            steady = sent
            with stream(server, "count", {"INPUT0": 3000}) as other:
                assert other.numbers() == list(range(3000))
        assert sent < 3000  # what the sockets hold, and a window
        assert supervisor.memory_info().rss - before_bytes < 24 << 20
        # Nothing is lost: it goes on where it stood.
        seen = slow.events()
        for number in range(sent + 500):
            assert next(seen)["OUTPUT0"] == [float(number)] * 1000
        assert read_note(notes, "sent-slow") > sent
    wait_until((notes / "cancelled-slow").exists)


def test_many_readers_that_stop_bound_the_memory(server: Server, notes: Path) -> None:
    """Twenty of them, with responses of 20 KB: each has a window of them, and no more."""
    supervisor = psutil.Process(server.process.pid)
    before_bytes = supervisor.memory_info().rss
    names = [f"fat{number}" for number in range(20)]
    with contextlib.ExitStack() as stack:
        for name in names:
            document = {"INPUT0": 5_000, "id": name}
            stack.enter_context(stream(server, "endless", document, receive_bytes=4096))
        wait_until(lambda: all(read_note(notes, f"sent-{name}") for name in names), 30)
        sent = [-1]
        while sent != (now := [read_note(notes, f"sent-{name}") for name in names]):
            sent = now
            with stream(server, "count", {"INPUT0": 1000}) as other:
                assert other.numbers() == list(range(1000))
        assert max(sent) < 300
        assert supervisor.memory_info().rss - before_bytes < 160 << 20
    wait_until(lambda: all((notes / f"cancelled-{name}").exists() for name in names), 30)


@pytest.mark.parametrize("model", ["endless", "silent"])
@pytest.mark.parametrize("how", ["close", "reset", "half"])
def test_a_reader_that_leaves_cancels_its_request(
    server: Server, notes: Path, model: str, how: str
) -> None:
    """Also where the model sends nothing that would fail."""
    name = f"{model}-{how}"
    with stream(server, model, {"INPUT0": 1, "id": name}) as events:
        assert next(events.events())["OUTPUT0"] == 0
        if model == "silent":
            wait_until((notes / f"begun-{name}").exists)
        if how == "half":
            events.sock.shutdown(socket.SHUT_WR)
            wait_until((notes / f"cancelled-{name}").exists)
        if how == "reset":
            linger = b"\1\0\0\0\0\0\0\0"
            events.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    wait_until((notes / f"cancelled-{name}").exists)


@pytest.mark.parametrize("action", ["generate", "generate_stream"])
def test_a_queued_request_of_a_reader_that_left_never_runs(
    server: Server, notes: Path, action: str
) -> None:
    """Its model is busy, then free, and has nothing to do."""
    with stream(server, "silent", {"INPUT0": 1, "id": f"busy-{action}"}) as events:
        assert next(events.events())["OUTPUT0"] == 0
        connection = http.client.HTTPConnection(server.address, timeout=30)
        body = json.dumps({"INPUT0": 1, "id": f"never-{action}"})
        connection.request("POST", path_of("silent", action), body)
        wait_until(lambda: queued(server) == 1)
        connection.close()
        wait_until(lambda: queued(server) == 0)
        (notes / f"go-busy-{action}").touch()
        assert [event["OUTPUT0"] for event in events.events()] == [-1]
    (notes / f"go-after-{action}").touch()
    with stream(server, "silent", {"INPUT0": 0, "id": f"after-{action}"}) as events:
        assert events.numbers() == [-1]
    assert not (notes / f"begun-never-{action}").exists()


def queued(server: Server) -> int:
    """Return how many requests to the silent model wait."""
    _, status = server.call("GET", "/v2/actorserve/status")
    model = next(each for each in status["models"] if each["name"] == "silent")
    return int(model["versions"][0]["scheduler"]["queued"])


# --- ends ----------------------------------------------------------------------------------------


def test_a_stub_that_dies_ends_the_stream_with_an_error(
    start_server: Any, repository: Path, tmp_path: Path
) -> None:
    """As an event, or as the status where it was to be the first one; the next stub serves."""
    write_model(repository, "dies", STREAM_HEAD + DIES, STREAM_CONFIG)
    write_model(repository, "count", STREAM_HEAD + COUNT, STREAM_CONFIG)
    server = start_server(repository, env={"NOTES": str(tmp_path)})
    with stream(server, "dies", {"INPUT0": 2}) as events:
        seen = events.events()
        assert [next(seen)["OUTPUT0"] for _ in range(2)] == [0, 1]
        (tmp_path / "die").touch()
        last = next(seen)
        assert "stub 'dies_0" in last["error"]
        assert "SIGKILL" in last["error"]
        assert next(seen, None) is None
        # The connection is as good as before.
        events.ask("count", {"INPUT0": 1})
        assert events.numbers() == [0]
    wait_until(lambda: server.call("GET", "/v2/models/dies/ready")[0] == 200, 20)
    with stream(server, "dies", {"INPUT0": 0}) as events:
        response = events.open()
        assert response.status == 503
        assert "SIGKILL" in json.loads(response.read())["error"]
    assert server.stop() == 0


def test_a_stop_drains_streams_and_fails_what_does_not_end(
    start_server: Any, repository: Path, tmp_path: Path
) -> None:
    """A stream that ends in time is whole; an endless one ends with an error event."""
    server = start_server(
        write_models(repository), "--exit-timeout-secs=2", env={"NOTES": str(tmp_path)}
    )
    with (
        stream(server, "silent", {"INPUT0": 1, "id": "x"}) as ends,
        stream(server, "endless", {"INPUT0": 1, "id": "y"}) as lasts,
    ):
        first, second = ends.events(), lasts.events()
        assert next(first)["OUTPUT0"] == 0
        assert next(second)["OUTPUT0"] == 0
        server.process.send_signal(signal.SIGTERM)
        server.wait_log("stopping when accepted work has ended")
        (tmp_path / "go-x").touch()
        assert [event["OUTPUT0"] for event in first] == [-1]
        *others, last = second
        assert [event["OUTPUT0"] for event in others] == list(range(1, len(others) + 1))
        assert "exiting" in last["error"]
    assert server.wait() == 0


def test_a_stop_is_not_held_up_by_a_reader_that_stopped(
    start_server: Any, repository: Path, tmp_path: Path
) -> None:
    """It is cut off after the grace time."""
    server = start_server(
        write_models(repository), "--exit-timeout-secs=1", env={"NOTES": str(tmp_path)}
    )
    with stream(server, "endless", {"INPUT0": 1000, "id": "z"}, receive_bytes=4096):
        wait_until(lambda: read_note(tmp_path, "sent-z") > 0)
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.wait(40) == 0
