# SPDX-License-Identifier: Apache-2.0
"""OpenAI's API through real sockets, asked by OpenAI's own client and byte by byte."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from actorserve.frontend.http_settings import HttpSettings
from tests.unit.frontend.conftest import Harness
from tests.unit.frontend.language_door import WINDOW, LanguageDoor

HELLO: Any = [{"role": "user", "content": "say 3"}]


@pytest.fixture
def door(loop_kind: str) -> Iterator[Any]:
    """Serve a model that speaks; yields the harness."""
    harness = Harness(HttpSettings(), loop_kind, LanguageDoor())
    yield harness
    harness.close()


@pytest.fixture
def client(door: Any) -> Iterator[openai.OpenAI]:
    """Return OpenAI's client, which tries nothing twice."""
    with openai.OpenAI(base_url=_url(door), api_key="any", max_retries=0, timeout=20) as made:
        yield made


def _url(door: Any) -> str:
    return f"http://127.0.0.1:{door.port}/v1"


def _post(door: Any, path: str, document: Any, headers: dict[str, str] | None = None) -> Any:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    with door.connect() as connection:
        return connection.request("POST", path, body, headers)


def _ask(door: Any, prompt: Any, **members: Any) -> Any:
    return _post(door, "/v1/completions", {"model": "words", "prompt": prompt, **members})


# --- answers -------------------------------------------------------------------------------------


def test_a_completion_in_one_piece(client: openai.OpenAI) -> None:
    """Text, reason and usage; two choices for each of two prompts, in their order."""
    done = client.completions.create(model="words", prompt="say 3")
    assert done.object == "text_completion" and done.id.startswith("cmpl-")
    assert [(each.text, each.finish_reason) for each in done.choices] == [("w0 w1 w2 ", "stop")]
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (2, 3)
    assert done.usage.total_tokens == 5
    done = client.completions.create(model="words", prompt=["say 1", "all"], n=2, max_tokens=2)
    assert [(each.index, each.text, each.finish_reason) for each in done.choices] == [
        (0, "w0 ", "stop"),
        (1, "w0 ", "stop"),
        (2, "w0 w1 ", "length"),
        (3, "w0 w1 ", "length"),
    ]
    assert done.usage is not None and done.usage.completion_tokens == 6


def test_a_completion_as_a_stream(client: openai.OpenAI) -> None:
    """The same, word by word; the usage comes last where it is wanted."""
    stream = client.completions.create(
        model="words",
        prompt=["say 2", "say 1"],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    texts = {0: "", 1: ""}
    reasons = {}
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        reasons[choice.index] = choice.finish_reason
    assert texts == {0: "w0 w1 ", 1: "w0 "}
    assert reasons == {0: "stop", 1: "stop"}
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 7
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_chat_in_one_piece(client: openai.OpenAI) -> None:
    """A message of the assistant, with log probabilities where they are wanted."""
    done = client.chat.completions.create(
        model="words", messages=HELLO, logprobs=True, top_logprobs=2
    )
    assert done.object == "chat.completion" and done.id.startswith("chatcmpl-")
    (choice,) = done.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "w0 w1 w2 ")
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None and choice.logprobs.content is not None
    first = choice.logprobs.content[0]
    assert (first.token, first.logprob, first.bytes) == ("w0 ", -0.5, [119, 48, 32])
    assert [(each.token, each.logprob) for each in first.top_logprobs] == [
        ("w0 ", -0.5),
        ("no", -9999.0),
    ]
    assert done.usage is not None and done.usage.completion_tokens == 3


def test_a_chat_as_a_stream(client: openai.OpenAI) -> None:
    """The role comes first, then content; OpenAI's own accumulator understands it."""
    chunks = list(client.chat.completions.create(model="words", messages=HELLO, stream=True))
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant", None, None]
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["w0 ", "w1 ", "w2 "]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, "stop"]
    with client.chat.completions.stream(model="words", messages=HELLO, logprobs=True) as stream:
        done = stream.get_final_completion()
    assert done.choices[0].message.content == "w0 w1 w2 "
    assert done.choices[0].logprobs is not None
    assert len(done.choices[0].logprobs.content or ()) == 3


