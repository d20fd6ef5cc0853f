# SPDX-License-Identifier: Apache-2.0
"""Batches in a stub: every request is answered once, whatever user code gives; no process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from actorserve.actors.bodies import Bodies
from actorserve.actors.execution import Execution
from actorserve.errors import Code, ResourceExhausted
from actorserve.triton import logger
from actorserve.triton.error import TritonError
from actorserve.triton.response import InferenceResponse
from actorserve.triton.tensor import Tensor
from actorserve.wire.messages import (
    Execute,
    Executed,
    Handle,
    Initialize,
    Responded,
    WireRequest,
    WireResponse,
    WireTensor,
)

decode = msgspec.msgpack.Decoder(Executed | Responded).decode


class FakePage:
    """A health page."""

    def __init__(self) -> None:
        self.cancelled: set[int] = set()
        self.calls: list[str] = []
        self.credit = 1000

    def begin_batch(self, batch: int, now_ns: int) -> None:
        self.calls.append(f"begin {batch}")

    def granted(self, slot: int) -> int:
        return self.credit

    def end_batch(self) -> None:
        self.calls.append("end")

    def is_cancelled(self, slot: int, request_id: int) -> bool:
        return request_id in self.cancelled


class FakeEnd:
    """A stub's channel over a list, with an arena that may be full."""

    instance = "i_0"
    arena_id = 2
    is_severed = False
    devices = None

    def __init__(self) -> None:
        self.page = FakePage()
        self.sent: list[Executed | Responded] = []
        self.max_frame_bytes = 100_000
        self.room = 10
        self.placed: list[int] = []
        self.withdrawn: list[int] = []
        self.kept: set[int] = set()  # blocks of which the model keeps a view
        self.given_back: list[int] = []
        self.settled = self.woken = 0
        self.inputs: dict[int, np.ndarray] = {}

    def view(self, handle: Handle, *, writable: bool) -> np.ndarray:
        view = self.inputs[handle.block][:]
        view.flags.writeable = writable
        return view

    def place(self, body: np.ndarray) -> Handle:
        if len(self.placed) == self.room:
            raise ResourceExhausted("shared memory is full")
        self.placed.append(len(self.placed) + 1)
        return Handle(2, self.placed[-1], 0, 0, body.nbytes)

    def own(self, handle: Handle) -> Handle:
        if handle.block in self.kept:
            return self.place(np.zeros(handle.nbytes, np.uint8))
        return handle

    def forwarded(self, tensors: list[WireTensor]) -> None:
        pass

    def wake_control(self) -> None:
        self.woken += 1

    def withdraw(self, tensors: list[WireTensor]) -> None:
        self.withdrawn += [t.data.block for t in tensors if isinstance(t.data, Handle)]

    def give_back(self, handles: list[Handle]) -> None:
        self.given_back += [handle.block for handle in handles]

    def send(self, message: Any) -> None:
        self.send_encoded(msgspec.msgpack.encode(message))

    def send_encoded(self, data: bytes) -> None:
        assert len(data) <= self.max_frame_bytes
        self.sent.append(decode(data))

    def settle(self) -> None:
        self.settled += 1

    @property
    def responses(self) -> list[WireResponse]:
        """All that was sent, in order."""
        return [response for message in self.sent for response in message.responses]


@pytest.fixture
def end() -> FakeEnd:
    """Return a channel."""
    return FakeEnd()


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """Return the lines that are logged."""
    lines: list[str] = []
    logger.set_sink(lambda level, file, line, message: lines.append(message))
    yield lines
    logger.set_sink(None)


@pytest.fixture
def run(end: FakeEnd, lines: list[str]) -> Callable[..., list[WireResponse]]:
    """Return `run(execute, *wires, **setting)`: one batch through a model's execute."""
    executions: list[Execution] = []

    def run(execute: Any, *wires: WireRequest, **setting: Any) -> list[WireResponse]:
        model = type("Model", (), {"execute": staticmethod(execute)} if execute else {})()
        decoupled = setting.pop("decoupled", False)
        settings = Initialize("/repo/m/1/model.py", {}, decoupled, 0, **setting)
        bodies = Bodies(end, shared_inputs=settings.shared_inputs)  # type: ignore[arg-type]
        execution = Execution(end, model, settings, bodies)  # type: ignore[arg-type]
        executions.append(execution)
        message = Execute(7, list(wires or [request(1)]))
        if execution.is_async:
            asyncio.run(execution.run_async(message))
        else:
            execution.run(message)
        execution.replies.reap()  # as the control thread does
        return end.responses

    return run


def request(number: int, *inputs: WireTensor, **fields: Any) -> WireRequest:
    """Return a request with the output OUT wanted."""
    return WireRequest(number, "", list(inputs), ["OUT"], **fields)


