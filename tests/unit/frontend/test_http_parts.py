# SPDX-License-Identifier: Apache-2.0
"""The pure parts of the HTTP front end: paths, heads, places of a body, the watch, access."""

from __future__ import annotations

import socket

import pytest

from actorserve.errors import InvalidArgument
from actorserve.frontend.http_access import may_administer
from actorserve.frontend.http_body import BodySink, Scatter
from actorserve.frontend.http_head import (
    InferHead,
    content_length_of,
    expects_continue,
    fill_head,
    pick,
    reply_head,
)
from actorserve.frontend.http_memo import HeadMemo, KnownHead, is_plain
from actorserve.frontend.http_route import ModelPath, match_model_path
from actorserve.frontend.http_settings import HttpSettings
from actorserve.frontend.http_watch import Phase, PhaseWatch, Verdict
from actorserve.frontend.malloc import tune_malloc
from actorserve.frontend.v2_response import EncodedBody


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Nothing here opens anything, so the costly look for leaks is left out."""


# --- paths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (b"/v2/models/m", ModelPath("m", "", "")),
        (b"/v2/models/m/infer", ModelPath("m", "", "infer")),
        (b"/v2/models/m/versions/3/infer", ModelPath("m", "3", "infer")),
        (b"/v2/models/m/versions/3", ModelPath("m", "3", "")),
        (b"/v2/models/m/ready", ModelPath("m", "", "ready")),
        (b"/v2/models/m/config", ModelPath("m", "", "config")),
        (b"/v2/models/a%20b/infer", ModelPath("a b", "", "infer")),
        (b"/v2/models/%C3%A9", ModelPath("é", "", "")),
        (b"/v2/models/m/versions/abc/ready", None),
        (b"/v2/models/m/versions/-1/infer", None),
        (b"/v2/models/m/versions/" + b"1" * 40 + b"/infer", None),
        (b"/v2/models/m/infer/", None),
        (b"/v2/models//infer", None),
        (b"/v2/models/", None),
        (b"/v2/models/m/infer\n", None),
        (b"/v3/models/m/infer", None),
    ],
)
def test_paths_name_a_model_a_version_and_an_action(
    path: bytes, expected: ModelPath | None
) -> None:
    """What is not a model's path is nothing."""
    assert match_model_path(path) == expected


@pytest.mark.parametrize(
    "name",
    [
        b"..",
        b".",
        b"%2e%2e",
        b"a%2fb",
        b"..%2f..%2fetc",
        b"a%5cb",
        b"a%00b",
        b"a%0Ab",
        b"a%1b[31m",
        b"%ff",
        b"x" * 300,
    ],
)
def test_names_that_reach_elsewhere_are_refused(name: bytes) -> None:
    """Rows 88 and 93: neither another folder nor a forged log line; and the text is escaped."""
    with pytest.raises(InvalidArgument, match="invalid model name") as caught:
        match_model_path(b"/v2/models/" + name + b"/infer")
    assert caught.value.message.isprintable()


# --- heads ---------------------------------------------------------------------------------------


def head_of(length: int, **fields: bytes) -> InferHead:
    """Read a head from its fields."""
    head = InferHead(length)
    fill_head(head, {name.replace("_", "-").encode(): value for name, value in fields.items()})
    return head


def test_the_head_of_an_inference_is_read() -> None:
    """Sizes, codings, expectations."""
    fields = pick(
        [(b"host", b"x"), (b"content-length", b"12"), (b"expect", b"100-Continue"), (b"x", b"y")]
    )
    assert content_length_of(fields) == 12
    assert expects_continue(fields)
    assert content_length_of(pick([(b"transfer-encoding", b"chunked")])) == -1
    assert content_length_of({}) == 0
    head = head_of(
        12, inference_header_content_length=b" 7", content_encoding=b"gzip", accept_encoding=b"gzip"
    )
    assert (head.json_bytes, head.encoding, head.accepted) == (7, "gzip", "gzip")


@pytest.mark.parametrize("value", [b"-1", b"abc", b"", b"1.5", b"0x10", b"9" * 30, b"13"])
def test_an_impossible_document_size_is_refused(value: bytes) -> None:
    """Row 86: negative, not a number, beyond the body."""
    with pytest.raises(InvalidArgument, match="Inference-Header-Content-Length"):
        head_of(12, inference_header_content_length=value)


def test_reply_heads_are_complete() -> None:
    """One head for each kind of body."""
    assert reply_head(200, EncodedBody([], 5), True) == (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 5\r\n\r\n"
    )
    assert reply_head(200, EncodedBody([], 5, 3, "gzip"), False) == (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\n"
        b"inference-header-content-length: 3\r\ncontent-encoding: gzip\r\nconnection: close\r\n"
        b"content-length: 5\r\n\r\n"
    )


