# SPDX-License-Identifier: Apache-2.0
"""curl, as the README and everybody's notes use it."""

from __future__ import annotations

import json
import shutil
import subprocess

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")

ADD = json.dumps(
    {
        "inputs": [
            {"name": f"INPUT{n}", "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4]}
            for n in range(2)
        ]
    }
)


@pytest.fixture
def curl(server):
    """Return a function that runs curl on a path of the server; returns (status, body)."""

    def run(path: str, *arguments: str) -> tuple[int, bytes]:
        command = ["curl", "-sS", "-w", "\\n%{http_code}", f"http://{server.address}{path}"]
        done = subprocess.run([*command, *arguments], capture_output=True, timeout=40, check=True)
        body, _, status = done.stdout.rpartition(b"\n")
        return int(status), body

    return run


def test_health_and_metadata(curl):
    """What probes and people ask."""
    assert curl("/v2/health/live") == (200, b"")
    assert curl("/v2/health/ready") == (200, b"")
    assert curl("/v2/health/ready", "-I")[0] == 200
    assert json.loads(curl("/v2/models/add_sub")[1])["platform"] == "python"
    status, body = curl("/v2/models/nobody")
    assert status == 404
    assert "is not found" in json.loads(body)["error"]


@pytest.mark.parametrize(
    "how",
    [
        (),
        ("-H", "Content-Type: application/json"),
        ("-H", "Expect: 100-continue"),
        ("-H", "Transfer-Encoding: chunked"),
        ("--compressed",),
        ("--http1.0",),
        ("--http2",),
    ],
    ids=lambda how: " ".join(how) or "plain",
)
def test_json_inference(curl, how):
    """However curl sends it."""
    status, body = curl("/v2/models/add_sub/infer", "-d", ADD, *how)
    assert status == 200
    assert json.loads(body)["outputs"][0]["data"] == [2, 4, 6, 8]


def test_a_file_is_uploaded_as_the_one_input(curl, tmp_path):
    """--data-binary @file with a document of no bytes, the answer into a file."""
    array = np.arange(1 << 20, dtype=np.float32)
    (tmp_path / "in").write_bytes(array.tobytes())
    status, answer = curl(
        "/v2/models/identity_fp32/infer",
        "--data-binary",
        f"@{tmp_path / 'in'}",
        "-H",
        "Inference-Header-Content-Length: 0",
        "-H",
        "Content-Type: application/octet-stream",
    )
    assert status == 200
    assert answer.endswith(array.tobytes())
    assert json.loads(answer[: -array.nbytes])["outputs"][0]["shape"] == [1 << 20]


def test_several_urls_share_a_connection(curl, server):
    """The tool keeps it alive between them."""
    url = f"http://{server.address}/v2/health/live"
    done = subprocess.run(
        ["curl", "-sS", "-w", "%{num_connects} ", url, url, url],
        capture_output=True,
        timeout=40,
        check=True,
    )
    assert done.stdout.split() == [b"1", b"0", b"0"]
