# SPDX-License-Identifier: Apache-2.0
"""`pb_utils.InferenceResponse` and `TritonError`."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from actorserve.triton.pb_utils import (
    InferenceResponse,
    Tensor,
    TritonError,
    TritonModelException,
)

TENSOR = Tensor("OUT", np.ones(1, np.float32))


def test_response_tells_its_tensors() -> None:
    """Tensors in, tensors out; no error, no parameters."""
    response = InferenceResponse([TENSOR])
    assert response.output_tensors() == [TENSOR]
    assert response.has_error() is False
    assert response.error() is None
    assert response.parameters() == ""


def test_response_may_be_empty() -> None:
    """No argument at all is a response without outputs."""
    assert InferenceResponse().output_tensors() == []
    assert InferenceResponse(output_tensors=[]).output_tensors() == []


def test_lists_are_not_shared() -> None:
    """Neither the model's list nor the returned one is the response's."""
    given = [TENSOR]
    response = InferenceResponse(given)
    given.clear()
    response.output_tensors().clear()
    assert response.output_tensors() == [TENSOR]
    assert InferenceResponse().output_tensors() == []


def test_error_drops_tensors_and_parameters() -> None:
    """A response with an error is nothing but the error."""
    error = TritonError("no", TritonError.NOT_FOUND)
    response = InferenceResponse([TENSOR], error, {"a": 1})
    assert response.has_error() is True
    assert response.error() is error
    assert response.output_tensors() == []
    assert response.parameters() == ""


def test_parameters_are_json_text() -> None:
    """All three types come back as what they were."""
    response = InferenceResponse([], parameters={"s": "ż", "i": 5, "b": True})
    assert json.loads(response.parameters()) == {"s": "ż", "i": 5, "b": True}
    assert InferenceResponse([], parameters={}).parameters() == "{}"


@pytest.mark.parametrize(
    "wrong",
    [
        {"output_tensors": None},
        {"output_tensors": TENSOR},
        {"output_tensors": [np.ones(1)]},
        {"error": "text"},
        {"error": ValueError("x")},
    ],
    ids=str,
)
def test_wrong_types_are_type_errors(wrong: dict[str, Any]) -> None:
    """A response is checked where the model makes it, so that the traceback shows the place."""
    with pytest.raises(TypeError):
        InferenceResponse(**wrong)


def test_empty_tensor_is_refused() -> None:
    """The text is the documented one."""
    with pytest.raises(TritonModelException) as caught:
        InferenceResponse([TENSOR, None])  # type: ignore[list-item]
    assert str(caught.value) == "Output tensor for inference response should not be empty."


@pytest.mark.parametrize("parameters", [[1], {1: 2}, {"x": 1.5}, {"x": [1]}])
def test_parameters_of_other_types_are_refused(parameters: Any) -> None:
    """Only a dict of str to bool, int or str."""
    with pytest.raises(TritonModelException, match="Expect parameters"):
        InferenceResponse([], parameters=parameters)


def test_public_names_are_the_apis() -> None:
    """Nothing shows but what models know."""
    assert [n for n in dir(InferenceResponse) if not n.startswith("_")] == [
        "error",
        "has_error",
        "output_tensors",
        "parameters",
    ]


# --- TritonError ---------------------------------------------------------------------------------


def test_error_has_a_message_and_a_code() -> None:
    """INTERNAL is the default."""
    error = TritonError("broken")
    assert error.message() == "broken"
    assert error.code() == TritonError.INTERNAL
    assert TritonError(message="x", code=TritonError.CANCELLED).code() is TritonError.CANCELLED


def test_codes_have_the_apis_numbers() -> None:
    """Each is a member of an enum and a number."""
    names = [
        "UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED",
        "ALREADY_EXISTS", "CANCELLED",
    ]  # fmt: skip
    assert [int(getattr(TritonError, name)) for name in names] == list(range(8))


@pytest.mark.parametrize("arguments", [(None,), (7,), (ValueError("x"),), ("x", "y"), ("x", 99)])
def test_error_of_other_types_is_a_type_error(arguments: tuple[Any, ...]) -> None:
    """A message is a str, a code one of the class's."""
    with pytest.raises(TypeError):
        TritonError(*arguments)


def test_error_cannot_be_raised() -> None:
    """It is a plain object; the exception is TritonModelException."""
    assert not isinstance(TritonError("x"), BaseException)
    assert issubclass(TritonModelException, Exception)
