# SPDX-License-Identifier: Apache-2.0
"""What is asked of a generation executor. Everything is checked here, before anything is sent."""

from __future__ import annotations

import numbers
from typing import Any

import msgspec

from actorserve.actors.generation.sampling_params import SamplingParams
from actorserve.errors import InvalidArgument

_MAX_TOKEN = (1 << 31) - 1


class LoRARequest(msgspec.Struct, frozen=True):
    """An adapter for a request: its name, its number (1 or more) and where its weights lie.

    Raises InvalidArgument for a missing path or a number that is none.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""

    def __post_init__(self) -> None:
        if not self.lora_path:
            raise InvalidArgument(f"adapter {self.lora_name!r}: lora_path is empty")
        if type(self.lora_int_id) is not int or self.lora_int_id < 1:
            raise InvalidArgument(
                f"adapter {self.lora_name!r}: lora_int_id is {self.lora_int_id!r},"
                " expected a number, 1 or more (0 is the model itself)"
            )

    @property
    def adapter_id(self) -> int:
        """The adapter's number."""
        return self.lora_int_id

    @property
    def name(self) -> str:
        """The adapter's name."""
        return self.lora_name

    @property
    def path(self) -> str:
        """Where its weights lie."""
        return self.lora_path


class GenerationRequest:
    """A prompt and how to go on from it.

    `prompt_token_ids` is a list, an array or a tensor of one dimension; it is copied. `timeout`
    is in seconds, from submitting to the last token. Of two requests that wait, the higher
    `priority` goes first. `user_id` is the client's own; it need not be unique. `extra` goes to
    the engine as it is. Raises InvalidArgument (which also is what a TypeError would say).
    """

    def __init__(
        self,
        prompt_token_ids: Any,
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
        streaming: bool = False,
        *,
        prompt: str | None = None,
        timeout: float | None = None,
        priority: int = 0,
        user_id: str | None = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise InvalidArgument(f"sampling_params is {params!r}, expected SamplingParams")
        if lora_request is not None and not isinstance(lora_request, LoRARequest):
            raise InvalidArgument(f"lora_request is {lora_request!r}, expected a LoRARequest")
        if timeout is not None and not (_is_number(timeout) and timeout > 0):
            raise InvalidArgument(f"timeout is {timeout!r}, expected seconds, more than 0")
        if type(priority) is not int:
            raise InvalidArgument(f"priority is {priority!r}, expected a whole number")
        if extra is not None and not (
            isinstance(extra, dict) and all(isinstance(key, str) for key in extra)
        ):
            raise InvalidArgument(f"extra is {extra!r}, expected a dict whose keys are texts")
        self.prompt_token_ids = checked_tokens(prompt_token_ids)
        self.prompt = prompt
        self.sampling_params = params
        self.lora_request = lora_request
        self.streaming = bool(streaming)
        self.timeout = timeout
        self.priority = priority
        self.user_id = user_id
        self.extra = extra
        self.id = -1

    def set_id(self, id: int) -> GenerationRequest:
        """Note the executor's number for it."""
        self.id = id
        return self

    def __repr__(self) -> str:
        return f"GenerationRequest(id={self.id}, {len(self.prompt_token_ids)} tokens)"


def checked_tokens(tokens: Any) -> list[int]:
    """Return a prompt as a list of its own. Raises InvalidArgument for what is no prompt."""
    if not isinstance(tokens, (list, tuple)):
        to_list = getattr(tokens, "tolist", None)
        found = None if to_list is None else to_list()
        if not isinstance(found, list):
            raise InvalidArgument(
                f"prompt_token_ids is {type(tokens).__name__}, expected a list of token ids,"
                " an array or a tensor"
            )
        tokens = found
    if not tokens:
        raise InvalidArgument("the prompt is empty: expected at least one token id")
    if set(map(type, tokens)) != {int}:
        tokens = [_token(each, place) for place, each in enumerate(tokens)]
    if min(tokens) < 0 or max(tokens) > _MAX_TOKEN:
        raise InvalidArgument(f"the prompt has token ids from {min(tokens)} to {max(tokens)}")
    return list(tokens)


def _token(value: Any, place: int) -> int:
    if not isinstance(value, bool) and isinstance(value, numbers.Integral):
        return int(value)
    raise InvalidArgument(f"the prompt's token {place} is {value!r}, expected a whole number")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value
