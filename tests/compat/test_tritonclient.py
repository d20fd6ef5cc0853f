# SPDX-License-Identifier: Apache-2.0
"""tritonclient.http as its users use it: plain, asynchronous by gevent and by asyncio."""

from __future__ import annotations

import asyncio
import warnings

import numpy as np
import pytest

pytest.importorskip("tritonclient")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    gevent = pytest.importorskip("gevent")
    http = pytest.importorskip("tritonclient.http")
    from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module", autouse=True)
def hub():
    """Keep gevent's loop for the whole module, and end it then."""
    hub = gevent.get_hub()
    gevent.sleep(0)
    yield
    hub.destroy(destroy_loop=True)


@pytest.fixture
def client(server):
    """Return a client with four connections."""
    client = http.InferenceServerClient(server.address, concurrency=4)
    yield client
    client.close()


def tensor(name, array, datatype="FP32", binary=True):
    """Return an input with data."""
    made = http.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array, binary_data=binary)
    return made


def test_server_and_models_are_described(client):
    """Health, metadata and configuration, as dicts."""
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("add_sub")
    assert client.is_model_ready("versions", "1")
    assert not client.is_model_ready("nobody")
    assert client.get_server_metadata()["name"] == "actorserve"
    metadata = client.get_model_metadata("matrix")
    assert metadata["inputs"] == [{"name": "X", "datatype": "FP32", "shape": [-1, 64]}]
    assert client.get_model_metadata("versions")["versions"] == ["1", "2"]
    config = client.get_model_config("matrix")
    assert (config["max_batch_size"], config["name"]) == (32, "matrix")


@pytest.mark.parametrize("binary_out", [True, False])
@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("packed", [None, "gzip", "deflate"])
def test_inference(client, binary_in, binary_out, packed):
    """Every mix of JSON, binary and compression."""
    a = np.array([1, 2, 3, 4], np.float32)
    result = client.infer(
        "add_sub",
        [tensor("INPUT0", a, binary=binary_in), tensor("INPUT1", a, binary=binary_in)],
        outputs=[http.InferRequestedOutput("OUTPUT0", binary_data=binary_out)],
        request_id="an id",
        request_compression_algorithm=packed,
        response_compression_algorithm=packed,
    )
    assert np.array_equal(result.as_numpy("OUTPUT0"), 2 * a)
    assert result.as_numpy("OUTPUT1") is None
    assert result.get_response()["id"] == "an id"
    assert result.get_response()["model_version"] == "1"


@pytest.mark.parametrize("binary", [True, False])
def test_bytes(client, binary):
    """Texts and bytes, in and out."""
    words = np.array(["hello", "wörld", "", "東京"], object)
    result = client.infer(
        "identity_string",
        [tensor("INPUT0", words, "BYTES", binary)],
        outputs=[http.InferRequestedOutput("OUTPUT0", binary_data=binary)],
    )
    values = [v.decode() if isinstance(v, bytes) else v for v in result.as_numpy("OUTPUT0")]
    assert values == words.tolist()
    texts = np.array([[b"Two words"]], object)
    result = client.infer("tokenizer", [tensor("TEXT", texts, "BYTES", binary)])
    assert result.as_numpy("TOKENS").tolist() == [[b"two", b"words"]]
    assert result.as_numpy("COUNTS").tolist() == [[2]]


@pytest.mark.parametrize(
    ("model", "datatype", "dtype"),
    [("fp16", "FP16", np.float16), ("int64", "INT64", np.int64), ("bool", "BOOL", np.bool_)],
)
def test_other_types(client, model, datatype, dtype):
    """Their arrays come back."""
    array = np.array([0, 1, 1, 0]).astype(dtype)
    result = client.infer(f"identity_{model}", [tensor("INPUT0", array, datatype)])
    assert result.as_numpy("OUTPUT0").dtype == dtype
    assert np.array_equal(result.as_numpy("OUTPUT0"), array)


def test_a_large_tensor(client):
    """Sixteen MiB both ways."""
    array = np.arange(4 << 20, dtype=np.float32)
    result = client.infer("identity_fp32", [tensor("INPUT0", array)])
    assert np.array_equal(result.as_numpy("OUTPUT0"), array)


def test_a_version_is_chosen(client):
    """model_version names it, the highest is the default."""
    one = [tensor("INPUT0", np.ones(1, np.float32))]
    assert client.infer("versions", one).get_response()["model_version"] == "2"
    result = client.infer("versions", one, model_version="1")
    assert result.get_response()["model_version"] == "1"


def test_many_requests_at_a_time(client):
    """async_infer on four connections: each result is its own."""
    ones = np.ones((1, 64), np.float32)
    pending = [client.async_infer("matrix", [tensor("X", ones * n)]) for n in range(40)]
    results = [request.get_result().as_numpy("Y") for request in pending]
    for number, result in enumerate(results):
        np.testing.assert_allclose(result, results[1] * number, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("model", "version", "text", "status"),
    [
        ("nobody", "", "Request for unknown model: 'nobody' is not found", "404"),
        ("versions", "9", "'versions' version 9 is not found", "404"),
        ("fails", "", "the model says no", "501"),
        ("add_sub", "", "expected 2 inputs but got 1 inputs for model 'add_sub'", "400"),
        ("identity_int64", "", "data-type is 'FP32', but model 'identity_int64' expects", "400"),
    ],
)
def test_errors_are_raised_with_their_text(client, model, version, text, status):
    """The client's own exception, with the server's message and status."""
    with pytest.raises(InferenceServerException) as caught:
        client.infer(model, [tensor("INPUT0", np.ones(1, np.float32))], model_version=version)
    assert text in caught.value.message()
    assert caught.value.status() == status


def test_what_is_not_there_yet_is_an_error(client):
    """The client raises instead of hanging or misreading an answer."""
    with pytest.raises(InferenceServerException):
        client.get_trace_settings()


def test_the_asyncio_client(server):
    """tritonclient.http.aio, ten requests at a time."""
    pytest.importorskip("aiohttp")
    import tritonclient.http.aio as aio

    async def main() -> None:
        async with aio.InferenceServerClient(server.address) as client:
            assert await client.is_server_ready()
            x = np.arange(3, dtype=np.int64)
            made = aio.InferInput("INPUT", [3], "INT64")
            made.set_data_from_numpy(x)
            calls = [client.infer("async_double", [made]) for _ in range(10)]
            for result in await asyncio.gather(*calls):
                assert np.array_equal(result.as_numpy("OUTPUT"), 2 * x)

    asyncio.run(main())


def test_statistics_are_read(client):
    """Of one version, of one model and of all; an unknown model is an error of the client's."""
    before = client.get_inference_statistics("versions", "2")["model_stats"][0]
    result = client.infer("versions", [tensor("INPUT0", np.ones(2, np.float32))])
    assert result.get_response()["model_version"] == "2"
    (after,) = client.get_inference_statistics("versions", "2")["model_stats"]
    assert after["inference_count"] == before["inference_count"] + 1
    assert after["inference_stats"]["success"]["ns"] > before["inference_stats"]["success"]["ns"]
    assert len(client.get_inference_statistics("versions")["model_stats"]) == 2
    assert len(client.get_inference_statistics()["model_stats"]) > 5
    with pytest.raises(InferenceServerException, match="requested model 'nope' is not available"):
        client.get_inference_statistics("nope")
