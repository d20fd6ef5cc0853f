# SPDX-License-Identifier: Apache-2.0
"""OpenAI's clients before a whole server with engines of its own."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.conftest import wait_until
from tests.server.generation_models import CHAT_ANSWER, write_engine
from tests.server.harness import IDENTITY, Launcher, Server, parameter, write_model

HELLO: Any = [{"role": "user", "content": "hello"}]
ENDLESS: Any = {"end_id": -1}
QUEUE = "dynamic_batching { default_queue_policy { max_queue_size: 1 } }\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, start_shared: Launcher) -> Iterator[Server]:
    """Serve models that generate, and one that does not."""
    repository = tmp_path_factory.mktemp("repository")
    write_engine(repository, "quick")
    write_engine(repository, "slow", delay_s=0.01)
    write_engine(repository, "narrow", parameter("MAX_IN_FLIGHT", 1) + QUEUE, delay_s=0.01)
    write_engine(repository, "tinygpt", engine="tinygpt")
    write_model(repository, "identity", IDENTITY)
    yield start_shared(repository)


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    """Return OpenAI's client, which tries nothing twice."""
    with openai.OpenAI(base_url=url(server), api_key="any", max_retries=0, timeout=30) as made:
        yield made


def url(server: Server) -> str:
    """Return where the API is."""
    return f"http://{server.address}/v1"


def running(server: Server, model: str) -> float:
    """Return how many requests the engine of a model works on, by the server's metrics."""
    text = server.request("GET", "/metrics", port=server.metrics_port).body.decode()
    for line in text.splitlines():
        if line.startswith("actorserve_generation_running{") and f'model="{model}"' in line:
            return float(line.rpartition(" ")[2])
    raise AssertionError(text)


def test_models(client: openai.OpenAI) -> None:
    """Only those that generate."""
    names = [each.id for each in client.models.list()]
    assert names == ["narrow", "quick", "slow", "tinygpt"]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("identity")


def test_completions(client: openai.OpenAI) -> None:
    """Whole, as a stream, several at once, with the prompt, with log probabilities, stopped."""
    create = client.completions.create
    assert create(model="quick", prompt="abc", max_tokens=4).choices[0].text == "defg"
    pieces = [
        chunk.choices[0].text
        for chunk in create(model="quick", prompt="abc", max_tokens=4, stream=True)
    ]
    assert "".join(pieces) == "defg"
    done = create(model="quick", prompt=["abc", "klm"], n=2, max_tokens=2, echo=True)
    assert [each.text for each in done.choices][::2] == ["abcde", "klmno"]
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (6, 8)
    done = create(model="quick", prompt="abc", max_tokens=9, stop=["fg"], logprobs=1)
    assert (done.choices[0].text, done.choices[0].finish_reason) == ("de", "stop")
    logprobs = done.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens[:2] == ["d", "e"]
    assert logprobs.top_logprobs[0] == {"d": -0.5}


def test_all_that_was_generated_is_counted(client: openai.OpenAI) -> None:
    """What `best_of` did not choose has cost as much."""
    create = client.completions.create
    done = create(model="tinygpt", prompt="The list", max_tokens=4, best_of=3, n=2, logit_bias={})
    assert len(done.choices) == 2
    assert done.usage is not None
    assert done.usage.completion_tokens == 12
    assert done.usage.total_tokens == done.usage.prompt_tokens + 12
    done = create(model="tinygpt", prompt="The list", max_tokens=4, n=2)
    assert done.usage is not None and done.usage.completion_tokens == 8


def test_chats(client: openai.OpenAI) -> None:
    """Whole and as a stream, with OpenAI's own accumulator; roles are the template's."""
    done = client.chat.completions.create(model="quick", messages=HELLO, max_tokens=3)
    assert done.choices[0].message.content == CHAT_ANSWER[:3]
    assert done.choices[0].finish_reason == "length"
    with client.chat.completions.stream(
        model="quick", messages=HELLO, stop=CHAT_ANSWER[3], stream_options={"include_usage": True}
    ) as stream:
        whole = stream.get_final_completion()
    assert whole.choices[0].message.content == CHAT_ANSWER[:3]
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None and whole.usage.completion_tokens == 4
    with pytest.raises(openai.BadRequestError, match="wizard"):
        wizard: Any = [{"role": "wizard", "content": "hello"}]
        client.chat.completions.create(model="quick", messages=wizard)
    with pytest.raises(openai.BadRequestError, match="chat template"):
        client.chat.completions.create(model="tinygpt", messages=HELLO)


