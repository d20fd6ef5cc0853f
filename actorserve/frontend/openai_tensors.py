# SPDX-License-Identifier: Apache-2.0
"""Between what is to be generated and the tensors of a model that generates.

    Asked ──► InferRequest, one for each prompt      InferResponse ──► Piece

Pure: no I/O. Inputs have the types that the model's description gives them; what names no input
of it goes as a parameter of the request. The names are those of docs/generation.md.
"""

from __future__ import annotations

import msgspec
import numpy as np

from actorserve.errors import (
    ActorserveError,
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
)
from actorserve.frontend.openai_errors import BadParameter
from actorserve.frontend.openai_request import Asked, Value
from actorserve.frontend.v2_response import body_bytes
from actorserve.frontend.v2_values import pack_values
from actorserve.triton.inference import (
    InferRequest,
    InferResponse,
    InferTensor,
    ModelInfo,
    Parameter,
    TensorSpec,
)
from actorserve.wire.tensors import BY_WIRE_NAME, decode_bytes

_PUBLIC_NAMES = {
    "text_input": "prompt",
    "input_ids": "prompt",
    "messages": "messages",
    "random_seed": "seed",
    "stop_words": "stop",
    "return_log_probs": "logprobs",
    "num_logprobs": "logprobs",
    "exclude_input_in_output": "echo",
}
"""What clients call the inputs that have another name here."""


class Alternative(msgspec.Struct, frozen=True):
    """A token that was likely at a place, as text, with the logarithm of its probability."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(msgspec.Struct, frozen=True):
    """The token that was taken, and those that were most probable (as many as were wanted)."""

    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[Alternative] = []


class Piece(msgspec.Struct, frozen=True):
    """What a response brings of one sequence of its request.

    `text` is new; `finish` is "stop" or "length" at the sequence's end, else empty. The counts of
    tokens are of all so far; `discarded_tokens` are those of sequences that were not chosen.
    """

    index: int
    text: str
    finish: str
    prompt_tokens: int
    completion_tokens: int
    logprobs: list[TokenLogprob] = []
    discarded_tokens: int = 0


class _Told(msgspec.Struct):
    """A token in `top_logprobs`. No logarithm (JSON has no infinity) stands for that of 0."""

    token: str
    logprob: float | None = None
    bytes: list[int] | None = None
    top_logprobs: list[_Told] = []


_NEVER = -9999.0
"""What OpenAI's API says for the logarithm of 0."""

_OUTPUTS = ["text_output", "index", "finish_reason", "prompt_tokens", "completion_tokens"]
_LOGPROBS = "top_logprobs"
_decode_logprobs = msgspec.json.Decoder(list[_Told]).decode


# --- there ---------------------------------------------------------------------------------------


def requests_of(asked: Asked, info: ModelInfo) -> list[InferRequest]:
    """Return one request to the model for each prompt. Raises BadParameter for what it lacks."""
    specs = {spec.name: spec for spec in info.inputs}
    shared: list[InferTensor] = []
    parameters: dict[str, Parameter] = {}
    for name, value in asked.options.items():
        spec = specs.get(name)
        if spec is not None:
            shared.append(_tensor(spec, value))
        elif isinstance(value, list):
            raise BadParameter(public_name(name), f"'{info.name}' takes no '{name}'")
        else:
            parameters[name] = value
    outputs = [*_OUTPUTS, _LOGPROBS] if asked.logprobs is not None else _OUTPUTS
    requests = []
    for name, value in asked.prompts:
        spec = specs.get(name)
        if spec is None:
            raise BadParameter(public_name(name), f"'{info.name}' has no input '{name}'")
        requests.append(
            InferRequest(
                info.name,
                [_tensor(spec, value), *shared],
                outputs=list(outputs),
                parameters=dict(parameters),
                takes_stream=True,
            )
        )
    return requests


def _tensor(spec: TensorSpec, value: Value) -> InferTensor:
    values = value if isinstance(value, list) else [value]
    datatype = BY_WIRE_NAME[spec.datatype]
    try:
        body = pack_values(spec.name, datatype, list(values))
    except InvalidArgument as error:
        raise BadParameter(public_name(spec.name), error.message) from None
    return InferTensor(spec.name, spec.datatype, (len(values),), body)


def public_name(name: str) -> str:
    """Return what OpenAI calls an input."""
    return _PUBLIC_NAMES.get(name, name)


# --- and back ------------------------------------------------------------------------------------


def piece_of(response: InferResponse) -> Piece:
    """Read a response that is no error and not empty.

    Raises InternalError for one that no generating model sends, and the error that ended the
    sequence where it has neither stopped nor got as long as it may.
    """
    outputs = {tensor.name: tensor for tensor in response.outputs}
    try:
        finish = _text(outputs, "finish_reason")
        piece = Piece(
            index=_integer(outputs, "index"),
            text=_text(outputs, "text_output"),
            finish=finish,
            prompt_tokens=_integer(outputs, "prompt_tokens"),
            completion_tokens=_integer(outputs, "completion_tokens"),
            logprobs=_logprobs(outputs),
            discarded_tokens=_discarded(response),
        )
    except (ActorserveError, ValueError, IndexError, msgspec.MsgspecError) as error:
        raise InternalError(
            f"model '{response.model_name}' sent a response that cannot be read as text: {error}"
        ) from None
    if finish not in ("", "stop", "length"):
        raise _ended(finish)
    return piece


def _discarded(response: InferResponse) -> int:
    count = response.parameters.get("discarded_tokens", 0) if response.parameters else 0
    return count if type(count) is int else 0


def _ended(finish: str) -> ActorserveError:
    if finish == "timeout":
        return DeadlineExceeded("the request's time was over before its answer was complete")
    return InternalError(f"the answer was not completed: {finish}")


def _text(outputs: dict[str, InferTensor], name: str) -> str:
    tensor = outputs.get(name)
    if tensor is None:
        return ""
    element = decode_bytes(body_bytes(tensor))[0]
    assert isinstance(element, bytes)
    return element.decode("utf-8", "replace")


def _integer(outputs: dict[str, InferTensor], name: str) -> int:
    tensor = outputs.get(name)
    if tensor is None:
        return 0
    return int(np.frombuffer(body_bytes(tensor), BY_WIRE_NAME[tensor.datatype].body_dtype)[0])


def _logprobs(outputs: dict[str, InferTensor]) -> list[TokenLogprob]:
    text = _text(outputs, _LOGPROBS)
    if not text:
        return []
    return [
        TokenLogprob(
            each.token,
            _finite(each.logprob),
            each.bytes,
            [_alternative(t) for t in each.top_logprobs],
        )
        for each in _decode_logprobs(text)
    ]


def _alternative(told: _Told) -> Alternative:
    return Alternative(told.token, _finite(told.logprob), told.bytes)


def _finite(logprob: float | None) -> float:
    return _NEVER if logprob is None else logprob
