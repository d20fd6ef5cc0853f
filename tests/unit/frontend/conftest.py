# SPDX-License-Identifier: Apache-2.0
"""A door without a server, the HTTP front end before it, and a client of plain sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import uvloop

from actorserve.errors import InternalError, NotFound, Unavailable
from actorserve.frontend.http_server import HttpServer
from actorserve.frontend.http_settings import HttpSettings
from actorserve.triton.inference import (
    InferRequest,
    InferResponse,
    InferTensor,
    ModelInfo,
    TensorSpec,
)
from actorserve.triton.request_validation import InputRule, RequestRules
from actorserve.wire.tensors import DataType

WAIT_S = 20.0

# libuv opens one pipe for the whole process with its first loop, and keeps it.
uvloop.new_event_loop().close()


class FakeSlab:
    """Memory that is counted until it is released."""

    def __init__(self, door: FakeDoor, nbytes: int) -> None:
        self._door = door
        self.buffer = memoryview(bytearray(nbytes))
        self._is_held = True

    @property
    def nbytes(self) -> int:
        """How much it is."""
        return self.buffer.nbytes

    def release(self) -> None:
        """Give it back, once."""
        if self._is_held:
            self._is_held = False
            self._door.slabs -= 1
            self._door.room_bytes += len(self.buffer)


class FakeInFlight:
    """A request whose cancellation is noted. Streams answer through it, when the test says so."""

    def __init__(
        self,
        door: FakeDoor,
        request: InferRequest | None = None,
        on_response: Callable[[InferResponse], None] | None = None,
    ) -> None:
        self._door = door
        self.request = request
        self.on_response = on_response
        self.taken = 0
        self.is_gone = False

    def cancel(self) -> None:
        """Count it."""
        self._door.cancelled += 1
        self._door.cancelled_event.set()

    def disconnect(self) -> None:
        """Count it; nothing comes any more."""
        self.is_gone = True
        self.cancel()

    def consumed(self, count: int = 1) -> None:
        """Count what the peer has taken."""
        self.taken += count

    def answer(self, *values: float, final: bool = False, **members: Any) -> None:
        """Send a response with these values (none: an empty one), as long as somebody listens."""
        assert self.request is not None
        assert self.on_response is not None
        if self.is_gone:
            return
        data = memoryview(np.array(values, "<f4").tobytes())
        outputs = [InferTensor("OUTPUT0", "FP32", (len(values),), data)] if values else []
        response = InferResponse(self.request.model_name, "1", self.request.id, outputs)
        response.final = final
        response.is_empty = not values and not members
        for name, value in members.items():
            setattr(response, name, value)
        self.on_response(response)


class Model:
    """A model: its description and its rules."""

    def __init__(
        self,
        name: str,
        inputs: dict[str, tuple[str, tuple[int, ...]]],
        outputs: dict[str, tuple[str, tuple[int, ...]]],
        max_batch_size: int = 0,
        decoupled: bool = False,
    ) -> None:
        batch = (-1,) if max_batch_size else ()
        self.info = ModelInfo(
            name=name,
            version="1",
            versions=("1",),
            platform="python",
            max_batch_size=max_batch_size,
            decoupled=decoupled,
            inputs=tuple(TensorSpec(n, t, (*batch, *s)) for n, (t, s) in inputs.items()),
            outputs=tuple(TensorSpec(n, t, (*batch, *s)) for n, (t, s) in outputs.items()),
        )
        rules = [InputRule(n, DataType.of_wire_name(t), s) for n, (t, s) in inputs.items()]
        self.rules = RequestRules(name, max_batch_size, rules, outputs)


def _ident(name: str, datatype: str = "FP32", shape: tuple[int, ...] = (-1,), **more: Any) -> Model:
    return Model(name, {"INPUT0": (datatype, shape)}, {"OUTPUT0": (datatype, shape)}, **more)


_FOUR = ("FP32", (4,))
MODELS = {
    model.info.name: model
    for model in (
        _ident("ident"),
        _ident("ident_batch", max_batch_size=8),
        _ident("held"),
        _ident("soon"),
        _ident("failing"),
        _ident("crashing"),
        _ident("busy"),
        _ident("decoupled", decoupled=True),
        _ident("stream", decoupled=True),
        *(_ident(f"ident_{t.wire_name.lower()}", t.wire_name) for t in DataType if t),
        Model(
            "add_sub",
            {"INPUT0": _FOUR, "INPUT1": _FOUR},
            {"OUTPUT0": _FOUR, "OUTPUT1": _FOUR},
        ),
    )
}


class FakeDoor:
    """The server, as a front end sees it. `ident*` answer at once, `soon` with the next turn of
    the loop, `held` and `stream` when the test says so; `failing`, `crashing` and `busy` are
    errors.
    """

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.slabs = 0
        self.most_slabs = 0
        self.room_bytes = 1 << 40
        self.grow_error: Exception | None = None
        self.grown = 0
        self.cancelled = 0
        self.cancelled_event = threading.Event()
        self.held_event = threading.Event()
        self.held: list[tuple[InferRequest, Callable[[InferResponse], None]]] = []
        self.requests: list[InferRequest] = []
        self.streams: list[FakeInFlight] = []
        self.stream_event = threading.Event()
        self.keep_requests = True
        self.live = self.ready = True
        self.response_parameters: dict[str, Any] = {}

    # --- the protocol ---

    def submit(
        self, request: InferRequest, on_response: Callable[[InferResponse], None]
    ) -> FakeInFlight:
        """Check the request, and answer it as its model does."""
        if self.keep_requests:
            self.requests.append(request)
        try:
            self._model(request.model_name, request.model_version).rules.check(request)
            if request.model_name == "busy":
                raise Unavailable("the queue is full", retry_after_s=1.2)
            if request.model_name == "crashing":
                raise RuntimeError("a bug in the server")
        except Exception:
            _release(request)
            raise
        if request.model_name == "stream":
            self.streams.append(FakeInFlight(self, request, on_response))
            self.stream_event.set()
            return self.streams[-1]
        if request.model_name == "held":
            self.held.append((request, on_response))
            self.held_event.set()
        elif request.model_name == "soon":
            assert self.loop is not None
            self.loop.call_soon(self.answer, request, on_response)
        else:
            self.answer(request, on_response)
        return FakeInFlight(self)

    def allocate(self, nbytes: int) -> FakeSlab | None:
        """Return memory while there is room."""
        if nbytes > self.room_bytes:
            return None
        self.room_bytes -= nbytes
        self.slabs += 1
        self.most_slabs = max(self.most_slabs, self.slabs)
        return FakeSlab(self, nbytes)

    async def grow(self, nbytes: int) -> None:
        """Make room, or fail as the test wants."""
        await asyncio.sleep(0)
        if self.grow_error is not None:
            raise self.grow_error
        self.grown += 1
        self.room_bytes += nbytes

    def model_info(self, name: str, version: str = "") -> ModelInfo:
        """Describe a model."""
        return self._model(name, version).info

    def model_config(self, name: str, version: str = "") -> bytes:
        """Return a configuration."""
        return b'{"name":"%b"}' % self._model(name, version).info.name.encode()

    def is_model_ready(self, name: str, version: str = "") -> bool:
        """Whether the model is known and not `busy`."""
        return name in MODELS and version in ("", "1") and name != "busy"

    async def check_model_ready(self, name: str, version: str = "") -> bool:
        """Whether it is."""
        return self.is_model_ready(name, version)

    async def check_ready(self) -> bool:
        """Whether the test says so."""
        return self.ready

    def is_live(self) -> bool:
        """Whether the test says so."""
        return self.live

    def is_ready(self) -> bool:
        """Whether the test says so."""
        return self.ready

    def _model(self, name: str, version: str) -> Model:
        model = MODELS.get(name)
        if model is None:
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        if version not in ("", "1"):
            raise NotFound(f"Request for unknown model: '{name}' version {version} is not found")
        return model

    # --- answers ---

    def answer(self, request: InferRequest, on_response: Callable[[InferResponse], None]) -> None:
        """Answer a request; its slabs are released behind the response's views."""
        response = InferResponse(
            request.model_name, "1", request.id, [], dict(self.response_parameters)
        )
        if request.model_name == "failing":
            response.error = InternalError("the model failed\nat line 3")
        elif request.model_name == "add_sub":
            a, b = (np.frombuffer(_body(t), "<f4") for t in request.inputs)
            response.outputs = [
                InferTensor("OUTPUT0", "FP32", (4,), memoryview((a + b).tobytes())),
                InferTensor("OUTPUT1", "FP32", (4,), memoryview((a - b).tobytes())),
            ]
        else:
            response.outputs = [
                InferTensor(
                    t.name.replace("INPUT", "OUTPUT"),
                    t.datatype,
                    t.shape,
                    memoryview(_body(t)).toreadonly(),
                )
                for t in request.inputs
            ]
        _release(request)
        on_response(response)

    def answer_held(self) -> None:
        """Answer everything that `held` holds."""
        held, self.held = self.held, []
        for request, on_response in held:
            self.answer(request, on_response)


