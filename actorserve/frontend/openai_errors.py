# SPDX-License-Identifier: Apache-2.0
"""Errors as OpenAI's clients read them: the status, the document, and when to come again.

    {"error": {"message": "…", "type": "invalid_request_error", "param": "n", "code": null}}

Pure. Statuses are the server's own but where their meaning differs: clients try again after 408,
409, 429 and whatever is 500 or more, so that a client's mistake is never one of these.
"""

from __future__ import annotations

import msgspec

from actorserve.errors import (
    ActorserveError,
    Code,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from actorserve.frontend.v2_response import retry_after_s
from actorserve.state.backlog import FULL_MESSAGE

BUSY_RETRY_AFTER_S = 1

_STATUS = {Code.UNKNOWN: 500, Code.CANCELLED: 500, Code.UNSUPPORTED: 400}
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES = {429: "rate_limit_exceeded", 503: "unavailable", 504: "timeout"}


class ErrorBody(msgspec.Struct, frozen=True):
    """What OpenAI's clients find in an error. `param` names the member that is wrong."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class _Document(msgspec.Struct, frozen=True):
    error: ErrorBody


class BadParameter(InvalidArgument):
    """A member of a request that is wrong or cannot be honoured."""

    def __init__(self, param: str, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code_name = code


class ModelNotFound(NotFound):
    """A model that is not there, or is none that generates text."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"The model '{name}' does not exist, does not serve now, or generates no text "
            "(GET /v1/models lists those that do)"
        )


def status_of(error: ActorserveError) -> int:
    """Return the HTTP status of an error."""
    if is_overload(error):
        return 429
    status = error.http_status
    return _STATUS.get(error.code, status) if status in (400, 501) else status


def is_overload(error: ActorserveError) -> bool:
    """Whether the server has too much to do, so that the client should slow down."""
    if isinstance(error, ResourceExhausted):
        return True
    return isinstance(error, Unavailable) and FULL_MESSAGE in error.message


def retry_after_of(error: ActorserveError) -> int | None:
    """Return the whole seconds for a Retry-After header, None for no such header."""
    if status_of(error) not in (429, 503):
        return None
    return retry_after_s(error) or BUSY_RETRY_AFTER_S


def error_body(error: ActorserveError) -> ErrorBody:
    """Return an error in OpenAI's terms."""
    if isinstance(error, ModelNotFound):
        return ErrorBody(error.message, "invalid_request_error", "model", "model_not_found")
    if isinstance(error, BadParameter):
        return ErrorBody(error.message, "invalid_request_error", error.param, error.code_name)
    return body_of_status(status_of(error), error.message)


def body_of_status(status: int, message: str, code: str | None = None) -> ErrorBody:
    """Return what is said with a status."""
    default = "server_error" if status >= 500 else "invalid_request_error"
    return ErrorBody(message, _TYPES.get(status, default), None, code or _CODES.get(status))


def encode_body(body: ErrorBody) -> bytes:
    """Return the document of an error; what UTF-8 cannot express is replaced."""
    clean = msgspec.structs.replace(body, message=body.message.encode("utf-8", "replace").decode())
    return msgspec.json.encode(_Document(clean))
