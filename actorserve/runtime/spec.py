# SPDX-License-Identifier: Apache-2.0
"""What is to be spawned: everything that each life of an actor is made from."""

from __future__ import annotations

from typing import Any

from actorserve.errors import InvalidArgument
from actorserve.runtime.actor import DEFAULT_MAILBOX, Actor
from actorserve.runtime.life import check_arguments, typed_arguments
from actorserve.runtime.naming import find_name, resolve
from actorserve.runtime.payload import Packed, pack, unpack
from actorserve.runtime.placement import Loop, Placement, Process
from actorserve.runtime.ref import Door
from actorserve.state.strategy import Strategy


class ActorSpec:
    """An actor to be: `kind` and arguments for this process, or `class_name` and `packed` for any.

    `name` is None until its family has given it one.
    """

    __slots__ = (
        "args",
        "class_name",
        "intensity",
        "kind",
        "kwargs",
        "mailbox",
        "name",
        "packed",
        "strategy",
        "where",
    )

    def __init__(
        self,
        class_name: str,
        where: Placement,
        name: str | None,
        mailbox: int,
        strategy: Strategy,
        intensity: tuple[int, float] | None,
    ) -> None:
        if isinstance(mailbox, bool) or not isinstance(mailbox, int) or mailbox < 1:
            raise InvalidArgument(f"mailbox is {mailbox!r}, expected the number of messages, 1 up")
        if name is not None and (not isinstance(name, str) or not name.isprintable() or not name):
            raise InvalidArgument(f"an actor cannot be named {name!r}")
        self.class_name = class_name
        self.where = where
        self.name = name
        self.mailbox = mailbox
        self.strategy = strategy
        self.intensity = intensity
        self.kind: type[Actor] | None = None
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.packed: Packed | None = None

    @property
    def is_remote(self) -> bool:
        """Whether it is for a process of its own."""
        return isinstance(self.where, Process)

    @property
    def short_name(self) -> str:
        """The class's own name."""
        return self.class_name.rpartition(":")[2].rpartition(".")[2]


def spec_of(
    door: Door,
    actor: type[Actor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    where: Placement | None,
    name: str | None,
    mailbox: int = DEFAULT_MAILBOX,
    *,
    is_packed: bool = False,
) -> ActorSpec:
    """Check what a user asks for; `is_packed` gets it ready for another process in any case.

    Raises InvalidArgument for what cannot be.
    """
    if not (isinstance(actor, type) and issubclass(actor, Actor)):
        raise InvalidArgument(f"expected a class of actors, not {actor!r:.60}")
    where = Loop() if where is None else where
    if not isinstance(where, Placement):
        raise InvalidArgument(f"where is {where!r:.60}, expected Loop(), Thread() or Process()")
    check_arguments(actor, args, kwargs)
    is_packed = is_packed or isinstance(where, Process)
    class_name = find_name(actor) if is_packed else actor.__qualname__
    spec = ActorSpec(class_name, where, name, mailbox, actor.strategy, actor.intensity)
    spec.kind, spec.args, spec.kwargs = actor, args, kwargs
    if is_packed:
        spec.packed = pack([list(args), kwargs], door, f"an argument of {actor.__name__}")
    return spec


def unpack_arguments(
    kind: type[Actor], packed: Packed, door: Door
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments that came from another process, in the types that are expected.

    Raises InvalidArgument where they do not fit.
    """
    args, kwargs = unpack(packed, tuple[list[Any], dict[str, Any]], door)
    return typed_arguments(kind, args, kwargs)


def load(spec: ActorSpec, door: Door) -> None:
    """Get a spec that came packed ready for this process. Raises BootError, InvalidArgument."""
    if spec.kind is None and spec.packed is not None:
        kind = resolve(spec.class_name)
        if not issubclass(kind, Actor):
            raise InvalidArgument(f"{spec.class_name} is no class of actors")
        spec.args, spec.kwargs = unpack_arguments(kind, spec.packed, door)
        spec.kind = kind
