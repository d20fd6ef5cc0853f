# SPDX-License-Identifier: Apache-2.0
"""The documents of POST /v1/completions and /v1/chat/completions: JSON to what is to be generated.

Pure: no I/O. What a member may hold stands in its type; what cannot be honoured is an error that
names the member. Members that change nothing of an answer (user, metadata, …) are taken and left
alone, those of engines that OpenAI lacks (top_k, min_p, …) are passed on, all others refused.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from actorserve.errors import InvalidArgument
from actorserve.frontend.openai_errors import BadParameter
from actorserve.frontend.v2_values import View

MAX_PROMPTS = 1024
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
COMPLETION_MAX_TOKENS = 16
"""What OpenAI generates where a completion names no limit; a chat takes the model's own."""

_INT32 = Meta(ge=-(1 << 31), le=(1 << 31) - 1)
_Int = Annotated[int, _INT32]
_Count = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
_Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
_Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Bias = Annotated[float, Meta(ge=-100, le=100)]
_Words = Annotated[str, Meta(min_length=1)]
_TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
_Ignored = Any

Value = bool | int | float | str | list[int] | list[str]
T = TypeVar("T")


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What else a stream holds. Obfuscation is padding: there is none."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Shared(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What both documents have."""

    model: str
    n: _Choices | None = None
    max_tokens: _Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: dict[str, _Bias] | None = None
    seed: _Seed | None = None
    stop: _Words | list[_Words] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # of engines, beyond OpenAI's
    min_tokens: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)] | None = None
    top_k: _Int | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    length_penalty: float | None = None
    beam_width: _Count | None = None
    no_repeat_ngram_size: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)] | None = None
    bad_words: list[_Words] | None = None
    include_stop: bool | None = None
    end_id: _Int | None = None
    lora_name: str | None = None

    # without effect on an answer
    user: _Ignored = None
    metadata: _Ignored = None
    store: _Ignored = None
    service_tier: _Ignored = None
    safety_identifier: _Ignored = None
    prompt_cache_key: _Ignored = None
    prompt_cache_retention: _Ignored = None


class CompletionRequest(_Shared, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[_Int]]
    best_of: _Choices | None = None
    echo: bool | None = None
    logprobs: _TopLogprobs | None = None
    suffix: str | None = None


