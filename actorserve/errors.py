# SPDX-License-Identifier: Apache-2.0
"""The one tree of errors. Each class carries its code, and so its HTTP status and gRPC status.

A message says what happened, where, what was expected and what to do. Codes 0 to 7 are the
model API's (`TritonError`); those from 8 on are the server's own.
"""

from __future__ import annotations

import enum


class Code(enum.IntEnum):
    """What went wrong, in the terms of the v2 protocol."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7
    DEADLINE_EXCEEDED = 8
    RESOURCE_EXHAUSTED = 9
    PERMISSION_DENIED = 10
    TOO_LARGE = 11
    DEVICE_UNREACHABLE = 12


HTTP_STATUS: dict[Code, int] = {
    Code.UNKNOWN: 400,
    Code.INTERNAL: 500,
    Code.NOT_FOUND: 404,
    Code.INVALID_ARG: 400,
    Code.UNAVAILABLE: 503,
    Code.UNSUPPORTED: 501,
    Code.ALREADY_EXISTS: 400,
    Code.CANCELLED: 400,
    Code.DEADLINE_EXCEEDED: 504,
    Code.RESOURCE_EXHAUSTED: 503,
    Code.PERMISSION_DENIED: 403,
    Code.TOO_LARGE: 413,
    Code.DEVICE_UNREACHABLE: 503,
}

GRPC_STATUS: dict[Code, str] = {
    Code.UNKNOWN: "UNKNOWN",
    Code.INTERNAL: "INTERNAL",
    Code.NOT_FOUND: "NOT_FOUND",
    Code.INVALID_ARG: "INVALID_ARGUMENT",
    Code.UNAVAILABLE: "UNAVAILABLE",
    Code.UNSUPPORTED: "UNIMPLEMENTED",
    Code.ALREADY_EXISTS: "ALREADY_EXISTS",
    Code.CANCELLED: "CANCELLED",
    Code.DEADLINE_EXCEEDED: "DEADLINE_EXCEEDED",
    Code.RESOURCE_EXHAUSTED: "RESOURCE_EXHAUSTED",
    Code.PERMISSION_DENIED: "PERMISSION_DENIED",
    Code.TOO_LARGE: "INVALID_ARGUMENT",
    Code.DEVICE_UNREACHABLE: "UNAVAILABLE",
}


class ActorserveError(Exception):
    """Base of every error that this package raises on purpose."""

    code: Code = Code.INTERNAL

    @property
    def message(self) -> str:
        """The text alone, as clients see it."""
        return str(self.args[0]) if self.args else type(self).__name__

    @property
    def http_status(self) -> int:
        """The HTTP status that this error is answered with."""
        return HTTP_STATUS[self.code]

    @property
    def grpc_status(self) -> str:
        """The name of the gRPC status that this error is answered with."""
        return GRPC_STATUS[self.code]


class ProtocolError(ActorserveError):
    """The peer broke the wire: a frame, message or handle that cannot be right."""


class InternalError(ActorserveError):
    """A fault of the server or of user code."""


class UnknownError(ActorserveError):
    """A model answered with the code UNKNOWN."""

    code = Code.UNKNOWN


class NotFound(ActorserveError):
    """The named model, version or resource does not exist."""

    code = Code.NOT_FOUND


class InvalidArgument(ActorserveError):
    """The caller's mistake."""

    code = Code.INVALID_ARG


class ConfigError(InvalidArgument):
    """A configuration that cannot be read or honoured; says file, line and column if known."""


class Unavailable(ActorserveError):
    """Nobody can serve this now; `retry_after_s` says when it may be worth another try."""

    code = Code.UNAVAILABLE

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unsupported(ActorserveError):
    """A feature that this version does not have."""

    code = Code.UNSUPPORTED


class DecoupledModel(Unsupported):
    """One response was asked of a model that may give any number of them."""


class AlreadyExists(ActorserveError):
    """The name is taken."""

    code = Code.ALREADY_EXISTS


class Cancelled(ActorserveError):
    """The request was cancelled by its caller."""

    code = Code.CANCELLED


class DeadlineExceeded(ActorserveError):
    """A deadline passed before the work was done."""

    code = Code.DEADLINE_EXCEEDED


class WaitTimeout(DeadlineExceeded, TimeoutError):
    """A wait took longer than its caller allowed; Python's own TimeoutError too."""