def ones(count: int = 1, name: str = "OUT") -> InferenceResponse:
    """Return an answer."""
    return InferenceResponse([Tensor(name, np.ones(count, np.float32))])


def errors(responses: list[WireResponse]) -> list[tuple[int, str]]:
    """Return the errors' codes and texts."""
    assert all(response.error is not None for response in responses)
    return [(r.error.code, r.error.message) for r in responses if r.error is not None]


# --- answers -------------------------------------------------------------------------------------


def test_a_batch_is_one_message(run, end):
    """In the order of the requests; the page says when it began and ended."""
    responses = run(lambda requests: [ones(n + 1) for n, _ in enumerate(requests)],
                    request(5), request(6))  # fmt: skip
    (message,) = end.sent
    assert isinstance(message, Executed)
    assert message.batch == 7
    assert message.execute_ns > 0
    assert [(r.id, r.outputs[0].shape) for r in responses] == [(5, (1,)), (6, (2,))]
    assert end.page.calls == ["begin 7", "end"]
    assert end.settled == 1


def test_only_wanted_outputs_travel(run):
    """Others are dropped here."""
    answer = InferenceResponse(
        [Tensor(name, np.zeros(1, np.float32)) for name in ("X", "OUT", "Y")]
    )
    (response,) = run(lambda requests: [answer])
    assert [tensor.name for tensor in response.outputs] == ["OUT"]


def test_small_bodies_travel_inside_and_large_ones_beside(run, end):
    """4 KiB is the limit."""
    small, large = run(lambda r: [ones(1024), ones(1025)], request(1), request(2))
    assert isinstance(small.outputs[0].data, bytes)
    assert isinstance(large.outputs[0].data, Handle)
    assert end.placed == [1]


def test_a_frame_is_not_filled_with_small_bodies(run, end):
    """Those beyond 256 KiB altogether go beside it."""
    end.max_frame_bytes = 1 << 20
    end.room = 100
    responses = run(lambda r: [ones(1024) for _ in r], *map(request, range(70)))
    inline = [r for r in responses if isinstance(r.outputs[0].data, bytes)]
    assert len(inline) == 64
    assert len(end.placed) == 6


def test_cancelled_requests_are_not_executed(run, end):
    """They get their error, their inputs go home; alone they never reach the model."""
    end.page.cancelled = {1, 3}
    wires = [WireTensor("IN", 11, (2,), Handle(1, n, 0, 0, 8)) for n in (1, 2, 3)]
    end.inputs[2] = np.zeros(8, np.uint8)
    responses = run(lambda r: [ones() for _ in r], *[request(n, wires[n - 1]) for n in (1, 2, 3)])
    assert end.given_back == [1, 3]
    by_id = {response.id: response for response in responses}
    assert by_id[2].error is None
    assert (
        errors([by_id[1], by_id[3]])
        == [(Code.CANCELLED, "the request was cancelled before it was executed")] * 2
    )
    end.sent.clear()
    end.page.cancelled = {9}
    responses = run(lambda r: pytest.fail("it was executed"), request(9))
    assert errors(responses)[0][0] == Code.CANCELLED


def test_a_coroutine_is_run_to_its_end(run):
    """On a loop of its own thread; SystemExit does not end it."""

    async def execute(requests: Any) -> Any:
        if requests[0].request_id() == "exit":
            raise SystemExit(3)
        return [ones()]

    assert run(execute)[0].error is None
    wire = WireRequest(2, "exit", [], ["OUT"])
    assert "SystemExit: 3" in errors(run(execute, wire)[1:])[0][1]


# --- inputs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shared", "readonly", "is_writeable", "is_same"),
    [(False, False, True, True), (True, False, True, False), (True, True, False, True)],
)
def test_whose_input_is_it(run, end, shared, readonly, is_writeable, is_same):
    """An exclusive block is writable; a shared one is copied, or read-only if the model says so."""
    end.inputs[4] = np.zeros(8, np.uint8)
    wire = WireTensor("IN", 11, (2,), Handle(1, 4, 0, 0, 8, shared))
    seen: list[np.ndarray] = []

    def execute(requests: Any) -> Any:
        seen.append(requests[0].inputs()[0].as_numpy())
        return [ones()]

    run(execute, request(1, wire), shared_inputs=readonly)
    assert seen[0].flags.writeable is is_writeable
    assert np.shares_memory(seen[0], end.inputs[4]) is is_same


def test_an_input_that_cannot_be_mapped_fails_its_batch(run, end):
    """With what happened; inputs that were not looked at go home, those that were as views do."""
    end.inputs[3] = np.zeros(8, np.uint8)
    wires = [WireTensor("IN", 11, (2,), Handle(1, block, 0, 0, 8)) for block in (3, 4, 5)]
    assert "KeyError: 4" in errors(run(lambda r: [ones()], request(1, *wires)))[0][1]
    assert sorted(end.given_back) == [4, 5]


