# SPDX-License-Identifier: Apache-2.0
"""The soak: its judges can fail, and a short one passes. `-m chaos` runs two minutes."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from actorserve.actors.response_factory import ResponseFactory
from benchmarks import history
from benchmarks.footprint import MIB, Footprint, Limits, growth, leftovers
from benchmarks.history import History
from benchmarks.soak import Soak
from benchmarks.soak_clients import WatchedSupervisor
from tests.faults.harness import write_model

AT_REST = Footprint(40 * MIB, 80 * MIB, 100, 20, 4 * MIB, 0, 0)


# --- the history ----------------------------------------------------------------------------------


def test_requests_that_end_once_are_all_right():
    """With one response, with many, and left by whoever sent them."""
    record = History()
    plain, stream, left = (record.began(kind) for kind in ("plain", "stream", "left"))
    record.responded(plain, final=True)
    for _ in range(3):
        record.responded(stream, final=False)
    record.responded(stream, final=True, end="error")
    record.left(left)
    record.left(plain)  # afterwards: nothing to it
    assert record.verdict() == []
    assert record.ends == {"plain: answered": 1, "stream: error": 1, "left: left": 1}
    assert (record.count, record.open) == (3, 0)


def test_a_request_without_an_end_is_found():
    """Only in the verdict: until then it may come."""
    record = History()
    number = record.began("stream")
    record.responded(number, final=False)
    assert record.problems == []
    assert record.verdict() == ["request 1 (stream) has no end after 1 responses"]


@pytest.mark.parametrize("is_final", [False, True])
@pytest.mark.parametrize("end", ["answered", "left"])
def test_a_response_after_the_end_is_found(end, is_final):
    """A second end, or one more response, whether it was answered or left."""
    record = History()
    number = record.began("plain")
    if end == "left":
        record.left(number)
    else:
        record.responded(number, final=True)
    record.responded(number, final=is_final)
    (problem,) = record.verdict()
    assert problem.startswith(f"request 1 (plain, {end}) got a ")
    assert problem.endswith("response after its end")


def test_a_response_for_nobody_and_a_wrong_answer_are_found():
    """A number that was never given out, and what a client says."""
    record = History()
    record.responded(5, final=True)
    record.wrong("2 + 2 = 5")
    assert record.verdict() == [
        "a final response came for request 5, which nobody has sent",
        "2 + 2 = 5",
    ]


def test_the_record_of_ended_requests_is_bounded(monkeypatch):
    """The oldest are forgotten, and what comes for them is still a problem."""
    monkeypatch.setattr(history, "KEPT_ENDS", 3)
    record = History()
    for _ in range(5):
        record.responded(record.began("plain"), final=True)
    record.responded(1, final=True)
    record.responded(4, final=True)
    assert [problem[:10] for problem in record.problems] == ["a final re", "request 4 "]


def test_the_history_sees_a_response_that_is_delivered_twice(repository, monkeypatch):
    """At the door of a real server."""
    deliver = ResponseFactory._deliver

    def twice(self, response):
        deliver(self, response)
        deliver(self, response)

    async def main() -> WatchedSupervisor:
        server = WatchedSupervisor(repository)
        server.history = History()
        async with server:
            await server.infer("bystander", {"INPUT0": np.ones(2, np.float32)})
            assert server.history.problems == []
            with monkeypatch.context() as patched:
                patched.setattr(ResponseFactory, "_deliver", twice)
                await server.infer("bystander", {"INPUT0": np.ones(2, np.float32)})
        return server

    (problem,) = asyncio.run(main()).history.verdict()
    assert problem.startswith("request 2 (embedded bystander, answered) got a final response")


def test_the_history_sees_a_request_that_is_forgotten(repository, monkeypatch):
    """A deadline would hide it from the client, so the client here gives up."""
    write_model(repository, "model")

    async def main() -> WatchedSupervisor:
        server = WatchedSupervisor(repository)
        server.history = History()
        async with server:
            monkeypatch.setattr(ResponseFactory, "_deliver", lambda self, response: None)
            task = asyncio.ensure_future(server.infer("model", {"INPUT0": np.ones(2, np.float32)}))
            await asyncio.wait([task], timeout=0.3)
            verdict = server.history.verdict()
            assert verdict == ["request 1 (embedded model) has no end after 0 responses"]
            task.cancel()
            await asyncio.wait([task])
        return server

    assert asyncio.run(main()).history.ends == {"embedded model: left": 1}


# --- what has grown -------------------------------------------------------------------------------


def test_what_stays_as_it_was_is_flat():
    """A little up and down is nothing."""
    samples = [
        msgspec.structs.replace(AT_REST, main_bytes=(40 + n % 3) * MIB, in_flight=n)
        for n in range(30)
    ]
    assert growth(samples, Limits()) == []
    assert leftovers(AT_REST, AT_REST, Limits()) == []


@pytest.mark.parametrize("name", ["main_bytes", "below_bytes"])
def test_memory_that_grows_under_load_is_found(name):
    """A megabyte with each look."""
    samples = [
        msgspec.structs.replace(AT_REST, **{name: getattr(AT_REST, name) + n * MIB})
        for n in range(30)
    ]
    (problem,) = growth(samples, Limits())
    assert problem.startswith(f"{name} grew from ")


@pytest.mark.parametrize("name", Footprint.__struct_fields__)
def test_what_is_more_at_the_end_is_found(name):
    """Each figure by itself."""
    more = 64 * MIB if name.endswith("_bytes") else 1
    after = msgspec.structs.replace(AT_REST, **{name: getattr(AT_REST, name) + more})
    (problem,) = leftovers(AT_REST, after, Limits())
    assert name in problem


# --- the whole ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seconds", [5.0, pytest.param(120.0, marks=[pytest.mark.chaos, pytest.mark.slow])]
)
def test_a_soak_passes(seconds, capsys):
    """Every kind of request was sent, each ended once, and nothing has grown."""
    soak = Soak(seconds, seed=1, look_s=seconds / 8)
    asyncio.run(soak.run())
    print(soak.verdict())
    assert soak.problems == []
    assert len({end.partition(":")[0] for end in soak.history.ends}) == 13
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("PASS: ")
    assert " requests  0 problems  embedded " in out