def _body(tensor: InferTensor) -> bytes | bytearray | memoryview:
    data = tensor.data
    return data if isinstance(data, (bytes, bytearray, memoryview)) else data.buffer


def _release(request: InferRequest) -> None:
    for tensor in request.inputs:
        if isinstance(tensor.data, FakeSlab):
            tensor.data.release()


# --- the server ----------------------------------------------------------------------------------


class Harness:
    """An HTTP server on a loop in a thread of its own."""

    def __init__(
        self, settings: HttpSettings, loop_kind: str, door: FakeDoor | None = None
    ) -> None:
        self.door = door or FakeDoor()
        self.loop = uvloop.new_event_loop() if loop_kind == "uvloop" else asyncio.new_event_loop()
        self.door.loop = self.loop
        self.loop_errors: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _, context: self.loop_errors.append(context))
        listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = listener.getsockname()[1]
        self.server = HttpServer(self.door, settings, [listener])
        self._thread = threading.Thread(target=self.loop.run_forever, name="http-loop")
        self._thread.start()
        self.run(self.server.start())

    def run(self, coroutine: Any) -> Any:
        """Run a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(WAIT_S)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function on the server's loop."""
        done: Future[Any] = Future()

        def target() -> None:
            try:
                done.set_result(function(*args))
            except BaseException as error:
                done.set_exception(error)

        self.loop.call_soon_threadsafe(target)
        return done.result(WAIT_S)

    def stats(self) -> Any:
        """Return the server's counts."""
        return self.call(self.server.stats)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds on the loop; each turn of the loop looks again."""

        async def look() -> None:
            while not condition():
                await asyncio.sleep(0.002)

        self.run(asyncio.wait_for(look(), WAIT_S))

    def connect(self) -> Client:
        """Open a connection."""
        return Client(self.port)

    def close(self) -> None:
        """Stop the server and its loop; nothing may be left."""
        self.run(self.server.stop())
        self.run(_no_tasks())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(WAIT_S)
        self.loop.close()
        assert not self._thread.is_alive()
        assert self.loop_errors == []
        assert self.door.slabs == 0


async def _no_tasks() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert not others, others


class Reply:
    """What a client reads back."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def json(self) -> Any:
        """The JSON part of the body."""
        size = self.headers.get("inference-header-content-length")
        return json.loads(self.body[: int(size)] if size else self.body)

    @property
    def binary(self) -> bytes:
        """What follows the JSON part."""
        return self.body[int(self.headers["inference-header-content-length"]) :]

    @property
    def error(self) -> str:
        """The text of an error."""
        text: str = self.json["error"]
        return text


