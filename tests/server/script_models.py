# SPDX-License-Identifier: Apache-2.0
"""Models that run the code which a request brings, and a server of them for a whole module.

The code sees `request`, `requests`, `self`, the names of HEAD and those below; what it assigns to
`result` is what execute returns.
"""

from __future__ import annotations

import asyncio
import gc
import textwrap
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from actorserve import Supervisor
from actorserve.config import Settings
from actorserve.errors import ActorserveError
from actorserve.triton.inference import InferRequest, InferResponse, InferTensor
from actorserve.wire.tensors import decode_bytes, encode_bytes
from tests.server.calling_models import DECOUPLED, HEAD
from tests.server.harness import parameter, write_model

T = TypeVar("T")

CONFIG = """\
backend: "python"
input [ { name: "CODE" data_type: TYPE_STRING dims: [ 1 ] } ]
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] optional: true } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "TEXT" data_type: TYPE_STRING dims: [ -1 ] } ]
"""

NAMES = '''
import gc

def tell(*texts, **more):
    """A response of these texts."""
    array = np.array([str(each) for each in texts], object)
    return pb_utils.InferenceResponse([pb_utils.Tensor("TEXT", array)], **more)

def attempt(function, *args, **more):
    """What an attempt raised, or ''."""
    try:
        function(*args, **more)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""

def failure(text, code=1):
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(text, code))

def start(function, *args):
    threading.Thread(target=function, args=args).start()

def until(condition):
    while not condition():
        time.sleep(0.002)

def _code(request):
    return pb_utils.get_input_tensor_by_name(request, "CODE").as_numpy().reshape(-1)[0].decode()

def scripted(model, code, **more):
    """A call of another script model."""
    return pb_utils.InferenceRequest(
        model_name=model,
        inputs=[pb_utils.Tensor("CODE", np.array([code.encode()], object))],
        requested_output_names=[],
        **more,
    )

class Kept:
    pass

kept = Kept()
"""Lives as long as the stub."""

def _main(kind, self, requests):
    """The code as a function, so that nothing of it outlives what it leaves behind."""
    lines = ["result = None", *_code(requests[0]).splitlines(), "return result"]
    body = "".join(f"    {line}\\n" for line in lines)
    names = dict(globals())
    exec(f"{kind} main(self, requests, request):\\n{body}", names)
    return names.pop("main")

def _run(self, requests):
    return _main("def", self, requests)(self, requests, requests[0])

async def _run_async(self, requests):
    return await _main("async def", self, requests)(self, requests, requests[0])

'''

SYNC = "def execute(self, requests):\n    return _run(self, requests)\n"
ASYNC = "async def execute(self, requests):\n    return await _run_async(self, requests)\n"


def write_script_models(repository: Path) -> None:
    """Write the models.

    `plain` and `stream` (decoupled) have one instance, `deep` has four; `aplain` and `astream` are
    asynchronous; `batched` is decoupled and takes batches of 4.
    """
    head = HEAD.replace("class TritonPythonModel", NAMES + "class TritonPythonModel")
    batched = CONFIG.replace(
        "input",
        "max_batch_size: 4\ndynamic_batching { max_queue_delay_microseconds: 50000 }\ninput",
        1,
    )
    quick = parameter("CONCURRENT_EXECUTES", 64)
    for name, body, config in (
        ("plain", SYNC, CONFIG),
        ("stream", SYNC, CONFIG + DECOUPLED),
        ("deep", SYNC, CONFIG + "instance_group [ { count: 4 kind: KIND_CPU } ]\n"),
        ("aplain", ASYNC, CONFIG + quick),
        ("astream", ASYNC, CONFIG + DECOUPLED),
        ("batched", SYNC, batched + DECOUPLED),
    ):
        write_model(repository, name, head + textwrap.indent(body, "    "), config)


class Heard:
    """What came back for one request, in order. `reads` takes each response as it comes."""

    def __init__(self, *, reads: bool = False) -> None:
        self.responses: list[InferResponse] = []
        self.came = asyncio.Event()
        self.ended = asyncio.Event()
        self.sent: Any = None
        self._reads = reads

    def take(self, response: InferResponse) -> None:
        """Take a response, as a front end does."""
        self.responses.append(response)
        self.came.set()
        if self._reads and self.sent is not None:
            self.sent.consumed()
        if response.final:
            self.ended.set()
            self.sent = None  # it knows this object: nothing of either has to wait for a collection

    def read(self) -> None:
        """Take what has come, and all that will."""
        self._reads = True
        if self.sent is not None:
            self.sent.consumed(len(self.responses))

    @property
    def values(self) -> list[Any]:
        """Each response as a float, a list of floats or texts, an error, or "" for a bare end."""
        return [_value(each) for each in self.responses]

    @property
    def text(self) -> list[str]:
        """The texts of the one response."""
        (response,) = [each for each in self.responses if not each.is_empty]
        assert response.error is None, response.error
        return _value(response)  # type: ignore[no-any-return]


