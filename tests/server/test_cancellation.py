# SPDX-License-Identifier: Apache-2.0
"""Cancelling from every side: what runs is told, what waits never runs, each has one end."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actorserve.errors import Cancelled, Code, DeadlineExceeded
from tests.conftest import wait_until
from tests.server.calling_models import until, write
from tests.server.cancelling import BUSY, PATIENT, Notes, cancel, in_task
from tests.server.script_models import Heard, ScriptServer, served


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptServer]:
    """Return a server of script models."""
    yield from served(tmp_path_factory.mktemp("cancel"))


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Replace the look after each test: the server is looked at when it ends."""


@pytest.fixture
def notes(tmp_path: Path) -> Notes:
    """Return what models write to."""
    return Notes(tmp_path / "notes")


@pytest.fixture(autouse=True)
def nothing_is_left(server: ScriptServer) -> Iterator[None]:
    """Fail a test after which anything is held or open, or for which a stub died."""
    restarts = server.restarts()
    yield
    wait_until(lambda: server.held_blocks() == 0)
    wait_until(lambda: server.pending() == 0)
    assert server.restarts() == restarts


# --- the client's side ---------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["plain", "aplain"])
def test_a_cancelled_task_cancels_its_request(server, notes, model):
    """The model sees it; the instance is free again."""
    code = (
        BUSY
        if model == "plain"
        else BUSY.replace("result =", "return").replace("time.sleep", "await asyncio.sleep")
    )
    task = in_task(server, model, notes.code(code))
    notes.wait("begun")
    cancel(server, task)
    notes.wait("begun", "told")
    answer = "return" if model == "aplain" else "result ="
    assert server.values(model, f"{answer} [answer([1])]") == [1]


def test_leaving_a_stream_cancels_it(server, notes):
    """By break, by closing the iterator, and by an exception in the loop."""
    code = notes.code(
        PATIENT.replace("while not", "while not sender.send(answer([1])) and not")
    ).encode()

    async def main(how: str) -> None:
        stream = server.server.stream("stream", {"CODE": [code]})
        if how == "close":
            await stream.__anext__()
            await stream.aclose()
            return
        try:
            async for _ in stream:
                if how == "break":
                    break
                raise KeyError
        except KeyError:
            pass
        await stream.aclose()

    for number, how in enumerate(("break", "close", "raise"), 1):
        server.run(main(how))
        notes.wait(*["begun", "told"] * number)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_deadline_cancels(server, notes, is_stream):
    """The client has its error at once, the model is told."""

    async def main() -> None:
        inputs = {"CODE": [notes.code(PATIENT if is_stream else BUSY).encode()]}
        with pytest.raises(DeadlineExceeded):
            if is_stream:
                async for _ in server.server.stream("stream", inputs, timeout_s=0.1):
                    pass
            else:
                await server.server.infer("plain", inputs, timeout_s=0.1)

    server.run(main())
    notes.wait("begun", "told")


def test_a_queued_request_that_is_cancelled_is_never_executed(server, notes):
    """Whoever cancels it, and while it waits anywhere."""
    busy = in_task(server, "plain", notes.code(BUSY))
    notes.wait("begun")
    waiting = [in_task(server, "plain", notes.code("note('executed')")) for _ in range(5)]

    async def main() -> list[Any]:
        heard = [Heard() for _ in range(5)]
        sent = [server.submit("plain", notes.code("note('executed')"), each) for each in heard]
        for each in sent:
            each.cancel()
            each.cancel()
        await until(lambda: all(each.ended.is_set() for each in heard))
        return [each.values for each in heard]

    for (error,) in server.run(main()):
        assert isinstance(error, Cancelled)
    for each in waiting:
        cancel(server, each)
    cancel(server, busy)
    notes.wait("begun", "told")
    assert server.text("plain", "result = [tell('next')]") == ["next"]
    assert notes.words == ["begun", "told"]


def test_a_cancelled_request_answers_in_its_own_time(server, notes):
    """What it sends still arrives, and the end is the model's."""
    code = notes.code(PATIENT.replace('note("told")', 'note("told"); sender.send(answer([7]))'))

    async def main() -> list[Any]:
        heard = Heard()
        sent = server.submit("stream", code, heard)
        await until(lambda: notes.words == ["begun"])
        for _ in range(3):
            sent.cancel()
        await asyncio.wait_for(heard.ended.wait(), 20)
        sent.cancel()
        sent.disconnect()
        return heard.values

    seven, error = server.run(main())
    assert seven == 7
    assert (error.message, error.code) == ("as you like", Code.CANCELLED)