class ResourceExhausted(ActorserveError):
    """Shared memory, descriptors or queue room ran out."""

    code = Code.RESOURCE_EXHAUSTED


class PermissionDenied(ActorserveError):
    """The peer may not use this door."""

    code = Code.PERMISSION_DENIED


class TooLarge(ActorserveError):
    """A body or tensor beyond a limit."""

    code = Code.TOO_LARGE


class DeviceUnreachable(ActorserveError):
    """A tensor lies on a device that its receiver cannot use; by host memory it can be sent.

    Between stubs only: the caller sends again, before anything was done.
    """

    code = Code.DEVICE_UNREACHABLE


class BootError(ActorserveError):
    """A child process that cannot start, whatever is tried: retrying will not help."""


# --- actors --------------------------------------------------------------------------------------


class ActorDead(Unavailable):
    """No answer will come from this actor: it is gone for good; the text says why."""


class ActorStopped(ActorDead):
    """The actor was stopped, is stopping, or has ended of itself; the message was not begun."""


class ActorDied(ActorDead):
    """The actor died while it had the message, which it may have begun; see its restart policy."""


class ActorRestarting(Unavailable):
    """The actor died and its next start is not near; `retry_after_s` says when it is due."""


class Full(ResourceExhausted):
    """There is no room for one more, a message or a request, and the caller does not wait."""


class Crash(ActorserveError):
    """Raised by an actor in `receive`: it cannot go on, and its restart policy decides."""


class ReceiveError(ActorserveError):
    """An actor's `receive` raised; the actor goes on with its next message.

    `kind` is the name of the exception's class, `detail` its text, `stack` its traceback as text.
    Within one process the exception itself is the `__cause__`.
    """

    def __init__(self, message: str, kind: str = "", detail: str = "", stack: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.detail = detail
        self.stack = stack


# --- engines -------------------------------------------------------------------------------------


class EngineDeadError(Unavailable):
    """The engine is dead, and every request that it had with it.

    `rank` and `pid` say which process died first, None where there is none; `reason` is what it
    died of, `traceback` its own, as text. `str()` has all of it; `message`, which clients of a
    server see, leaves the traceback out. `refusal` is set where the engine itself refused to load
    what was asked of it: what its user is told instead. `is_accident` says that a process
    ended and nobody had meant it to: another start may go well.
    """

    def __init__(
        self,
        reason: str,
        *,
        rank: int | None = None,
        pid: int | None = None,
        traceback: str = "",
        retry_after_s: float | None = None,
        refusal: ActorserveError | None = None,
        is_accident: bool = False,
    ) -> None:
        who = "the engine" if rank is None else f"the engine's rank {rank}"
        if pid is not None:
            who += f" (process {pid})"
        self._head = f"{who} is dead: {reason}"
        text = f"{self._head}\n{traceback.rstrip()}" if traceback else self._head
        super().__init__(text, retry_after_s)
        self.rank = rank
        self.pid = pid
        self.reason = reason
        self.traceback = traceback
        self.refusal = refusal
        self.is_accident = is_accident

    @property
    def message(self) -> str:
        """The text without the traceback."""
        return self._head


_BY_CODE: dict[Code, type[ActorserveError]] = {
    Code.UNKNOWN: UnknownError,
    Code.INTERNAL: InternalError,
    Code.NOT_FOUND: NotFound,
    Code.INVALID_ARG: InvalidArgument,
    Code.UNAVAILABLE: Unavailable,
    Code.UNSUPPORTED: Unsupported,
    Code.ALREADY_EXISTS: AlreadyExists,
    Code.CANCELLED: Cancelled,
    Code.DEADLINE_EXCEEDED: DeadlineExceeded,
    Code.RESOURCE_EXHAUSTED: ResourceExhausted,
    Code.PERMISSION_DENIED: PermissionDenied,
    Code.TOO_LARGE: TooLarge,
    Code.DEVICE_UNREACHABLE: DeviceUnreachable,
}


def error_for(code: int, message: str) -> ActorserveError:
    """Build the error of a code that came over a wire; an unknown code becomes INTERNAL."""
    try:
        kind = _BY_CODE[Code(code)]
    except ValueError:
        kind = InternalError
    return kind(message)
