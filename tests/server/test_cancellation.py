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
from tests.server.script_models import Heard, ScriptServer, served

PATIENT = """\
kept.told = None
sender = request.get_response_sender()
note("begun")
def run(request=request, sender=sender):
    while not request.is_cancelled():
        time.sleep(0.002)
    note("told")
    sender.send(failure("as you like", pb_utils.TritonError.CANCELLED), FINAL)
start(run)
"""
"""Answers when it is cancelled, and notes both moments."""

BUSY = """\
note("begun")
while not request.is_cancelled():
    time.sleep(0.002)
note("told")
result = [failure("as you like", pb_utils.TritonError.CANCELLED)]
"""
"""The same on the main thread of a plain model."""


class Notes:
    """A file to which models write words."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_text("")

    @property
    def words(self) -> list[str]:
        """What was written since the last look at `clear`."""
        return self.path.read_text().split()

    def code(self, code: str) -> str:
        """Return code that may call `note`."""
        note = f"def note(word):\n    open({str(self.path)!r}, 'a').write(word + ' ')\n"
        return note + code

    def wait(self, *words: str) -> None:
        """Wait until these words were written, in any order."""
        wait_until(lambda: sorted(self.words) == sorted(words), 20, f"{self.words} != {words}")


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


def in_task(server: ScriptServer, model: str, code: str) -> Any:
    """Start an inference in a task of the server's loop; returns the task."""

    async def main() -> Any:
        inputs = {"CODE": [code.encode()]}
        return asyncio.ensure_future(server.server.infer(model, inputs))

    return server.run(main())


def cancel(server: ScriptServer, task: Any) -> None:
    """Cancel a task and wait for its end."""

    async def main() -> None:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    server.run(main())


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


# --- calls ---------------------------------------------------------------------------------------

CALLS = {
    "exec": "scripted(MODEL, TEXT).exec()",
    "a stream": "list(scripted(MODEL, TEXT).exec(decoupled=True))",
    "async_exec": "await scripted(MODEL, TEXT).async_exec()",
    "a thread's exec": "await asyncio.to_thread(scripted(MODEL, TEXT).exec)",
}


def calling(how: str, model: str, text: str) -> str:
    """Return code that makes a call, and answers with its outcome."""
    made = CALLS[how].replace("MODEL", repr(model)).replace("TEXT", repr(text))
    word = "return" if "await" in how + made else "result ="
    return f"response = {made}\n{word} [answer([1])]\n"


@pytest.mark.parametrize("how", CALLS)
def test_calls_are_cancelled_with_the_request_that_made_them(server, notes, how):
    """Running ones are told."""
    is_async = "await" in CALLS[how]
    callee = "stream" if how == "a stream" else "deep"
    text = notes.code(PATIENT if how == "a stream" else BUSY)
    task = in_task(server, "aplain" if is_async else "plain", calling(how, callee, text))
    notes.wait("begun")
    cancel(server, task)
    notes.wait("begun", "told")


@pytest.mark.parametrize("how", ["exec", "async_exec"])
def test_cancelling_goes_down_three_levels(server, notes, how):
    """From the first caller to the last callee."""
    model = "deep" if how == "exec" else "aplain"
    last = notes.code(BUSY)
    text = calling(how, model, calling(how, model, calling(how, "plain", last)))
    task = in_task(server, model, text)
    notes.wait("begun")
    cancel(server, task)
    notes.wait("begun", "told")


def test_a_queued_call_of_a_cancelled_request_is_never_executed(server, notes):
    """Its model is busy with something else."""
    busy = in_task(server, "plain", notes.code(BUSY))
    notes.wait("begun")
    text = notes.code("note('executed')")
    tasks = [
        in_task(server, "deep", calling("exec", "plain", text)),
        in_task(server, "aplain", calling("async_exec", "plain", text)),
    ]

    async def are_queued() -> None:
        def queued() -> int:
            models = {m.name: m.versions[0].scheduler for m in server.server.stats().models}
            return models["plain"].queued

        await until(lambda: queued() == 2)

    server.run(are_queued())
    for task in tasks:
        cancel(server, task)
    cancel(server, busy)
    assert server.text("plain", "result = [tell('next')]") == ["next"]
    assert notes.words == ["begun", "told"]


def test_a_call_for_a_whole_batch_outlives_one_cancelled_request_of_it(server, notes):
    """The others still want its answer; when all are cancelled, so is it."""
    inner = notes.code(
        """\
note("begun")
def is_over():
    return request.is_cancelled() or os.path.exists(GO)
while not is_over(): time.sleep(0.002)
note("told" if request.is_cancelled() else "done")
result = [answer([5])]
"""
    )
    go = notes.path.parent / "go"
    inner = inner.replace("GO", repr(str(go)))
    code = f"""\
if len(requests) == 2:
    inner = scripted("deep", {inner!r}).exec()
for each in requests:
    each.get_response_sender().send(
        failure("one only") if len(requests) < 2 else
        pb_utils.InferenceResponse(error=inner.error()) if inner.has_error() else
        pb_utils.InferenceResponse(
            [pb_utils.Tensor("OUTPUT0", value(inner).reshape(1, 1))]), FINAL)
"""

    async def begun() -> list[Heard]:
        """Two requests, tried until they are one batch."""
        while True:
            notes.path.write_text("")
            heard = [Heard(), Heard()]
            for each in heard:
                server.submit("batched", code, each)

            def is_over(heard: list[Heard] = heard) -> bool:
                return bool(notes.words) or all(each.ended.is_set() for each in heard)

            await until(is_over)
            if notes.words:
                return heard

    async def pair(cancels: int) -> list[list[Any]]:
        heard = await begun()
        for each in heard[:cancels]:
            each.sent.cancel()
        if cancels == 1:
            await asyncio.sleep(0.1)
            assert notes.words == ["begun"]
            go.touch()
        await until(lambda: all(each.ended.is_set() for each in heard))
        return [each.values for each in heard]

    assert server.run(pair(1)) == [[5], [5]]
    notes.wait("begun", "done")
    go.unlink()
    server.run(pair(2))
    notes.wait("begun", "told")


@pytest.mark.parametrize("model", ["plain", "aplain"])
def test_a_call_that_is_given_up_is_cancelled(server, notes, model):
    """An iterator let go, a cancelled future, a timeout."""
    text = notes.code(PATIENT)
    if model == "plain":
        code = f"""\
iterator = scripted("stream", {text!r}).exec(decoupled=True)
until(lambda: open({str(notes.path)!r}).read())
del iterator
result = [answer([1])]
"""
    else:
        code = f"""\
made = scripted("deep", {notes.code(BUSY)!r}).async_exec()
try:
    await asyncio.wait_for(made, 0.3)
except asyncio.TimeoutError:
    return [answer([1])]
"""
    assert server.values(model, code) == [1]
    notes.wait("begun", "told")


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
