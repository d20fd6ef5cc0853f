# SPDX-License-Identifier: Apache-2.0
"""Calls are cancelled with the requests that they were made for, or when they are given up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.server.calling_models import until
from tests.server.cancelling import BUSY, PATIENT, Notes, cancel, in_task
from tests.server.script_models import Heard, ScriptServer, served


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptServer]:
    """Return a server of script models."""
    yield from served(tmp_path_factory.mktemp("call_cancel"))


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


CALLS = {
    "exec": "scripted(MODEL, TEXT).exec()",
    "a stream": "list(scripted(MODEL, TEXT).exec(decoupled=True))",
    "async_exec": "await scripted(MODEL, TEXT).async_exec()",
    "a thread's exec": "await asyncio.to_thread(scripted(MODEL, TEXT).exec)",
    "a job of the loop's executor": (
        "await asyncio.get_running_loop().run_in_executor("
        "None, lambda: scripted(MODEL, TEXT).exec())"
    ),
    "a job of an executor": "kept.pool.submit(lambda: scripted(MODEL, TEXT).exec()).result()",
    "a thread that is started there": "in_thread(lambda: scripted(MODEL, TEXT).exec())",
    "a request that an old thread sends": "old_thread(scripted(MODEL, TEXT).exec)",
}


def calling(how: str, model: str, text: str) -> str:
    """Return code that makes a call, and answers with its outcome."""
    made = CALLS[how].replace("MODEL", repr(model)).replace("TEXT", repr(text))
    word = "return" if "await" in how + made else "result ="
    return f"{THREADS}response = {made}\n{word} [answer([1])]\n"


THREADS = """\
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

def in_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()

def old_thread(function):
    done = SimpleQueue()
    kept.jobs.put(lambda: done.put(function()))
    done.get()

def work(jobs):
    while True:
        jobs.get()()

if not hasattr(kept, "pool"):
    # Threads that no request is to be found by: they were there before.
    def prepare():
        kept.pool = ThreadPoolExecutor(1)
        kept.pool.submit(int).result()
        kept.jobs = SimpleQueue()
        threading.Thread(target=work, args=(kept.jobs,), daemon=True).start()
    import contextvars
    contextvars.Context().run(prepare)
"""


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
