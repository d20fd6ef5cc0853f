# SPDX-License-Identifier: Apache-2.0
"""Engines as entries of a repository: over HTTP's generate and generate_stream."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actorserve.triton.generation_tensors import INPUTS, OUTPUTS
from tests.conftest import wait_until
from tests.server.harness import Launcher, Server, parameter
from tests.server.scrape import of_model, scrape

ENGINE = Path(__file__).with_name("generation_engine.py")


def json_parameter(name: str, value: Any) -> str:
    """Return a parameter that is JSON, in config.pbtxt's words."""
    return f"parameters {{ key: '{name}' value: {{ string_value: '{json.dumps(value)}' }} }}"


def write_engine(repository: Path, name: str, *parameters: str, **options: Any) -> Path:
    """Write an entry with the echo engine and these options; returns its folder."""
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    shutil.copy(ENGINE, folder / "1" / "echo_engine.py")
    given = [parameter("ENGINE", "echo_engine:Echo"), *parameters]
    if options:
        given.append(json_parameter("ENGINE_OPTIONS", options))
    (folder / "config.pbtxt").write_text('backend: "generation"\n' + "\n".join(given))
    return folder


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file where the engines say what they hear."""
    return tmp_path_factory.mktemp("notes") / "notes"


@pytest.fixture(scope="module")
def server(start_shared: Launcher, tmp_path_factory: pytest.TempPathFactory, notes: Path) -> Server:
    """Return a server of these engines."""
    repository = tmp_path_factory.mktemp("repository")
    echo = write_engine(
        repository,
        "echo",
        parameter("DEFAULT_MAX_TOKENS", 5),
        json_parameter("ADAPTERS", {"stars": "stars.txt", "gone": "gone.txt"}),
    )
    (echo / "1" / "stars.txt").write_text("*")
    (echo / "1" / "gone.txt").write_text("?")
    write_engine(repository, "slow", notes=str(notes), slots=1, pace_s=0.01)
    tiny = repository / "tiny"
    (tiny / "1").mkdir(parents=True)
    (tiny / "config.pbtxt").write_text('backend: "generation"\n' + parameter("ENGINE", "tinygpt"))
    started = start_shared(repository)
    (echo / "1" / "gone.txt").unlink()
    return started


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Replace the look after each test: the server is looked at when it ends."""


def generate(server: Server, model: str, **members: Any) -> tuple[int, Any]:
    """Return the status and the answer of a generate."""
    return server.call("POST", f"/v2/models/{model}/generate", members)


def events_of(body: bytes) -> list[Any]:
    """Return the JSON of server-sent events."""
    return [json.loads(each.removeprefix(b"data: ")) for each in body.split(b"\n\n") if each]


def stream(server: Server, model: str, **members: Any) -> list[Any]:
    """Return all events of a generate_stream."""
    reply = server.request("POST", f"/v2/models/{model}/generate_stream", members)
    assert reply.status == 200, reply.body
    return events_of(reply.body)


# --- what is answered ----------------------------------------------------------------------------


def test_generate_answers_with_everything(server: Server) -> None:
    """The text, its tokens, why it ended and what was counted."""
    status, answer = generate(server, "echo", text_input="abc")
    assert status == 200, answer
    assert answer == {
        "model_name": "echo",
        "model_version": "1",
        "text_output": "abcab",
        "output_ids": [97, 98, 99, 97, 98],
        "index": 0,
        "finish_reason": "length",
        "prompt_tokens": 3,
        "completion_tokens": 5,
    }


def test_a_stream_is_the_same_in_pieces(server: Server) -> None:
    """A character of several bytes comes whole; the end brings the counts."""
    events = stream(server, "echo", text_input="grün", max_tokens=11, stream=True)
    assert "".join(each["text_output"] for each in events) == "grüngrüng"
    tokens = [token for each in events for token in _list(each["output_ids"])]
    assert tokens == [*"grüngrüng".encode()]
    assert [each["finish_reason"] for each in events][-1] == "length"
    assert not any(each["finish_reason"] for each in events[:-1])
    assert events[-1]["prompt_tokens"] == 5
    assert events[-1]["completion_tokens"] == 11


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def test_prompts_may_be_tokens_or_conversations(server: Server) -> None:
    """A conversation is what the engine's tokenizer makes of it."""
    assert generate(server, "echo", input_ids=[100, 101])[1]["text_output"] == "deded"
    messages = json.dumps([{"role": "user", "content": "Hi"}])
    answer = generate(server, "echo", messages=messages, max_tokens=9)[1]
    assert answer["text_output"] == "user: Hi "


