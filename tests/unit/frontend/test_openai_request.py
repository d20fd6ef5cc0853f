# SPDX-License-Identifier: Apache-2.0
"""OpenAI's documents, read: what is to be generated, and which member is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from actorserve.errors import InvalidArgument
from actorserve.frontend.openai_errors import BadParameter
from actorserve.frontend.openai_request import (
    COMPLETION_MAX_TOKENS,
    Asked,
    read_chat,
    read_completion,
)

HELLO = [{"role": "user", "content": "hello"}]


def completion(**members: Any) -> Asked:
    """Read a completion."""
    return read_completion(json.dumps({"model": "m", "prompt": "p", **members}).encode())


def chat(**members: Any) -> Asked:
    """Read a chat."""
    return read_chat(json.dumps({"model": "m", "messages": HELLO, **members}).encode())


def test_defaults_are_openais() -> None:
    """A temperature of 1; 16 tokens for a completion, the model's own limit for a chat."""
    asked = completion()
    assert asked == Asked(
        "m",
        False,
        [("text_input", "p")],
        {"temperature": 1.0, "max_tokens": COMPLETION_MAX_TOKENS, "stream": False},
    )
    assert chat().options == {"temperature": 1.0, "stream": False}


def test_null_stands_for_absent() -> None:
    """As clients write what they leave to the server."""
    absent = dict.fromkeys(
        ("n", "max_tokens", "temperature", "stop", "stream", "logit_bias", "seed", "user", "top_p")
    )
    assert completion(**absent, logprobs=None, echo=None, suffix=None) == completion()
    assert chat(**absent, tools=None, response_format=None, logprobs=None) == chat()


def test_what_changes_nothing_is_taken() -> None:
    """And what asks for what happens anyway."""
    asked = chat(
        user="me",
        metadata={"a": "b"},
        store=True,
        service_tier="auto",
        response_format={"type": "text"},
        modalities=["text"],
        tools=[{"type": "function"}],
        tool_choice="none",
        parallel_tool_calls=True,
        reasoning_effort="none",
    )
    assert asked == chat()


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", [("text_input", "a")]),
        (["a", "b"], [("text_input", "a"), ("text_input", "b")]),
        ([1, 2], [("input_ids", [1, 2])]),
        ([[1, 2], [3]], [("input_ids", [1, 2]), ("input_ids", [3])]),
        (["a", [3]], [("text_input", "a"), ("input_ids", [3])]),
    ],
)
def test_prompts(prompt: Any, expected: Any) -> None:
    """Texts, tokens, and lists of them."""
    assert completion(prompt=prompt).prompts == expected


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": "2"}, "n"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"presence_penalty": -3}, "presence_penalty"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias[...]"),
        ({"seed": 1 << 63}, "seed"),
        ({"stop": [""]}, "stop[0]"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 1, "echo": True}, "logprobs"),
        ({"suffix": "end"}, "suffix"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {"usage": True}, "stream": True}, "stream_options.usage"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[1, "a"]]}, "prompt[0][1]"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1 << 31]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"top_kay": 5}, "top_kay"),
        ({"model": 5}, "model"),
    ],
)
def test_a_completion_that_is_wrong(members: dict[str, Any], param: str) -> None:
    """The error names the member."""
    with pytest.raises(BadParameter) as caught:
        completion(**members)
    assert caught.value.param == param
    assert caught.value.message


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [*HELLO, {"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[1].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
            "messages[0].tool_calls",
        ),
        ({"tools": [{"type": "function"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"functions": [{}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "a"}}, "audio"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True}, "echo"),
    ],
)
def test_a_chat_that_is_wrong(members: dict[str, Any], param: str) -> None:
    """The error names the member."""
    with pytest.raises(BadParameter) as caught:
        chat(**members)
    assert caught.value.param == param


def test_a_missing_member_is_named() -> None:
    """With the code that OpenAI has for it."""
    with pytest.raises(BadParameter) as caught:
        read_completion(b'{"model": "m"}')
    assert (caught.value.param, caught.value.code_name) == ("prompt", "missing_required_parameter")


@pytest.mark.parametrize(
    "document", [b"", b"{", b"[]", b"null", b'{"model": "\xff"}', b"[" * 100_000]
)
def test_what_is_no_document(document: bytes) -> None:
    """An error of the client's, whatever came."""
    for read in (read_completion, read_chat):
        with pytest.raises(InvalidArgument):
            read(document)
