# SPDX-License-Identifier: Apache-2.0
"""Inferences through real sockets: bodies of every kind, and what comes back."""

from __future__ import annotations

import gzip
import itertools
import json
import struct
import threading
import zlib
from typing import Any

import numpy as np
import pytest

from actorserve.errors import ResourceExhausted

WANT_BINARY = {"parameters": {"binary_data_output": True}}


def binary(nbytes: int, name: str = "INPUT0") -> dict[str, Any]:
    """Describe an FP32 input that follows as a block."""
    return {
        "name": name,
        "datatype": "FP32",
        "shape": [nbytes // 4],
        "parameters": {"binary_data_size": nbytes},
    }


def pattern(nbytes: int) -> bytes:
    """Bytes of which no two neighbourhoods are alike."""
    return np.arange((nbytes + 3) // 4, dtype="<u4").tobytes()[:nbytes]


def head(model: str, length: int, json_bytes: int | None = None, more: str = "") -> bytes:
    """Build the head of an inference whose body is sent separately."""
    size = f"Inference-Header-Content-Length: {json_bytes}\r\n" if json_bytes is not None else ""
    return (
        f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n"
        f"{size}{more}\r\n"
    ).encode()


@pytest.mark.parametrize("model", ["ident", "soon"])
@pytest.mark.parametrize("nbytes", [4, 4096, 4100, 200_000, 3_000_000])
def test_binary_bodies_come_back(server: Any, client: Any, model: str, nbytes: int) -> None:
    """Small ones in the message, large ones through slabs, all of them whole; twice, because the
    parser behind a large body is a new one.
    """
    body = pattern(nbytes)
    for _ in range(2):
        reply = client.infer(model, {"inputs": [binary(nbytes)], **WANT_BINARY}, body)
        assert reply.status == 200
        assert reply.headers["content-type"] == "application/octet-stream"
        assert reply.binary == body
    assert (server.door.most_slabs > 0) == (nbytes > 4096)
    assert server.door.slabs == 0


def test_bodies_up_to_4_kib_take_no_slab(server: Any, client: Any) -> None:
    """They travel inside the message, even when they come in several pieces."""
    text = json.dumps({"inputs": [binary(4096)], **WANT_BINARY}).encode()
    client.send(head("ident", len(text) + 4096, len(text)) + text)
    client.send(pattern(1000))
    client.send(pattern(4096)[1000:])
    assert client.read().binary == pattern(4096)
    assert server.door.most_slabs == 0


def test_json_goes_in_and_out(client: Any) -> None:
    """The document is the whole body."""
    reply = client.infer(
        "add_sub",
        {
            "id": "7",
            "inputs": [
                {"name": "INPUT0", "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4]},
                {"name": "INPUT1", "datatype": "FP32", "shape": [4], "data": [1, 1, 1, 1]},
            ],
        },
    )
    assert reply.headers["content-type"] == "application/json"
    assert reply.json["id"] == "7"
    assert [output["data"] for output in reply.json["outputs"]] == [[2, 3, 4, 5], [0, 1, 2, 3]]


def test_many_inputs_of_all_sizes_keep_their_order(server: Any, client: Any) -> None:
    """JSON, small blocks, empty blocks and large ones in one request."""
    sizes = [0, 8, 5000, 4, 300_000, 12, 0, 150_000]
    inputs = [binary(size, f"INPUT{i}") for i, size in enumerate(sizes)]
    inputs.insert(1, {"name": "J", "datatype": "FP32", "shape": [1], "data": [5]})
    body = pattern(sum(sizes))
    reply = client.infer("ident", {"inputs": inputs, **WANT_BINARY}, body)
    assert reply.status == 400  # the model has one input; but the request got there whole
    request = server.door.requests[0]
    assert [tensor.name for tensor in request.inputs][:3] == ["INPUT0", "J", "INPUT1"]
    assert server.door.slabs == 0


def test_outputs_may_be_mixed(client: Any) -> None:
    """One output as JSON, one as a block."""
    inputs = [
        {"name": f"INPUT{i}", "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4]}
        for i in range(2)
    ]
    outputs = [{"name": "OUTPUT1", "parameters": {"binary_data": True}}, {"name": "OUTPUT0"}]
    reply = client.infer("add_sub", {"inputs": inputs, "outputs": outputs})
    assert reply.json["outputs"][0]["data"] == [2, 4, 6, 8]
    assert reply.json["outputs"][1]["parameters"] == {"binary_data_size": 16}
    assert reply.binary == bytes(16)


@pytest.mark.parametrize("nbytes", [8, 100_000, 500_000])
@pytest.mark.parametrize("step", [1, 7, 60_000])
def test_chunked_bodies_are_read(client: Any, nbytes: int, step: int) -> None:
    """The length is known at the end only; with and without blocks."""
    if nbytes // step > 20_000:
        step = 997
    text = json.dumps({"inputs": [binary(nbytes)], **WANT_BINARY}).encode()
    out = []
    body = text + pattern(nbytes)
    for at in range(0, len(body), step):
        piece = body[at : at + step]
        out.append(b"%x\r\n%b\r\n" % (len(piece), piece))
    client.send(
        b"POST /v2/models/ident/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
        b"Inference-Header-Content-Length: %d\r\n\r\n" % len(text)
    )
    client.send(b"".join(out) + b"0\r\n\r\n")
    assert client.read().binary == pattern(nbytes)
    reply = client.infer(
        "ident", {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": [1]}]}
    )
    assert reply.status == 200


def test_a_body_may_come_byte_by_byte(server: Any, client: Any) -> None:
    """Wherever the bytes are cut, the request is the same."""
    text = json.dumps({"inputs": [binary(4200)], **WANT_BINARY}).encode()
    message = head("ident", len(text) + 4200, len(text)) + text + pattern(4200)
    cut = len(message) - 4150
    for at in range(cut):
        client.send(message[at : at + 1])
    for at in range(cut, len(message), 10):
        client.send(message[at : at + 10])
    assert client.read().binary == pattern(4200)
    assert server.door.slabs == 0


def test_large_documents_are_parsed_beside_the_loop(server: Any, client: Any) -> None:
    """Megabytes of JSON are read, and written, in a codec thread; small documents are not."""
    client.infer("ident", {"inputs": [binary(8)], **WANT_BINARY}, bytes(8))
    assert not codec_threads()
    count = 200_000
    values = [float(i) for i in range(count)]
    reply = client.infer(
        "ident",
        {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [count], "data": values}]},
    )
    assert reply.json["outputs"][0]["data"] == values
    reply = client.infer(
        "ident", {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [9], "data": values}]}
    )
    assert "Shape does not match true shape" in reply.error
    assert codec_threads()


def codec_threads() -> list[str]:
    """Name the codec threads that have been started."""
    return [t.name for t in threading.enumerate() if t.name.startswith("http-codec")]


def test_a_large_document_with_blocks(client: Any) -> None:
    """The blocks that arrive while the document is parsed wait, and find their places."""
    text = json.dumps({"inputs": [binary(600_000)], "x": "y" * 300_000, **WANT_BINARY}).encode()
    client.send(head("ident", len(text) + 600_000, len(text)) + text + pattern(600_000))
    assert client.read().binary == pattern(600_000)


# --- raw requests --------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 16, 300_000])
@pytest.mark.parametrize("framing", ["length", "chunked", "gzip"])
def test_raw_requests_are_one_input(client: Any, nbytes: int, framing: str) -> None:
    """A document of 0 bytes: the whole body is the input, and the output is binary."""
    body = pattern(nbytes)
    fields = "Inference-Header-Content-Length: 0\r\n"
    if framing == "chunked":
        fields += "Transfer-Encoding: chunked\r\n"
        body = (b"%x\r\n%b\r\n" % (nbytes, body) if nbytes else b"") + b"0\r\n\r\n"
    else:
        if framing == "gzip":
            body = gzip.compress(body)
            fields += "Content-Encoding: gzip\r\n"
        fields += f"Content-Length: {len(body)}\r\n"
    client.send(f"POST /v2/models/ident/infer HTTP/1.1\r\nHost: x\r\n{fields}\r\n".encode() + body)
    reply = client.read()
    assert reply.status == 200
    assert reply.json["outputs"][0]["shape"] == [nbytes // 4]
    assert reply.binary == pattern(nbytes)


def test_a_raw_request_to_a_bytes_input_is_one_element(client: Any) -> None:
    """The element gets its length in front; large ones too."""
    for size in (5, 100_000):
        client.send(head("ident_bytes", size, 0) + pattern(size))
        assert client.read().binary == struct.pack("<I", size) + pattern(size)


def test_a_raw_request_needs_a_model_with_one_input(client: Any) -> None:
    """Which one is it, otherwise?"""
    client.send(head("add_sub", 16, 0) + bytes(16))
    assert "exactly 1 input" in client.read().error


# --- compression ---------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize("nbytes", [8, 400_000, 5_000_000])
def test_compressed_requests_and_replies(client: Any, encoding: str, nbytes: int) -> None:
    """The size of the document counts before compression, both ways."""
    text = json.dumps({"inputs": [binary(nbytes)], **WANT_BINARY}).encode()
    body = text + pattern(nbytes)
    packed = gzip.compress(body, 1) if encoding == "gzip" else zlib.compress(body, 1)
    more = f"Content-Encoding: {encoding}\r\nAccept-Encoding: {encoding}\r\n"
    client.send(head("ident", len(packed), len(text), more) + packed)
    reply = client.read()
    assert reply.status == 200
    assert reply.headers["content-encoding"] == encoding
    plain = gzip.decompress(reply.body) if encoding == "gzip" else zlib.decompress(reply.body)
    assert plain[int(reply.headers["inference-header-content-length"]) :] == pattern(nbytes)


def test_errors_are_not_compressed(client: Any) -> None:
    """They are short, and read by people."""
    reply = client.infer("ident", b"{", Accept_Encoding="gzip")
    assert "content-encoding" not in reply.headers
    assert reply.status == 400


def test_a_bomb_is_413_and_the_connection_stays(start: Any) -> None:
    """Row 87: what a body decodes to counts, before anything is allocated for it."""
    server = start(max_input_bytes=1 << 20)
    with server.connect() as client:
        bomb = gzip.compress(bytes(8 << 20))
        client.send(head("ident", len(bomb), None, "Content-Encoding: gzip\r\n") + bomb)
        assert client.read().status == 413
        client.send(head("ident", 5, None, "Content-Encoding: gzip\r\n") + b"12345")
        assert "no valid gzip data" in client.read().error
        client.send(head("ident", 5, None, "Content-Encoding: br\r\n") + b"12345")
        assert client.read().status == 415
    assert server.door.most_slabs == 0


# --- errors --------------------------------------------------------------------------------------


def test_errors_leave_the_connection_usable(server: Any, client: Any) -> None:
    """A client's mistake is answered when its body has been read, and the next request works."""
    wrong: list[tuple[bytes, int, str]] = []
    text = json.dumps({"inputs": [binary(8)]}).encode()
    wrong.append((head("ident", len(text) + 4, len(text)) + text + bytes(4), 400, "4 additional"))
    wrong.append(
        (head("ident", len(text) + 9, len(text)) + text + bytes(9), 400, "additional input")
    )
    wrong.append((head("ident", len(text), 9999) + text, 400, "Content-Length is 9999"))
    wrong.append((head("ident", 4, -1) + bytes(4), 400, "Content-Length b'-1'"))
    wrong.append((head("ident", 9, 4) + b"{{{{12345", 400, "failed to parse"))
    wrong.append((head("nope", 9, 4) + b"{{{{12345", 404, "'nope' is not found"))
    wrong.append((head("ident", 0), 400, "truncated"))
    wrong.append((head("decoupled", 2) + b"{}", 501, "decoupled transaction policy"))
    big = json.dumps({"inputs": [binary(400_000)], "id": 5}).encode()
    wrong.append((head("ident", len(big) + 400_000, len(big)) + big + bytes(400_000), 400, "$.id"))
    for message, status, expected in wrong:
        client.send(message)
        reply = client.read()
        assert (reply.status, expected in reply.error) == (status, True), reply.error
    good = client.infer("ident", {"inputs": [binary(8)], **WANT_BINARY}, pattern(8))
    assert good.status == 200
    assert server.stats().errors == len(wrong)


@pytest.mark.parametrize(
    ("tail", "status", "expected"),
    [(b"", 400, "4 additional bytes"), (bytes(9), 400, "unexpected additional input data")],
)
def test_a_chunked_body_of_the_wrong_size_is_400(
    client: Any, tail: bytes, status: int, expected: str
) -> None:
    """What Content-Length tells at once is seen at the end here."""
    for nbytes in (8, 8000):
        text = json.dumps({"inputs": [binary(nbytes)]}).encode()
        body = text + bytes(nbytes - 4) + tail
        client.send(
            b"POST /v2/models/ident/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
            b"Inference-Header-Content-Length: %d\r\n\r\n" % len(text)
        )
        client.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        reply = client.read()
        assert (reply.status, expected in reply.error) == (status, True), reply.error


def test_the_models_and_the_doors_errors_are_passed_on(client: Any) -> None:
    """With their status, their text and Retry-After; a bug is a 500 that says nothing of it."""
    document = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": [1]}]}
    reply = client.infer("failing", document)
    assert (reply.status, reply.error) == (500, "the model failed\nat line 3")
    reply = client.infer("busy", document)
    assert (reply.status, reply.error) == (503, "the queue is full")
    assert reply.headers["retry-after"] == "2"
    reply = client.infer("crashing", document)
    assert reply.status == 500
    assert "bug" not in reply.error


def test_an_output_that_json_cannot_carry_is_400(client: Any) -> None:
    """And the same output as binary data is fine."""
    tensor = {
        "name": "INPUT0",
        "datatype": "FP16",
        "shape": [2],
        "parameters": {"binary_data_size": 4},
    }
    reply = client.infer("ident_fp16", {"inputs": [tensor]}, bytes(4))
    assert reply.error.startswith("sending FP16 data via JSON is not supported")
    assert client.infer("ident_fp16", {"inputs": [tensor], **WANT_BINARY}, bytes(4)).status == 200


def test_nan_is_a_bare_word_unless_strict(start: Any) -> None:
    """--strict-json makes it an error."""
    body = struct.pack("<2f", float("nan"), 1)
    with start().connect() as client:
        reply = client.infer("ident", {"inputs": [binary(8)]}, body)
        assert b'"data":[NaN,1.0]' in reply.body
    with start(strict_json=True).connect() as client:
        assert "NaN or Infinity" in client.infer("ident", {"inputs": [binary(8)]}, body).error


def test_response_parameters_are_sent(server: Any, client: Any) -> None:
    """As the model gave them."""
    server.door.response_parameters = {"a": 1, "b": True, "c": "x"}
    reply = client.infer("ident", {"inputs": [binary(8)]}, bytes(8))
    assert reply.json["parameters"] == {"a": 1, "b": True, "c": "x"}


# --- memory --------------------------------------------------------------------------------------


def test_a_body_waits_while_the_arena_grows(server: Any, client: Any) -> None:
    """Nothing is read meanwhile, nothing gets lost, and other connections go on."""
    server.door.room_bytes = 10_000
    sizes = [8_000, 500_000, 8_000, 900_000]
    inputs = [binary(size, f"INPUT{i}") for i, size in enumerate(sizes)]
    body = pattern(sum(sizes))
    reply = client.infer("ident", {"inputs": inputs}, body)
    assert "expected 1 inputs but got 4 inputs" in reply.error
    assert server.door.grown == 3
    reply = client.infer(
        "ident", {"inputs": [binary(3_000_000)], **WANT_BINARY}, pattern(3_000_000)
    )
    assert reply.binary == pattern(3_000_000)
    assert server.door.slabs == 0


def test_a_body_without_memory_is_503(server: Any, client: Any) -> None:
    """Row 29's kind: an error for that request, and the connection goes on."""
    server.door.room_bytes = 10_000
    server.door.grow_error = ResourceExhausted("shared memory is full: see --shm-size")
    inputs = [binary(8_000), binary(500_000, "INPUT1")]
    reply = client.infer("ident", {"inputs": inputs}, bytes(508_000))
    assert (reply.status, "--shm-size" in reply.error) == (503, True)
    assert server.door.slabs == 0
    assert client.infer("ident", {"inputs": [binary(8)]}, bytes(8)).status == 200


def test_a_bug_while_growing_is_500(server: Any, client: Any) -> None:
    """What nobody foresaw is logged and answered."""
    server.door.room_bytes = 0
    server.door.grow_error = RuntimeError("a bug")
    reply = client.infer("ident", {"inputs": [binary(8_000)]}, bytes(8_000))
    assert reply.status == 500


def test_stats_count_what_happened(server: Any, client: Any) -> None:
    """Connections, inferences, errors."""
    client.infer("ident", {"inputs": [binary(8)]}, bytes(8))
    client.infer("nope", {"inputs": [binary(8)]}, bytes(8))
    stats = server.stats()
    assert (stats.connections, stats.accepted, stats.inferences, stats.errors) == (1, 1, 1, 1)
    assert stats.in_flight == 0


def test_the_same_connection_serves_every_kind_in_turn(client: Any) -> None:
    """Large, small, JSON and ASGI requests do not disturb each other."""
    for size in itertools.islice(itertools.cycle([8, 200_000, 16, 1_000_000]), 12):
        reply = client.infer("soon", {"inputs": [binary(size)], **WANT_BINARY}, pattern(size))
        assert reply.binary == pattern(size)
        assert client.request("GET", "/v2/health/live").status == 200


def test_a_head_that_was_seen_before_means_the_same_again(server: Any, client: Any) -> None:
    """Equal heads with other bodies: whole, in pieces, pipelined, wrong, and right again."""
    plain = {"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": [1]}
    texts = [json.dumps({"id": str(i), "inputs": [plain]}).encode() for i in range(8)]
    messages = [head("soon", len(text)) + text for text in texts]
    for message in messages[:3]:
        client.send(message)
        assert client.read().status == 200
    client.send(messages[3][:-9])
    server.wait_until(lambda: any(c._receiving for c in server.server._state.connections))
    client.send(messages[3][-9:] + messages[4] + messages[5])
    assert [client.read().json["id"] for _ in range(3)] == ["3", "4", "5"]
    client.send(messages[6].replace(b"FP32", b"FOO!"))
    assert client.read().error == "invalid datatype for input INPUT0"
    client.send(messages[7])
    assert client.read().json["id"] == "7"
    for nbytes in (8, 8, 60_000, 60_000):
        reply = client.infer("ident", {"inputs": [binary(nbytes)], **WANT_BINARY}, pattern(nbytes))
        assert reply.binary == pattern(nbytes)
    assert [request.id for request in server.door.requests[:3]] == ["0", "1", "2"]