def test_the_prompt_may_stand_in_front(server: Server) -> None:
    """Of the text and of the tokens."""
    answer = generate(server, "echo", text_input="ab", exclude_input_in_output=False)[1]
    assert answer["text_output"] == "abababa"
    assert len(answer["output_ids"]) == 7
    answer = generate(server, "echo", input_ids=[99], exclude_input_in_output=False)[1]
    assert answer["text_output"] == "cccccc"


def test_several_sequences_are_several_responses(server: Server) -> None:
    """For a stream, whole or in pieces; generate has only one response and says so."""
    events = stream(server, "echo", text_input="ab", n=2)
    assert [(each["index"], each["text_output"]) for each in events] == [(0, "ababa"), (1, "ababa")]
    events = stream(server, "echo", text_input="ab", n=2, stream=True)
    for index in range(2):
        mine = [each for each in events if each["index"] == index]
        assert "".join(each["text_output"] for each in mine) == "ababa"
        assert [each["completion_tokens"] for each in mine[-1:]] == [5]
    status, answer = generate(server, "echo", text_input="ab", n=2)
    assert status >= 400
    assert "generate stream" in answer["error"]


def test_log_probabilities_and_logits(server: Server) -> None:
    """Where they are asked for."""
    answer = generate(server, "echo", text_input="ab", max_tokens=2, num_logprobs=1)[1]
    assert answer["output_log_probs"] == [-0.5, -0.5]
    assert answer["cum_log_probs"] == -1.0
    first, second = json.loads(answer["top_logprobs"])
    assert (first["token"], second["token"]) == ("a", "b")
    assert first["top_logprobs"] == [{"id": 97, "token": "a", "bytes": [97], "logprob": -0.5}]
    answer = generate(
        server,
        "echo",
        text_input="ab",
        max_tokens=2,
        return_context_logits=True,
        return_generation_logits=True,
    )[1]
    assert len(answer["context_logits"]) == 2 * 256
    assert answer["generation_logits"][0] == 97.0
    assert answer["generation_logits"][-1] == 98.0


def test_stop_words_end_a_sequence(server: Server) -> None:
    """They are left out, unless they are to stay, and need not be of one piece."""
    answer = generate(server, "echo", text_input="abcd", max_tokens=50, stop_words=["da", "x"])[1]
    assert (answer["text_output"], answer["finish_reason"]) == ("abc", "stop")
    events = stream(
        server, "echo", text_input="abcd", max_tokens=50, stop_words=["da"], stream=True
    )
    assert "".join(each["text_output"] for each in events) == "abc"
    assert events[-1]["finish_reason"] == "stop"


def test_adapters_have_names(server: Server) -> None:
    """One that is not there is the request's error, as is one that cannot be loaded."""
    assert generate(server, "echo", text_input="ab", lora_name="stars")[1]["text_output"] == "*****"
    assert generate(server, "echo", text_input="ab")[1]["text_output"] == "ababa"
    status, answer = generate(server, "echo", text_input="ab", lora_name="moon")
    assert (status, answer["error"]) == (
        400,
        "there is no adapter 'moon': this model has stars, gone",
    )
    status, answer = generate(server, "echo", text_input="ab", lora_name="gone")
    assert status == 400
    assert "FileNotFoundError" in answer["error"]


def test_a_real_engine_answers(server: Server) -> None:
    """The same text each time, in a stream too."""
    whole = generate(server, "tiny", text_input="The list", max_tokens=8)[1]
    events = stream(server, "tiny", text_input="The list", max_tokens=8, stream=True)
    assert "".join(each["text_output"] for each in events) == whole["text_output"] != ""
    assert whole["completion_tokens"] == 8


def test_beams_come_whole(server: Server) -> None:
    """Each at its end, with stream as well."""
    for streams in (False, True):
        events = stream(
            server, "tiny", text_input="The", max_tokens=4, beam_width=2, stream=streams
        )
        assert [each["index"] for each in events] == [0, 1]
        assert len({each["text_output"] for each in events}) == 2


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ({}, "exactly one of text_input, input_ids, messages, got none of them"),
        ({"text_input": "a", "input_ids": [1]}, "got text_input and input_ids"),
        ({"text_input": ""}, "the prompt is empty"),
        ({"text_input": "a", "max_tokens": 0}, "max_tokens is 0, expected a whole number, 1 or"),
        ({"text_input": "a", "top_p": 1.5}, "top_p is 1.5"),
        ({"text_input": "a", "max_token": 5}, "unknown parameter 'max_token': perhaps max_tokens?"),
        ({"text_input": "a", "temperature": "hot"}, "Unable to parse input 'temperature' as FP32"),
        ({"text_input": "a", "beam_width": 5}, "more than the executor's max_beam_width (4)"),
        ({"input_ids": [1, 0]}, "the prompt has a zero in it"),
        ({"messages": "hello"}, "input 'messages' is no JSON list"),
    ],
)
def test_mistakes_are_the_client_s(server: Server, members: Any, expected: str) -> None:
    """Status 400, with a text that says what was expected; others are not affected."""
    status, answer = generate(server, "echo", **members)
    assert status == 400
    assert expected in answer["error"]