# --- known heads ---------------------------------------------------------------------------------

HEAD = b"POST /v2/models/m/infer HTTP/1.1\r\nContent-Length: 5\r\n\r\n"
KNOWN = KnownHead(ModelPath("m", "", "infer"), InferHead(5))


def test_a_known_head_is_found_with_any_body_of_its_length() -> None:
    """Exactly one whole request, or nothing."""
    memo = HeadMemo()
    assert memo.find(HEAD + b"12345") is None
    memo.keep(HEAD + b"12345", KNOWN)
    assert memo.find(HEAD + b"abcde") == (KNOWN, b"abcde")
    for data in (HEAD, HEAD + b"1234", HEAD + b"123456", HEAD[1:] + b"12345", b"", b"\r\n\r\n"):
        assert memo.find(data) is None


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n\r\n" + HEAD + b"12345",
        HEAD + b"12345" + HEAD + b"12345",
        HEAD.replace(b"\r\n", b"\n") + b"1\r\n\r\n",
        HEAD[:-4] + b"\r\nx: " + b"y" * 1100 + b"\r\n\r\n12345",
        b"GET" + HEAD[4:] + b"12345",
    ],
)
def test_a_head_whose_border_is_in_doubt_is_not_kept(data: bytes) -> None:
    """Whatever the parser made of it."""
    memo = HeadMemo()
    memo.keep(data, KNOWN)
    assert memo.find(data) is None
    assert memo.find(b"\r\n\r\n12345") is None


def test_only_so_many_heads_are_kept() -> None:
    """A client that makes up a new head for each request costs a bounded amount."""
    memo = HeadMemo()
    for number in range(3000):
        memo.keep(HEAD[:-2] + b"x: %d\r\n\r\n12345" % number, KNOWN)
    assert len(memo._heads) <= 1024


def test_plain_heads_negotiate_nothing() -> None:
    """Neither an expectation, nor an upgrade, nor chunks."""
    assert is_plain({b"content-length": b"5", b"accept-encoding": b"gzip"})
    for name in (b"expect", b"upgrade", b"transfer-encoding"):
        assert not is_plain({name: b"x"})


# --- places --------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 2, 3, 5, 100])
def test_chunks_are_scattered_whatever_their_size(step: int) -> None:
    """Empty places are skipped; bytes without a place are reported."""
    places = [bytearray(n) for n in (3, 0, 5, 1)]
    scatter = Scatter([memoryview(place) for place in places])
    data = b"abcdefghi" + b"XY"
    taken = sum(scatter.feed(data[i : i + step]) for i in range(0, len(data), step))
    assert (taken, scatter.remaining) == (9, 0)
    assert places == [b"abc", b"", b"defgh", b"i"]


class Owner:
    """A connection that only counts."""

    def __init__(self) -> None:
        self.count = 0
        self.ended = False

    def on_direct_bytes(self, count: int) -> None:
        self.count += count

    def on_direct_end(self) -> None:
        self.ended = True

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...

    def eof_received(self) -> None: ...

    def connection_lost(self, exc: Exception | None) -> None: ...


@pytest.mark.parametrize("step", [1000, 70_000, 1 << 20])
def test_a_sink_fills_the_places_and_never_asks_for_more(step: int) -> None:
    """Large places are handed out themselves, small ones share a detour."""
    sizes = [100_000, 10, 20, 70_000, 5]
    data = bytes(i % 251 for i in range(sum(sizes)))
    places = [bytearray(n) for n in sizes]
    scatter = Scatter([memoryview(place) for place in places])
    owner = Owner()
    sink = BodySink(owner, scatter)
    at = 0
    while not owner.ended:
        window = sink.get_buffer(-1)
        count = min(step, len(window))
        assert at + len(window) <= len(data)
        window[:count] = data[at : at + count]
        at += count
        sink.buffer_updated(count)
    assert b"".join(places) == data
    assert owner.count == len(data)


# --- the watch -----------------------------------------------------------------------------------

LIMITS = HttpSettings(
    head_timeout_s=10,
    keep_alive_timeout_s=20,
    body_grace_s=10,
    min_body_bytes_per_s=100,
    write_timeout_s=10,
)


def judge(
    watch: PhaseWatch, kind: str, now_s: float, mark: int = 0, body: int = 0, paused: bool = False
) -> Verdict | None:
    """Sweep once."""
    return watch.judge(Phase(kind, mark), now_s, body, paused, LIMITS)


