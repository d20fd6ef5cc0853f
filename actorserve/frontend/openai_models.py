# SPDX-License-Identifier: Apache-2.0
"""Which models OpenAI's clients see, and every path under /v1 but those that generate.

    GET /v1/models          the models that generate text and serve now
    GET /v1/models/NAME     one of them

A model generates text where its backend is "generation", which is its platform, too.
"""

from __future__ import annotations

import msgspec

from actorserve.clock import epoch_s, monotonic_s
from actorserve.errors import ActorserveError, NotFound
from actorserve.frontend.http_exchange import unexpected
from actorserve.frontend.http_route import model_name
from actorserve.frontend.openai_errors import (
    ErrorBody,
    ModelNotFound,
    body_of_status,
    encode_body,
    error_body,
    retry_after_of,
    status_of,
)
from actorserve.frontend.openai_route import ACTIONS
from actorserve.triton.generation_tensors import GENERATION
from actorserve.triton.inference import Door, ModelInfo

_MODELS = b"/v1/models"


class _Model(msgspec.Struct):
    id: str
    created: int
    object: str = "model"
    owned_by: str = "actorserve"


class _List(msgspec.Struct):
    data: list[_Model]
    object: str = "list"


class Answer(msgspec.Struct, frozen=True):
    """A status, a JSON document and more headers."""

    status: int
    body: bytes
    extra: tuple[tuple[bytes, bytes], ...] = ()


def now_s() -> int:
    """Return the wall clock's time: people want to know when something was made."""
    return int(epoch_s() + monotonic_s())


def generating_model(door: Door, name: str) -> ModelInfo:
    """Describe a model that generates text. Raises ModelNotFound or Unavailable."""
    try:
        info = door.model_info(name)
    except NotFound:
        raise ModelNotFound(name) from None
    if info.platform != GENERATION:
        raise ModelNotFound(name)
    return info


async def answer(door: Door, method: str, path: bytes, since_s: int) -> Answer:
    """Answer what is no POST to one of ACTIONS. `since_s` is when the server was made."""
    try:
        return await _answer(door, method, path, since_s)
    except ActorserveError as error:
        return answer_of(error)
    except Exception:
        return answer_of(unexpected())


async def _answer(door: Door, method: str, path: bytes, since_s: int) -> Answer:
    is_one = path.startswith(_MODELS + b"/") and path.count(b"/") == 3
    allowed = ("POST",) if path in ACTIONS else ("GET", "HEAD")
    if path not in ACTIONS and path != _MODELS and not is_one:
        shown = f"{method} {path.decode('ascii', 'replace')[:200]}"
        body = body_of_status(404, f"Unknown request URL: {shown}", "unknown_url")
        return Answer(404, encode_body(body))
    if method not in allowed or path in ACTIONS:
        body = body_of_status(405, f"Not allowed here: {method}", "method_not_allowed")
        return Answer(405, encode_body(body), ((b"allow", ", ".join(allowed).encode()),))
    if not is_one:
        names = dict.fromkeys(entry.name for entry in await door.control.index(is_ready=True))
        found = [_Model(name, since_s) for name in names if _is_shown(door, name)]
        return Answer(200, msgspec.json.encode(_List(found)))
    name = model_name(path[len(_MODELS) + 1 :])
    generating_model(door, name)
    return Answer(200, msgspec.json.encode(_Model(name, since_s)))


def _is_shown(door: Door, name: str) -> bool:
    """Whether a model generates text; one that does not serve just now is left out."""
    try:
        generating_model(door, name)
    except ActorserveError:
        return False
    return True


def answer_of(error: ActorserveError) -> Answer:
    """Return an error as an answer."""
    return _failure(status_of(error), error_body(error), retry_after_of(error))


def _failure(status: int, body: ErrorBody, retry_after_s: int | None) -> Answer:
    extra = () if retry_after_s is None else ((b"retry-after", b"%d" % retry_after_s),)
    return Answer(status, encode_body(body), extra)