def _value(response: InferResponse) -> Any:
    if response.error is not None:
        return response.error
    if response.is_empty:
        return ""
    found: list[Any] = []
    for tensor in response.outputs:
        data = tensor.data
        assert isinstance(data, memoryview)
        if tensor.datatype == "BYTES":
            found += [each.decode() for each in decode_bytes(bytes(data))]
        else:
            found += np.frombuffer(data, np.float32).tolist()
    return found[0] if len(found) == 1 and isinstance(found[0], float) else found


class ScriptServer:
    """An embedded server in a thread of its own, and clients that send it code."""

    def __init__(self, repository: Path, **settings: Any) -> None:
        self.folder = repository
        settings.setdefault("crash_dir", str(repository.parent / "crashes"))
        settings.setdefault("restart_backoff_s", (0.0, 0.0))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="script-server")
        self._thread.start()
        self.server = Supervisor(repository, Settings(**settings))
        self.run(self.server.start())

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = 40) -> T:
        """Run a coroutine in the server's loop."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result(timeout_s)

    def submit(self, model: str, code: str, heard: Heard, *outputs: str, data: Any = None) -> Any:
        """Submit a request; its loop only."""
        code = textwrap.dedent(code)
        body = encode_bytes(np.array([code.encode()], object))
        shape = (1, 1) if model == "batched" else (1,)
        inputs = [InferTensor("CODE", "BYTES", shape, body)]
        if data is not None:
            array = np.asarray(data, np.float32)
            inputs.append(InferTensor("INPUT0", "FP32", array.shape, array.tobytes()))
        request = InferRequest(model, inputs, outputs=list(outputs), takes_stream=True)
        sent = self.server.submit(request, heard.take)
        heard.sent = None if heard.ended.is_set() else sent
        return sent

    def hear(self, model: str, code: str, *outputs: str, data: Any = None) -> Heard:
        """Send code and read to the end, which comes exactly once."""

        async def main() -> Heard:
            heard = Heard(reads=True)
            self.submit(model, code, heard, *outputs, data=data)
            await asyncio.wait_for(heard.ended.wait(), 30)
            for _ in range(3):
                await asyncio.sleep(0)
            assert [each.final for each in heard.responses].count(True) == 1
            assert heard.responses[-1].final
            return heard

        return self.run(main())

    def values(self, model: str, code: str, *outputs: str, data: Any = None) -> list[Any]:
        """Send code and return what came, see Heard.values."""
        return self.hear(model, code, *outputs, data=data).values

    def text(self, model: str, code: str, *outputs: str, data: Any = None) -> list[str]:
        """Send code and return the texts of its one response."""
        return self.hear(model, code, *outputs, data=data).text

    def error(self, model: str, code: str) -> ActorserveError:
        """Send code and return the error that is its last response."""
        (error,) = [each for each in self.values(model, code) if isinstance(each, ActorserveError)]
        return error

    def held_blocks(self) -> int:
        """How many blocks of shared memory anybody holds."""

        async def look() -> int:
            gc.collect()  # what the tests themselves have let go of
            return self.server.stats().exchange.held_blocks

        return self.run(look())

    def pending(self) -> int:
        """How many requests are queued or in flight."""

        async def look() -> int:
            counts = [v.scheduler for m in self.server.stats().models for v in m.versions]
            return sum(each.queued + each.in_flight for each in counts)

        return self.run(look())

    def restarts(self) -> int:
        """How often a stub was started again."""

        async def look() -> int:
            models = self.server.stats().models
            return sum(each.restarts for m in models for v in m.versions for each in v.instances)

        return self.run(look())

    def close(self) -> None:
        """Stop the server and its loop."""
        self.run(self.server.stop(grace_s=1))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def served(folder: Path, **settings: Any) -> Iterator[ScriptServer]:
    """Serve the script models until the fixture that iterates over this ends.

    A test that uses such a server maps memory which stays until then, so only then is seen what is
    left: the test module has to replace the fixture `no_leaks`.
    """
    before = {path.name for path in Path("/proc/self/fd").iterdir()}
    repository = folder / "repository"
    repository.mkdir()
    write_script_models(repository)
    server = ScriptServer(repository, **settings)
    yield server
    server.close()
    left = {path.name for path in Path("/proc/self/fd").iterdir()} - before
    assert not left, f"descriptors left behind: {left}"
