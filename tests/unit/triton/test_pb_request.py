# SPDX-License-Identifier: Apache-2.0
"""`pb_utils.InferenceRequest`: what execute gets, and what a model makes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from actorserve.triton import pb_utils
from actorserve.triton.pb_utils import (
    InferenceRequest,
    InferenceResponseSender,
    Tensor,
    TritonModelException,
)


class FakeReply:
    """The way back of a request."""

    def __init__(self, *cancelled: bool) -> None:
        self.answers = iter(cancelled)

    def sender(self) -> InferenceResponseSender:
        return InferenceResponseSender._of(self)  # type: ignore[arg-type]

    def is_cancelled(self) -> bool:
        return next(self.answers)


TENSOR = Tensor("INPUT0", np.ones(1, np.float32))


def received(**changes: Any) -> InferenceRequest:
    """Return a request as the stub makes it."""
    parts: dict[str, Any] = {
        "inputs": [TENSOR],
        "request_id": "abc",
        "correlation_id": 9,
        "requested_outputs": ["OUTPUT1", "OUTPUT0"],
        "parameters": '{"my_d": 2.5}',
        "flags": 1,
        "timeout_us": 123456,
        "reply": FakeReply(),
    }
    return InferenceRequest._received(**{**parts, **changes})


def made(**changes: Any) -> InferenceRequest:
    """Return a request as a model makes it."""
    arguments: dict[str, Any] = {
        "model_name": "other",
        "inputs": [TENSOR],
        "requested_output_names": ["OUT"],
    }
    return InferenceRequest(**{**arguments, **changes})


def test_public_names_are_exactly_the_apis() -> None:
    """Models look at `dir()`; the real server's names are there and no others."""
    for request in (received(), made()):
        assert [n for n in dir(request) if not n.startswith("_")] == [
            "async_exec",
            "correlation_id",
            "exec",
            "flags",
            "get_response_sender",
            "inputs",
            "is_cancelled",
            "parameters",
            "request_id",
            "requested_output_names",
            "set_flags",
            "set_release_flags",
            "timeout",
            "trace",
        ]
        assert not hasattr(request, "preferred_memory")
        assert not hasattr(request, "model_name")


def test_received_request_tells_its_parts() -> None:
    """Each part is readable as the API gives it."""
    request = received()
    assert request.inputs() == [TENSOR]
    assert request.request_id() == "abc"
    assert request.correlation_id() == 9
    assert request.requested_output_names() == {"OUTPUT0", "OUTPUT1"}
    assert request.flags() == 1
    assert request.timeout() == 123456
    assert json.loads(request.parameters()) == {"my_d": 2.5}
    assert request.trace().get_context() is None


def test_list_of_inputs_is_the_callers() -> None:
    """Emptying it does not empty the request."""
    request = received()
    request.inputs().clear()
    assert request.inputs() == [TENSOR]


def test_cancellation_is_asked_for_each_time() -> None:
    """The stub's answer is the request's, at the moment of asking."""
    request = received(reply=FakeReply(False, True))
    assert request.is_cancelled() is False
    assert request.is_cancelled() is True


def test_own_request_cannot_be_asked_for_cancellation() -> None:
    """Nobody but the model itself could cancel it."""
    with pytest.raises(TritonModelException, match="is_cancelled"):
        made().is_cancelled()


def test_defaults_are_the_apis() -> None:
    """What is not given has the documented value."""
    request = made()
    assert request.request_id() == ""
    assert request.correlation_id() == 0
    assert request.flags() == 0
    assert request.timeout() == 0
    assert request.parameters() == "{}"
    assert request._model_version == -1


def test_given_arguments_are_read_back() -> None:
    """Large timeouts, texts as sequence ids and parameters of all three types are legal."""
    request = made(
        request_id="r",
        correlation_id="seq",
        requested_output_names=["B", "A", "B"],
        model_version=3,
        flags=3,
        timeout=11_000_000_000,
        preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0),
        trace=received().trace(),
        parameters={"s": "x", "i": 5, "b": False},
    )
    assert request.correlation_id() == "seq"
    assert request.requested_output_names() == {"A", "B"}
    assert request._requested_outputs == ["A", "B"]
    assert request.timeout() == 11_000_000_000
    assert json.loads(request.parameters()) == {"s": "x", "i": 5, "b": False}
    request.set_flags(1)
    assert request.flags() == 1


