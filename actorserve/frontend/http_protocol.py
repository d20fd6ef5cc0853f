# SPDX-License-Identifier: Apache-2.0
"""The protocol of one HTTP connection: uvicorn's, with inference requests handled in place.

    socket ──► data_received ──► httptools ──► on_headers_complete ─┬─ POST …/infer, …/generate,
                   ▲                                                │  …/generate_stream, or
                   │                                                │  …/completions: an Intake
                   │                                                └─ anything else: an ASGI cycle
    large bodies ──┴─ BodySink: from the kernel into shared memory     (uvicorn's own, http_app.py)

A request that comes whole and whose head was seen before goes past the parser (http_memo.py).
uvicorn's protocol contributes the parser's set-up, the ASGI cycles and flow control; its timer,
its queueing and its error replies are replaced here, because they know neither exchanges nor a
limit on heads.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.server import ServerState

from actorserve.errors import ActorserveError
from actorserve.frontend.http_body import BodySink
from actorserve.frontend.http_exchange import Refusal, unexpected
from actorserve.frontend.http_front import HttpFront
from actorserve.frontend.http_generate import GenerateExchange
from actorserve.frontend.http_head import (
    InferHead,
    content_length_of,
    expects_continue,
    fill_head,
    pick,
    unknown_coding,
)
from actorserve.frontend.http_infer import InferExchange
from actorserve.frontend.http_intake import Intake, too_large
from actorserve.frontend.http_memo import KnownHead, is_plain
from actorserve.frontend.http_parser import body_parser, new_parser
from actorserve.frontend.http_route import ModelPath
from actorserve.frontend.http_stream import StreamExchange
from actorserve.frontend.http_turns import HttpTurns, abandon
from actorserve.frontend.http_watch import Phase, PhaseWatch
from actorserve.frontend.openai_exchange import OpenAIExchange, OpenAIRefusal
from actorserve.frontend.openai_route import PREFIX

_Kind = type[InferExchange] | type[GenerateExchange] | type[StreamExchange] | type[OpenAIExchange]
_EXCHANGES: dict[str, _Kind] = {
    "infer": InferExchange,
    "generate": GenerateExchange,
    "generate_stream": StreamExchange,
    "completions": OpenAIExchange,
    "chat": OpenAIExchange,
}
"""What serves the inferences (http_route.INFERENCES and openai_models.ACTIONS)."""


class _Refused(Exception):
    """The bytes of a connection cannot be read any further; raised through the parser."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class HttpConnection(HttpTurns):
    """One connection."""

    def __init__(
        self,
        front: HttpFront,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(front, config, server_state, app_state, _loop)
        self._serial = 0
        self._is_in_head = False
        self._feed_bytes = 0
        self._head_fed_bytes = 0
        self._body_bytes = 0
        self._put_off_length = 0
        self._known: KnownHead | None = None
        self._is_feeding = False
        self._watch = PhaseWatch()

    # --- the transport ---

    def data_received(self, data: bytes) -> None:
        """Feed the parser; what it finds comes back through the `on_…` methods."""
        if self._is_broken:
            return
        if self.pipeline and self._is_streaming:
            self._hold(data)
            return
        begins = not self._is_in_head and self._receiving is None
        if begins and self._active is None and not self.pipeline:
            found = self.front.memo.find(data)
            if found is not None:
                self._serve_known(*found)
                return
        serial = self._serial
        self._feed_bytes = len(data)
        if self._is_in_head:
            self._head_fed_bytes += len(data)
        self._is_feeding = True
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            self._is_feeding = False
            self._refuse_after(error)
            return
        self._is_feeding = False
        is_one = begins and self._serial == serial + 1
        if self._is_in_head:
            if self._serial != serial:  # it began in these bytes, with the first one or later
                self._head_fed_bytes = len(data) if is_one else self._seen_head_bytes()
            if self._head_fed_bytes > self.front.settings.max_head_bytes:
                self._refuse(431, self._head_text())
        elif self._receiving is not None:
            self.consider_direct()
        elif is_one and self._known is not None:
            self.front.memo.keep(data, self._known)

    def _serve_known(self, known: KnownHead, body: bytes) -> None:
        """Serve a whole request past the parser, which does not notice."""
        self._serial += 1
        exchange = _EXCHANGES[known.route.action](self, True, known.route, known.head)
        self.cycle = exchange  # type: ignore[assignment]
        self._active = exchange
        exchange.start_whole(body)

    def _feed(self, data: bytes) -> None:
        rest: bytes | memoryview = data
        while rest:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                # No other protocol is spoken here: what follows is read as HTTP.
                rest = memoryview(rest)[upgrade.args[0] :]
                if self._put_off_length:
                    self.parser = body_parser(self, self._put_off_length)
                    self._put_off_length = 0

    # --- the parser: heads ---

    def on_message_begin(self) -> None:
        """A request begins, somewhere in the bytes that are being fed."""
        self._serial += 1
        self._is_in_head = True
        self._known = None
        self._head_fed_bytes = 0
        self.url = b""
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Decide who serves the request, and let it begin if it is its turn."""
        self._is_in_head = False
        self._body_bytes = 0
        if self._is_ending:
            return
        settings = self.front.settings
        # Mostly a head came in one piece, together with its body, and that was small enough.
        is_suspect = self._head_fed_bytes or self._feed_bytes > settings.max_head_bytes
        if is_suspect and self._seen_head_bytes() > settings.max_head_bytes:
            raise _Refused(431, self._head_text())
        fields = pick(self.headers)
        if b"transfer-encoding" in fields:
            unknown = unknown_coding(self.headers)
            if unknown is not None:
                raise _Refused(501, unknown)
        length = content_length_of(fields)
        if length > settings.max_input_bytes:
            raise _Refused(413, too_large(settings.max_input_bytes).message)
        if b"upgrade" in fields and self.parser.should_upgrade():
            self._put_off_length = length
        if self.parser.get_method() == b"POST":
            route = self.front.infer_route(self.url)
            if route is not None:
                self._begin_infer(route, fields, length)
                return
        self._begin_asgi(expects_continue(fields))

    def _begin_infer(self, route: ModelPath, fields: dict[bytes, bytes], length: int) -> None:
        keep_alive = self.parser.should_keep_alive()
        if keep_alive and b"connection" in fields:
            keep_alive = self.parser.get_http_version() != "1.0"  # as uvicorn does it
        head = InferHead(length)
        if b"expect" in fields:
            head.expects_continue = (
                expects_continue(fields) and self.parser.get_http_version() != "1.0"
            )
        if route.action != "infer":
            head.takes_chunks = self.parser.get_http_version() != "1.0"
        exchange = _EXCHANGES[route.action](self, keep_alive, route, head)
        try:
            fill_head(head, fields)
            if route.action != "infer":
                head.json_bytes = None  # no blocks follow
            if keep_alive and is_plain(fields):
                self._known = KnownHead(route, head)
        except ActorserveError as error:
            exchange.fail(error)
        self.cycle = exchange  # type: ignore[assignment]
        self._receiving = exchange
        if self._active is None:
            self._active = exchange
            self._start(exchange)
        else:
            self.pipeline.appendleft((exchange, self.app))  # type: ignore[arg-type]
            self.sync_reading()

    def _begin_asgi(self, expects: bool) -> None:
        url, headers = self.url, self.headers
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        self.headers.extend(headers)
        super().on_headers_complete()
        if expects:
            self.cycle.keep_alive = False  # nobody knows whether the body will still come
        self._receiving = self.cycle
        if self._active is None:
            self._active = self.cycle
        else:
            self.sync_reading()

    def _seen_head_bytes(self) -> int:
        """Count what the parser has shown of a head: of headers, only complete ones."""
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _head_text(self) -> str:
        return f"the request's head is larger than {self.front.settings.max_head_bytes} bytes"

    # --- the parser: bodies ---

    def on_body(self, body: bytes) -> None:
        """Lead a part of a body to whoever serves its request."""
        self._body_bytes += len(body)
        receiving = self._receiving
        if isinstance(receiving, Intake):
            try:
                receiving.on_body(body)
            except Exception:
                receiving.fail(unexpected())
        elif receiving is not None:
            if self._body_bytes > self.front.settings.max_input_bytes:
                raise _Refused(413, too_large(self.front.settings.max_input_bytes).message)
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete, unless an offer to upgrade made the parser skip its body."""
        if self._put_off_length:
            return
        receiving, self._receiving = self._receiving, None
        if isinstance(receiving, Intake):
            try:
                receiving.on_end()
            except Exception:
                receiving.fail(unexpected())
        elif receiving is not None:
            super().on_message_complete()

    def consider_direct(self) -> None:
        """Let the kernel write the rest of a large body into its places, past the parser."""
        exchange = self._receiving
        if (
            self._is_feeding
            or self._sink is not None
            or not isinstance(exchange, Intake)
            or not exchange.wants_direct
            or exchange.scatter is None
            or self.transport.is_closing()
        ):
            return
        self._sink = BodySink(self, exchange.scatter)
        self.transport.set_protocol(self._sink)

    def on_direct_bytes(self, count: int) -> None:
        """`count` bytes of the body are in their places."""
        self._body_bytes += count

    def on_direct_end(self) -> None:
        """The body is complete: parse what follows. The old parser still waits for the body."""
        self._leave_sink()
        self.parser = new_parser(self)
        self.on_message_complete()

    # --- what cannot be read ---

    def _refuse_after(self, error: httptools.HttpParserError) -> None:
        """Answer bytes that the parser, or a callback of it, could not take."""
        cause = error.__context__
        if isinstance(cause, _Refused):
            self._refuse(cause.status, cause.message)
        else:
            self._refuse(400, f"Invalid HTTP request: {str(error)[:200] or 'unreadable'}")

    def _refuse(self, status: int, message: str) -> None:
        """Send a last reply, in its turn, and end the connection."""
        if self._is_broken:
            return
        self._is_broken = True
        self._leave_sink()
        broken, self._receiving = self._receiving, None
        if isinstance(broken, Intake) and broken is self._active:
            broken.refuse(status, message)
            return
        if isinstance(broken, RequestResponseCycle) and broken.response_started:
            self.transport.close()  # its reply cannot be taken back
            return
        if broken is not None and broken is self._active:
            abandon(broken)
            self._active = None
        elif broken is not None and self.pipeline and self.pipeline[0][0] is broken:
            self.pipeline.popleft()
            abandon(broken)
        is_openai = self.url.startswith(PREFIX)
        refusal = (OpenAIRefusal if is_openai else Refusal)(self, status, message)
        self.cycle = refusal  # type: ignore[assignment]
        if self._active is None:
            self._active = refusal
            refusal.start()
        else:
            self.pipeline.appendleft((refusal, self.app))  # type: ignore[arg-type]

    # --- timeouts ---

    def check(self, now_s: float) -> None:
        """Look at how long the connection has been in its present phase."""
        verdict = self._watch.judge(
            self._phase(), now_s, self._body_bytes, self.flow.read_paused, self.front.settings
        )
        if verdict is None:
            return
        if verdict.action == "close":
            self.transport.close()
            return
        self.front.timeouts += 1
        if verdict.action == "abort":
            self.transport.abort()
        else:
            self._refuse(408, verdict.reason)

    def _phase(self) -> Phase:
        if self._is_closing():
            return Phase("end")
        if self.flow.write_paused:
            return Phase("write", self.transport.get_write_buffer_size())
        if self.pipeline:
            return Phase("run")  # what is still to come is not waited for
        if self._receiving is not None:
            return Phase("body", self._serial)
        if self._is_in_head:
            return Phase("head", self._serial)
        if self._active is None and not self.pipeline:
            return Phase("idle", self._serial)
        return Phase("run")
