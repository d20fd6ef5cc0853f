# SPDX-License-Identifier: Apache-2.0
"""What a connection does: order, limits, timeouts, disconnects, the end."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from typing import Any

import pytest

DOCUMENT = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": [1]}]}
TEXT = json.dumps(DOCUMENT).encode()


def infer(model: str, text: bytes = TEXT, more: str = "", version: str = "1.1") -> bytes:
    """Build an inference of a JSON document."""
    return (
        f"POST /v2/models/{model}/infer HTTP/{version}\r\nHost: x\r\n"
        f"Content-Length: {len(text)}\r\n{more}\r\n"
    ).encode() + text


def get(path: str = "/v2/health/live", more: str = "") -> bytes:
    """Build a GET."""
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n{more}\r\n".encode()


def with_id(number: int) -> bytes:
    """Build a document with an id."""
    return json.dumps({"id": str(number), **DOCUMENT}).encode()


# --- order ---------------------------------------------------------------------------------------


def test_pipelined_requests_are_answered_in_order(server: Any, client: Any) -> None:
    """Inferences that are answered at once, later, and ASGI requests, all mixed."""
    kinds = ["soon", "ident", "live", "nope", "ident", "soon", "live", "bad"] * 20
    out = []
    for number, kind in enumerate(kinds):
        if kind == "live":
            out.append(get())
        elif kind == "bad":
            out.append(infer("ident", b"{"))
        else:
            out.append(infer(kind, with_id(number)))
    threading.Thread(target=client.send, args=(b"".join(out),)).start()
    for number, kind in enumerate(kinds):
        reply = client.read()
        if kind in ("soon", "ident"):
            assert reply.json["id"] == str(number)
        else:
            assert reply.status == {"live": 200, "nope": 404, "bad": 400}[kind]
    assert client.request("GET", "/v2").status == 200


def test_thousands_of_pipelined_requests_need_no_deep_stack(client: Any) -> None:
    """Each is answered before its successor is looked at, in a loop."""
    count = 3000
    sender = threading.Thread(target=client.send, args=(infer("ident") * count,))
    sender.start()
    for _ in range(count):
        assert client.read().status == 200
    sender.join()


def test_a_waiting_request_stops_the_reading_of_more(server: Any, client: Any) -> None:
    """What a peer can make the server hold while one request runs is bounded."""
    big = json.dumps({"x": "y" * 50_000, **DOCUMENT}).encode()
    client.send(infer("held"))
    server.wait_until(lambda: len(server.door.held) == 1)
    client.sock.settimeout(0.3)
    sent = 0
    with pytest.raises(TimeoutError):
        while True:
            sent += client.sock.send(infer("soon", big))
            assert sent < 64 << 20
    client.sock.settimeout(20)
    held = server.call(lambda: sum(len(c.pipeline) for c in server.server._state.connections))
    assert held < 20
    server.call(server.door.answer_held)
    assert client.read().status == 200
    assert client.read().status == 200


# --- framing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [100, 300_000])
def test_expect_100_continue_is_answered_before_the_body(client: Any, size: int) -> None:
    """The client waits for it."""
    text = json.dumps({"x": "y" * size, **DOCUMENT}).encode()
    message = infer("ident", text, "Expect: 100-continue\r\n")
    client.send(message[: -len(text)])
    assert client.read().status == 100
    client.send(text)
    assert client.read().status == 200


def test_expect_100_continue_is_refused_for_what_cannot_work(start: Any) -> None:
    """The body is not asked for when it would be dropped, and the connection ends."""
    server = start(max_input_bytes=1000)
    bad = [
        ("Content-Length: 2000\r\n", 413),
        ("Content-Length: 20\r\nInference-Header-Content-Length: x\r\n", 400),
        ("Content-Length: 20\r\nContent-Encoding: br\r\n", 415),
    ]
    for fields, status in bad:
        with server.connect() as client:
            client.send(
                b"POST /v2/models/ident/infer HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
                + fields.encode()
                + b"\r\n"
            )
            reply = client.read()
            assert (reply.status, reply.headers["connection"]) == (status, "close")
            assert client.is_closed()


def test_a_pipelined_expectation_is_met_in_its_turn(server: Any, client: Any) -> None:
    """The interim response does not overtake the reply before it."""
    message = infer("ident", TEXT, "Expect: 100-continue\r\n")
    client.send(infer("held") + message[: -len(TEXT)])
    server.wait_until(lambda: len(server.door.held) == 1)
    server.call(server.door.answer_held)
    assert client.read().status == 200
    assert client.read().status == 100
    client.send(TEXT)
    assert client.read().status == 200


@pytest.mark.parametrize(
    ("more", "version"),
    [("Connection: close\r\n", "1.1"), ("", "1.0"), ("Connection: keep-alive\r\n", "1.0")],
)
def test_connections_end_when_they_should(client: Any, more: str, version: str) -> None:
    """Asked to, or by the rules of HTTP/1.0."""
    client.send(infer("ident", TEXT, more, version))
    reply = client.read()
    assert (reply.status, reply.headers["connection"]) == (200, "close")
    assert client.is_closed()


def test_what_follows_the_last_request_is_not_served(server: Any, client: Any) -> None:
    """After `Connection: close`, nothing reaches the door any more."""
    client.send(infer("ident", TEXT, "Connection: close\r\n") + infer("ident") * 5)
    assert client.read().status == 200
    assert client.is_closed()
    assert server.stats().inferences == 1


@pytest.mark.parametrize("fields", ["Upgrade: websocket", "Upgrade: h2c"])
def test_upgrades_are_not_offered(client: Any, fields: str) -> None:
    """The request is served as HTTP/1.1, and so are those behind it, however many."""
    more = f"Connection: Upgrade\r\n{fields}\r\n"
    large = json.dumps({"x": "y" * 300_000, **DOCUMENT}).encode()
    client.send(infer("ident", TEXT, more) + get(more=more) * 2 + infer("soon", large, more))
    client.send(infer("ident", TEXT, more)[: -len(TEXT)])
    assert [client.read().status for _ in range(4)] == [200] * 4
    client.send(TEXT + get())
    assert [client.read().status for _ in range(2)] == [200] * 2
    client.send(
        b"POST /v2/models/ident/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
        + more.encode()
        + b"\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(TEXT), TEXT)
        + get()
    )
    assert [client.read().status for _ in range(2)] == [200] * 2


def test_absolute_targets_and_queries_are_understood(client: Any) -> None:
    """As proxies send them."""
    for target in ("http://h:1/v2/models/ident/infer", "/v2/models/ident/infer?a=b"):
        assert client.request("POST", target, TEXT).status == 200
    assert client.request("POST", "/v2/models/%69dent/versions/1/infer", TEXT).status == 200


# --- everything else than inferences -------------------------------------------------------------


def test_health_says_what_the_door_says(server: Any, client: Any) -> None:
    """Live and ready are two things; bodies are empty."""
    for name in ("live", "ready"):
        reply = client.request("GET", f"/v2/health/{name}")
        assert (reply.status, reply.body) == (200, b"")
    server.door.ready = False
    assert client.request("GET", "/v2/health/ready").status == 503
    assert client.request("GET", "/v2/health/live?x=1").status == 200
    server.door.live = False
    assert client.request("GET", "/v2/health/live").status == 503


def test_models_are_described(client: Any) -> None:
    """Metadata, configuration and readiness, with and without a version."""
    for path in ("/v2/models/ident_batch", "/v2/models/ident_batch/versions/1"):
        assert client.request("GET", path).json == {
            "name": "ident_batch",
            "versions": ["1"],
            "platform": "python",
            "inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [-1, -1]}],
            "outputs": [{"name": "OUTPUT0", "datatype": "FP32", "shape": [-1, -1]}],
        }
        assert client.request("GET", f"{path}/config").json == {"name": "ident_batch"}
        assert client.request("GET", f"{path}/ready").status == 200
    assert client.request("GET", "/v2/models/nope").status == 404
    reply = client.request("GET", "/v2/models/nope/ready")
    assert (reply.status, reply.error) == (400, "Model version not ready")
    reply = client.request("GET", "/v2/models/ident/versions/9")
    assert reply.error == "Request for unknown model: 'ident' version 9 is not found"


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", "/v2/models/ident/infer", 405, "POST"),
        ("HEAD", "/v2/models/ident/infer", 405, "POST"),
        ("POST", "/v2/health/live", 405, "GET, HEAD"),
        ("DELETE", "/v2/models/ident", 405, "GET, HEAD"),
        ("OPTIONS", "/v2", 405, "GET, HEAD"),
        ("HEAD", "/v2", 200, None),
        ("HEAD", "/v2/models/ident/config", 200, None),
        ("GET", "/", 404, None),
        ("POST", "/v2/models/ident/versions/abc/infer", 404, None),
        ("POST", "/v2/models/a%2Fb/infer", 400, None),
        ("GET", "/v2/models/%2e%2e/config", 400, None),
    ],
)
def test_methods_and_paths(
    client: Any, method: str, path: str, status: int, allow: str | None
) -> None:
    """405 names what is allowed, 404 is for what does not exist, 400 for what cannot be."""
    reply = client.request(method, path)
    assert (reply.status, reply.headers.get("allow")) == (status, allow)
    assert client.request("GET", "/v2/health/live").status == 200


def test_the_body_of_an_unknown_path_is_dropped(client: Any) -> None:
    """However large, and the connection stays usable."""
    reply = client.request("POST", "/v2/nothing/here", bytes(3_000_000))
    assert reply.status == 404
    assert client.request("GET", "/v2/health/live").status == 200


# --- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", [1 << 20, 1000])
@pytest.mark.parametrize("many", [False, True])
def test_a_head_that_is_too_large_is_431(start: Any, piece: int, many: bool) -> None:
    """One long header or many, in one piece or several; complete or not."""
    server = start(max_head_bytes=8192)
    header = "".join(f"h{i}: {'x' * 40}\r\n" for i in range(300)) if many else f"h: {'x' * 12_000}"
    for end in ("\r\n\r\n", ""):
        with server.connect() as client:
            data = f"GET /v2 HTTP/1.1\r\nHost: x\r\n{header.rstrip()}{end}".encode()
            for at in range(0, len(data), piece):
                try:
                    client.send(data[at : at + piece])
                except ConnectionError:
                    break
            assert client.read().status == 431
            assert client.is_closed()
    with server.connect() as client:
        assert client.request("GET", "/v2", headers={"h": "x" * 7000}).status == 200


def test_a_large_head_behind_a_small_one_does_not_hide(start: Any) -> None:
    """The limit is per head, not per connection or read."""
    server = start(max_head_bytes=8192)
    with server.connect() as client:
        client.send(get(more=f"h: {'x' * 5000}\r\n") * 20)
        assert [client.read().status for _ in range(20)] == [200] * 20
        client.send(infer("soon") + get(more=f"h: {'x' * 9000}\r\n"))
        assert [client.read().status for _ in range(2)] == [200, 431]


def test_a_body_that_is_too_large_is_413(start: Any) -> None:
    """Row 86: by its Content-Length at once, else when it is; for every path."""
    server = start(max_input_bytes=10_000)
    for path in ("/v2/models/ident/infer", "/v2/nothing"):
        with server.connect() as client:
            client.send(
                f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 10001\r\n\r\n".encode()
            )
            reply = client.read()
            assert reply.status == 413
            assert "--http-max-input-size" in reply.error
            assert client.is_closed()
    for fields in ("", "Inference-Header-Content-Length: 99\r\n"):
        with server.connect() as client:
            client.send(
                b"POST /v2/models/ident/infer HTTP/1.1\r\nHost: x\r\n"
                b"Transfer-Encoding: chunked\r\n" + fields.encode() + b"\r\n"
            )
            chunk = b"3e8\r\n" + b" " * 1000 + b"\r\n"
            try:
                for _ in range(1000):
                    client.send(chunk)
            except ConnectionError:
                continue
            assert client.read().status == 413


@pytest.mark.parametrize("path", ["/v2/models/ident/infer", "/v2/models/ident/generate", "/v2/x"])
@pytest.mark.parametrize(
    "fields",
    [
        "Transfer-Encoding: gzip, chunked",
        "Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked",
    ],
)
def test_a_transfer_coding_that_is_not_known_is_501(start: Any, path: str, fields: str) -> None:
    """Its chunks are no body, but what a body was made into."""
    server = start()
    with server.connect() as client:
        client.send(f"POST {path} HTTP/1.1\r\nHost: x\r\n{fields}\r\n\r\n".encode())
        client.send(b"1\r\n{\r\n0\r\n\r\n")
        reply = client.read()
        assert reply.status == 501
        assert "expected 'chunked'; a compressed body is named by Content-Encoding" in reply.error
        assert client.is_closed()
    with server.connect() as client:
        client.send(
            infer("ident", b"", "Transfer-Encoding: Chunked\r\n").replace(
                b"Content-Length: 0\r\n", b""
            )
        )
        client.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(TEXT), TEXT))
        assert client.read().status == 200


def test_a_chunked_body_may_not_ask_for_more_than_the_limit(start: Any) -> None:
    """Row 86: nothing is allocated for what could never arrive."""
    server = start(max_input_bytes=10_000)
    document = {
        "inputs": [
            {
                "name": f"I{i}",
                "datatype": "UINT8",
                "shape": [9000],
                "parameters": {"binary_data_size": 9000},
            }
            for i in range(3)
        ]
    }
    text = json.dumps(document).encode()
    with server.connect() as client:
        client.send(
            b"POST /v2/models/ident/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
            b"Inference-Header-Content-Length: %d\r\n\r\n%x\r\n%b\r\n0\r\n\r\n"
            % (len(text), len(text), text)
        )
        assert client.read().status == 413
    assert server.door.most_slabs == 0


def test_too_many_connections_are_503(start: Any) -> None:
    """With Retry-After; as soon as one leaves, there is room again."""
    server = start(max_connections=3)
    clients = [server.connect() for _ in range(3)]
    for client in clients:
        assert client.request("GET", "/v2").status == 200
    with server.connect() as extra:
        reply = extra.read()
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        assert extra.is_closed()
    server.wait_until(lambda: server.server.stats().connections == 3)
    assert server.stats().refused == 1
    clients.pop().close()
    server.wait_until(lambda: server.server.stats().connections == 2)
    with server.connect() as client:
        assert client.request("GET", "/v2").status == 200
    for client in clients:
        client.close()


# --- timeouts ------------------------------------------------------------------------------------


def test_a_slow_head_is_408(start: Any) -> None:
    """Row 69: slowloris, one byte now and then."""
    server = start(head_timeout_s=0.2)
    with server.connect() as client:
        client.send(b"GET /v2 HTTP/1.1\r\nHo")
        assert client.read().status == 408
        assert client.is_closed()
    with server.connect() as client:
        assert client.request("GET", "/v2").status == 200
        client.send(b"G")
        assert client.read().status == 408
    assert server.stats().timeouts == 2


def test_an_idle_connection_is_closed(start: Any) -> None:
    """Without a word, whether it has sent a request or not."""
    server = start(keep_alive_timeout_s=0.2)
    with server.connect() as client:
        assert client.is_closed()
    with server.connect() as client:
        assert client.request("GET", "/v2").status == 200
        assert client.is_closed()
    assert server.stats().timeouts == 0


@pytest.mark.parametrize("size", [100, 1_000_000])
def test_a_slow_body_is_408(start: Any, size: int) -> None:
    """Row 69: a body that stops, collected or received straight into a slab."""
    server = start(body_grace_s=0.2, min_body_bytes_per_s=1e9)
    document = {"name": "INPUT0", "datatype": "FP32", "shape": [size // 4]}
    text = json.dumps({"inputs": [document | {"parameters": {"binary_data_size": size}}]}).encode()
    with server.connect() as client:
        client.send(
            b"POST /v2/models/ident/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n"
            b"Inference-Header-Content-Length: %d\r\n\r\n%b" % (len(text) + size, len(text), text)
        )
        client.send(bytes(size // 2))
        assert client.read().status == 408
        assert client.is_closed()
    assert server.door.slabs == 0
    assert server.door.most_slabs == (size > 4096)


def test_a_running_request_has_no_timeout_here(start: Any) -> None:
    """How long a model may take is not for the connection to say."""
    server = start(head_timeout_s=0.05, keep_alive_timeout_s=0.05, body_grace_s=0.05)
    with server.connect() as client:
        client.send(infer("held"))
        server.wait_until(lambda: len(server.door.held) == 1)
        server.run(asyncio.sleep(0.5))
        server.call(server.door.answer_held)
        assert client.read().status == 200


def test_a_peer_that_does_not_read_its_reply_is_cut_off(start: Any) -> None:
    """Row 68: what it holds is freed, and nobody else is held up."""
    server = start(write_timeout_s=0.3)
    size = 32 << 20
    document = {"name": "INPUT0", "datatype": "UINT8", "shape": [size]}
    text = json.dumps(
        {
            "inputs": [document | {"parameters": {"binary_data_size": size}}],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    with server.connect() as client, server.connect() as other:
        client.send(
            b"POST /v2/models/ident_uint8/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n"
            b"Inference-Header-Content-Length: %d\r\n\r\n%b" % (len(text) + size, len(text), text)
        )
        client.send(bytes(size))
        server.wait_until(lambda: server.server.stats().inferences == 1)
        assert other.request("GET", "/v2").status == 200
        server.wait_until(lambda: server.server.stats().connections == 1)
        assert other.request("GET", "/v2").status == 200
    assert server.stats().timeouts == 1


# --- disconnects ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["close", "half", "reset"])
def test_a_disconnect_cancels_the_request(server: Any, how: str) -> None:
    """Rows 65 and 66. A peer that ends its half is gone too: which of both it is, nobody can
    tell, and work for nobody must not go on.
    """
    client = server.connect()
    client.send(infer("held"))
    server.wait_until(lambda: len(server.door.held) == 1)
    if how == "half":
        client.sock.shutdown(socket.SHUT_WR)
        assert client.is_closed()
    elif how == "reset":
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    client.close()
    assert server.door.cancelled_event.wait(20)
    server.wait_until(lambda: server.server.stats().connections == 0)
    server.call(server.door.answer_held)  # the answer comes all the same, and goes nowhere
    stats = server.stats()
    assert (server.door.cancelled, stats.disconnects, stats.in_flight) == (1, 1, 0)


@pytest.mark.parametrize("sent", [0, 10_000, 900_000])
def test_a_disconnect_in_a_body_gives_the_memory_back(server: Any, sent: int) -> None:
    """Wherever it happens: in the parser, or straight from the socket."""
    size = 1_000_000
    document = {"name": "INPUT0", "datatype": "FP32", "shape": [size // 4]}
    text = json.dumps({"inputs": [document | {"parameters": {"binary_data_size": size}}]}).encode()
    with server.connect() as client:
        client.send(
            b"POST /v2/models/ident/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n"
            b"Inference-Header-Content-Length: %d\r\n\r\n%b" % (len(text) + size, len(text), text)
        )
        client.send(bytes(sent))
        server.wait_until(lambda: server.door.slabs == 1)
    server.wait_until(lambda: server.door.slabs == 0)
    assert server.stats().inferences == 0


def test_a_disconnect_while_the_arena_grows_leaves_nothing(server: Any) -> None:
    """The step that waits finds out, and gives back what it had."""
    gate = server.call(asyncio.Event)
    server.door.room_bytes = 10_000

    async def grow(nbytes: int) -> None:
        server.door.held_event.set()
        await gate.wait()
        server.door.room_bytes += nbytes

    server.door.grow = grow
    inputs = [
        {
            "name": f"I{i}",
            "datatype": "UINT8",
            "shape": [9000],
            "parameters": {"binary_data_size": 9000},
        }
        for i in range(2)
    ]
    text = json.dumps({"inputs": inputs}).encode()
    client = server.connect()
    client.send(
        b"POST /v2/models/ident/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n"
        b"Inference-Header-Content-Length: %d\r\n\r\n%b" % (len(text) + 18000, len(text), text)
    )
    assert server.door.held_event.wait(20)
    # Reading has stopped, so only a connection that is cut off is noticed now.
    server.call(lambda: [c.transport.abort() for c in list(server.server._state.connections)])
    client.close()
    server.wait_until(lambda: server.server.stats().connections == 0)
    server.call(gate.set)
    server.wait_until(lambda: server.door.slabs == 0)
    assert server.stats().inferences == 0


def test_a_disconnect_drops_what_is_pipelined(server: Any) -> None:
    """None of it reaches the door."""
    client = server.connect()
    client.send(infer("held") + infer("ident") * 10 + get() * 3)
    server.wait_until(lambda: len(server.door.held) == 1)
    server.call(lambda: [c.transport.abort() for c in list(server.server._state.connections)])
    client.close()
    server.wait_until(lambda: server.server.stats().connections == 0)
    assert server.stats().inferences == 1
    server.call(server.door.answer_held)


# --- bytes that are no HTTP ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "garbage",
    [b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n", b"\0" * 100],
)
def test_garbage_is_400_after_what_came_before_it(server: Any, client: Any, garbage: bytes) -> None:
    """The replies of good requests are not lost, and keep their order."""
    client.send(infer("soon") + infer("held") + infer("soon") + garbage)
    assert client.read().status == 200
    server.wait_until(lambda: len(server.door.held) == 1)
    server.call(server.door.answer_held)
    assert [client.read().status for _ in range(3)] == [200, 200, 400]
    assert client.is_closed()


@pytest.mark.parametrize("path", ["/v2/models/ident/infer", "/v2/nothing"])
def test_a_broken_chunk_ends_the_request_with_400(server: Any, client: Any, path: str) -> None:
    """What follows cannot be told from the body any more."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    client.send(head.encode() + b"5\r\nabcde\r\nNONSENSE\r\n")
    statuses = [client.read().status]
    if statuses == [404]:
        assert client.is_closed()
        return
    assert statuses == [400]
    assert client.is_closed()


