# SPDX-License-Identifier: Apache-2.0
"""Everything that the HTTP front end serves besides inferences: a raw ASGI application.

    GET /v2                                   name, version, extensions
    GET /v2/health/live, /v2/health/ready     200 or 503, no body
    GET /v2/models/M[/versions/V]             metadata
    GET /v2/models/M[/versions/V]/ready       200, or 400 with an error
    GET /v2/models/M[/versions/V]/config      the model's configuration
    GET /v2/models/M[/versions/V]/stats       what was counted of it; without M, of all models
    GET /metrics                              metrics for Prometheus
    POST /v2/repository/…                     index, load, unload (http_repository.py)
    GET, POST /v2/logging                     what is logged, and how (http_logging.py)
    GET /v2/actorserve/status                 where models and stubs stand (see http_access.py)
    GET /v1/models, /v1/models/M              models for OpenAI's clients (openai_models.py)

Inferences never come here, except with another method than POST. The port for metrics has a front
that serves nothing else.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from actorserve import __version__
from actorserve.errors import ActorserveError, InvalidArgument, PermissionDenied
from actorserve.frontend import openai_models
from actorserve.frontend.http_access import may_administer
from actorserve.frontend.http_exchange import unexpected
from actorserve.frontend.http_front import HttpFront
from actorserve.frontend.http_logging import LOGGING_PATH, change_log, show_log
from actorserve.frontend.http_repository import (
    RepositoryPath,
    match_repository_path,
    serve,
)
from actorserve.frontend.http_route import INFERENCES, ModelPath, match_model_path
from actorserve.frontend.metrics_text import CONTENT_TYPE, exposition
from actorserve.frontend.openai_route import PREFIX
from actorserve.frontend.v2_response import encode_error, retry_after_s
from actorserve.triton.inference import Door, ModelInfo, TensorSpec

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
HeaderList = list[tuple[bytes, bytes]]

EXTENSIONS = (
    "binary_tensor_data",
    "logging",
    "model_configuration",
    "model_repository",
    "model_repository(unload_dependents)",
    "parameters",
    "schedule_policy",
    "statistics",
)
"""What really works, by the protocol's names for it."""

METRICS_PATH = b"/metrics"

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


Answer = Reply | Awaitable[Reply]
"""What serves a path returns its reply at once, or later."""


class HttpApp:
    """The application; `door` is asked anew for every request, so that nothing it says is old."""

    def __init__(self, front: HttpFront) -> None:
        self._front = front
        self._door: Door = front.door
        self._since_s = openai_models.now_s()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Bodies are read of those that order something, of no others."""
        if scope["type"] != "http":
            return
        try:
            answer = (
                await self._openai(scope)
                or await self._control(scope, receive)
                or self._route(scope)
            )
            reply = answer if isinstance(answer, Reply) else await answer
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

    async def _openai(self, scope: Scope) -> Reply | None:
        """Serve what OpenAI's clients ask; None for any other request."""
        path = _path(scope)
        if self._front.settings.only_metrics or not path.startswith(PREFIX):
            return None
        found = await openai_models.answer(self._door, scope["method"], path, self._since_s)
        return Reply(found.status, found.body, _JSON, list(found.extra))

    async def _control(self, scope: Scope, receive: Receive) -> Reply | None:
        """Serve a request to the repository or the log; None for any other."""
        if self._front.settings.only_metrics:
            return None
        if _path(scope) == LOGGING_PATH:
            return await self._logging(scope, receive)
        path: RepositoryPath | None = match_repository_path(_path(scope))
        if path is None:
            return None
        if scope["method"] != "POST":
            return _not_allowed(("POST",))
        _check_administers(scope, self._front)
        body = await serve(self._door.control, path, await _body(scope, receive))
        return Reply(200, body, _JSON)

    async def _logging(self, scope: Scope, receive: Receive) -> Reply | None:
        log = self._front.settings.log
        if log is None:
            return None
        if scope["method"] not in ("GET", "HEAD", "POST"):
            return _not_allowed(("GET", "HEAD", "POST"))
        _check_administers(scope, self._front)
        if scope["method"] == "POST":
            change_log(log, await _body(scope, receive))
        return Reply(200, show_log(log), _JSON)

    def _route(self, scope: Scope) -> Answer:
        path = _path(scope)
        plain = self._plain(path)
        model: ModelPath | None = None
        if plain is None and not self._front.settings.only_metrics:
            model = match_model_path(path)
        if plain is None and model is None:
            return Reply(404, encode_error("Not Found"), _JSON)
        is_inference = model is not None and model.action in INFERENCES
        allowed = ("POST",) if is_inference else ("GET", "HEAD")
        if scope["method"] not in allowed:
            return _not_allowed(allowed)
        if plain is not None:
            if path in _ADMIN:
                _check_administers(scope, self._front)
            return plain(self._front)
        assert model is not None
        return _MODEL[model.action](self._door, model)

    def _plain(self, path: bytes) -> Callable[[HttpFront], Answer] | None:
        """Return what serves a path that names no model."""
        settings = self._front.settings
        if path == METRICS_PATH and settings.has_metrics:
            return _metrics
        if settings.only_metrics:
            return None
        return _PLAIN.get(path) or _ADMIN.get(path)


