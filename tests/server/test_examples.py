# SPDX-License-Identifier: Apache-2.0
"""The models of examples/repository do what they show, over HTTP and embedded."""

from __future__ import annotations

import asyncio
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from actorserve import Supervisor
from actorserve.errors import InvalidArgument
from tests.server.harness import EXAMPLES

TEXTS = ["Hello, world!", "Grüße aus Köln", "東京 タワー", "😀 emoji ok", ""]
WORDS = [
    ["hello", ",", "world", "!"],
    ["grüße", "aus", "köln"],
    ["東京", "タワー"],
    ["😀", "emoji", "ok"],
    [],
]


@pytest.fixture(scope="module")
def server(start_shared):
    """Return a server of the examples."""
    return start_shared(EXAMPLES)


def _rotation() -> np.ndarray:
    """Return the matrix that the example model makes for itself."""
    weights, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((64, 64)))
    return weights.astype(np.float32)


def _padded(words: list[list[str]]) -> list[list[str]]:
    width = max(map(len, words))
    return [row + [""] * (width - len(row)) for row in words]


# --- over HTTP -----------------------------------------------------------------------------------


def test_add_sub_answers_json_and_binary(server):
    """Sum and difference, whichever way the tensors travel."""
    a, b = np.array([1, 2, 3, 4], np.float32), np.array([10, 20, 30, 40], np.float32)
    status, outputs = server.infer(
        "add_sub", {"INPUT0": ("FP32", [4], a.tolist()), "INPUT1": ("FP32", [4], b.tolist())}
    )
    assert status == 200, outputs
    assert outputs == {"OUTPUT0": [11, 22, 33, 44], "OUTPUT1": [-9, -18, -27, -36]}
    outputs = server.infer_binary("add_sub", {"INPUT0": ("FP32", a), "INPUT1": ("FP32", b)}).outputs
    assert np.array_equal(outputs["OUTPUT0"], a + b)
    assert np.array_equal(outputs["OUTPUT1"], a - b)


def test_tokenizer_splits_texts_of_any_script(server):
    """BYTES in and out as JSON strings; a request's texts are one tensor."""
    status, outputs = server.infer("tokenizer", {"TEXT": ("BYTES", [len(TEXTS), 1], TEXTS)})
    assert status == 200, outputs
    tokens = np.array(outputs["TOKENS"], object).reshape(len(TEXTS), -1).tolist()
    assert tokens == _padded(WORDS)
    assert outputs["COUNTS"] == [len(row) for row in WORDS]


def test_tokenizer_splits_binary_texts(server):
    """The same as binary tensors: elements with their length in front, in UTF-8."""
    texts = np.array([[text.encode()] for text in TEXTS], object)
    outputs = server.infer_binary("tokenizer", {"TEXT": ("BYTES", texts)}).outputs
    tokens = [[word.decode() for word in row] for row in outputs["TOKENS"]]
    assert tokens == _padded(WORDS)
    assert outputs["COUNTS"].tolist() == [[len(row)] for row in WORDS]


def test_tokenizer_names_text_that_is_not_utf_8(server):
    """What the model raises reaches the client, and the model goes on."""
    bad = np.array([[b"\xff\xfe"]], object)
    reply = server.infer_binary("tokenizer", {"TEXT": ("BYTES", bad)})
    assert reply.status == 500
    assert "UnicodeDecodeError" in reply.error
    assert server.infer("tokenizer", {"TEXT": ("BYTES", [1, 1], ["ok"])})[0] == 200


def test_matrix_answers_concurrent_requests_each_with_its_own(server):
    """Sixty-four requests at the same time are merged and taken apart again without a mix-up."""
    rotation = _rotation()
    vectors = np.random.default_rng(1).standard_normal((64, 1, 64)).astype(np.float32)
    with ThreadPoolExecutor(16) as pool:
        replies = list(
            pool.map(lambda x: server.infer_binary("matrix", {"X": ("FP32", x)}), vectors)
        )
    for vector, reply in zip(vectors, replies):
        np.testing.assert_allclose(reply.outputs["Y"], vector @ rotation, rtol=1e-4, atol=1e-5)


def test_async_double_overlaps_its_requests(server):
    """The coroutine model answers all of them."""

    def double(number: int) -> list[int]:
        status, outputs = server.infer("async_double", {"INPUT": ("INT64", [2], [number, -number])})
        assert status == 200, outputs
        return outputs["OUTPUT"]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(double, range(8))) == [[2 * n, -2 * n] for n in range(8)]
    big = 1 << 61
    assert double(big) == [2 * big, -2 * big]


def test_the_readme_s_curl_gets_the_readme_s_answer(server):
    """What the README promises is what comes, byte for byte."""
    readme = (EXAMPLES.parents[1] / "README.md").read_text()
    shown = re.search(r"infer -d '(.*?)'\n(\{.*?\})\n```", readme, re.DOTALL)
    assert shown is not None
    reply = server.request("POST", "/v2/models/add_sub/infer", shown[1].encode())
    assert reply.body.decode() == shown[2]


# --- embedded ------------------------------------------------------------------------------------


def test_the_examples_are_embedded():
    """Arrays and lists in, arrays out, with the outputs that were asked for."""

    async def main() -> None:
        async with Supervisor(EXAMPLES) as server:
            assert server.failures == {}
            a = np.arange(4, dtype=np.float32)
            outputs = await server.infer("add_sub", {"INPUT0": a, "INPUT1": a}, outputs=["OUTPUT1"])
            assert list(outputs) == ["OUTPUT1"]
            assert outputs["OUTPUT1"].tolist() == [0, 0, 0, 0]
            outputs = await server.infer("tokenizer", {"TEXT": [[text] for text in TEXTS]})
            tokens = [[word.decode() for word in row] for row in outputs["TOKENS"]]
            assert tokens == _padded(WORDS)
            outputs = await server.infer("async_double", {"INPUT": np.array([21], np.int64)})
            assert outputs["OUTPUT"].tolist() == [42]
            with pytest.raises(InvalidArgument, match="expected 2 inputs but got 1 inputs"):
                await server.infer("add_sub", {"INPUT0": a})

    asyncio.run(main())


def test_matrix_really_forms_batches():
    """Far fewer batches than requests run, and every request has its own answer."""
    rotation = _rotation()
    count = 256

    async def main() -> None:
        async with Supervisor(EXAMPLES) as server:
            rows = np.random.default_rng(2).standard_normal((count, 1, 64)).astype(np.float32)
            answers = await asyncio.gather(*[server.infer("matrix", {"X": row}) for row in rows])
            for row, answer in zip(rows, answers):
                np.testing.assert_allclose(answer["Y"], row @ rotation, rtol=1e-4, atol=1e-5)
            stats = next(model for model in server.stats().models if model.name == "matrix")
            scheduler = stats.versions[0].scheduler
            assert (scheduler.accepted, scheduler.succeeded, scheduler.failed) == (count, count, 0)
            assert scheduler.batches <= count // 4
            executed = sum(each.executed_batches for each in stats.versions[0].instances)
            assert executed == scheduler.batches

    asyncio.run(main())


def test_a_server_runs_off_the_main_thread():
    """An embedding app may keep it in a thread with a loop of its own."""
    answers: list[object] = []

    async def serve() -> None:
        async with Supervisor(EXAMPLES) as server:
            a = np.ones(4, np.float32)
            answers.append((await server.infer("add_sub", {"INPUT0": a, "INPUT1": a}))["OUTPUT0"])

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert np.array_equal(answers[0], np.full(4, 2, np.float32))