class Message(msgspec.Struct):
    """One message of a conversation."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[Any] | None = None
    function_call: Any = None
    audio: Any = None


class ChatRequest(_Shared, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: _Count | None = None
    logprobs: bool | None = None
    top_logprobs: _TopLogprobs | None = None
    response_format: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: _Ignored = None
    functions: list[Any] | None = None
    function_call: str | dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: Any = None
    web_search_options: Any = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    prediction: _Ignored = None


class Asked(msgspec.Struct, frozen=True):
    """What is to be generated.

    `prompts` are inputs of the model by name, each the whole prompt of one request to it;
    `options` go with all of them. Each has `n` choices, numbered prompt by prompt. `logprobs` is
    None where none are wanted, else how many beside those of the tokens themselves.
    """

    model: str
    is_chat: bool
    prompts: list[tuple[str, Value]]
    options: dict[str, Value]
    n: int = 1
    stream: bool = False
    has_usage: bool = False
    logprobs: int | None = None


# --- reading -------------------------------------------------------------------------------------


def read_completion(document: View) -> Asked:
    """Read the document of a completion. Raises InvalidArgument, BadParameter where it can."""
    request = _decoded(document, _decode_completion)
    n = request.n or 1
    best_of = request.best_of or n
    if best_of < n:
        raise BadParameter("best_of", f"best_of is {best_of}, but n is {n}: expected no less")
    if request.stream and best_of > n:
        raise BadParameter("best_of", "a stream cannot wait for the best: best_of must equal n")
    if request.suffix:
        raise BadParameter("suffix", "text in front of a suffix cannot be generated here")
    if request.echo and request.logprobs is not None:
        raise BadParameter("logprobs", "no log probabilities of an echoed prompt are computed")
    options = _options(request, n)
    options.setdefault("max_tokens", COMPLETION_MAX_TOKENS)
    _add_logprobs(options, request.logprobs)
    if best_of > n:
        options["best_of"] = best_of
    if request.echo:
        options["exclude_input_in_output"] = False
    return _asked(request, False, _prompts(request.prompt), options, n, request.logprobs)


def read_chat(document: View) -> Asked:
    """Read the document of a chat. Raises InvalidArgument, BadParameter where it can."""
    request = _decoded(document, _decode_chat)
    _refuse_tools(request)
    if (request.response_format or {"type": "text"}).get("type") != "text":
        raise BadParameter("response_format", "answers are text: the only type is 'text'")
    if any(each != "text" for each in request.modalities or ()):
        raise BadParameter("modalities", "answers are text: expected ['text']")
    for name in ("audio", "web_search_options", "reasoning_effort", "verbosity"):
        if getattr(request, name) not in (None, "none"):
            raise BadParameter(name, f"'{name}' cannot be honoured here")
    n = request.n or 1
    options = _options(request, n)
    if request.max_completion_tokens is not None:
        if request.max_tokens is not None:
            raise BadParameter("max_tokens", "give max_completion_tokens or max_tokens, not both")
        options["max_tokens"] = request.max_completion_tokens
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    if request.top_logprobs is not None and logprobs is None:
        raise BadParameter("top_logprobs", "top_logprobs needs logprobs to be true")
    _add_logprobs(options, logprobs)
    conversation = [_plain(at, each) for at, each in enumerate(request.messages)]
    messages = msgspec.json.encode(conversation).decode()
    return _asked(request, True, [("messages", messages)], options, n, logprobs)


def _asked(
    request: _Shared,
    is_chat: bool,
    prompts: list[tuple[str, Value]],
    options: dict[str, Value],
    n: int,
    logprobs: int | None,
) -> Asked:
    stream = bool(request.stream)
    if request.stream_options is not None and not stream:
        raise BadParameter("stream_options", "stream_options needs stream to be true")
    options["stream"] = stream
    has_usage = request.stream_options is not None and bool(request.stream_options.include_usage)
    return Asked(request.model, is_chat, prompts, options, n, stream, has_usage, logprobs)


_PASSED_ON = (
    *("max_tokens", "min_tokens", "top_p", "top_k", "min_p", "presence_penalty", "lora_name"),
    *("frequency_penalty", "repetition_penalty", "length_penalty", "beam_width", "bad_words"),
    *("end_id", "no_repeat_ngram_size", "include_stop"),
)
"""The members whose names are those of the model's inputs."""


def _options(request: _Shared, n: int) -> dict[str, Value]:
    """Return the inputs beside the prompt that both documents have."""
    options: dict[str, Value] = {"temperature": 1.0}
    if request.temperature is not None:
        options["temperature"] = request.temperature
    for name in _PASSED_ON:
        value = getattr(request, name)
        if value is not None and value != []:
            options[name] = value
    if request.seed is not None:
        options["random_seed"] = request.seed
    if request.stop:
        options["stop_words"] = [request.stop] if isinstance(request.stop, str) else request.stop
    if request.logit_bias:
        if not all(token.isdecimal() and token.isascii() for token in request.logit_bias):
            raise BadParameter("logit_bias", 'the keys of logit_bias are token ids, as in "50256"')
        options["logit_bias"] = msgspec.json.encode(request.logit_bias).decode()
    if n > 1:
        options["n"] = n
    return options


def _add_logprobs(options: dict[str, Value], logprobs: int | None) -> None:
    if logprobs is not None:
        options["return_log_probs"] = True
        options["num_logprobs"] = logprobs


# --- prompts -------------------------------------------------------------------------------------


