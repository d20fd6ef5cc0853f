# SPDX-License-Identifier: Apache-2.0
"""Clients that others wrote, each in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TRITONCLIENT = """
import sys
import numpy as np
import tritonclient.http as http
from tritonclient.utils import InferenceServerException

client = http.InferenceServerClient(sys.argv[1], concurrency=4)
assert client.is_server_live() and client.is_server_ready()
assert client.is_model_ready("ident") and not client.is_model_ready("nope")
assert client.get_server_metadata()["name"] == "actorserve"
assert client.get_model_metadata("ident")["inputs"][0]["datatype"] == "FP32"
assert client.get_model_config("ident")["name"] == "ident"

def tensor(array, name="INPUT0", binary=True, datatype="FP32"):
    made = http.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array, binary_data=binary)
    return made

for count in (1, 1000, 1_000_000):
    array = np.arange(count, dtype=np.float32)
    for binary in (True, False) if count < 1_000_000 else (True,):
        wanted = [http.InferRequestedOutput("OUTPUT0", binary_data=binary)]
        for packed in (None, "gzip", "deflate"):
            result = client.infer(
                "ident", [tensor(array, binary=binary)], outputs=wanted, request_id="7",
                request_compression_algorithm=packed, response_compression_algorithm=packed,
            )
            assert (result.as_numpy("OUTPUT0") == array).all()
            assert result.get_response()["id"] == "7"

words = np.array([b"a", "h\\u00e9".encode(), b""], dtype=object)
for binary in (True, False):
    result = client.infer("ident_bytes", [tensor(words, binary=binary, datatype="BYTES")])
    assert result.as_numpy("OUTPUT0").tolist() == words.tolist()

halves = np.arange(4, dtype=np.float16)
result = client.infer("ident_fp16", [tensor(halves, datatype="FP16")])
assert (result.as_numpy("OUTPUT0") == halves).all()

four = np.ones(4, dtype=np.float32)
pending = [
    client.async_infer("add_sub", [tensor(four * i), tensor(four, "INPUT1")]) for i in range(20)
]
for i, request in enumerate(pending):
    assert (request.get_result().as_numpy("OUTPUT0") == i + 1).all()

for model, text in (("nope", "'nope' is not found"), ("failing", "the model failed")):
    try:
        client.infer(model, [tensor(four)])
    except InferenceServerException as error:
        assert text in error.message(), error
    else:
        raise AssertionError(model)
client.close()
"""


def run(*command: str, stdin: bytes = b"") -> bytes:
    """Run a program to its end; it must succeed."""
    done = subprocess.run(command, check=False, input=stdin, capture_output=True, timeout=50)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


@pytest.mark.skipif(
    not importlib.util.find_spec("tritonclient"), reason="tritonclient is not installed"
)
def test_tritonclient_is_served(server: Any) -> None:
    """Binary and JSON, compressed and not, BYTES and FP16, one by one and all at once."""
    run(sys.executable, "-W", "ignore", "-c", TRITONCLIENT, f"127.0.0.1:{server.port}")


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_curl_is_served(server: Any, tmp_path: Path) -> None:
    """JSON from the command line, an offer of HTTP/2, an expectation, compression, an upload."""
    url = f"http://127.0.0.1:{server.port}/v2/models"
    document = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [2], "data": [1, 2]}]}
    text = json.dumps(document).encode()
    for more in ([], ["--http2"], ["--http1.0"], ["--compressed"], ["-H", "Expect: 100-continue"]):
        out = run("curl", "-sS", *more, "--data-binary", "@-", f"{url}/ident/infer", stdin=text)
        assert json.loads(out)["outputs"][0]["data"] == [1.0, 2.0]
    upload = tmp_path / "body"
    upload.write_bytes(bytes(2_000_000))
    out = run(
        "curl",
        "-sS",
        "-H",
        "Inference-Header-Content-Length: 0",
        "--data-binary",
        f"@{upload}",
        f"{url}/ident/infer",
    )
    assert out.endswith(bytes(2_000_000))
    out = run("curl", "-sS", "-o", "/dev/null", "-w", "%{http_code}", "-I", f"{url}/ident")
    assert out == b"200"


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_curl_sees_the_refusal_of_a_large_upload(start: Any, tmp_path: Path) -> None:
    """The reply arrives although the upload is not read; with and without an expectation."""
    server = start(max_input_bytes=1 << 20)
    upload = tmp_path / "body"
    upload.write_bytes(bytes(8 << 20))
    for more in (["-H", "Expect:"], ["-H", "Expect: 100-continue"]):
        out = run(
            "curl",
            "-sS",
            *more,
            "-w",
            "%{http_code}",
            "--data-binary",
            f"@{upload}",
            f"http://127.0.0.1:{server.port}/v2/models/ident/infer",
        )
        assert out.endswith(b"413")
        assert b"--http-max-input-size" in out
