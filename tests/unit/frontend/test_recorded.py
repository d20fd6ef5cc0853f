# SPDX-License-Identifier: Apache-2.0
"""The recorded cases that a front end decides, alone or with a door that validates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

RECORDED = Path(__file__).parents[2] / "cases" / "recorded"
SERVED = {"add_sub", "ident", "ident_batch", "nope", ""}
OWN_NAME = {"srv_metadata"}


def cases() -> list[dict[str, Any]]:
    """Load the cases of the models that the fake door has."""
    found = [json.loads(path.read_text()) for path in sorted(RECORDED.glob("*.json"))]
    return [
        case
        for case in found
        if case["protocol"] == "http" and case["mark"] == "spine" and case["model"] in SERVED
    ]


@pytest.mark.parametrize("case", cases(), ids=lambda case: str(case["name"]))
def test_recorded_answers_are_given_again(server: Any, case: dict[str, Any]) -> None:
    """Status and JSON are those of the recording, or what the case says is right instead."""
    request = case["request"]
    body = b""
    if "body" in request:
        body = json.dumps(request["body"]).encode()
    elif "body_text" in request:
        body = request["body_text"].encode()
    with server.connect() as client:
        reply = client.request(request["method"], request["path"], body)
    wanted = case["response"]
    if "ours" in case:
        assert reply.status == case["ours"]["status"]
        assert reply.error
        return
    assert reply.status == wanted["status"]
    if "text" in wanted:
        assert reply.body.decode() == wanted["text"]
    elif case["name"] in OWN_NAME:
        assert set(reply.json) == set(wanted["json"])
        assert reply.json["name"] == "actorserve"
    else:
        assert reply.json == wanted["json"]
    if reply.status < 400:
        assert reply.headers["content-type"] == wanted["headers"]["content-type"]


def test_enough_cases_are_served() -> None:
    """The selection above is not empty by mistake."""
    assert len(cases()) > 25
