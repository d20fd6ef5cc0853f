# SPDX-License-Identifier: Apache-2.0
"""The model API's two kinds of error: one to be sent (`TritonError`), one to be raised."""

from __future__ import annotations

import enum
from typing import ClassVar


class TritonErrorCode(enum.IntEnum):
    """What went wrong, as the model API numbers it; the same numbers as `errors.Code` up to 7."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7


class TritonError:
    """An error to answer a request with. A plain object: it cannot be raised."""

    __slots__ = ("__weakref__", "_code", "_message")

    UNKNOWN: ClassVar[TritonErrorCode] = TritonErrorCode.UNKNOWN
    INTERNAL: ClassVar[TritonErrorCode] = TritonErrorCode.INTERNAL
    NOT_FOUND: ClassVar[TritonErrorCode] = TritonErrorCode.NOT_FOUND
    INVALID_ARG: ClassVar[TritonErrorCode] = TritonErrorCode.INVALID_ARG
    UNAVAILABLE: ClassVar[TritonErrorCode] = TritonErrorCode.UNAVAILABLE
    UNSUPPORTED: ClassVar[TritonErrorCode] = TritonErrorCode.UNSUPPORTED
    ALREADY_EXISTS: ClassVar[TritonErrorCode] = TritonErrorCode.ALREADY_EXISTS
    CANCELLED: ClassVar[TritonErrorCode] = TritonErrorCode.CANCELLED

    def __init__(self, message: str, code: TritonErrorCode = TritonErrorCode.INTERNAL) -> None:
        """Take the text and one of the class's codes. Raises TypeError for anything else."""
        self._message = exact_str(message, "the message of a TritonError")
        try:
            self._code = TritonErrorCode(code)
        except ValueError:
            raise TypeError(
                f"the code of a TritonError is one of TritonError.UNKNOWN … CANCELLED, got {code!r}"
            ) from None

    def code(self) -> TritonErrorCode:
        """Return the code."""
        return self._code

    def message(self) -> str:
        """Return the text."""
        return self._message

    def __repr__(self) -> str:
        return f"TritonError({self._message!r}, TritonError.{self._code.name})"


class TritonModelException(Exception):
    """Raised for every misuse of the model API, and by models themselves."""


def exact_str(value: object, what: str) -> str:
    """Return a string as a plain `str`, which is all that a wire can carry (numpy's is not).

    Raises TypeError that names `what`.
    """
    if type(value) is str:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    raise TypeError(f"{what} must be a str, got {type(value)}")