def test_the_asynchronous_client(door: Any) -> None:
    """Many chats and streams at once."""

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=_url(door), api_key="any", timeout=20) as client:

            async def chat(count: int) -> str:
                done = await client.chat.completions.create(
                    model="words",
                    max_tokens=99,
                    messages=[{"role": "user", "content": f"say {count}"}],
                )
                return done.choices[0].message.content or ""

            async def stream(count: int) -> str:
                text = ""
                async for chunk in await client.completions.create(
                    model="words", prompt=f"say {count}", max_tokens=99, stream=True
                ):
                    text += chunk.choices[0].text
                return text

            counts = range(1, 17)
            answers = await asyncio.gather(*map(chat, counts), *map(stream, counts))
            for count, text in zip([*counts, *counts], answers, strict=True):
                assert text.split() == [f"w{k}" for k in range(count)]

    asyncio.run(main())


def test_logprobs_of_completions_stand_in_columns(client: openai.OpenAI) -> None:
    """With offsets that go on over the pieces of a stream."""
    done = client.completions.create(model="words", prompt="say 2", logprobs=1)
    found = done.choices[0].logprobs
    assert found is not None
    assert (found.tokens, found.text_offset) == (["w0 ", "w1 "], [0, 3])
    assert found.token_logprobs == [-0.5, -0.5]
    assert found.top_logprobs == [{"w0 ": -0.5}, {"w1 ": -0.5}]
    chunks = list(client.completions.create(model="words", prompt="x", logprobs=0, stream=True))
    offsets = [chunk.choices[0].logprobs.text_offset for chunk in chunks]  # type: ignore[union-attr]
    assert offsets[:3] == [[0], [3], [6]]


def test_echo_begins_with_the_prompt(client: openai.OpenAI) -> None:
    """The model is told to."""
    done = client.completions.create(model="words", prompt="say 1", echo=True)
    assert done.choices[0].text == "say 1w0 "


def test_what_is_asked_reaches_the_model(door: Any, client: openai.OpenAI) -> None:
    """By the names of its inputs, members of other engines included."""
    client.chat.completions.create(
        model="words",
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "say 1"}]},
        ],
        max_completion_tokens=5,
        temperature=0.5,
        top_p=0.25,
        presence_penalty=1.5,
        frequency_penalty=-0.5,
        logit_bias={"7": -100},
        seed=1 << 40,
        stop=["\n", "end"],
        n=2,
        user="me",
        extra_body={"top_k": 5, "min_p": 0.125, "bad_words": ["no"], "lora_name": "pirate"},
    )
    inputs = door.door.speeches[-1].inputs
    assert json.loads(inputs.pop("messages")) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "say 1"},
    ]
    assert json.loads(inputs.pop("logit_bias")) == {"7": -100.0}
    assert inputs == {
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.25,
        "presence_penalty": 1.5,
        "frequency_penalty": -0.5,
        "random_seed": 1 << 40,
        "stop_words": ["\n", "end"],
        "n": 2,
        "stream": False,
        "top_k": 5,
        "min_p": 0.125,
        "bad_words": ["no"],
        "lora_name": "pirate",
    }


def test_prompts_of_tokens(door: Any, client: openai.OpenAI) -> None:
    """One list of them, or several."""
    client.completions.create(model="words", prompt=[1, 2, 3])
    assert door.door.speeches[-1].inputs["input_ids"] == [1, 2, 3]
    done = client.completions.create(model="words", prompt=[[1, 2], [3]])
    assert len(done.choices) == 2
    assert [each.inputs["input_ids"] for each in door.door.speeches[-2:]] == [[1, 2], [3]]


def test_a_body_may_be_compressed_both_ways(door: Any) -> None:
    """As for every inference."""
    body = gzip.compress(json.dumps({"model": "words", "prompt": "say 1"}).encode())
    headers = {"Content-Encoding": "gzip", "Accept-Encoding": "gzip"}
    reply = _post(door, "/v1/completions", body, headers)
    assert reply.headers["content-encoding"] == "gzip"
    assert json.loads(gzip.decompress(reply.body))["choices"][0]["text"] == "w0 "


def test_a_large_prompt_and_a_large_answer(door: Any, client: openai.OpenAI) -> None:
    """Are read and written beside the loop."""
    prompt = "all " + "x" * 400_000
    done = client.completions.create(model="words", prompt=prompt, max_tokens=20_000)
    assert done.choices[0].text.split()[-1] == "w19999"
    assert door.door.speeches[-1].inputs["text_input"] == prompt