def test_looking_for_a_cancellation_asks_nobody(server, notes):
    """The main thread holds the interpreter elsewhere, the supervisor is not asked."""
    code = notes.code(
        """\
import ctypes
sender = request.get_response_sender()
note("begun")
hold = ctypes.PyDLL(None).usleep
while not request.is_cancelled():
    hold(20000)
looks = 0
end = time.monotonic() + 0.1
while time.monotonic() < end:
    looks += request.is_cancelled() and sender.is_cancelled()
note("told" if looks > 2000 else "slow")
sender.send(flags=FINAL)
"""
    )

    async def main() -> None:
        heard = Heard()
        sent = server.submit("stream", code, heard)
        await until(lambda: notes.words == ["begun"])
        sent.disconnect()

    server.run(main())
    notes.wait("begun", "told")


def test_a_cancelled_stream_frees_its_slot(server):
    """More are begun and left than a page has slots, and the stub serves on."""
    code = """\
sender = request.get_response_sender()
sender.send(answer([1]))
if not hasattr(kept, "left"):
    kept.left = []
    def run():
        while True:
            for each in list(kept.left):
                if each.is_cancelled():
                    each.send(flags=FINAL)
                    kept.left.remove(each)
            time.sleep(0.001)
    threading.Thread(target=run, daemon=True).start()
kept.left.append(sender)
"""

    async def one() -> None:
        heard = Heard()
        sent = server.submit("stream", code, heard)
        await asyncio.wait_for(heard.came.wait(), 50)
        sent.disconnect()

    async def main() -> None:
        await asyncio.gather(*[one() for _ in range(1300)])

    server.run(main())
    wait_until(lambda: server.pending() == 0, 30)


def test_cancel_races_with_the_last_response(server):
    """Ten thousand times: one end each, and nobody is disturbed."""
    quick = "request.get_response_sender().send(answer([1]), FINAL)\n"
    chance = random.Random(7)

    async def one(semaphore: asyncio.Semaphore) -> str:
        async with semaphore:
            heard = Heard()
            sent = server.submit("stream", quick, heard)
            for _ in range(chance.randrange(12)):
                await asyncio.sleep(0)
            (sent.cancel if chance.random() < 0.5 else sent.disconnect)()
            sent.cancel()
            for _ in range(3):
                await asyncio.sleep(0)
            await until(lambda: heard.ended.is_set() or sent.state >= 4, 30)
            finals = [each for each in heard.responses if each.final]
            assert len(finals) <= 1
            assert not finals or heard.responses[-1] is finals[0]
            (value,) = heard.values or [None]
            return type(value).__name__

    async def main() -> list[str]:
        semaphore = asyncio.Semaphore(64)
        return await asyncio.gather(*[one(semaphore) for _ in range(10_000)])

    outcomes = server.run(main(), 50)
    assert {*outcomes} >= {"float", "Cancelled", "NoneType"}, {*outcomes}


# --- over HTTP -----------------------------------------------------------------------------------


def test_a_client_that_hangs_up_cancels_its_request(start_server, tmp_path):
    """The model is told, and the next client is served."""
    repository = tmp_path / "repository"
    notes = tmp_path / "notes"
    notes.touch()
    write(
        repository,
        "waits",
        f"""
def execute(self, requests):
    if read(requests[0])[0] < 0:
        open({str(notes)!r}, "a").write("begun ")
        while not requests[0].is_cancelled():
            time.sleep(0.002)
        open({str(notes)!r}, "a").write("told ")
    return [answer(read(r)) for r in requests]
""",
    )
    server = start_server(repository)
    body = b'{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1],"data":[-1]}]}'
    head = f"POST /v2/models/waits/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((server.host, server.port)) as client:
        client.sendall(head.encode() + body)
        wait_until(lambda: notes.read_text() == "begun ")
    wait_until(lambda: notes.read_text() == "begun told ")
    assert server.infer("waits", {"INPUT0": ("FP32", [1], [3.0])}) == (200, {"OUTPUT0": [3.0]})
    assert server.stop() == 0
