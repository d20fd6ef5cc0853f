# SPDX-License-Identifier: Apache-2.0
"""One invariant: whatever bytes a peer sends, it gets an HTTP reply or an end, the server lives
on, and no memory is lost.

Seeded: `ACTORSERVE_FUZZ_SEED` and `ACTORSERVE_FUZZ_ROUNDS` choose another run and a longer one.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import random
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SEED = int(os.environ.get("ACTORSERVE_FUZZ_SEED", "1"))
ROUNDS = int(os.environ.get("ACTORSERVE_FUZZ_ROUNDS", "150"))
MODELS = ["ident", "ident", "soon", "soon", "add_sub", "ident_bytes", "ident_fp16", "nope"]
MODELS += ["failing", "decoupled"]


def _harness() -> ModuleType:
    """Load the fake door and its server, which live with the front end's unit tests."""
    name = "actorserve_frontend_conftest"
    if name not in sys.modules:
        path = Path(__file__).parents[1] / "unit" / "frontend" / "conftest.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


HARNESS = _harness()


@pytest.fixture(params=["asyncio", "uvloop"])
def server(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A server with small limits, so that they are met."""
    settings = HARNESS.HttpSettings(
        max_input_bytes=1 << 20,
        max_head_bytes=8192,
        head_timeout_s=0.15,
        keep_alive_timeout_s=0.15,
        body_grace_s=0.15,
        min_body_bytes_per_s=1e9,
        linger_s=0.3,
    )
    started = HARNESS.Harness(settings, request.param)
    started.door.keep_requests = False
    yield started
    started.close()


def good_document(dice: random.Random) -> tuple[bytes, bytes]:
    """Make a document that a model with one FP32 input takes, and its block."""
    size = dice.choice([0, 4, 4096, 5000, 70_000, 300_000])
    member = {"name": "INPUT0", "datatype": "FP32", "shape": [size // 4]}
    whole = {"inputs": [member | {"parameters": {"binary_data_size": size}}], "x": ""}
    if dice.random() < 0.2:
        whole["x"] = "y" * dice.choice([10, 300_000])
    return json.dumps(whole).encode(), dice.randbytes(size)


def document(dice: random.Random) -> tuple[bytes, bytes]:
    """Make a document, often right, and the blocks behind it."""
    if dice.random() < 0.5:
        return good_document(dice)
    inputs, blocks = [], []
    for i in range(dice.choice([0, 1, 1, 1, 2, 2, 5])):
        datatype = dice.choice(["FP32", "FP32", "INT8", "BYTES", "FP16", "FOO"])
        size = dice.choice([0, 4, 16, 4096, 5000, 70_000])
        shape = dice.choice([[size // 4], [size], [-1], [1 << 62, 4], [], [2, 2], "x", None])
        member: dict[str, Any] = {
            "name": dice.choice([f"INPUT{i}", "INPUT0", "\n", 5]),
            "datatype": datatype,
            "shape": shape,
        }
        if dice.random() < 0.6:
            claimed = size if dice.random() < 0.8 else dice.choice([-1, 0, size + 1, 1 << 40, "4"])
            member["parameters"] = {"binary_data_size": claimed}
            blocks.append(dice.randbytes(size))
        else:
            values: list[Any] = [1, 2.5, "a", None, True, [1], 10**30, -1]
            count = size // 4 % 100 if dice.random() < 0.7 else 4
            member["data"] = [dice.choice(values)] * count
        for key in list(member):
            if dice.random() < 0.03:
                del member[key]
        inputs.append(member)
    whole: dict[str, Any] = {"inputs": inputs}
    if dice.random() < 0.3:
        whole["parameters"] = dice.choice(
            [{"binary_data_output": True}, {"a": 1}, {"triton_x": 1}, {"timeout": -1}, [], None]
        )
    if dice.random() < 0.2:
        whole["outputs"] = dice.choice([[{"name": "OUTPUT0"}], [{"name": 1}], 7, []])
    return json.dumps(whole).encode(), b"".join(blocks)


def flat_document(dice: random.Random) -> bytes:
    """Make a document for generate, often right."""
    values: list[Any] = [1, 1.5, -1, [1, 2], [], "a", ["a"], True, None, [[1]], {"a": 1}, 10**30]
    values += [[1.0] * 30_000, "y" * 10_000, "\n\n", "\ud800", [None], [1, "a"]]
    names = ["INPUT0", "INPUT0", "INPUT1", "id", "timeout", "priority", "triton_x", "k", "", "é"]
    whole: dict[str, Any] = {} if dice.random() < 0.2 else {"INPUT0": dice.choice([1, [1, 2]])}
    for _ in range(dice.choice([0, 0, 1, 1, 3])):
        whole[dice.choice(names)] = dice.choice(values)
    if dice.random() < 0.3:
        nested = {dice.choice(names): dice.choice(values) for _ in range(2)}
        whole["parameters"] = nested if dice.random() < 0.8 else dice.choice(values)
    if dice.random() < 0.05:
        return b'{"INPUT0":' + b"[" * dice.choice([50, 5000, 300_000])
    return json.dumps(whole).encode()


def request(dice: random.Random) -> bytes:
    """Make one request, with a lie here and there."""
    kind = dice.random()
    if kind < 0.15:
        path = dice.choice(["/v2", "/v2/health/live", "/v2/models/ident", "/x", "*", "/%ff", "//"])
        method = dice.choice(["GET", "HEAD", "POST", "DELETE", "OPTIONS", "BREW"])
        return f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    action = dice.choice(["infer", "infer", "generate", "generate_stream"])
    text, blocks = document(dice) if action == "infer" else (flat_document(dice), b"")
    body = text + blocks
    fields = []
    if blocks or dice.random() < 0.1:
        lie = dice.choice([0, 0, 0, 0, 1, -1, len(text) + 5000])
        size: Any = len(text) if dice.random() < 0.8 else lie
        fields.append(f"Inference-Header-Content-Length: {size}")
    if dice.random() < 0.15:
        body = gzip.compress(body, 1)
        fields.append(f"Content-Encoding: {dice.choice(['gzip', 'gzip', 'deflate', 'br'])}")
    if dice.random() < 0.1:
        fields.append("Accept-Encoding: gzip")
    if dice.random() < 0.1:
        fields.append("Expect: 100-continue")
    if dice.random() < 0.05:
        fields.append("Connection: Upgrade\r\nUpgrade: h2c")
    if dice.random() < 0.3:
        fields.append("Transfer-Encoding: chunked")
        step = dice.choice([1000, 30_000, 1 << 20])
        pieces = [body[i : i + step] for i in range(0, len(body), step)]
        body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    else:
        length = len(body) if dice.random() < 0.9 else dice.choice([0, 5, len(body) + 9, 1 << 30])
        fields.append(f"Content-Length: {length}")
    model = dice.choice(MODELS)
    version = "1.1" if dice.random() < 0.95 else "1.0"
    line = f"POST /v2/models/{model}/{action} HTTP/{version}"
    head = "\r\n".join([line, "Host: x", *fields, "", ""])
    return head.encode() + body


def mutated(dice: random.Random, data: bytes) -> bytes:
    """Change, drop, double or cut a few bytes."""
    out = bytearray(data)
    for _ in range(dice.choice([0, 0, 1, 1, 3, 10])):
        at = dice.randrange(len(out) + 1) if dice.random() < 0.3 else dice.randrange(300)
        at = min(at, len(out))
        change: Callable[[], None] = dice.choice(
            [
                lambda at=at: out.__setitem__(slice(at, at + 1), dice.randbytes(1)),
                lambda at=at: out.__delitem__(slice(at, at + dice.randrange(1, 20))),
                lambda at=at: out.__setitem__(slice(at, at), out[at : at + 50]),
                lambda at=at: out.__setitem__(slice(at, at), dice.randbytes(8)),
                lambda at=at: out.__delitem__(slice(at, len(out))),
            ]
        )
        change()
    return bytes(out)


def talk(dice: random.Random, port: int, data: bytes) -> bytes:
    """Send bytes in pieces, then end, leave or wait; return what came back."""
    got = b""
    with socket.create_connection(("127.0.0.1", port), 20) as sock:
        try:
            at = 0
            while at < len(data):
                step = dice.choice([1, 10, 1000, 1 << 20]) if at < 500 else 1 << 20
                sock.sendall(data[at : at + step])
                at += step
            end = dice.random()
            if end < 0.1:
                return got
            sock.sendall(b"\r\n\r\nGET /v2/health/live HTTP/1.1\r\nConnection: close\r\n\r\n")
            if end < 0.2:
                sock.shutdown(socket.SHUT_WR)
            while chunk := sock.recv(1 << 16):  # a server that neither replies nor ends times out
                got += chunk
        except TimeoutError:
            raise
        except OSError:
            pass  # reset while sending: the server has ended the connection
    return got


def test_no_bytes_hurt_the_server(server: Any) -> None:
    """Rows 69, 82 to 87: mutated, truncated, lying and random requests."""
    dice = random.Random(SEED)
    for number in range(ROUNDS):
        if number % 10 == 0:  # so that the arena has to grow now and then
            server.door.room_bytes = min(server.door.room_bytes, 100_000)
        if dice.random() < 0.1:
            data = dice.randbytes(dice.choice([1, 100, 10_000]))
        else:
            data = b"".join(
                mutated(dice, request(dice)) for _ in range(dice.choice([1, 1, 1, 2, 5]))
            )
        got = talk(dice, server.port, data)
        where = f"seed {SEED}, round {number}: {got[:200]!r}"
        assert not got or got.startswith(b"HTTP/1.1 "), where
        assert b" 500 " not in got.split(b"\r\n", 1)[0] or b"the model failed" in got, where
    server.wait_until(lambda: server.server.stats().connections == 0)
    server.wait_until(lambda: server.door.slabs == 0)
    assert server.stats().in_flight == 0
    with server.connect() as client:
        assert client.request("GET", "/v2/health/live").status == 200