# --- errors --------------------------------------------------------------------------------------


def test_a_model_s_error_keeps_its_code_and_a_text_that_can_travel(run):
    """Broken Unicode is escaped, a novel is cut."""
    answers = [
        InferenceResponse(error=TritonError("no", TritonError.NOT_FOUND)),
        InferenceResponse(error=TritonError("bad \ud800")),
        InferenceResponse(error=TritonError("x" * 1_000_000)),
    ]
    found = errors(run(lambda r: answers, *map(request, (1, 2, 3))))
    assert found[0] == (Code.NOT_FOUND, "no")
    assert found[1] == (Code.INTERNAL, "bad \\ud800")
    assert len(found[2][1]) < 50_000
    assert found[2][1].endswith("more characters)")


@pytest.mark.parametrize(
    "error", [ValueError("x"), KeyboardInterrupt(), SystemExit(1), MemoryError(), GeneratorExit()]
)
def test_whatever_is_raised_fails_the_batch_and_not_the_stub(run, lines, error):
    """Each request gets the text, the log too."""

    def execute(requests: Any) -> Any:
        raise error

    found = errors(run(execute, request(1), request(2)))
    assert len(found) == 2
    assert found[0] == found[1]
    code, text = found[0]
    assert code == Code.INTERNAL
    assert text.startswith(
        f"Failed to process the request(s) for model 'i_0', message: {type(error).__name__}: "
    )
    assert lines == [text]


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (None, "execute returned None, and the request was dropped without a response sender"),
        ((), "Expected a list in the execute return, found type '<class 'tuple'>'."),
        ([], "InferenceRequest(s) size is:1, and InferenceResponse(s) size is:0\n"),
        ([1], "in the execute function return list, found type '<class 'int'>'."),
        ([None], "execute returned None, and the request was dropped without a response sender"),
    ],
)
def test_a_result_that_cannot_be(run, result, text):
    """In the words of the model API."""
    ((code, message),) = errors(run(lambda requests: result))
    assert code == Code.INTERNAL
    assert text in message


def test_a_model_without_execute(run):
    """It loads, and says so when it is asked."""
    ((_, message),) = errors(run(None))
    assert "Python model /repo/m/1/model.py does not implement `execute` method." in message


def test_a_decoupled_model_must_not_return_answers(run):
    """Its responses go another way."""
    ((_, message),) = errors(run(lambda requests: [ones()], decoupled=True))
    assert "is using the decoupled mode and the execute function must return None." in message


# --- memory and frames ---------------------------------------------------------------------------


def test_a_response_without_memory_is_an_error_and_keeps_none(run, end):
    """What was placed of it is given up; the neighbours are answered."""
    end.room = 2
    big = [Tensor("OUT", np.ones(2000, np.float32)) for _ in range(3)]
    responses = run(
        lambda r: [ones(), InferenceResponse(big), ones()], request(1), request(2), request(3)
    )
    assert [response.error is None for response in responses] == [True, False, True]
    assert errors(responses[1:2]) == [(Code.RESOURCE_EXHAUSTED, "shared memory is full")]
    assert end.withdrawn == end.placed == [1, 2]


def test_an_answer_of_which_the_model_keeps_a_view_is_copied(run, end):
    """It could change what has been given; without memory for the copy the request fails."""
    end.kept = {1, 2}
    end.room = 4
    responses = run(lambda r: [ones(2000) for _ in r], *map(request, (1, 2, 3)))
    assert [response.error is None for response in responses] == [True, False, True]
    first, _, last = responses
    assert isinstance(first.outputs[0].data, Handle)
    assert first.outputs[0].data.block == 4
    assert isinstance(last.outputs[0].data, Handle)
    assert last.outputs[0].data.block == 3
    assert end.withdrawn == [2]


def test_answers_that_no_frame_holds_go_one_by_one(run, end):
    """Then the end of the batch."""
    end.max_frame_bytes = 10_000
    run(lambda r: [ones(1000) for _ in r], *map(request, range(4)))
    assert [type(message).__name__ for message in end.sent] == ["Responded"] * 4 + ["Executed"]
    assert [response.id for response in end.responses] == [0, 1, 2, 3]


def test_one_answer_that_no_frame_holds_is_an_error(run, end):
    """Its blocks are given up, its neighbours are answered."""
    end.max_frame_bytes = 10_000
    tensors = [Tensor("OUT", np.ones(2000, np.float32))]
    large = InferenceResponse(tensors, parameters={"p": "x" * 20_000})
    responses = run(lambda r: [ones(), large], request(1), request(2))
    assert responses[0].error is None
    assert errors(responses[1:]) == [
        (
            Code.RESOURCE_EXHAUSTED,
            "the response of 'i_0' has names or parameters beyond 10000 bytes",
        )
    ]
    assert end.withdrawn == end.placed
