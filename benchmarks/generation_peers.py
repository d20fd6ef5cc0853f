# SPDX-License-Identifier: Apache-2.0
"""Other ways to bring tokens from an engine's process to whoever waits: pickled or msgpack'd.

    engine process:  requests ─► add ─► poll ─► a message for each output, or one an iteration
    here:            a thread reads, finds the request's queue, and wakes its reader in the loop

The first is what TensorRT-LLM's executor did at first: multiprocessing.connection with pickle, a
message an output, a queue a result. pyzmq carries the same messages as msgpack arrays; "batched"
is one message an iteration, as vLLM has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from multiprocessing.connection import Client, Connection, Listener
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from actorserve.actors.generation.engine import GenRequest, Output, Sampling
from actorserve.actors.generation.engines.registry import engine_class
from benchmarks.partner import Partner
from benchmarks.sampling import CannotRun

CONNECTION, ZMQ, ZMQ_BATCHED = "mp.connection", "pyzmq", "pyzmq batched"
LIMIT_S = 30.0


class EngineChoice(NamedTuple):
    """An engine by name, with its options."""

    name: str
    options: dict[str, Any]


class Response(NamedTuple):
    """What is pickled for each output."""

    request_id: int
    output_token_ids: list[list[int]]
    is_final: bool


class Link(Protocol):
    """The engine process's end: requests in, outputs out."""

    def requests(self, *, wait: bool) -> Sequence[GenRequest]:
        """Return what has come; wait for the first if there is nothing else to do."""

    def outputs(self, outputs: Sequence[Output]) -> None:
        """Send what an iteration brought."""


Road = Callable[[EngineChoice], contextlib.AbstractContextManager["Tokens"]]


class Tokens(Protocol):
    """A road to an engine in another process."""

    def stream(self, length: int) -> AsyncIterator[int]:
        """Ask for so many tokens, and yield how many came each time."""


def serve(choice: EngineChoice, link: Link) -> None:
    """Run an engine for a link until the process is killed."""
    engine = engine_class(choice.name)(**choice.options)
    engine.start(0, None)
    running = 0
    while True:
        for request in link.requests(wait=not running):
            engine.add(request)
            running += 1
        outputs = engine.poll(0.0)
        running -= sum(output.final for output in outputs)
        if outputs:
            link.outputs(outputs)


class Dispatcher:
    """Results by id, each with a queue in the loop that reads it."""

    def __init__(self, send: Callable[[GenRequest], None]) -> None:
        self._send = send
        self._ids = itertools.count(1)
        self._queues: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Queue[Any]]] = {}

    def give(self, request_id: int, tokens: list[int], is_final: bool) -> None:
        """Hand an output to its queue; called by the reading thread."""
        loop, queue = self._queues[request_id]
        if is_final:
            del self._queues[request_id]
        loop.call_soon_threadsafe(queue.put_nowait, (len(tokens), is_final))

    async def stream(self, length: int) -> AsyncIterator[int]:
        """Ask, and yield how many tokens came each time."""
        number = next(self._ids)
        queue: asyncio.Queue[tuple[int, bool]] = asyncio.Queue()
        self._queues[number] = asyncio.get_running_loop(), queue
        self._send(GenRequest(number, [1, 2, 3], Sampling(max_tokens=length)))
        is_final = False
        while not is_final:
            count, is_final = await queue.get()
            yield count


# --- multiprocessing.connection -------------------------------------------------------------------


class _Connected:
    """The engine's end of a pair of connections."""

    def __init__(self, up: Connection, down: Connection) -> None:
        self._up, self._down = up, down

    def requests(self, *, wait: bool) -> Sequence[GenRequest]:
        found = []
        while wait or self._down.poll():
            found.append(GenRequest(**self._down.recv()))
            wait = False
        return found

    def outputs(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            self._up.send(Response(output.id, [output.tokens], output.final))


@contextlib.contextmanager
def connection(choice: EngineChoice) -> Iterator[Tokens]:
    """Connect by multiprocessing.connection: one pickle an output, over localhost."""
    with Listener(("127.0.0.1", 0), authkey=b"bench") as listener:

        def work() -> None:
            up = Client(listener.address, authkey=b"bench")
            down = Client(listener.address, authkey=b"bench")
            serve(choice, _Connected(up, down))  # type: ignore[arg-type]

        with Partner(work):
            up, down = listener.accept(), listener.accept()
            lock = threading.Lock()

            def send(request: GenRequest) -> None:
                with lock:
                    down.send(msgspec.structs.asdict(request))

            results = Dispatcher(send)

            def read() -> None:
                with contextlib.suppress(EOFError, OSError):
                    while True:
                        response = up.recv()
                        results.give(
                            response.request_id, response.output_token_ids[0], response.is_final
                        )

            reader = threading.Thread(target=read, daemon=True)
            reader.start()
            yield results
        reader.join(LIMIT_S)
        up.close()
        down.close()


# --- pyzmq ---------------------------------------------------------------------------------------


class _Zmq:
    """The engine's end of two sockets."""

    def __init__(self, zmq: Any, address: str, *, is_batched: bool) -> None:
        context = zmq.Context()
        self._again = zmq.Again
        self._no_wait = zmq.NOBLOCK
        self._up = context.socket(zmq.PUSH)
        self._up.connect(f"{address}-up")
        self._down = context.socket(zmq.PULL)
        self._down.connect(f"{address}-down")
        self._is_batched = is_batched
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(GenRequest).decode

    def requests(self, *, wait: bool) -> Sequence[GenRequest]:
        found = []
        with contextlib.suppress(self._again):
            while True:
                found.append(self._decode(self._down.recv(0 if wait else self._no_wait)))
                wait = False
        return found

    def outputs(self, outputs: Sequence[Output]) -> None:
        if self._is_batched:
            self._up.send(self._encode(outputs))
            return
        for output in outputs:
            self._up.send(self._encode(output))


@contextlib.contextmanager
def zmq_sockets(choice: EngineChoice, *, is_batched: bool) -> Iterator[Tokens]:
    """Connect by pyzmq: msgpack over ipc, one message an output or one an iteration."""
    try:
        import zmq
    except ModuleNotFoundError:
        raise CannotRun("pyzmq is not installed") from None

    address = f"ipc://{Path(get_temp_dir(), 'generation')}"

    def work() -> None:
        serve(choice, _Zmq(zmq, address, is_batched=is_batched))

    with Partner(work), zmq.Context() as context:
        up, down = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        up.bind(f"{address}-up")
        down.bind(f"{address}-down")
        encode = msgspec.msgpack.Encoder().encode
        decode = msgspec.msgpack.Decoder(list[Output] if is_batched else Output).decode
        lock = threading.Lock()
        is_over = threading.Event()

        def send(request: GenRequest) -> None:
            with lock:
                down.send(encode(request))

        results = Dispatcher(send)

        def read() -> None:
            while not is_over.is_set():
                if not up.poll(100):
                    continue
                message: Any = decode(up.recv())
                for output in message if is_batched else [message]:
                    results.give(output.id, output.tokens, output.final)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            yield results
        finally:
            is_over.set()
            reader.join(LIMIT_S)
            up.close(linger=0)
            down.close(linger=0)