def _path(scope: Scope) -> bytes:
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    return path


async def _body(scope: Scope, receive: Receive) -> bytes:
    """Read a body, which the protocol has bounded. Raises InvalidArgument."""
    for name, value in scope["headers"]:
        if name == b"content-encoding" and value.lower() != b"identity":
            raise InvalidArgument("requests that order something must not be compressed")
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise InvalidArgument("the client has gone before its request was complete")
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _not_allowed(allowed: tuple[str, ...]) -> Reply:
    allow = (b"allow", ", ".join(allowed).encode())
    return Reply(405, encode_error("Method Not Allowed"), _JSON, [allow])


# --- the server ----------------------------------------------------------------------------------


def _metadata(front: HttpFront) -> Reply:
    name = front.settings.server_name
    document = {"name": name, "version": __version__, "extensions": EXTENSIONS}
    return Reply(200, _encode(document), _JSON)


def _live(front: HttpFront) -> Reply:
    return Reply(200 if front.door.is_live() else 503)


def _metrics(front: HttpFront) -> Reply:
    text = exposition(front.door.metrics())
    return Reply(200, text.encode(errors="replace"), CONTENT_TYPE.encode())


def _all_statistics(front: HttpFront) -> Reply:
    return Reply(200, front.door.statistics(), _JSON)


async def _ready(front: HttpFront) -> Reply:
    return Reply(200 if await front.door.check_ready() else 503)


_PLAIN: dict[bytes, Callable[[HttpFront], Answer]] = {
    b"/v2": _metadata,
    b"/v2/": _metadata,
    b"/v2/health/live": _live,
    b"/v2/health/ready": _ready,
    b"/v2/models/stats": _all_statistics,
}


async def _status(front: HttpFront) -> Reply:
    return Reply(200, await front.door.status(), _JSON)


_ADMIN: dict[bytes, Callable[[HttpFront], Answer]] = {b"/v2/actorserve/status": _status}


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


async def _model_ready(door: Door, path: ModelPath) -> Reply:
    if await door.check_model_ready(path.model, path.version):
        return Reply(200)
    return Reply(400, encode_error("Model version not ready"), _JSON)


def _model_config(door: Door, path: ModelPath) -> Reply:
    return Reply(200, door.model_config(path.model, path.version), _JSON)


def _model_statistics(door: Door, path: ModelPath) -> Reply:
    return Reply(200, door.statistics(path.model, path.version), _JSON)


def _infer(door: Door, path: ModelPath) -> Reply:
    """Answer a POST that the protocol did not take for an inference; nothing is known to."""
    return Reply(404, encode_error("Not Found"), _JSON)


_MODEL: dict[str, Callable[[Door, ModelPath], Answer]] = {
    "": _model_metadata,
    "ready": _model_ready,
    "config": _model_config,
    "stats": _model_statistics,
    **dict.fromkeys(INFERENCES, _infer),
}


def _error(error: ActorserveError) -> Reply:
    reply = Reply(error.http_status, encode_error(error.message), _JSON)
    wait_s = retry_after_s(error)
    if wait_s is not None:
        reply.extra = [(b"retry-after", b"%d" % wait_s)]
    return reply


# --- access --------------------------------------------------------------------------------------


def _check_administers(scope: Scope, front: HttpFront) -> None:
    if not may_administer(scope, front.settings.admin_token):
        raise PermissionDenied(
            "this is for the server's operator: ask from the server's own machine, as localhost "
            "or by its address and from no web page, or with the bearer token of "
            "--admin-token-file"
        )