def _prompts(prompt: str | list[str | int | list[int]]) -> list[tuple[str, Value]]:
    """Return the prompts: a string, tokens, or a list of either."""
    if isinstance(prompt, str):
        return [("text_input", prompt)]
    if not prompt:
        raise BadParameter("prompt", "prompt is an empty list")
    if all(isinstance(each, int) for each in prompt):
        return [("input_ids", _tokens(prompt))]
    if len(prompt) > MAX_PROMPTS:
        raise BadParameter("prompt", f"{len(prompt)} prompts, at most {MAX_PROMPTS} are allowed")
    found: list[tuple[str, Value]] = []
    for each in prompt:
        if isinstance(each, str):
            found.append(("text_input", each))
        elif isinstance(each, list):
            found.append(("input_ids", _tokens(each)))
    if len(found) != len(prompt):
        raise BadParameter("prompt", "expected a string, token ids, or a list of either")
    return found


def _tokens(tokens: list[Any]) -> list[int]:
    if not tokens:
        raise BadParameter("prompt", "a prompt of token ids is empty")
    if not all(0 <= token < 1 << 31 for token in tokens):
        raise BadParameter("prompt", "token ids are from 0 to 2147483647")
    return tokens


def _plain(at: int, message: Message) -> dict[str, str]:
    """Return a message as a chat template takes it: role and content, a text."""
    where = f"messages[{at}]"
    for name in ("tool_calls", "function_call", "audio"):
        if getattr(message, name):
            raise BadParameter(f"{where}.{name}", f"{where}.{name}: models here call no tools")
    role = "system" if message.role == "developer" else message.role
    content = message.content
    if content is None:
        raise BadParameter(f"{where}.content", f"{where}.content is missing")
    if isinstance(content, list):
        parts = [_text(f"{where}.content[{k}]", part) for k, part in enumerate(content)]
        content = "".join(parts)
    return {"role": role, "content": content}


def _text(where: str, part: dict[str, Any]) -> str:
    kind = part.get("type")
    if kind != "text":
        raise BadParameter(
            f"{where}.type", f"{where} has the type {kind!r}: only 'text' can be read here"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise BadParameter(f"{where}.text", f"{where}.text: expected a string")
    return text


def _refuse_tools(request: ChatRequest) -> None:
    """Refuse what could make the model call something; it is never told of tools."""
    if request.tool_choice not in (None, "none", "auto"):
        raise BadParameter("tool_choice", "models here call no tools: expected 'none'")
    if request.tools and request.tool_choice != "none":
        raise BadParameter("tools", "models here call no tools: set tool_choice to 'none'")
    if request.function_call not in (None, "none", "auto"):
        raise BadParameter("function_call", "models here call no functions: expected 'none'")
    if request.functions and request.function_call != "none":
        raise BadParameter("functions", "models here call no functions: set function_call 'none'")


# --- JSON ----------------------------------------------------------------------------------------

_decode_completion = msgspec.json.Decoder(CompletionRequest)
_decode_chat = msgspec.json.Decoder(ChatRequest)
_AT = re.compile(r" - at `\$\.?([^`]*)`$")
_FIELD = re.compile(r"Object (?:contains unknown|missing required) field `([^`]*)`")


def _decoded(document: View, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode a document; an error names the member that is wrong."""
    try:
        return decoder.decode(document)
    except msgspec.ValidationError as error:
        raise _wrong(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"the body of the request is no JSON: {error}") from None
    except RecursionError:
        raise InvalidArgument("the body of the request is nested too deep") from None


def _wrong(text: str) -> InvalidArgument:
    at = _AT.search(text)
    path = at[1] if at is not None else ""
    what = text[: at.start()] if at is not None else text
    field = _FIELD.match(what)
    if field is not None:
        path = f"{path}.{field[1]}" if path else field[1]
        if "unknown" in field[0]:
            return BadParameter(path, f"'{path}' is not known here", "unknown_parameter")
        return BadParameter(path, f"'{path}' is missing", "missing_required_parameter")
    if not path:
        return InvalidArgument(f"the body of the request: {what}")
    return BadParameter(path, f"'{path}': {what[:1].lower()}{what[1:]}")
