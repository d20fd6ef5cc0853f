# SPDX-License-Identifier: Apache-2.0
"""Clients that ask all that can be asked, at random, and check every answer.

Door    embedded: the history sees each response at the supervisor's door
Http    over connections of its own; some are closed in the middle
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from actorserve import ActorserveError, Supervisor
from actorserve.actors.response_factory import ResponseFactory
from actorserve.errors import Cancelled, DeadlineExceeded, InvalidArgument
from actorserve.triton.inference import InferRequest, InferResponse
from benchmarks.history import History

SIZES = (1, 5_000, 262_144)
MOST_CALLS = 8
MOST_STREAMS = 32
MOST_RESPONSES = 300
TIMEOUT_S = 120.0
LETTERLESS = "1 2 3"


class Watched:
    """A request in flight as whoever sent it sees it; the history hears when they leave."""

    def __init__(self, factory: ResponseFactory, history: History, number: int) -> None:
        self._factory = factory
        self._history = history
        self._number = number

    def __getattr__(self, name: str) -> Any:
        """Be the request in everything else."""
        return getattr(self._factory, name)

    def disconnect(self) -> None:
        """Leave: nothing may come from now on."""
        self._history.left(self._number)
        self._factory.disconnect()


class WatchedSupervisor(Supervisor):
    """A supervisor whose door is watched."""

    history: History

    def submit(
        self, request: InferRequest, on_response: Callable[[InferResponse], None]
    ) -> ResponseFactory:
        """Note the request and each of its responses."""
        history = self.history
        number = history.began(f"embedded {request.model_name}")

        def note(response: InferResponse) -> None:
            error = response.error
            end = "answered" if error is None else type(error).__name__
            history.responded(number, final=response.final, end=end)
            on_response(response)

        try:
            factory = super().submit(request, note)
        except ActorserveError as error:
            history.responded(number, final=True, end=f"refused, {type(error).__name__}")
            raise
        return Watched(factory, history, number)  # type: ignore[return-value]


class Door:
    """An embedding app's clients."""

    def __init__(self, server: WatchedSupervisor, chance: random.Random) -> None:
        self._server = server
        self._chance = chance
        self._history = server.history
        self._acts: list[Callable[[], Awaitable[None]]] = [
            self._identity,
            self._call,
            self._fan,
            self._listen,
            self._leave_a_stream,
            self._cancel,
            self._be_late,
            self._err,
        ]

    async def act(self) -> None:
        """Do one thing."""
        await self._chance.choice(self._acts)()

    async def peak(self, clients: int) -> None:
        """Do the largest of everything, each by this many at once."""
        for act in (
            lambda: self._identity(SIZES[-1]),
            lambda: self._call(MOST_CALLS),
            lambda: self._fan(MOST_STREAMS),
            lambda: self._read(MOST_RESPONSES, MOST_RESPONSES),
        ):
            await asyncio.gather(*[act() for _ in range(clients)])

    def _check(self, is_right: object, what: str) -> None:
        if not is_right:
            self._history.wrong(what)

    async def _infer(self, model: str, **inputs: Any) -> Any:
        return await self._server.infer(model, inputs, timeout_s=TIMEOUT_S)

    async def _identity(self, size: int | None = None) -> None:
        x = np.full(size or self._chance.choice(SIZES), self._chance.random(), np.float32)
        outputs = await self._infer("identity", INPUT0=x)
        self._check(np.array_equal(outputs["OUTPUT0"], x), "identity answered something else")

    async def _call(self, count: int | None = None) -> None:
        count = self._chance.randint(0, MOST_CALLS) if count is None else count
        model = self._chance.choice(("caller", "caller_async"))
        outputs = await self._infer(model, N=np.array([count], np.int32))
        self._check(outputs["OUT"][0] == sum(range(count)), f"{model} answered {outputs}")

    async def _fan(self, streams: int | None = None) -> None:
        streams = self._chance.randint(0, MOST_STREAMS) if streams is None else streams
        outputs = await self._infer("orchestrator", STREAMS=[streams], LENGTH=[3])
        self._check(outputs["COMPLETE"][0] == streams, f"{streams} streams ended as {outputs}")

    async def _listen(self) -> None:
        count = self._chance.randint(0, MOST_RESPONSES)
        await self._read(count, count)

    async def _leave_a_stream(self) -> None:
        count = self._chance.randint(2, MOST_RESPONSES)
        await self._read(count, self._chance.randrange(1, count))

    async def _read(self, count: int, most: int) -> None:
        inputs = {"N": np.array([count], np.int32)}
        stream = self._server.stream("count", inputs, timeout_s=TIMEOUT_S)
        numbers = []
        async for outputs in stream:
            numbers.append(int(outputs["OUT"][0]))
            if len(numbers) == most < count:
                break
        await stream.aclose()
        self._check(numbers == list(range(most)), f"a stream of {count} gave {len(numbers)}")

    async def _cancel(self) -> None:
        task = asyncio.ensure_future(self._infer("patient", STEPS=[200]))
        await asyncio.wait([task], timeout=self._chance.random() * 0.05)
        task.cancel()
        await asyncio.wait([task])

    async def _be_late(self) -> None:
        try:
            await self._server.infer("patient", {"STEPS": [200]}, timeout_s=0.02)
        except (DeadlineExceeded, Cancelled):
            return
        self._check(False, "what takes two seconds was done in 20 ms")

    async def _err(self) -> None:
        try:
            await self._infer("pipeline", TEXT=[LETTERLESS])
        except InvalidArgument:
            return
        self._check(False, "a text without letters was no error")


