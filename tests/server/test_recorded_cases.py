# SPDX-License-Identifier: Apache-2.0
"""Requests that the real server was asked, and what it answered: ours has to be the same.

`tests/cases/recorded` holds them. A case with "ours" says what is right instead. Everything else
has to agree but for floats beyond six digits, paths, addresses, and the content type of errors.
"""

from __future__ import annotations

import base64
import http.client
import json
import re
from pathlib import Path
from typing import Any

CASES = Path(__file__).parents[1] / "cases"
KEPT_HEADERS = ("content-type", "inference-header-content-length", "content-encoding")
OWN = {"srv_metadata"}
"""Name, version and extensions of the server are its own; the keys are compared."""


def load_cases(mark: str) -> list[dict[str, Any]]:
    """Return the HTTP cases with this mark."""
    cases = [json.loads(path.read_text()) for path in sorted((CASES / "recorded").glob("*.json"))]
    return [case for case in cases if case["mark"] == mark and case["protocol"] == "http"]


def send(address: str, request: dict[str, Any]) -> dict[str, Any]:
    """Send one recorded request; returns status, headers and the body in its recorded form."""
    body = None
    if "body_b64" in request:
        body = base64.b64decode(request["body_b64"])
    elif "body_text" in request:
        body = request["body_text"].encode()
    elif request.get("body") is not None:
        body = json.dumps(request["body"]).encode()
    headers = dict(request.get("headers") or {})
    if body is not None:
        headers.setdefault("Content-Type", "application/json")
    connection = http.client.HTTPConnection(address, timeout=15)
    try:
        connection.request(request["method"], request["path"], body, headers)
        response = connection.getresponse()
        raw = response.read()
    finally:
        connection.close()
    kept = {k.lower(): v for k, v in response.getheaders() if k.lower() in KEPT_HEADERS}
    answer: dict[str, Any] = {"status": response.status, "headers": kept}
    if "inference-header-content-length" in kept:
        end = int(kept["inference-header-content-length"])
        answer["json"] = json.loads(raw[:end])
        answer["binary_b64"] = base64.b64encode(raw[end:]).decode()
        return answer
    try:
        answer["json"] = json.loads(raw)
    except ValueError:
        answer["text"] = raw.decode()
    return answer


def normal(value: Any) -> Any:
    """Return a value without what may differ."""
    if isinstance(value, dict):
        dropped = ("transfer-encoding", "reason", "allow")
        return {k: normal(v) for k, v in sorted(value.items()) if k not in dropped}
    if isinstance(value, list):
        return [normal(item) for item in value]
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, str):
        value = re.sub(r"(<REPO>|(/[\w.\-]+)+)/(?=\w+/\d+/\w+\.py)", "<REPO>/", value)
        # A comprehension has a frame of its own only before Python 3.12.
        value = re.sub(r"  \S+\(\d+\): <listcomp>\n", "", value)
        return re.sub(r"0x[0-9a-f]+", "0x", value)
    return value


def difference(case: dict[str, Any], got: dict[str, Any]) -> str | None:
    """Return what is wrong with an answer, or None."""
    ours = case.get("ours")
    if ours is not None:
        if got["status"] != ours.get("status", got["status"]):
            return f"status {got['status']}, expected {ours['status']}"
        if ours.get("contains", "") not in json.dumps(got):
            return f"{ours['contains']!r} is missing in {got}"
        return None
    want = dict(case["response"])
    for answer in (want, got):
        if answer.get("status", 200) >= 400:
            answer.get("headers", {}).pop("content-type", None)
    if case["name"] in OWN:
        same = sorted(want["json"]) == sorted(got["json"]) and want["status"] == got["status"]
        return None if same else f"other keys: {got}"
    if normal(want) != normal(got):
        return f"expected {normal(want)}, got {normal(got)}"
    return None


def replay(address: str, mark: str) -> list[str]:
    """Send every case; returns a line for each difference."""
    found = []
    for case in load_cases(mark):
        problem = difference(case, send(address, case["request"]))
        if problem is not None:
            found.append(f"{case['name']}: {problem}")
    return found


def test_answers_are_those_of_the_real_server(start_server):
    """Every recorded request gets the recorded answer, or the right one."""
    flags = ["--exit-on-error=false", "--model-control-mode=explicit", "--load-model=*"]
    server = start_server(CASES / "repository", flags=flags)
    assert len(load_cases("spine")) > 50
    assert len(load_cases("model")) > 8
    assert replay(server.address, "spine") + replay(server.address, "model") == []
    # Whatever the models did to their stubs, the server goes on and ends well.
    status, outputs = server.infer("ident", {"INPUT0": ("FP32", [2], [1.5, 2.5])})
    assert (status, outputs) == (200, {"OUTPUT0": [1.5, 2.5]})
    assert server.stop() == 0