class Client:
    """One connection, byte by byte under the test's control."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), WAIT_S)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self.sock.makefile("rb")

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._file.close()
        self.sock.close()

    def send(self, data: bytes) -> None:
        """Send bytes."""
        self.sock.sendall(data)

    def read(self, has_body: bool = True) -> Reply:
        """Read one reply."""
        line = self._file.readline()
        assert line.startswith(b"HTTP/1.1 "), line
        status = int(line.split()[1])
        headers: dict[str, str] = {}
        while (line := self._file.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        size = int(headers.get("content-length", 0)) if has_body and status >= 200 else 0
        body = self._file.read(size)
        assert len(body) == size
        return Reply(status, headers, body)

    def is_closed(self) -> bool:
        """Wait for the server's end of file (or reset)."""
        try:
            return self._file.read(1) == b""
        except ConnectionError:
            return True

    def request(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> Reply:
        """Send a request and read its reply."""
        self.send(message(method, path, body, headers))
        return self.read(has_body=method != "HEAD")

    def infer(self, model: str, document: Any, binary: bytes = b"", **headers: str) -> Reply:
        """Send an inference and read its reply."""
        self.send(infer_message(model, document, binary, **headers))
        return self.read()


def message(
    method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
) -> bytes:
    """Build a request."""
    fields = {"Host": "x", **(headers or {})}
    if body and not any(name.lower() == "transfer-encoding" for name in fields):
        fields.setdefault("Content-Length", str(len(body)))
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {v}" for name, v in fields.items()), "", ""]
    return "\r\n".join(lines).encode() + body


def infer_message(model: str, document: Any, binary: bytes = b"", **headers: str) -> bytes:
    """Build an inference; with binary blocks, the header that says where they begin."""
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    if binary:
        fields.setdefault("Inference-Header-Content-Length", str(len(text)))
    return message("POST", f"/v2/models/{model}/infer", text + binary, fields)


def binary_input(nbytes: int, name: str = "INPUT0", **more: Any) -> dict[str, Any]:
    """Describe an FP32 input that follows as a block."""
    parameters = {"binary_data_size": nbytes}
    return {
        "name": name,
        "datatype": "FP32",
        "shape": [nbytes // 4],
        "parameters": parameters,
    } | more


def chunked(body: bytes, sizes: Iterator[int]) -> bytes:
    """Encode a body as HTTP chunks of the sizes given."""
    out, at = [], 0
    while at < len(body):
        size = min(next(sizes), len(body) - at)
        out.append(b"%x\r\n%b\r\n" % (size, body[at : at + size]))
        at += size
    return b"".join([*out, b"0\r\n\r\n"])


@pytest.fixture(params=["asyncio", "uvloop"])
def loop_kind(request: pytest.FixtureRequest) -> str:
    """Which event loop serves."""
    return str(request.param)


@pytest.fixture
def start(loop_kind: str) -> Iterator[Callable[..., Harness]]:
    """Start servers with settings of the test's own."""
    with contextlib.ExitStack() as stack:

        def begin(**settings: Any) -> Harness:
            harness = Harness(HttpSettings(**settings), loop_kind)
            stack.callback(harness.close)
            return harness

        yield begin


@pytest.fixture
def server(start: Callable[..., Harness]) -> Harness:
    """A server with the default settings."""
    return start()


@pytest.fixture
def client(server: Harness) -> Iterator[Client]:
    """A connection to it."""
    with server.connect() as connection:
        yield connection