# --- models --------------------------------------------------------------------------------------


def test_models_are_those_that_generate(client: openai.OpenAI) -> None:
    """Each once, however many versions it has."""
    assert [each.id for each in client.models.list()] == ["words"]
    model = client.models.retrieve("words")
    assert (model.id, model.object, model.owned_by) == ("words", "model", "actorserve")
    assert model.created > 1_600_000_000


@pytest.mark.parametrize("name", ["nope", "ident"])
def test_other_models_are_not_found(client: openai.OpenAI, name: str) -> None:
    """One that is not there, and one that generates no text."""
    calls = (
        lambda: client.models.retrieve(name),
        lambda: client.completions.create(model=name, prompt="x"),
        lambda: client.chat.completions.create(model=name, messages=HELLO, stream=True),
    )
    for call in calls:
        with pytest.raises(openai.NotFoundError) as caught:
            call()
        assert caught.value.code == "model_not_found"
        assert caught.value.param == "model"


# --- errors --------------------------------------------------------------------------------------


def test_errors_have_openais_classes(door: Any, client: openai.OpenAI) -> None:
    """Statuses, and what the client makes of them; a full queue says when to come again."""
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="words", prompt="wrong")
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(openai.RateLimitError) as full:
        client.completions.create(model="words", prompt="full", stream=True)
    assert full.value.code == "rate_limit_exceeded"
    assert full.value.response.headers["retry-after"] == "1"
    with pytest.raises(openai.InternalServerError) as down:
        client.completions.create(model="words", prompt="down")
    assert down.value.status_code == 503
    assert down.value.response.headers["retry-after"] == "3"
    with pytest.raises(openai.InternalServerError) as loading:
        client.completions.create(model="loading", prompt="x")
    assert loading.value.response.headers["retry-after"] == "4"
    with pytest.raises(openai.InternalServerError) as late:
        client.completions.create(model="words", prompt="gone 2")
    assert (late.value.status_code, late.value.code) == (504, "timeout")
    assert door.stats().in_flight == 0


def test_an_error_before_the_first_word_is_the_reply(client: openai.OpenAI) -> None:
    """Of a stream, too."""
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError, match="lost the thread"):
            client.completions.create(model="words", prompt="fail 0", stream=stream)


def test_an_error_inside_a_stream_is_an_event(door: Any, client: openai.OpenAI) -> None:
    """The client raises it behind what came before."""
    words = []
    with pytest.raises(openai.APIError, match="lost the thread"):
        for chunk in client.completions.create(model="words", prompt="fail 3", stream=True):
            words.append(chunk.choices[0].text)
    assert words == ["w0 ", "w1 ", "w2 "]
    assert door.stats().in_flight == 0
    assert door.stats().errors == 1


def test_one_bad_prompt_ends_the_others(door: Any) -> None:
    """Those that were sent before it are cancelled, and the connection serves on."""
    for bad in ("full", "fail 0"):
        reply = _ask(door, ["wait", bad, "wait"])
        assert reply.status in (429, 500)
        door.wait_until(lambda: all(s.is_gone for s in door.door.speeches if s.order == "wait"))
    assert door.stats().in_flight == 0


def test_one_prompt_that_fails_ends_a_stream_of_several(door: Any, client: openai.OpenAI) -> None:
    """The others are cancelled."""
    with pytest.raises(openai.APIError, match="lost the thread"):
        list(client.completions.create(model="words", prompt=["wait", "fail 2"], stream=True))
    door.wait_until(lambda: door.door.speeches[0].is_gone)
    assert door.stats().in_flight == 0


def test_errors_say_which_member_is_wrong(door: Any) -> None:
    """In OpenAI's form."""
    reply = _ask(door, "x", temperature=3)
    assert reply.status == 400
    assert reply.json["error"] == {
        "message": "'temperature': expected `float` <= 2.0",
        "type": "invalid_request_error",
        "param": "temperature",
        "code": None,
    }


