# SPDX-License-Identifier: Apache-2.0
"""Generate and streams of events through real sockets, with a door that the test answers for."""

from __future__ import annotations

import gzip
import json
import socket
import threading
from typing import Any

import pytest

from actorserve.errors import DecoupledModel, InternalError, InvalidArgument, Unavailable
from actorserve.triton.inference import InferTensor

WAIT_S = 20.0
INPUT = {"INPUT0": [1.5]}
HALF = InferTensor("OUTPUT0", "FP16", (1,), memoryview(b"ab"))


def generate(
    model: str, document: Any = INPUT, *, version: str = "1.1", action: str = "generate_stream"
) -> bytes:
    """Build a request."""
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    head = f"POST /v2/models/{model}/{action} HTTP/{version}\r\nHost: x\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def read_head(client: Any) -> tuple[int, dict[str, str]]:
    """Read the head of a reply."""
    status = int(client._file.readline().split()[1])
    headers = {}
    while (line := client._file.readline()) not in (b"\r\n", b""):
        name, _, value = line.decode().partition(":")
        headers[name.lower()] = value.strip()
    return status, headers


def read_chunk(client: Any) -> bytes:
    """Read one chunk; the last one is empty."""
    size = int(client._file.readline(), 16)
    data = client._file.read(size)
    assert client._file.readline() == b"\r\n"
    assert len(data) == size
    return bytes(data)


def read_rest(client: Any) -> bytes:
    """Read all chunks that are left."""
    pieces = []
    while piece := read_chunk(client):
        pieces.append(piece)
    return b"".join(pieces)


def events(data: bytes) -> list[Any]:
    """Return the documents of whole events."""
    assert data.endswith(b"\n\n") or not data
    return [json.loads(each.removeprefix(b"data: ")) for each in data.split(b"\n\n")[:-1]]


def numbers(data: bytes) -> list[Any]:
    """Return the values of whole events."""
    return [each["OUTPUT0"] for each in events(data)]


def begin(server: Any, client: Any, **more: Any) -> Any:
    """Ask for a stream; returns the door's side of it."""
    known = len(server.door.streams)
    client.send(generate("stream", **more))
    server.wait_until(lambda: len(server.door.streams) > known)
    return server.door.streams[-1]


# --- streams -------------------------------------------------------------------------------------


def test_responses_are_events_as_they_come(server: Any, client: Any) -> None:
    """Each is there before the next one is sent; then the connection serves on."""
    stream = begin(server, client)
    for number in range(3):
        server.call(stream.answer, number)
        if not number:
            status, headers = read_head(client)
            assert status == 200
            assert headers == {
                "content-type": "text/event-stream; charset=utf-8",
                "transfer-encoding": "chunked",
            }
        expected = f'data: {{"OUTPUT0":{number}.0,"model_name":"stream","model_version":"1"}}\n\n'
        assert read_chunk(client).decode() == expected
        server.wait_until(lambda n=number: stream.taken == n + 1)
    server.call(lambda: stream.answer(final=True))
    assert read_chunk(client) == b""
    assert client.request("GET", "/v2/health/live").status == 200
    assert server.stats().in_flight == 0
    assert server.stats().inferences == 1


def test_what_comes_in_one_turn_leaves_together(server: Any, client: Any) -> None:
    """Many responses and the end, with one write."""
    stream = begin(server, client)

    def burst() -> None:
        for number in range(100):
            stream.answer(number)
        stream.answer(final=True)

    server.call(burst)
    assert read_head(client)[0] == 200
    assert numbers(read_chunk(client)) == list(range(100))
    assert read_chunk(client) == b""


def test_no_response_is_an_empty_stream(server: Any, client: Any) -> None:
    """Status 200 and nothing."""
    stream = begin(server, client)
    server.call(lambda: stream.answer(final=True))
    assert read_head(client)[0] == 200
    assert read_chunk(client) == b""


@pytest.mark.parametrize("final", [True, False])
def test_an_error_as_the_first_response_is_the_reply(server: Any, client: Any, final: bool) -> None:
    """With its status, as for infer; nothing else of that request is sent."""
    stream = begin(server, client)
    error = Unavailable("the stub died", 3.0)
    server.call(lambda: stream.answer(final=final, error=error))
    reply = client.read()
    assert (reply.status, reply.error) == (503, "the stub died")
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["retry-after"] == "3"
    assert stream.is_gone is not final
    server.call(lambda: stream.answer(5, final=True))
    assert client.request("GET", "/v2/health/live").status == 200
    assert server.stats().in_flight == 0


