# SPDX-License-Identifier: Apache-2.0
"""The repository API over HTTP: the index, loading and unloading.

    POST /v2/repository/index                        {"ready": bool}?
    POST /v2/repository/models/M/load                {"parameters": {"config": JSON text,
                                                      "file:1/model.py": base64, …}}?
    POST /v2/repository/models/M/unload              {"parameters": {"unload_dependents": bool}}?

Nothing of HTTP's own is known here: a path and a body come in, a body or an error goes out. Who
may ask is decided before (`http_access.may_administer`).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from typing import Any

import msgspec

from actorserve.errors import InvalidArgument, Unsupported
from actorserve.frontend.http_route import model_name
from actorserve.triton.inference import ModelControl

_PATH = re.compile(rb"/v2/repository(?:/([^/]+))?/(?:(index)|models/([^/]+)/(load|unload))")
LONG_BODY_BYTES = 1 << 20
"""Reading a body beyond this size is nothing for the loop."""

_TYPES = {bool: "BOOL", int: "INT", float: "DOUBLE", str: "STRING"}
_encode = msgspec.json.Encoder().encode


class RepositoryPath(msgspec.Struct, frozen=True):
    """A path under /v2/repository; `action` is "index", "load" or "unload"."""

    repository: str
    model: str
    action: str


class _Index(msgspec.Struct):
    ready: Any = None


class _Order(msgspec.Struct):
    parameters: dict[str, Any] | None = None


def match_repository_path(path: bytes) -> RepositoryPath | None:
    """Read the path of a URL (percent-encoded, without query); None where it is another's.

    Raises InvalidArgument for a model name that cannot be one.
    """
    match = _PATH.fullmatch(path)
    if match is None:
        return None
    repository, index, model, action = match.groups()
    return RepositoryPath(
        repository.decode("latin-1") if repository else "",
        model_name(model) if model else "",
        (index or action).decode(),
    )


async def serve(control: ModelControl, path: RepositoryPath, body: bytes) -> bytes:
    """Carry a request out and return the body of its reply. Raises ActorserveError."""
    if path.repository:
        raise Unsupported("'repository_name' specification is not supported")
    if path.action == "index":
        return await _index(control, body)
    if path.action == "load":
        await _load(control, path.model, body)
    else:
        parameters = (await _decoded(body, _Order)).parameters or {}
        dependents = parameters.get("unload_dependents", False)
        if not isinstance(dependents, bool):
            raise InvalidArgument("Invalid value for 'unload_dependents': expected a boolean")
        await control.unload_model(path.model, unload_dependents=dependents)
    return b""


async def _index(control: ModelControl, body: bytes) -> bytes:
    ready = (await _decoded(body, _Index)).ready
    if ready is not None and not isinstance(ready, bool):
        raise InvalidArgument("Invalid value for 'ready': expected a boolean")
    return _encode(await control.index(is_ready=bool(ready)))


async def _load(control: ModelControl, model: str, body: bytes) -> None:
    parameters = (await _decoded(body, _Order)).parameters or {}
    config = ""
    encoded: dict[str, str] = {}
    for key, value in parameters.items():
        if not isinstance(value, str):
            kind = _TYPES.get(type(value), "JSON")
            raise InvalidArgument(f"Unrecognized load parameter '{key}' with type '{kind}'")
        if key == "config":
            config = value
        elif key.startswith("file:"):
            encoded[key] = value
        else:
            raise InvalidArgument(f"Unrecognized load parameter '{key}' with type 'STRING'")
    files = await _off_loop(len(body), lambda: _decode_files(encoded))
    await control.load_model(model, config, files)


def _decode_files(encoded: dict[str, str]) -> dict[str, bytes]:
    files = {}
    for key, text in encoded.items():
        try:
            files[key] = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            raise InvalidArgument(f"the parameter '{key}' is no base64") from None
    return files


async def _decoded(body: bytes, kind: type[Any]) -> Any:
    """Read a body; an empty one says nothing. Raises InvalidArgument."""
    if not body.strip():
        return kind()
    return await _off_loop(len(body), lambda: _decode(body, kind))


def _decode(body: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f"failed to parse the request JSON: {error}") from None


async def _off_loop(nbytes: int, work: Any) -> Any:
    if nbytes <= LONG_BODY_BYTES:
        return work()
    return await asyncio.get_running_loop().run_in_executor(None, work)