class Http:
    """One client over HTTP: a connection that is kept, or closed in the middle."""

    def __init__(self, port: int, history: History, chance: random.Random) -> None:
        self._port = port
        self._history = history
        self._chance = chance
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def act(self) -> None:
        """Send one request, and wait for its answer, or do not."""
        await self._ask(
            *self._chance.choice(
                (self._identity, self._caller, self._fan, self._error, self._patient)
            )()
        )

    async def peak(self) -> None:
        """Send the largest of each."""
        await self._ask(*self._caller(MOST_CALLS))
        await self._ask(*self._fan(MOST_STREAMS))

    async def _ask(self, model: str, inputs: Any, expected: Any) -> None:
        tensors = [
            {"name": name, "datatype": kind, "shape": [len(data)], "data": data}
            for name, (kind, data) in inputs.items()
        ]
        body = json.dumps({"inputs": tensors}).encode()
        head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}"
        number = self._history.began(f"HTTP {model}")
        reader, writer = await self._connected()
        if expected is None:
            await self._leave(number, writer, f"{head}\r\n\r\n".encode() + body)
            return
        writer.write(f"{head}\r\n\r\n".encode() + body)
        status, answer = await _answer(reader)
        self._history.responded(number, final=True, end=str(status))
        if (status, answer) != expected:
            self._history.wrong(f"{model} answered {status} {answer}, not {expected}")

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        return self._streams

    async def _leave(self, number: int, writer: asyncio.StreamWriter, request: bytes) -> None:
        """Close the connection within the request, or before its answer."""
        writer.write(request[: self._chance.choice((50, len(request) - 1, len(request)))])
        await asyncio.sleep(self._chance.random() * 0.05)
        self._history.left(number)
        await self.close()

    async def close(self) -> None:
        """Close the connection."""
        if self._streams is not None:
            _, writer = self._streams
            self._streams = None
            writer.close()
            try:
                await writer.wait_closed()
            except OSError:
                pass

    # --- what is asked: the model, its inputs, and the answer; None to leave ---------------------

    def _identity(self) -> Any:
        data = [float(self._chance.randrange(1000)) for _ in range(4)]
        return "identity", {"INPUT0": ("FP32", data)}, (200, {"OUTPUT0": data})

    def _caller(self, count: int | None = None) -> Any:
        count = self._chance.randint(0, MOST_CALLS) if count is None else count
        model = self._chance.choice(("caller", "caller_async"))
        return model, {"N": ("INT32", [count])}, (200, {"OUT": [float(sum(range(count)))]})

    def _fan(self, streams: int | None = None) -> Any:
        streams = self._chance.randint(0, MOST_STREAMS) if streams is None else streams
        inputs = {"STREAMS": ("INT64", [streams]), "LENGTH": ("INT64", [3])}
        answer = {"COMPLETE": [streams], "INCOMPLETE": [0], "ERRORS": [0]}
        return "orchestrator", inputs, (200, answer)

    def _error(self) -> Any:
        return "pipeline", {"TEXT": ("BYTES", [LETTERLESS])}, (400, "the text has no letters")

    def _patient(self) -> Any:
        return "patient", {"STEPS": ("INT64", [200])}, None


async def _answer(reader: asyncio.StreamReader) -> tuple[int, Any]:
    """Read one response: its status, and the outputs by name or the error."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
    length = next(int(line[15:]) for line in head if line.startswith("content-length:"))
    document = json.loads(await reader.readexactly(length))
    status = int(head[0].split()[1])
    if status != 200:
        return status, document["error"]
    return status, {output["name"]: output["data"] for output in document["outputs"]}
