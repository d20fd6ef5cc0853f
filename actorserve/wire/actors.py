# SPDX-License-Identifier: Apache-2.0
"""What the process of an actor and the process of its system say to each other.

    system ── work lane ────► actor   Begin, Deliver, Revoke, Grant, DropWaiting, EndActor;
                                      Answered, Failed, ItemSent, Done
    system ── control lane ─► actor   Ping; the same four, for calls of the actor's other threads
    actor  ── up lane ──────► system  PhaseEntered, BootFailed, Started, Progress, Leaving;
                                      Answered, Failed, ItemSent, Done; PassOn, Revoke, Grant,
                                      SpawnActor, StopActor; LogRecord, Pong

A call has the number that its caller gave it, unique on this channel: those of the system count
up in the order in which they are delivered (so that one number says how far the actor has come),
those of the actor are its own. Both sides answer with Answered, ItemSent and Done, or Failed.
"""

from __future__ import annotations

import msgspec

from actorserve.wire.codec import Decoder
from actorserve.wire.messages import (
    BootFailed,
    Handle,
    LogRecord,
    Message,
    PhaseEntered,
    Ping,
    Pong,
)

TELL, ASK, STREAM = 0, 1, 2
"""The kinds of a call: nothing comes back, one answer, or many."""


class WireArray(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A numpy array: its dtype in numpy's own spelling, its bytes in C order or their handle."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | Handle


class Parcel(msgspec.Struct, frozen=True, array_like=True):
    """A value: msgpack, in which an extension of code 1 is the index of one of the arrays.

    `kind` is the "module:qualname" of a message's class, "" for an answer. A long body lies in an
    arena as the arrays do.
    """

    kind: str
    body: bytes | Handle
    arrays: list[WireArray] = []

    def handles(self) -> list[Handle]:
        """Return every handle in it."""
        found = [self.body] if isinstance(self.body, Handle) else []
        return found + [each.data for each in self.arrays if isinstance(each.data, Handle)]


class WireFailure(msgspec.Struct, frozen=True, array_like=True):
    """An error: its class in `errors`, its code where that class is unknown, its text.

    `kind`, `detail` and `stack` are those of a ReceiveError.
    """

    error: str
    code: int
    message: str
    kind: str = ""
    detail: str = ""
    stack: str = ""
    retry_after_s: float | None = None


# --- system to actor -----------------------------------------------------------------------------


class Begin(Message, frozen=True, tag=70):
    """Be this actor: load the class, construct it with the arguments, call its first hook.

    `main_path` is the script that stands behind the module name "__main__", if there is one.
    """

    actor: int
    name: str
    class_name: str
    main_path: str | None
    arguments: Parcel
    parent: tuple[int, str] | None
    restarts: int
    reason: str


class Deliver(Message, frozen=True, tag=71):
    """Take a message. `deadline_ns` is monotonic, 0 for none; `credit` the items of a stream
    that may be sent at once.
    """

    number: int
    kind: int
    parcel: Parcel
    deadline_ns: int = 0
    credit: int = 0


class DropWaiting(Message, frozen=True, tag=68):
    """Fail all messages that have come and not been begun; you alone know which."""

    failure: WireFailure


class EndActor(Message, frozen=True, tag=72):
    """End after the message in hand: call `stopping`, then leave."""


# --- both ways -----------------------------------------------------------------------------------


class Revoke(Message, frozen=True, tag=73):
    """Nobody waits for this call of mine any more."""

    number: int


class Grant(Message, frozen=True, tag=74):
    """So many more items of the stream that this call of mine brings may be sent."""

    number: int
    count: int


class Answered(Message, frozen=True, tag=75):
    """The answer to your call."""

    number: int
    parcel: Parcel


class ItemSent(Message, frozen=True, tag=76):
    """One item of the stream that your call brings."""

    number: int
    parcel: Parcel


class Done(Message, frozen=True, tag=77):
    """Your stream has ended, or your message was taken, or your order is carried out."""

    number: int


class Failed(Message, frozen=True, tag=78):
    """Your call failed."""

    number: int
    failure: WireFailure


# --- actor to system -----------------------------------------------------------------------------


class Started(Message, frozen=True, tag=80):
    """The first hook has returned; messages may come."""


class Progress(Message, frozen=True, tag=81):
    """Every message up to this number has been begun; those before it are done with."""

    number: int


class Leaving(Message, frozen=True, tag=82):
    """The actor ends: of itself, as it was told, or because it crashed."""

    reason: str
    is_normal: bool


class PassOn(Message, frozen=True, tag=83):
    """Bring this message to another actor. `is_nowait` fails instead of waiting for room.

    What comes back goes on the control lane with `on_control`.
    """

    number: int
    on_control: bool
    target: int
    kind: int
    parcel: Parcel
    deadline_ns: int = 0
    is_nowait: bool = False


class SpawnActor(Message, frozen=True, tag=84):
    """Spawn an actor, as a child of the sender with `is_child`. `where` is an encoded placement."""

    number: int
    on_control: bool
    class_name: str
    arguments: Parcel
    where: bytes
    name: str
    mailbox: int
    strategy: str
    intensity: tuple[int, float] | None
    is_child: bool


class StopActor(Message, frozen=True, tag=85):
    """Stop an actor."""

    number: int
    on_control: bool
    target: int
    is_drained: bool
    timeout_s: float | None


Outcome = Answered | ItemSent | Done | Failed
ToActor = Begin | Deliver | DropWaiting | EndActor | Revoke | Grant | Outcome | Ping
FromActor = (
    PhaseEntered
    | BootFailed
    | Started
    | Progress
    | Leaving
    | Outcome
    | PassOn
    | Revoke
    | Grant
    | SpawnActor
    | StopActor
    | LogRecord
    | Pong
)

decode_to_actor: Decoder[ToActor] = Decoder(ToActor, "to an actor")
decode_from_actor: Decoder[FromActor] = Decoder(FromActor, "from an actor")