def test_empty_lists_are_allowed() -> None:
    """No inputs and no requested outputs is for the callee to judge."""
    assert made(inputs=[], requested_output_names=[]).inputs() == []


@pytest.mark.parametrize("missing", ["model_name", "inputs", "requested_output_names"])
def test_required_arguments_are_required(missing: str) -> None:
    """A missing one is a TypeError that names it."""
    arguments = {"model_name": "m", "inputs": [], "requested_output_names": []}
    del arguments[missing]
    with pytest.raises(TypeError, match=missing):
        InferenceRequest(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        {"inputs": None},
        {"inputs": TENSOR},
        {"inputs": [np.ones(1)]},
        {"model_name": None},
        {"model_name": b"m"},
        {"requested_output_names": None},
        {"requested_output_names": [None]},
        {"requested_output_names": "OUT"},
        {"request_id": None},
        {"request_id": 7},
        {"model_version": None},
        {"model_version": "1"},
        {"flags": None},
        {"flags": -1},
        {"flags": 1 << 32},
        {"timeout": -1},
        {"timeout": 1.5},
        {"correlation_id": None},
        {"correlation_id": 1.5},
        {"correlation_id": -1},
        {"preferred_memory": 0},
        {"trace": None},
    ],
    ids=str,
)
def test_wrong_types_are_type_errors(wrong: dict[str, Any]) -> None:
    """Each argument is checked before anything is sent."""
    with pytest.raises(TypeError):
        made(**wrong)


def test_correlation_id_of_another_type_is_named() -> None:
    """The documented text is in the error."""
    with pytest.raises(TypeError, match="Correlation ID must be integer or string"):
        made(correlation_id=[1])


def test_empty_input_is_named_with_request_and_model() -> None:
    """The text is the documented one."""
    with pytest.raises(TritonModelException) as caught:
        made(inputs=[None], request_id="R")
    assert str(caught.value) == (
        "Input tensor for request with id 'R' and model name 'other' should not be empty."
    )


def test_empty_output_name_is_refused() -> None:
    """The text is the documented one."""
    with pytest.raises(TritonModelException) as caught:
        made(requested_output_names=["OUT", ""], request_id="R")
    assert str(caught.value) == (
        "Requested output name for request with id 'R' and model name 'other' should not be empty."
    )


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({1: "x"}, "Expect parameters keys to have type str, found type <class 'int'>"),
        (
            {"x": 1.5},
            "Expect parameters values to have type bool/int/str, found type <class 'float'>",
        ),
        (
            {"x": None},
            "Expect parameters values to have type bool/int/str, found type <class 'NoneType'>",
        ),
    ],
)
def test_parameters_of_other_types_are_refused(parameters: Any, text: str) -> None:
    """The texts are the documented ones."""
    with pytest.raises(TritonModelException) as caught:
        made(parameters=parameters)
    assert str(caught.value) == text


def test_parameters_are_a_dict() -> None:
    """Anything else is named at the end of the text."""
    with pytest.raises(TritonModelException, match=r", got <class 'list'>$"):
        made(parameters=[1])


@pytest.mark.parametrize("name", ["exec", "async_exec"])
def test_no_calls_outside_of_a_server(name: str) -> None:
    """Where nothing can carry a call, it is refused in the documented words."""
    text = "^BLS is only supported during the 'execute' function.$"
    with pytest.raises(TritonModelException, match=text):
        getattr(made(), name)()


def test_a_request_of_the_model_s_own_has_no_sender() -> None:
    """It is answered to the model, not by it."""
    sender = made().get_response_sender()
    with pytest.raises(TritonModelException, match="no reference to the decoupled state"):
        sender.send(pb_utils.InferenceResponse([]))


def test_release_flags_are_all_or_an_error() -> None:
    """The default may be said; rescheduling needs another model; nonsense is refused."""
    request = received()
    request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_ALL)
    with pytest.raises(TritonModelException, match="not configured to handle such a flag"):
        request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
    with pytest.raises(TritonModelException, match="got 7"):
        request.set_release_flags(7)


def test_set_flags_takes_numbers_only() -> None:
    """Flags are a 32-bit number."""
    with pytest.raises(TypeError):
        received().set_flags("1")  # type: ignore[arg-type]