@pytest.mark.parametrize(
    ("kind", "limit_s", "action"),
    [("head", 10, "refuse"), ("idle", 20, "close"), ("write", 10, "abort"), ("body", 10, "refuse")],
)
def test_a_phase_that_lasts_is_ended(kind: str, limit_s: float, action: str) -> None:
    """Row 69: nothing before the limit, the verdict after it."""
    watch = PhaseWatch()
    assert judge(watch, kind, 100) is None
    assert judge(watch, kind, 100 + limit_s) is None
    verdict = judge(watch, kind, 100.1 + limit_s)
    assert verdict is not None
    assert verdict.action == action


def test_a_step_forward_begins_the_phase_anew() -> None:
    """A next head, or one more byte taken of a reply."""
    watch = PhaseWatch()
    judge(watch, "head", 100, mark=1)
    assert judge(watch, "head", 109, mark=2) is None
    assert judge(watch, "head", 118, mark=2) is None
    assert judge(watch, "run", 200) is None
    assert judge(watch, "run", 9999) is None


def test_a_body_has_to_keep_up_a_rate() -> None:
    """One byte a second is too slow; time that the server makes it wait does not count."""
    watch = PhaseWatch()
    judge(watch, "body", 100)
    assert judge(watch, "body", 120, body=1001) is None
    assert judge(watch, "body", 120, body=999) is not None
    watch = PhaseWatch()
    judge(watch, "body", 0)
    for sweep in range(1, 100):
        now_s = sweep * LIMITS.sweep_interval_s
        assert judge(watch, "body", now_s, paused=True) is None


# --- access and the allocator --------------------------------------------------------------------


def scope(
    client: tuple[str, int] | None, server: object = ("h", 1), **headers: str
) -> dict[str, object]:
    """An ASGI scope with what matters."""
    fields = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"client": client, "server": server, "headers": fields}


@pytest.mark.parametrize(
    ("peer", "expected"),
    [
        (scope(("127.0.0.1", 5)), True),
        (scope(("127.8.9.1", 5)), True),
        (scope(("::1", 5)), True),
        (scope(("::ffff:127.0.0.1", 5)), True),
        (scope(("::ffff:10.0.0.1", 5)), False),
        (scope(("10.0.0.1", 5)), False),
        (scope(("fe80::1%eth0", 5)), False),
        (scope(("nonsense", 5)), False),
        (scope(None, ("/run/x.sock", None)), True),
        (scope(None), False),
        (scope(None, None), False),
        (scope(("127.0.0.1", 5), x_forwarded_for="1.2.3.4"), False),
        (scope(("127.0.0.1", 5), forwarded="for=1.2.3.4"), False),
        (scope(("10.0.0.1", 5), authorization="Bearer secret"), True),
        (scope(("10.0.0.1", 5), authorization="bearer secret"), True),
        (scope(("10.0.0.1", 5), authorization="Bearer wrong"), False),
        (scope(("127.0.0.1", 5), authorization="Bearer wrong"), False),
        (scope(("127.0.0.1", 5), authorization="Basic x"), True),
        (scope(("127.0.0.1", 5), host="localhost:8000"), True),
        (scope(("127.0.0.1", 5), host="LOCALHOST."), True),
        (scope(("127.0.0.1", 5), host="127.0.0.1:8000"), True),
        (scope(("::1", 5), host="[::1]:8000"), True),
        (scope(("127.0.0.1", 5), host=socket.gethostname()), True),
        (scope(("127.0.0.1", 5), host="evil.example"), False),
        (scope(("127.0.0.1", 5), host="localhost.evil.example:8000"), False),
        (scope(("127.0.0.1", 5), host=""), False),
        (scope(("127.0.0.1", 5), origin="http://evil.example"), False),
        (scope(("127.0.0.1", 5), origin="null"), False),
        (scope(("127.0.0.1", 5), sec_fetch_site="cross-site"), False),
        (scope(("127.0.0.1", 5), sec_fetch_site="same-origin"), False),
        (scope(("127.0.0.1", 5), sec_fetch_site="none"), True),
        (scope(("127.0.0.1", 5), origin="http://x", authorization="Bearer secret"), True),
    ],
)
def test_only_local_peers_and_bearers_administer(peer: dict[str, object], expected: bool) -> None:
    """Loading a model runs its code, so a stranger may not."""
    assert may_administer(peer, token="secret") is expected


def test_without_a_token_no_bearer_counts() -> None:
    """An empty token never matches."""
    assert not may_administer(scope(("10.0.0.1", 5), authorization="Bearer "))
    assert not may_administer(scope(("10.0.0.1", 5), authorization="Bearer x"))


def test_malloc_is_tuned_where_it_can_be() -> None:
    """On glibc both thresholds are taken."""
    assert tune_malloc() in (True, False)
