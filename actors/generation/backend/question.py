# SPDX-License-Identifier: Apache-2.0
"""A request's tensors and parameters, read as what is to be generated.

A request may say each thing once: by the input of that name or by a parameter of that name. Pure.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from actorserve.actors.generation import SamplingParams
from actorserve.errors import InvalidArgument
from actorserve.triton.generation_tensors import INPUTS
from actorserve.triton.request import InferenceRequest
from actorserve.triton.tensor_config import DataType

Message = dict[str, str]

_PROMPTS = ("text_input", "input_ids", "messages")
_TYPES = {each.name: each.data_type for each in INPUTS}
_LISTS = frozenset(each.name for each in INPUTS if each.dims == (-1,))

# What sampling parameters are called where they have another name.
_SAMPLING = {
    "max_tokens": "max_tokens",
    "min_tokens": "min_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "random_seed": "seed",
    "stop_words": "stop",
    "include_stop": "include_stop_str_in_output",
    "bad_words": "bad",
    "end_id": "end_id",
    "beam_width": "beam_width",
    "n": "n",
    "best_of": "best_of",
    "length_penalty": "length_penalty",
    "return_log_probs": "return_log_probs",
    "num_logprobs": "logprobs",
    "return_context_logits": "return_context_logits",
    "return_generation_logits": "return_generation_logits",
}


class Question(msgspec.Struct, frozen=True):
    """What a request asks for. Of `text`, `tokens` and `messages` one is not None.

    `adapter` is a name, "" for none. With `streams`, each step is a response.
    """

    params: SamplingParams
    text: str | None = None
    tokens: list[int] | None = None
    messages: list[Message] | None = None
    adapter: str = ""
    streams: bool = False
    with_input: bool = False

    @property
    def has_logprobs(self) -> bool:
        """Whether it asks for probabilities."""
        return self.params.return_log_probs or self.params.logprobs is not None


def read_question(request: InferenceRequest, default_max_tokens: int) -> Question:
    """Read a request. Raises InvalidArgument for whatever is wrong with it."""
    given = _values(request)
    prompts = [name for name in _PROMPTS if name in given]
    if len(prompts) != 1:
        got = " and ".join(prompts) or "none of them"
        raise InvalidArgument(f"expected exactly one of {', '.join(_PROMPTS)}, got {got}")
    sampling = {own: given[name] for name, own in _SAMPLING.items() if name in given}
    sampling.setdefault("max_tokens", default_max_tokens)
    if "logit_bias" in given:
        sampling["logit_bias"] = _bias(given["logit_bias"])
    messages = given.get("messages")
    return Question(
        SamplingParams(**sampling),
        given.get("text_input"),
        given.get("input_ids"),
        None if messages is None else _conversation(messages),
        given.get("lora_name", ""),
        given.get("stream", False),
        not given.get("exclude_input_in_output", True),
    )


def _values(request: InferenceRequest) -> dict[str, Any]:
    """Return everything that the request says, by name, as plain values."""
    values: dict[str, Any] = {}
    for tensor in request.inputs():
        name = tensor.name()
        flat = tensor.as_numpy().reshape(-1).tolist()
        if _TYPES[name] is DataType.TYPE_STRING:
            flat = [_text(name, each) for each in flat]
        values[name] = flat if name in _LISTS else flat[0]
    text = request.parameters()
    if text != "{}":
        _take_parameters(values, json.loads(text))
    return values


def _take_parameters(values: dict[str, Any], parameters: Mapping[str, Any]) -> None:
    """Take the parameters that are named like an input. Others are not ours, unless by mistake."""
    for name, value in parameters.items():
        data_type = _TYPES.get(name)
        if data_type is None:
            close = difflib.get_close_matches(name, _TYPES, 1, 0.8)
            if close:
                raise InvalidArgument(f"unknown parameter '{name}': perhaps {close[0]}?")
        elif name in values:
            raise InvalidArgument(f"'{name}' is given as an input and as a parameter")
        else:
            value = _READERS[data_type](name, value)
            values[name] = [value] if name in _LISTS else value


def _text(name: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"input '{name}' is not valid UTF-8: {error}") from None


def _whole(name: str, value: Any) -> int:
    if type(value) is not int:
        raise InvalidArgument(f"parameter '{name}' is {value!r}, expected a whole number")
    return value


def _number(name: str, value: Any) -> float:
    if type(value) not in (int, float):
        raise InvalidArgument(f"parameter '{name}' is {value!r}, expected a number")
    try:
        return float(value)
    except OverflowError:
        raise InvalidArgument(f"parameter '{name}' is larger than any number can be") from None


def _bool(name: str, value: Any) -> bool:
    if type(value) is not bool:
        raise InvalidArgument(f"parameter '{name}' is {value!r}, expected true or false")
    return value


def _string(name: str, value: Any) -> str:
    if type(value) is not str:
        raise InvalidArgument(f"parameter '{name}' is {value!r}, expected a text")
    return value


_READERS: dict[DataType, Callable[[str, Any], Any]] = {
    DataType.TYPE_INT32: _whole,
    DataType.TYPE_INT64: _whole,
    DataType.TYPE_FP32: _number,
    DataType.TYPE_BOOL: _bool,
    DataType.TYPE_STRING: _string,
}


# --- JSON within a text --------------------------------------------------------------------------

_decode_messages = msgspec.json.Decoder(list[dict[str, Any]]).decode
_decode_bias = msgspec.json.Decoder(dict[int, float]).decode


def _conversation(text: str) -> list[Message]:
    """Return the messages of a conversation; what they have beside role and content is left out."""
    try:
        messages = _decode_messages(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidArgument(f"input 'messages' is no JSON list of objects: {error}") from None
    for number, message in enumerate(messages):
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise InvalidArgument(
                    f"input 'messages': message {number} has no text as its '{key}'"
                )
    if not messages:
        raise InvalidArgument("input 'messages' is empty, expected at least one message")
    return [{"role": each["role"], "content": each["content"]} for each in messages]


def _bias(text: str) -> dict[int, float]:
    try:
        return _decode_bias(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidArgument(
            f"input 'logit_bias' is no JSON object like {{\"42\": -100}}: {error}"
        ) from None