def test_a_real_language_model(client: openai.OpenAI) -> None:
    """Greedy and seeded texts are repeatable, alone and as a stream."""
    ask: dict[str, Any] = {"model": "tinygpt", "prompt": "The value of ", "max_tokens": 12}
    greedy = client.completions.create(**ask, temperature=0)
    stream = client.completions.create(**ask, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == greedy.choices[0].text
    seeded = [client.completions.create(**ask, seed=5, n=2).choices for _ in range(2)]
    assert [each.text for each in seeded[0]] == [each.text for each in seeded[1]]


def test_many_at_once(server: Server) -> None:
    """By the asynchronous client, all in one engine."""

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=url(server), api_key="any", timeout=30) as client:

            async def ask(first: int) -> str:
                text = ""
                prompt = chr(ord("a") + first)
                async for chunk in await client.completions.create(
                    model="quick", prompt=prompt, max_tokens=5, stream=True
                ):
                    text += chunk.choices[0].text
                return text

            texts = await asyncio.gather(*map(ask, range(16)))
        letters = "abcdefghijklmnopqrstuvwxyz"
        assert texts == [letters[first + 1 : first + 6] for first in range(16)]

    asyncio.run(main())


def test_a_client_that_leaves_ends_its_requests(server: Server, client: openai.OpenAI) -> None:
    """The engine works on nothing soon after, and serves the next one."""
    with client.completions.create(
        model="slow", prompt="abc", max_tokens=100_000, stream=True, extra_body=ENDLESS
    ) as stream:
        for _ in zip(range(3), stream, strict=False):
            pass
        wait_until(lambda: running(server, "slow") == 1)
    wait_until(lambda: running(server, "slow") == 0)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).completions.create(
            model="slow", prompt=["abc", "xyz"], max_tokens=100_000, extra_body=ENDLESS
        )
    wait_until(lambda: running(server, "slow") == 0)
    assert client.completions.create(model="slow", prompt="a", max_tokens=1).choices[0].text == "b"


def test_too_many_requests(server: Server, client: openai.OpenAI) -> None:
    """429 where the queue is full, with the time to wait; then all goes on."""
    streams = [
        client.completions.create(
            model="narrow", prompt="abc", max_tokens=100_000, stream=True, extra_body=ENDLESS
        )
    ]
    next(iter(streams[0]))
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(model="narrow", prompt=["a", "b", "c"], max_tokens=1)
    assert caught.value.response.headers["retry-after"] == "1"
    streams[0].close()
    wait_until(lambda: running(server, "narrow") == 0)
    patient = client.with_options(max_retries=5)
    assert patient.completions.create(model="narrow", prompt="a", max_tokens=1).choices


def test_an_engine_that_dies(repository: Path, start_server: Launcher) -> None:
    """Its stream ends with the error, and a later request finds a new one."""
    write_engine(repository, "mortal", fail_at=6, delay_s=0.01)
    server = start_server(repository)
    with openai.OpenAI(base_url=url(server), api_key="any", timeout=30) as client:
        words = ""
        with pytest.raises(openai.APIError, match="dead"):
            for chunk in client.completions.create(
                model="mortal", prompt="abc", max_tokens=100, stream=True
            ):
                words += chunk.choices[0].text
        assert words == "defgh"
        done = client.completions.create(model="mortal", prompt="abc", max_tokens=2)
        assert done.choices[0].text == "de"


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(server: Server, tmp_path: Path) -> None:
    """As the pages show it."""
    document = {"model": "quick", "messages": HELLO, "max_tokens": 2, "stream": True}
    command = ["curl", "-sN", f"{url(server)}/chat/completions", "-d", json.dumps(document)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    events = done.stdout.split("\n\n")
    deltas = [json.loads(each[6:])["choices"][0]["delta"] for each in events[:-2]]
    assert deltas[0]["role"] == "assistant"
    assert "".join(each["content"] for each in deltas) == CHAT_ANSWER[:2]
    assert events[-2:] == ["data: [DONE]", ""]