@pytest.mark.parametrize(
    "fields",
    [
        "Content-Length: 5\r\nContent-Length: 6\r\n",
        "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        "Content-Length: -1\r\n",
        "Content-Length: 99999999999999999999999\r\n",
        "Transfer-Encoding: chunked, gzip\r\n",
    ],
)
def test_ambiguous_lengths_are_refused(client: Any, fields: str) -> None:
    """Nobody smuggles a request past a proxy through here."""
    client.send(f"POST /v2/models/ident/infer HTTP/1.1\r\nHost: x\r\n{fields}\r\n12345".encode())
    assert client.read().status == 400
    assert client.is_closed()


BROKEN = b"%b %b HTTP/1.1\r\nHost: x\r\n%b\r\n12345"
SMUGGLED = b"Content-Length: 5\r\nContent-Length: 6\r\n"


@pytest.mark.parametrize("path", [b"/v1/completions", b"/v1/chat/completions", b"/v1/models"])
@pytest.mark.parametrize("fields", [SMUGGLED, b"bad header\r\n", b"X: " + b"x" * 70_000 + b"\r\n"])
def test_what_cannot_be_read_is_refused_in_the_words_of_its_api(
    client: Any, path: bytes, fields: bytes
) -> None:
    """OpenAI's clients find an object in `error`, those of the v2 protocol a text."""
    client.send(BROKEN % (b"POST", path, fields))
    reply = client.read()
    error = json.loads(reply.body)["error"]
    assert reply.status in (400, 431)
    assert error["type"] == "invalid_request_error" and error["message"]
    assert client.is_closed()