def test_paths_that_are_not_there(door: Any, client: openai.OpenAI) -> None:
    """And methods that are not allowed: still in OpenAI's form."""
    with pytest.raises(openai.NotFoundError) as caught:
        client.embeddings.create(model="words", input="x")
    assert caught.value.code == "unknown_url"
    with door.connect() as connection:
        reply = connection.request("GET", "/v1/chat/completions")
        assert (reply.status, reply.headers["allow"]) == (405, "POST")
        reply = connection.request("DELETE", "/v1/models/words")
        assert (reply.status, reply.headers["allow"]) == (405, "GET, HEAD")
        assert reply.json["error"]["type"] == "invalid_request_error"
        reply = connection.request("POST", "/v1/completions", b"{", {"Expect": "100-continue"})
        assert reply.status == 100
        assert connection.read().json["error"]["message"].startswith("the body of the request")


def test_a_body_beyond_the_limit(loop_kind: str) -> None:
    """413, and the connection ends."""
    harness = Harness(HttpSettings(max_input_bytes=1000), loop_kind, LanguageDoor())
    try:
        with harness.connect() as connection:
            head = b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
            connection.send(head + b"400\r\n" + b" " * 1024 + b"\r\n")
            reply = connection.read()
            assert reply.status == 413
            assert reply.json["error"]["type"] == "invalid_request_error"
            assert connection.is_closed()
    finally:
        harness.close()


# --- ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_peer_that_goes_cancels(door: Any, stream: bool) -> None:
    """All that was sent for it, at once."""
    connection = door.connect()
    document = {"model": "words", "prompt": ["wait", "wait"], "stream": stream}
    body = json.dumps(document).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body)
    connection.send(head + body)
    door.wait_until(lambda: len(door.door.speeches) == 2)
    connection.close()
    door.wait_until(lambda: all(each.is_gone for each in door.door.speeches))
    assert door.stats().disconnects == 1
    assert door.stats().in_flight == 0


def test_leaving_a_stream_cancels(door: Any, client: openai.OpenAI) -> None:
    """As OpenAI's client does it."""
    with client.completions.create(
        model="words", prompt="all", max_tokens=1_000_000, stream=True
    ) as stream:
        for _ in zip(range(20), stream, strict=False):
            pass
    door.wait_until(lambda: door.door.speeches[0].is_gone)
    assert door.stats().in_flight == 0


def test_a_slow_reader_stops_the_model(door: Any) -> None:
    """It is at most a window ahead of what the connection holds; then all arrives."""
    words = 5_000
    with door.connect() as connection:
        document = {"model": "words", "prompt": "long", "max_tokens": words, "stream": True}
        body = json.dumps(document).encode()
        head = b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body)
        connection.send(head + body)
        speech = door.run(_settled(door))
        assert speech.sent < words
        assert speech.sent - speech.taken <= WINDOW
        data = connection._file.read()
    assert data.endswith(b"data: [DONE]\n\n")
    assert data.count(b"data: ") == words + 1


async def _settled(door: Any) -> Any:
    """Wait until a speech goes no further."""
    while not door.door.speeches:
        await asyncio.sleep(0.005)
    (speech,) = door.door.speeches
    sent = -1
    while speech.sent != sent:
        sent = speech.sent
        await asyncio.sleep(0.3)
    return speech


def test_requests_of_one_connection_keep_their_order(door: Any) -> None:
    """A stream, and what was sent behind it before its end."""
    one = json.dumps({"model": "words", "prompt": "say 2", "stream": True}).encode()
    two = json.dumps({"model": "words", "prompt": "say 1"}).encode()
    with door.connect() as connection:
        for body in (one, two):
            head = b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body)
            connection.send(head + body)
        seen = b""
        while not seen.endswith(b"0\r\n\r\n"):
            seen += connection._file.readline()
        assert seen.count(b"data: ") == 3
        assert connection.read().json["choices"][0]["text"] == "w0 "


def test_a_stop_waits_for_a_stream(loop_kind: str) -> None:
    """What was accepted is answered."""
    with contextlib.ExitStack() as stack:
        harness = Harness(HttpSettings(), loop_kind, LanguageDoor())
        stack.callback(harness.close)
        connection = stack.enter_context(harness.connect())
        body = json.dumps({"model": "words", "prompt": "say 2", "stream": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body)
        connection.send(head + body)
        harness.wait_until(lambda: bool(harness.door.speeches))  # type: ignore[attr-defined]
        harness.run(harness.server.stop())
        assert connection._file.read().endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
