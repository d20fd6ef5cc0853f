# SPDX-License-Identifier: Apache-2.0
"""Everything that the HTTP front end serves besides inferences: a raw ASGI application.

    GET /v2                                   name, version, extensions
    GET /v2/health/live, /v2/health/ready     200 or 503, no body
    GET /v2/models/M[/versions/V]             metadata
    GET /v2/models/M[/versions/V]/ready       200, or 400 with an error
    GET /v2/models/M[/versions/V]/config      the model's configuration
    GET /v2/actorserve/status                 where models and stubs stand (see `may_administer`)

Inferences never come here, except with another method than POST.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from actorserve import __version__
from actorserve.errors import ActorserveError, PermissionDenied
from actorserve.frontend.http_exchange import unexpected
from actorserve.frontend.http_front import HttpFront
from actorserve.frontend.http_route import ModelPath, match_model_path
from actorserve.frontend.v2_response import encode_error, retry_after_s
from actorserve.triton.inference import Door, ModelInfo, TensorSpec

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
HeaderList = list[tuple[bytes, bytes]]

EXTENSIONS = ("binary_tensor_data", "model_configuration", "parameters", "schedule_policy")
"""What really works, by the protocol's names for it."""

_JSON = b"application/json"
_TEXT = b"text/plain"
_encode = msgspec.json.Encoder().encode


class Reply(msgspec.Struct):
    """A status, a body and its headers."""

    status: int
    body: bytes = b""
    content_type: bytes = _TEXT
    extra: HeaderList = []

    def headers(self) -> HeaderList:
        """Return all headers."""
        return [
            (b"content-type", self.content_type),
            (b"content-length", b"%d" % len(self.body)),
            *self.extra,
        ]


class HttpApp:
    """The application; `door` is asked anew for every request, so that nothing it says is old."""

    def __init__(self, front: HttpFront) -> None:
        self._front = front
        self._door: Door = front.door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Bodies are not read: no request here has one."""
        if scope["type"] != "http":
            return
        try:
            reply = self._route(scope)
        except ActorserveError as error:
            reply = _error(error)
        except Exception:
            reply = _error(unexpected())
        if reply.status >= 400:
            self._front.errors += 1
        await send(
            {"type": "http.response.start", "status": reply.status, "headers": reply.headers()}
        )
        await send({"type": "http.response.body", "body": reply.body})

    def _route(self, scope: Scope) -> Reply:
        path: bytes = scope.get("raw_path") or scope["path"].encode()
        plain = _PLAIN.get(path) or _ADMIN.get(path)
        model: ModelPath | None = None
        if plain is None:
            model = match_model_path(path)
            if model is None:
                return Reply(404, encode_error("Not Found"), _JSON)
        allowed = ("POST",) if model is not None and model.action == "infer" else ("GET", "HEAD")
        if scope["method"] not in allowed:
            allow = (b"allow", ", ".join(allowed).encode())
            return Reply(405, encode_error("Method Not Allowed"), _JSON, [allow])
        if plain is not None:
            if path in _ADMIN and not may_administer(scope, self._front.settings.admin_token):
                raise PermissionDenied(
                    "this is for the server's operator: ask from the server's own machine, or "
                    "with the bearer token of --admin-token-file"
                )
            return plain(self._front)
        assert model is not None
        return _MODEL[model.action](self._door, model)


# --- the server ----------------------------------------------------------------------------------


def _metadata(front: HttpFront) -> Reply:
    name = front.settings.server_name
    document = {"name": name, "version": __version__, "extensions": EXTENSIONS}
    return Reply(200, _encode(document), _JSON)


def _live(front: HttpFront) -> Reply:
    return Reply(200 if front.door.is_live() else 503)


def _ready(front: HttpFront) -> Reply:
    return Reply(200 if front.door.is_ready() else 503)


_PLAIN: dict[bytes, Callable[[HttpFront], Reply]] = {
    b"/v2": _metadata,
    b"/v2/": _metadata,
    b"/v2/health/live": _live,
    b"/v2/health/ready": _ready,
}


def _status(front: HttpFront) -> Reply:
    return Reply(200, front.door.status(), _JSON)


_ADMIN: dict[bytes, Callable[[HttpFront], Reply]] = {b"/v2/actorserve/status": _status}


# --- models --------------------------------------------------------------------------------------


def _model_metadata(door: Door, path: ModelPath) -> Reply:
    info: ModelInfo = door.model_info(path.model, path.version)
    document = {
        "name": info.name,
        "versions": info.versions,
        "platform": info.platform,
        "inputs": [_tensor(spec) for spec in info.inputs],
        "outputs": [_tensor(spec) for spec in info.outputs],
    }
    return Reply(200, _encode(document), _JSON)


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": spec.shape}


def _model_ready(door: Door, path: ModelPath) -> Reply:
    if door.is_model_ready(path.model, path.version):
        return Reply(200)
    return Reply(400, encode_error("Model version not ready"), _JSON)


def _model_config(door: Door, path: ModelPath) -> Reply:
    return Reply(200, door.model_config(path.model, path.version), _JSON)


def _infer(door: Door, path: ModelPath) -> Reply:
    """Answer a POST that the protocol did not take for an inference; nothing is known to."""
    return Reply(404, encode_error("Not Found"), _JSON)


_MODEL: dict[str, Callable[[Door, ModelPath], Reply]] = {
    "": _model_metadata,
    "ready": _model_ready,
    "config": _model_config,
    "infer": _infer,
}


def _error(error: ActorserveError) -> Reply:
    reply = Reply(error.http_status, encode_error(error.message), _JSON)
    wait_s = retry_after_s(error)
    if wait_s is not None:
        reply.extra = [(b"retry-after", b"%d" % wait_s)]
    return reply


# --- access --------------------------------------------------------------------------------------


def may_administer(scope: Scope, token: str = "") -> bool:
    """Whether this peer may use what administers the server (loading models runs their code).

    A bearer token decides where one is set and sent. Else the peer has to be on this machine: on
    a loopback address or a Unix socket, and not a proxy that speaks for somebody else.
    """
    headers: dict[bytes, bytes] = dict(scope["headers"])
    scheme, _, credentials = headers.get(b"authorization", b"").partition(b" ")
    if token and scheme.lower() == b"bearer":
        return hmac.compare_digest(credentials.strip(), token.encode())
    if b"forwarded" in headers or b"x-forwarded-for" in headers:
        return False
    client = scope.get("client")
    if client is None:
        server = scope.get("server")
        return server is not None and server[1] is None  # a Unix socket has no port
    try:
        address = ipaddress.ip_address(client[0].partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)