def test_a_later_error_is_an_event(server: Any, client: Any) -> None:
    """The stream goes on, if the model does."""
    stream = begin(server, client)

    def answer() -> None:
        stream.answer(1)
        stream.answer(error=InternalError("no\nluck"))
        stream.answer(2)
        stream.answer(error=InternalError("dead"), final=True)

    server.call(answer)
    assert read_head(client)[0] == 200
    seen = events(read_rest(client))
    assert [each.get("OUTPUT0", each.get("error")) for each in seen] == [1, "no\nluck", 2, "dead"]


def test_an_output_that_json_cannot_carry_is_an_error_of_its_own(start: Any) -> None:
    """As the status, or as an event."""
    server = start()
    for before in (0, 1):
        with server.connect() as client:
            client.send(generate("ident_fp16", {}))
            assert client.read().status == 400
            stream = begin(server, client)

            def answer(before: int = before, stream: Any = stream) -> None:
                for _ in range(before):
                    stream.answer(1)
                stream.answer(1, outputs=[HALF])
                stream.answer(final=True)

            server.call(answer)
            if before:
                assert read_head(client)[0] == 200
                assert "FP16" in events(read_rest(client))[1]["error"]
            else:
                reply = client.read()
                assert reply.status == 400
                assert "sending FP16 data via JSON is not supported" in reply.error


def test_a_model_that_is_not_decoupled_streams_its_one_response(client: Any) -> None:
    """Whether it answers at once, in a turn of its own, or with an error."""
    for model in ("ident", "soon"):
        client.send(generate(model))
        assert read_head(client)[0] == 200
        assert numbers(read_rest(client)) == [1.5]
    client.send(generate("failing"))
    assert client.read().status == 500


@pytest.mark.parametrize(
    ("model", "document", "status", "text"),
    [
        ("nope", INPUT, 404, "unknown model: 'nope'"),
        ("stream", {}, 400, "expected 1 inputs but got 0 inputs"),
        ("stream", {"INPUT0": "x"}, 400, "Expected `float`, got `str`"),
        ("stream", b"{", 400, "failed to parse the request JSON"),
        ("busy", INPUT, 503, "the queue is full"),
        ("crashing", INPUT, 500, "the HTTP front end failed"),
        ("failing", INPUT, 500, "the model failed"),
    ],
)
@pytest.mark.parametrize("action", ["generate", "generate_stream"])
def test_what_fails_before_the_stream_has_a_status(
    server: Any, client: Any, model: str, document: Any, status: int, text: str, action: str
) -> None:
    """And the connection serves on."""
    client.send(generate(model, document, action=action))
    reply = client.read()
    assert reply.status == status
    assert text in reply.error
    assert client.request("GET", "/v2/health/live").status == 200
    assert server.stats().in_flight == 0


def test_large_responses_keep_their_order(server: Any, client: Any) -> None:
    """Their JSON is made beside the loop, that of small ones at once."""
    stream = begin(server, client)
    sizes = [1, 500_000, 1, 20_000, 20_000, 1]  # the largest leaves in pieces

    def answer() -> None:
        for number, size in enumerate(sizes):
            stream.answer(*[number] * size)
        stream.answer(error=InternalError("last"), final=True)

    server.call(answer)
    assert read_head(client)[0] == 200
    seen = events(read_rest(client))
    assert seen.pop() == {"error": "last"}
    first = [each["OUTPUT0"] for each in seen]
    assert [len(v) if isinstance(v, list) else 1 for v in first] == sizes
    assert [v[0] if isinstance(v, list) else v for v in first] == list(range(6))


