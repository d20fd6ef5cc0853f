# SPDX-License-Identifier: Apache-2.0
"""Which model, version and action a path names. Pure; imports nothing of the server's parts.

A name is decoded only after the path has been cut at its slashes, so that `%2F` never moves a
segment border, and a name that could reach out of a directory or forge a log line is refused
here, before anything looks it up.
"""

from __future__ import annotations

import re
from urllib.parse import unquote_to_bytes

import msgspec

from actorserve.errors import InvalidArgument

_MODEL_PATH = re.compile(
    rb"/v2/models/([^/]+)(?:/versions/([0-9]{1,32}))?"
    rb"(?:/(infer|generate|generate_stream|ready|config|stats))?"
)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
MAX_NAME_CHARS = 255
INFERENCES = frozenset(("infer", "generate", "generate_stream"))
"""The actions that send a request to a model: by POST, and never through the ASGI application."""


class ModelPath(msgspec.Struct, frozen=True):
    """A path under /v2/models. `action` is its last segment, "" for the metadata."""

    model: str
    version: str
    action: str


def match_model_path(path: bytes) -> ModelPath | None:
    """Read the path of a URL (percent-encoded, without query); None where it is no model's path.

    Raises InvalidArgument for a model name that cannot be one.
    """
    match = _MODEL_PATH.fullmatch(path)
    if match is None:
        return None
    name, version, action = match.groups()
    return ModelPath(
        model=model_name(name),
        version=version.decode() if version else "",
        action=action.decode() if action else "",
    )


def model_name(segment: bytes) -> str:
    """Decode one segment of a path. Raises InvalidArgument for a name that cannot be a model's."""
    try:
        name = unquote_to_bytes(segment).decode()
    except UnicodeDecodeError:
        raise InvalidArgument(f"invalid model name {segment[:64]!r}: it is not UTF-8") from None
    if len(name) > MAX_NAME_CHARS:
        raise InvalidArgument(
            f"invalid model name {name[:32]!r}…: it has {len(name)} characters, "
            f"at most {MAX_NAME_CHARS} are allowed"
        )
    if name in (".", "..") or "/" in name or "\\" in name or _CONTROL.search(name):
        raise InvalidArgument(
            f"invalid model name {name!r}: it must not be '.' or '..' nor hold slashes, "
            "backslashes or control characters"
        )
    return name
