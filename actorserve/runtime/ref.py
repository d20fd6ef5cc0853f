# SPDX-License-Identifier: Apache-2.0
"""References: all that anybody has of an actor, and all that one needs.

    ref.tell, ask, stream, stop ──► Door ──► the actor's mailbox, or the system's process

A reference may be used from any thread and any event loop of its process, and be sent in
messages. It stays valid over restarts; when the actor is gone, every use fails with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Protocol, TypeVar

from actorserve.clock import monotonic_s
from actorserve.errors import InvalidArgument
from actorserve.runtime.answer import Answer
from actorserve.runtime.message import Message
from actorserve.runtime.stream import Stream
from actorserve.runtime.waiting import Waiting, limit_of

R = TypeVar("R")


class Door(Protocol):
    """The way from references to actors, in one process."""

    def tell(self, ref: ActorRef, message: Message[Any], deadline_s: float | None) -> Answer[None]:
        """Bring a message."""

    def tell_nowait(self, ref: ActorRef, message: Message[Any]) -> None:
        """Bring a message, or raise."""

    def ask(
        self, ref: ActorRef, message: Message[R], deadline_s: float | None, *, is_nowait: bool
    ) -> Answer[R]:
        """Bring a message and its answer."""

    def stream(self, ref: ActorRef, message: Message[R], item_timeout_s: float | None) -> Stream[R]:
        """Bring a message and its many answers."""

    def stop(self, ref: ActorRef, *, is_drained: bool, timeout_s: float | None) -> Answer[None]:
        """Stop an actor."""

    def ref(self, number: int, name: str) -> ActorRef:
        """Return the reference to the actor of this id."""

    def block(self, waiting: Waiting, timeout_s: float | None) -> bool:
        """See Blocker."""

    def later(self, function: Callable[[], None]) -> None:
        """Call it soon, in this door's own thread. From anywhere, a garbage collection too."""


class ActorRef:
    """A reference to an actor. Two references to one actor are equal.

    What can wait returns an `Answer`: `await` it in an event loop, or call its `result()` in a
    thread. Nothing has to be awaited: the message is on its way when the call returns.
    """

    __slots__ = ("_door", "id", "name", "target")

    def __init__(self, door: Door, number: int, name: str, target: Any = None) -> None:
        self._door = door
        self.id = number
        self.name = name
        self.target = target  # the door's own

    def tell(self, message: Message[Any], *, timeout_s: float | None = None) -> Answer[None]:
        """Send a message for which no answer is wanted.

        The Answer is there when the mailbox has taken it; while it is full, senders stand in
        line, in their order. Fails with ActorStopped or ActorDead, with DeadlineExceeded after
        `timeout_s` seconds in line. What goes wrong later is in the log, not here.
        """
        return self._door.tell(self, _checked(message), _deadline_s(timeout_s))

    def tell_nowait(self, message: Message[Any]) -> None:
        """Send a message, or raise Full at once when the mailbox has no room."""
        self._door.tell_nowait(self, _checked(message))

    def ask(self, message: Message[R], *, timeout_s: float | None = None) -> Answer[R]:
        """Send a message and get its answer.

        Fails with ReceiveError when `receive` raised, with ActorStopped or ActorDead when no
        answer can come, with DeadlineExceeded after `timeout_s` seconds (mailbox and work
        together). Cancelling the wait takes the message back, unless it has been begun.
        """
        return self._door.ask(self, _checked(message), _deadline_s(timeout_s), is_nowait=False)

    def ask_nowait(self, message: Message[R], *, timeout_s: float | None = None) -> Answer[R]:
        """Ask, but fail with Full instead of standing in line for room in the mailbox."""
        return self._door.ask(self, _checked(message), _deadline_s(timeout_s), is_nowait=True)

    def stream(self, message: Message[R], *, timeout_s: float | None = None) -> Stream[R]:
        """Send a message and get many answers: what its `receive` yields.

        Iterate with `async for` or `for`. `timeout_s` is the longest wait for one item. Leaving
        the loop early, or closing the stream, ends the generator in the actor.
        """
        return self._door.stream(self, _checked(message), limit_of(timeout_s))

    def stop(self, *, drain: bool = True, timeout_s: float | None = None) -> Answer[None]:
        """Stop the actor and its children; the Answer is there when they are gone.

        New messages are refused at once. With `drain` those in its mailbox are worked off first,
        else they fail; the message in hand ends in any case. Then `stopping` is called. What is
        not done after `timeout_s` seconds is killed, as far as its place allows. Stopping a
        stopped actor is fine.
        """
        return self._door.stop(self, is_drained=drain, timeout_s=limit_of(timeout_s))

    def is_behind(self, door: Door | None) -> bool:
        """Whether this reference belongs to that door."""
        return self._door is door

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActorRef) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"<ActorRef {self.name!r}>"

    def __copy__(self) -> ActorRef:
        return self

    def __deepcopy__(self, _memo: object) -> ActorRef:
        return self

    def __reduce__(self) -> NoReturn:
        raise InvalidArgument("references are never pickled: send them in messages")


def _checked(message: Message[R]) -> Message[R]:
    if not isinstance(message, Message):
        raise InvalidArgument(f"expected a Message, not {type(message).__name__} {message!r:.60}")
    return message


def _deadline_s(timeout_s: float | None) -> float | None:
    """Turn seconds from now into a point in time. Raises InvalidArgument unless 0 or more."""
    limit_s = limit_of(timeout_s)
    return None if limit_s is None else monotonic_s() + limit_s