def test_a_fault_while_a_large_response_is_encoded_ends_the_stream(
    server: Any, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an event, as the status is out; the request is cancelled."""
    stream = begin(server, client)
    server.call(stream.answer, 1)
    assert read_head(client)[0] == 200
    assert numbers(read_chunk(client)) == [1]

    def fault(*_: Any) -> bytes:
        raise RuntimeError("a bug")

    monkeypatch.setattr("actorserve.frontend.v2_generate.GenerateEncoder.encode", fault)
    server.call(lambda: stream.answer(*[1.0] * 20_000))
    seen = events(read_rest(client))
    assert "the HTTP front end failed" in seen[0]["error"]
    assert stream.is_gone
    assert client.request("GET", "/v2/health/live").status == 200


# --- other versions and methods ------------------------------------------------------------------


def test_a_peer_of_http_1_0_gets_no_chunks(server: Any, client: Any) -> None:
    """The end of the connection is the end of the stream."""
    stream = begin(server, client, version="1.0")
    for number in range(2):
        server.call(stream.answer, number)
    server.call(lambda: stream.answer(final=True))
    status, headers = read_head(client)
    assert status == 200
    assert "transfer-encoding" not in headers
    assert headers["connection"] == "close"
    assert numbers(client._file.read()) == [0, 1]


@pytest.mark.parametrize("action", ["generate", "generate_stream"])
@pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE"])
def test_other_methods_are_refused(client: Any, action: str, method: str) -> None:
    """Only POST asks for something."""
    reply = client.request(method, f"/v2/models/stream/{action}")
    assert reply.status == 405
    assert reply.headers["allow"] == "POST"


def test_a_version_may_be_named(client: Any) -> None:
    """In the path."""
    client.send(generate("ident/versions/1", action="generate"))
    assert client.read().json["OUTPUT0"] == 1.5
    client.send(generate("ident/versions/2", action="generate"))
    assert client.read().status == 404


# --- generate ------------------------------------------------------------------------------------


@pytest.mark.parametrize("final", [True, False])
def test_generate_waits_for_the_end(server: Any, client: Any, final: bool) -> None:
    """One response, with the end or before it."""
    stream = begin(server, client, action="generate", document={**INPUT, "id": "7"})
    server.call(lambda: stream.answer(2.5, final=final))
    if not final:
        server.call(lambda: stream.answer(final=True))
    reply = client.read()
    assert reply.headers["content-type"] == "application/json"
    expected = {"OUTPUT0": 2.5, "id": "7", "model_name": "stream", "model_version": "1"}
    assert reply.json == expected
    assert server.stats().in_flight == 0


@pytest.mark.parametrize("count", [0, 2])
def test_generate_takes_exactly_one_response(server: Any, client: Any, count: int) -> None:
    """None is an error at the end, a second one is an error at once."""
    stream = begin(server, client, action="generate")
    for number in range(count):
        server.call(stream.answer, number)
    if not count:
        server.call(lambda: stream.answer(final=True))
    reply = client.read()
    assert reply.status == 400
    assert reply.error == (
        "generate expects model to produce exactly 1 response, use generate stream for model "
        "that generates various number of responses"
    )
    assert stream.is_gone == bool(count)
    assert client.request("GET", "/v2/health/live").status == 200


def test_generate_of_large_outputs_and_compressed(server: Any, client: Any) -> None:
    """Its JSON is made beside the loop; who accepts gzip gets it."""
    client.send(generate("ident", {"INPUT0": [1.0] * 100_000}, action="generate"))
    assert client.read().json["OUTPUT0"] == [1.0] * 100_000
    body = json.dumps(INPUT).encode()
    reply = client.request("POST", "/v2/models/ident/generate", body, {"Accept-Encoding": "gzip"})
    assert reply.headers["content-encoding"] == "gzip"


def test_generate_reports_an_error_in_the_middle(server: Any, client: Any) -> None:
    """It is what the reply is made of."""
    stream = begin(server, client, action="generate")
    server.call(stream.answer, 1)
    server.call(lambda: stream.answer(error=InvalidArgument("bad")))
    assert client.read().error == "bad"
    assert stream.is_gone


def test_a_model_that_cannot_be_described_now_cannot_be_mapped(
    server: Any, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Infer leaves it to the door, which still refuses a decoupled model in the known words."""

    def model_info(*_: Any) -> Any:
        raise Unavailable("not now")

    def submit(*_: Any) -> Any:
        raise DecoupledModel("ask for a stream")

    monkeypatch.setattr(server.door, "model_info", model_info)
    monkeypatch.setattr(server.door, "submit", submit)
    for action in ("generate", "generate_stream"):
        client.send(generate("stream", action=action))
        reply = client.read()
        assert (reply.status, reply.error) == (503, "not now")
    reply = client.infer("stream", {"inputs": []})
    assert reply.status == 501
    assert reply.error == (
        "HTTP end point doesn't support models with decoupled transaction policy"
    )
    assert server.stats().in_flight == 0


def test_large_and_compressed_documents_are_read_beside_the_loop(client: Any) -> None:
    """As those of infer are; a binary part has no meaning here."""
    large = {"INPUT0": [1.0] * 100_000}
    client.send(generate("ident", large))
    assert read_head(client)[0] == 200
    assert numbers(read_rest(client)) == [large["INPUT0"]]
    packed = gzip.compress(json.dumps(large).encode())
    fields = {"Content-Encoding": "gzip", "Inference-Header-Content-Length": "5"}
    reply = client.request("POST", "/v2/models/ident/generate", packed, fields)
    assert reply.json["OUTPUT0"] == large["INPUT0"]


# --- the peer's pace -----------------------------------------------------------------------------


def narrow(server: Any) -> Any:
    """Open a connection that takes little before it is read."""
    client = server.connect()
    client.sock.close()
    client._file.close()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(WAIT_S)
    sock.connect(("127.0.0.1", server.port))
    client.sock, client._file = sock, sock.makefile("rb")
    return client


def fill(server: Any, stream: Any, most: int = 100_000) -> int:
    """Answer until nothing more is taken; returns how many were sent."""
    sent = 0

    def answer() -> None:
        nonlocal sent
        for _ in range(50):
            stream.answer(*[float(sent)] * 200)
            sent += 1

    while sent < most:
        server.call(answer)
        server.call(lambda: None)  # the turn in which it is written
        if stream.taken < sent:
            return sent
    raise AssertionError("the peer that does not read takes everything")


def test_a_slow_reader_gives_no_credit_and_holds_up_nobody(server: Any) -> None:
    """Only what the transport has taken below its mark counts; then everything is there."""
    with narrow(server) as slow, server.connect() as quick:
        stalled = begin(server, slow)
        sent = fill(server, stalled)
        taken = stalled.taken
        other = begin(server, quick)
        for number in range(200):
            server.call(other.answer, number)
        server.wait_until(lambda: other.taken == 200)
        server.call(lambda: other.answer(final=True))
        assert read_head(quick)[0] == 200
        assert numbers(read_rest(quick)) == list(range(200))
        assert stalled.taken == taken
        server.call(lambda: stalled.answer(final=True))
        assert read_head(slow)[0] == 200
        assert [each[0] for each in numbers(read_rest(slow))] == list(range(sent))
        server.wait_until(lambda: server.server.stats().in_flight == 0)
        assert slow.request("GET", "/v2/health/live").status == 200


def test_credit_comes_back_when_a_slow_reader_reads(server: Any) -> None:
    """Without another response to push it."""
    with narrow(server) as client:
        stream = begin(server, client)
        sent = fill(server, stream)
        assert read_head(client)[0] == 200
        seen = b""
        while seen.count(b"\n\n") < sent:
            seen += read_chunk(client)
        server.wait_until(lambda: stream.taken == sent)
        server.call(lambda: stream.answer(final=True))
        assert read_chunk(client) == b""


def test_a_reader_that_takes_nothing_is_cut_off(start: Any) -> None:
    """After the write timeout, and its request is cancelled."""
    server = start(write_timeout_s=0.2)
    with narrow(server) as client:
        stream = begin(server, client)
        fill(server, stream)
        server.wait_until(lambda: stream.is_gone)
        assert server.stats().timeouts == 1


# --- peers that leave ----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["close", "reset", "half"])
@pytest.mark.parametrize("action", ["generate", "generate_stream"])
@pytest.mark.parametrize("sent", [0, 1])
def test_a_peer_that_leaves_cancels_at_once(
    server: Any, client: Any, how: str, action: str, sent: int
) -> None:
    """Before the first response and after it, without another write."""
    stream = begin(server, client, action=action)
    for number in range(sent):
        server.call(stream.answer, number)
    leave(client, how)
    server.wait_until(lambda: stream.is_gone)
    assert server.stats().in_flight == 0
    assert server.stats().disconnects == 1
    server.wait_until(lambda: server.server.stats().connections == 0)


@pytest.mark.parametrize("how", ["close", "reset", "half"])
def test_a_slow_reader_that_leaves_cancels_at_once(server: Any, how: str) -> None:
    """Whatever is still to be written."""
    client = narrow(server)
    stream = begin(server, client)
    fill(server, stream)
    leave(client, how)
    server.wait_until(lambda: stream.is_gone)
    server.wait_until(lambda: server.server.stats().connections == 0)
    client.close()


@pytest.mark.parametrize("behind", [1, 2, 3000])
def test_a_peer_that_leaves_cancels_whatever_waits_behind_its_stream(
    server: Any, client: Any, behind: int
) -> None:
    """Requests that are pipelined do not hide its end."""
    stream = begin(server, client)
    client.send(generate("held") * behind if behind < 3000 else generate("held") + bytes(3000))
    server.call(stream.answer, 1)
    assert read_head(client)[0] == 200
    read_chunk(client)
    leave(client, "half")
    server.wait_until(lambda: stream.is_gone)
    assert not server.door.held_event.is_set()


def leave(client: Any, how: str) -> None:
    """End a connection from the peer's side."""
    if how == "half":
        client.sock.shutdown(socket.SHUT_WR)
        return
    if how == "reset":
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    client.close()


# --- turns ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [7, 1000, 1 << 20])
def test_requests_behind_a_stream_wait_for_its_end(server: Any, client: Any, step: int) -> None:
    """However they arrive: whole, in pieces, more than is read ahead, a stream behind a stream."""
    first = begin(server, client)
    server.call(first.answer, 0)
    assert read_head(client)[0] == 200
    assert numbers(read_chunk(client)) == [0]
    large = {"INPUT0": [1.0] * (100 if step == 7 else 40_000)}
    behind = generate("ident") + generate("stream") + generate("ident", large)
    behind += b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n" + generate("soon")

    def send() -> None:
        for at in range(0, len(behind), step):
            client.sock.sendall(behind[at : at + step])

    sender = threading.Thread(target=send)
    sender.start()
    server.call(lambda: first.answer(1, final=True))
    assert numbers(read_rest(client)) == [1]
    assert read_head(client)[0] == 200
    assert numbers(read_rest(client)) == [1.5]
    server.wait_until(lambda: len(server.door.streams) == 2)
    second = server.door.streams[1]
    server.call(lambda: second.answer(2, final=True))
    assert read_head(client)[0] == 200
    assert numbers(read_rest(client)) == [2]
    assert read_head(client)[0] == 200
    assert numbers(read_rest(client)) == [large["INPUT0"]]
    assert client.read().status == 200
    assert read_head(client)[0] == 200
    assert numbers(read_rest(client)) == [1.5]
    sender.join(WAIT_S)
    assert server.stats().in_flight == 0


def test_reading_behind_a_stream_is_bounded(server: Any, client: Any) -> None:
    """A peer cannot make the server hold what it likes."""
    stream = begin(server, client)
    client.sock.settimeout(0.2)
    sent = 0
    with pytest.raises(TimeoutError):
        for _ in range(1000):
            client.sock.sendall(generate("ident", action="generate") * 1000)
            sent += 1
    assert sent < 200  # what the kernel's buffers hold
    server.call(lambda: stream.answer(final=True))


def test_garbage_behind_a_stream_does_not_harm_it(server: Any, client: Any) -> None:
    """It is refused in its turn."""
    stream = begin(server, client)
    client.send(b"\x00garbage\r\n\r\n")
    server.call(lambda: stream.answer(1, final=True))
    assert read_head(client)[0] == 200
    assert numbers(read_rest(client)) == [1]
    assert client.read().status == 400
    assert client.is_closed()


def test_a_long_stream_blames_nobody_for_what_waits(start: Any) -> None:
    """Half a head and half a body behind a stream run into no timeout of theirs."""
    server = start(head_timeout_s=0.1, body_grace_s=0.1, min_body_bytes_per_s=1e9)
    with server.connect() as client:
        stream = begin(server, client)
        whole = generate("ident")
        client.send(whole + whole[:20])
        for number in range(5):
            server.wait_until(_sweeps(server, 0.1))
            server.call(stream.answer, number)
        server.call(lambda: stream.answer(final=True))
        assert read_head(client)[0] == 200
        assert numbers(read_rest(client)) == list(range(5))
        client.send(whole[20:])
        for _ in range(2):
            assert read_head(client)[0] == 200
            assert numbers(read_rest(client)) == [1.5]


def _sweeps(server: Any, seconds: float) -> Any:
    end_s = server.loop.time() + seconds
    return lambda: server.loop.time() > end_s


# --- the end of the server -----------------------------------------------------------------------


def test_a_stop_lets_a_stream_end(server: Any, client: Any) -> None:
    """Within the grace time; then the connection is closed."""
    stream = begin(server, client)
    server.call(stream.answer, 0)
    assert read_head(client)[0] == 200
    assert numbers(read_chunk(client)) == [0]

    async def stop() -> None:
        stopping = server.loop.create_task(server.server.stop(WAIT_S))
        server.loop.call_later(0.05, lambda: stream.answer(1, final=True))
        await stopping

    server.run(stop())
    assert numbers(read_rest(client)) == [1]
    assert client.is_closed()


def test_a_stop_cuts_off_a_stream_that_does_not_end(server: Any, client: Any) -> None:
    """And cancels its request."""
    stream = begin(server, client)
    server.call(stream.answer, 0)
    server.run(server.server.stop(0.05))
    assert stream.is_gone
    assert server.door.cancelled == 1