def test_a_stream_says_its_mistakes_too(server: Server) -> None:
    """As it says all errors."""
    reply = server.request("POST", "/v2/models/echo/generate_stream", {"stream": True})
    assert b"exactly one of" in reply.body


def test_infer_refuses_what_is_decoupled(server: Server) -> None:
    """As for every decoupled model."""
    status, answer = server.infer("echo", {"text_input": ("BYTES", [1], ["ab"])})
    assert status >= 400
    assert "decoupled" in answer


# --- what can be seen ----------------------------------------------------------------------------


def test_metadata_and_configuration_are_complete(server: Server) -> None:
    """Nothing of it stands in config.pbtxt."""
    status, told = server.call("GET", "/v2/models/echo")
    assert status == 200
    assert told["platform"] == "generation"
    assert [each["name"] for each in told["inputs"]] == [each.name for each in INPUTS]
    status, config = server.call("GET", "/v2/models/echo/config")
    assert status == 200
    assert config["backend"] == "generation"
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert [each["name"] for each in config["output"]] == [each.name for each in OUTPUTS]
    assert all(each["optional"] for each in config["input"])
    assert "model.py" not in json.dumps(config)


def test_metrics_count(server: Server) -> None:
    """Tokens and times by model and version, gauges by instance, too."""
    head = "actorserve_generation_"
    before = scrape(server)
    stream(server, "tiny", text_input="The list", max_tokens=8, stream=True)
    after = scrape(server)

    def grown(name: str) -> float:
        return of_model(after, "tiny", head + name) - of_model(before, "tiny", head + name)

    assert grown("tokens_total") == 8
    assert grown("prompt_tokens_total") > 0
    assert grown("time_to_first_token_seconds_count") == 1
    assert grown("time_per_output_token_seconds_count") == 1

    def gauges() -> list[float]:
        found = scrape(server)
        names = ("queued", "running", "kv_usage")
        return [of_model(found, "tiny", head + each, instance="tiny_0") for each in names]

    wait_until(lambda: gauges() == [0, 0, 0], what="the engine is idle")


# --- clients that go -----------------------------------------------------------------------------


def noted(notes: Path) -> list[str]:
    """Return what the slow engine has heard."""
    return notes.read_text().split() if notes.exists() else []


@contextlib.contextmanager
def asked(server: Server, action: str, **members: Any) -> Iterator[http.client.HTTPConnection]:
    """Send a request to the slow engine, and go away at the end of the block."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=30)
    try:
        body = json.dumps({"max_tokens": 100_000, **members})
        connection.request("POST", f"/v2/models/slow/{action}", body)
        yield connection
    finally:
        connection.close()


@pytest.mark.parametrize("action", ["generate", "generate_stream"])
@pytest.mark.parametrize("streams", [False, True])
def test_who_goes_away_frees_the_engine(
    server: Server, notes: Path, action: str, streams: bool
) -> None:
    """Whether anything came or not; the one slot is another's at once."""
    prompt = f"{action}-{streams}"
    with asked(server, action, text_input=prompt, stream=streams):
        wait_until(lambda: f"add:{prompt}" in noted(notes))
    wait_until(lambda: f"abort:{prompt}" in noted(notes))
    assert generate(server, "slow", text_input="next", max_tokens=1)[0] == 200


def test_who_goes_away_while_waiting_is_never_begun(server: Server, notes: Path) -> None:
    """The engine has one slot, and that is taken."""
    with asked(server, "generate", text_input="holder"):
        wait_until(lambda: "add:holder" in noted(notes))
        with asked(server, "generate", text_input="waiter"):
            gauge = "actorserve_generation_queued"
            wait_until(
                lambda: of_model(scrape(server), "slow", gauge, instance="slow_0") == 1,
                what="the second one waits",
            )
        wait_until(
            lambda: of_model(scrape(server), "slow", gauge, instance="slow_0") == 0,
            what="nobody waits",
        )
    wait_until(lambda: "abort:holder" in noted(notes))
    assert generate(server, "slow", text_input="next", max_tokens=1)[0] == 200
    assert "add:waiter" not in noted(notes)
