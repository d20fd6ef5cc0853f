# SPDX-License-Identifier: Apache-2.0
"""Pieces of text to OpenAI's documents and events, and errors to its errors."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from actorserve.errors import (
    ActorserveError,
    Cancelled,
    DeadlineExceeded,
    EngineDeadError,
    Full,
    InternalError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    TooLarge,
    Unavailable,
    UnknownError,
    Unsupported,
)
from actorserve.frontend.openai_errors import (
    BadParameter,
    ModelNotFound,
    encode_body,
    error_body,
    retry_after_of,
    status_of,
)
from actorserve.frontend.openai_request import Asked
from actorserve.frontend.openai_response import Chunks, Whole, error_events
from actorserve.frontend.openai_tensors import Piece, piece_of, requests_of
from actorserve.state.backlog import FULL_MESSAGE
from actorserve.triton.inference import InferResponse, InferTensor
from actorserve.wire.tensors import encode_bytes
from tests.unit.frontend.language_door import INFO


def asked(**members: Any) -> Asked:
    """Return what is asked, with one prompt by default."""
    fields: dict[str, Any] = {"model": "m", "is_chat": True, "prompts": [("text_input", "p")]}
    return Asked(**{**fields, "options": {}, **members})


def end(text: str = "", index: int = 0, finish: str = "stop") -> Piece:
    """Return the last piece of a sequence."""
    return Piece(index, text, finish, 2, 3)


# --- replies -------------------------------------------------------------------------------------


def test_a_whole_chat() -> None:
    """Its document, member by member."""
    reply = Whole(asked(), "7", 1700000000)
    reply.take(0, Piece(0, "he", "", 0, 0))
    reply.take(0, end("llo"))
    assert json.loads(reply.document()) == {
        "id": "chatcmpl-7",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5},
    }


def test_choices_are_numbered_prompt_by_prompt() -> None:
    """In whatever order they end."""
    reply = Whole(
        asked(is_chat=False, prompts=[("text_input", "a"), ("text_input", "b")], n=2), "", 0
    )
    for prompt, index in ((1, 1), (0, 1), (1, 0), (0, 0)):
        reply.take(prompt, end(f"{prompt}{index}", index))
    document = json.loads(reply.document())
    assert [each["text"] for each in document["choices"]] == ["00", "01", "10", "11"]
    assert document["usage"]["prompt_tokens"] == 4
    assert document["usage"]["completion_tokens"] == 12


def test_chunks_of_a_chat() -> None:
    """The role once, empty deltas at the end, no usage unless it is wanted."""
    reply = Chunks(asked(stream=True), "7", 1)
    texts = [reply.take(0, Piece(0, "hi", "", 0, 0)), reply.take(0, end())]
    events = [json.loads(text.removeprefix(b"data: ")) for text in texts]
    assert [each["choices"][0]["delta"] for each in events] == [
        {"role": "assistant", "content": "hi"},
        {},
    ]
    assert [each["choices"][0]["finish_reason"] for each in events] == [None, "stop"]
    assert all("usage" not in each for each in events)
    assert reply.end() == b"data: [DONE]\n\n"


@pytest.mark.parametrize("kind", [Whole, Chunks])
def test_a_model_that_says_too_little_or_too_much(kind: Any) -> None:
    """Is no success."""
    reply = kind(asked(n=2), "", 0)
    reply.take(0, end())
    with pytest.raises(InternalError, match="completed 1 of 2 answers"):
        reply.document() if kind is Whole else reply.end()
    with pytest.raises(InternalError, match="sequence 2 of 2"):
        reply.take(0, end("", 2))


def test_an_error_ends_a_stream() -> None:
    """As an event, with the mark of the end behind it."""
    first, last = error_events(InternalError("no")).split(b"\n\n")[:2]
    assert json.loads(first.removeprefix(b"data: "))["error"]["message"] == "no"
    assert last == b"data: [DONE]"


# --- tensors -------------------------------------------------------------------------------------


def test_options_are_inputs_of_their_types() -> None:
    """What the model has no input for is a parameter, or an error where it is a list."""
    options: dict[str, Any] = {"max_tokens": 5, "temperature": 0.5, "stop_words": ["a", "b"]}
    (request,) = requests_of(asked(options={**options, "beam": 3}), INFO)
    assert [(t.name, t.datatype, t.shape, t.data) for t in request.inputs] == [
        ("text_input", "BYTES", (1,), encode_bytes(["p"])),
        ("max_tokens", "INT32", (1,), b"\x05\0\0\0"),
        ("temperature", "FP32", (1,), np.float32(0.5).tobytes()),
        ("stop_words", "BYTES", (2,), encode_bytes(["a", "b"])),
    ]
    assert request.parameters == {"beam": 3}
    assert request.takes_stream
    with pytest.raises(BadParameter, match="takes no 'beams'"):
        requests_of(asked(options={"beams": ["a"]}), INFO)
    with pytest.raises(BadParameter) as caught:
        requests_of(asked(options={"end_id": 1 << 40}), INFO)
    assert caught.value.param == "end_id"


def response(**texts: bytes) -> InferResponse:
    """Return a response with outputs of bytes."""
    outputs = [InferTensor(n, "BYTES", (1,), encode_bytes([t])) for n, t in texts.items()]
    return InferResponse("m", "1", "", outputs)


def test_a_response_that_is_none() -> None:
    """The model is at fault; an end that is no success is an error."""
    assert piece_of(response(text_output=b"a\xff")).text == "a\ufffd"
    with pytest.raises(InternalError, match="cannot be read as text"):
        piece_of(response(top_logprobs=b"{"))
    broken = InferResponse("m", "1", "", [InferTensor("index", "INT32", (0,), b"")])
    with pytest.raises(InternalError, match="cannot be read as text"):
        piece_of(broken)
    with pytest.raises(DeadlineExceeded):
        piece_of(response(finish_reason=b"timeout"))
    with pytest.raises(InternalError, match="not completed: cancelled"):
        piece_of(response(finish_reason=b"cancelled"))


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "retry_after_s"),
    [
        (InvalidArgument("x"), 400, "invalid_request_error", None, None),
        (BadParameter("n", "x"), 400, "invalid_request_error", None, None),
        (ModelNotFound("x"), 404, "invalid_request_error", "model_not_found", None),
        (NotFound("x"), 404, "invalid_request_error", None, None),
        (PermissionDenied("x"), 403, "permission_error", None, None),
        (TooLarge("x"), 413, "invalid_request_error", None, None),
        (Unsupported("x"), 400, "invalid_request_error", None, None),
        (Full("x"), 429, "rate_limit_error", "rate_limit_exceeded", 1),
        (Unavailable(FULL_MESSAGE, 1.0), 429, "rate_limit_error", "rate_limit_exceeded", 1),
        (Unavailable("x", 2.5), 503, "server_error", "unavailable", 3),
        (Unavailable("x"), 503, "server_error", "unavailable", 1),
        (EngineDeadError("x"), 503, "server_error", "unavailable", 1),
        (DeadlineExceeded("x"), 504, "server_error", "timeout", None),
        (InternalError("x"), 500, "server_error", None, None),
        (UnknownError("x"), 500, "server_error", None, None),
        (Cancelled("x"), 500, "server_error", None, None),
    ],
)
def test_errors(
    error: ActorserveError, status: int, kind: str, code: str | None, retry_after_s: int | None
) -> None:
    """Each with the status at which clients do the right thing."""
    assert status_of(error) == status
    assert retry_after_of(error) == retry_after_s
    body = error_body(error)
    assert (body.type, body.code) == (kind, code)
    assert set(json.loads(encode_body(body))["error"]) == {"message", "type", "param", "code"}