def test_what_cannot_be_read_elsewhere_is_refused_with_a_text(client: Any) -> None:
    """As ever."""
    client.send(BROKEN % (b"POST", b"/v2/models/ident/infer", SMUGGLED))
    assert isinstance(json.loads(client.read().body)["error"], str)


# --- the end -------------------------------------------------------------------------------------


def test_a_stop_answers_what_was_accepted(server: Any) -> None:
    """Running and pipelined requests are answered, idle connections closed, new ones refused."""
    idle, busy = server.connect(), server.connect()
    assert idle.request("GET", "/v2").status == 200
    busy.send(infer("held") + infer("soon"))
    server.wait_until(lambda: len(server.door.held) == 1)
    stopping = asyncio.run_coroutine_threadsafe(server.server.stop(20), server.loop)
    assert idle.is_closed()
    with pytest.raises(OSError):
        server.connect()
    assert not stopping.done()
    server.call(server.door.answer_held)
    assert busy.read().status == 200
    last = busy.read()
    assert (last.status, last.headers["connection"]) == (200, "close")
    assert busy.is_closed()
    stopping.result(20)
    idle.close()
    busy.close()


def test_a_stop_cuts_off_what_does_not_end(server: Any) -> None:
    """After the grace time, and the request is cancelled."""
    client = server.connect()
    client.send(infer("held"))
    server.wait_until(lambda: len(server.door.held) == 1)
    server.run(server.server.stop(0.1))
    assert client.is_closed()
    client.close()
    assert server.door.cancelled == 1
    server.call(server.door.answer_held)


def test_a_stop_waits_for_an_upload_within_the_grace_time(server: Any) -> None:
    """A request whose body is under way counts as accepted."""
    client = server.connect()
    message = infer("ident")
    client.send(message[:-5])
    server.wait_until(lambda: any(c._receiving for c in server.server._state.connections))
    stopping = asyncio.run_coroutine_threadsafe(server.server.stop(20), server.loop)
    server.wait_until(lambda: not server.server._listeners)
    client.send(message[-5:])
    reply = client.read()
    assert (reply.status, reply.headers["connection"]) == (200, "close")
    stopping.result(20)
    client.close()


def test_a_server_starts_once_and_stops_twice(server: Any) -> None:
    """A second start is a mistake, a second stop is not."""
    with pytest.raises(RuntimeError, match="already"):
        server.run(server.server.start())
    assert server.call(lambda: server.server.addresses) == [("127.0.0.1", server.port)]
    server.run(server.server.stop())
    server.run(server.server.stop())
