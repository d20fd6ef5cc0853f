# SPDX-License-Identifier: Apache-2.0
"""What a user's actor is made of: the base class, and what an actor knows of itself."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from actorserve.runtime.answer import Answer
from actorserve.runtime.placement import Placement
from actorserve.runtime.ref import ActorRef
from actorserve.state.strategy import Strategy

DEFAULT_MAILBOX = 1024
"""Messages that wait for an actor before its senders have to."""


class Spawning(Protocol):
    """Whatever can spawn actors: the system, in its own process or seen from another."""

    def spawn(
        self,
        actor: type[Actor],
        *args: Any,
        where: Placement | None = None,
        name: str | None = None,
        mailbox: int = DEFAULT_MAILBOX,
        **kwargs: Any,
    ) -> Answer[ActorRef]:
        """Start an actor; the Answer is its reference, when it runs."""


class Self(Protocol):
    """The home of a living actor, as its context needs it."""

    @property
    def system(self) -> Spawning:
        """Where new top-level actors come from."""

    def spawn_child(
        self,
        actor: type[Actor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        where: Placement | None,
        name: str | None,
        mailbox: int,
    ) -> Answer[ActorRef]:
        """Start an actor below this one."""

    def end(self) -> None:
        """End this actor after the message in hand."""


class ActorContext:
    """What an actor knows of itself: `self.context`.

    `ref` is its own reference, `parent` that of the actor which spawned it (None at the top),
    `restarts` how often it was started again, and `last_end` why its life before this one ended.
    """

    __slots__ = ("_self", "last_end", "parent", "ref", "restarts")

    def __init__(
        self, home: Self, ref: ActorRef, parent: ActorRef | None, restarts: int, last_end: str
    ) -> None:
        self._self = home
        self.ref = ref
        self.parent = parent
        self.restarts = restarts
        self.last_end = last_end

    @property
    def name(self) -> str:
        """The actor's name."""
        return self.ref.name

    @property
    def system(self) -> Spawning:
        """The system: `spawn` there makes an actor at the top, not a child of this one."""
        return self._self.system

    def spawn(
        self,
        actor: type[Actor],
        *args: Any,
        where: Placement | None = None,
        name: str | None = None,
        mailbox: int = DEFAULT_MAILBOX,
        **kwargs: Any,
    ) -> Answer[ActorRef]:
        """Start an actor as a child of this one; see ActorSystem.spawn.

        Children are supervised by their parent's class (`strategy`, `intensity`), and stopped
        whenever it ends, also before it is started again.
        """
        return self._self.spawn_child(actor, args, kwargs, where, name, mailbox)

    def stop(self) -> None:
        """End this actor of its own will, after the message in hand.

        Then `stopping` is called. Its restart policy decides: a "permanent" actor is started
        again, the others (the default is "transient") are not.
        """
        self._self.end()


class Actor:
    """Base class of actors: one message at a time, and nobody else touches its state.

    `receive` and the hooks may be plain or async. `strategy` and `intensity=(n, seconds)` say how
    the children of such an actor are supervised: which of them are restarted together, and that
    more than n restarts in that time are the parent's failure too.
    """

    strategy: ClassVar[Strategy] = Strategy.ONE_FOR_ONE
    intensity: ClassVar[tuple[int, float] | None] = None
    context: ActorContext

    def receive(self, message: Any) -> Any:
        """Take one message; what is returned is the answer, what is yielded a stream.

        An exception is the answer too, and the actor goes on; `raise Crash(...)` ends it, and its
        restart policy decides.
        """
        raise NotImplementedError(f"{type(self).__name__} has no receive")

    def started(self) -> Any:
        """Get ready: called once before the first message."""

    def restarted(self, reason: str) -> Any:
        """Get ready again: called instead of `started` in every later life of this actor.

        The object is a new one. `reason` says how the life before ended.
        """
        return self.started()

    def stopping(self) -> Any:
        """Tidy up: called after the last message, but not after a crash."""
