# SPDX-License-Identifier: Apache-2.0
"""Messages: frozen data that names the type of its answer."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, ForwardRef, Generic, TypeVar, get_args, get_origin

import msgspec

R_co = TypeVar("R_co", covariant=True)

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_options: Any) -> Any:
        """Say nothing: only type checkers want to know that subclasses are frozen too."""
        return lambda kind: kind


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class Message(msgspec.Struct, Generic[R_co], frozen=True, array_like=True, tag=True):
    """Base of what actors are sent: `class Add(Message[int]): a: int; b: int`.

    The type in brackets is that of the answer to `ask`, or of each item of a `stream`; type
    checkers follow it, and what comes from another process is checked against it. Fields are
    msgspec data (numbers, text, bytes, containers, dates, Structs, dataclasses), numpy arrays and
    `ActorRef`s. Within one process a message is handed over as it is: do not change an array or a
    list that you have sent.
    """


def reply_type(kind: type[Message[Any]]) -> Any:
    """Return what a class of messages is answered with; Any where it does not say."""
    for base in kind.__mro__:
        for generic in base.__dict__.get("__orig_bases__", ()):
            origin = get_origin(generic)
            if isinstance(origin, type) and issubclass(origin, Message):
                (reply,) = get_args(generic)
                return _resolved(reply, base.__module__)
    return Any


def _resolved(reply: Any, module: str) -> Any:
    """Look up a type that was given as text, or left open."""
    if isinstance(reply, TypeVar):
        return Any
    if isinstance(reply, ForwardRef):
        names = vars(sys.modules[module]) if module in sys.modules else {}
        try:
            return eval(reply.__forward_code__, dict(names))  # as typing.get_type_hints does
        except NameError:
            return Any
    return reply
