# SPDX-License-Identifier: Apache-2.0
"""One life of an actor: its object and the calls into user code, each in one place."""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

from actorserve.errors import InvalidArgument
from actorserve.runtime.actor import Actor, ActorContext
from actorserve.runtime.message import Message
from actorserve.runtime.payload import convert

_HOOKS = ("receive", "started", "restarted", "stopping")


class Life:
    """The actor's object, from its construction to its last hook. What user code raises passes."""

    def __init__(
        self,
        kind: type[Actor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: ActorContext,
    ) -> None:
        self.kind = kind
        self.context = context
        self._args = args
        self._kwargs = kwargs
        self._actor: Actor | None = None

    @property
    def name(self) -> str:
        """The actor's name."""
        return self.context.name

    def begin(self) -> Any:
        """Construct the actor and call its first hook; what it returns may be awaitable."""
        if self.kind.__new__ is object.__new__:
            actor = self.kind.__new__(self.kind)
        else:
            actor = self.kind.__new__(self.kind, *self._args, **self._kwargs)
        actor.context = self.context
        self._actor = actor
        actor.__init__(*self._args, **self._kwargs)  # type: ignore[misc]
        if self.context.restarts:
            return actor.restarted(self.context.last_end)
        return actor.started()

    def receive(self, message: Message[Any]) -> Any:
        """Call the actor's receive."""
        assert self._actor is not None
        return self._actor.receive(message)

    def finish(self) -> Any:
        """Call the last hook; what it returns may be awaitable."""
        return self._actor.stopping() if self._actor is not None else None


def is_async(kind: type[Actor]) -> bool:
    """Whether an actor of this class needs an event loop."""
    hooks = [inspect.unwrap(getattr(kind, name)) for name in _HOOKS]
    return any(
        inspect.iscoroutinefunction(hook) or inspect.isasyncgenfunction(hook) for hook in hooks
    )


def check_arguments(kind: type[Actor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse arguments that the constructor does not take. Raises InvalidArgument."""
    try:
        inspect.signature(kind).bind(*args, **kwargs)
    except TypeError as error:
        raise InvalidArgument(f"{kind.__name__}: {error}") from None
    except ValueError:
        pass  # it has no signature that can be read


def typed_arguments(
    kind: type[Actor], args: list[Any], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Turn plain data from another process into what the constructor's annotations say.

    Raises InvalidArgument where it does not fit.
    """
    try:
        hints = get_type_hints(kind.__init__)
        bound = inspect.signature(kind).bind(*args, **kwargs)
        parameters = inspect.signature(kind).parameters
    except (TypeError, ValueError, NameError):
        return tuple(args), kwargs  # the constructor itself will say what is wrong
    for name, value in bound.arguments.items():
        hint = hints.get(name)
        if hint is None:
            continue
        where = f"argument {name!r} of {kind.__name__}"
        if parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
            bound.arguments[name] = tuple(_converted(each, hint, where) for each in value)
        elif parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            bound.arguments[name] = {
                key: _converted(each, hint, where) for key, each in value.items()
            }
        else:
            bound.arguments[name] = _converted(value, hint, where)
    return bound.args, bound.kwargs


def _converted(value: Any, hint: Any, where: str) -> Any:
    try:
        return convert(value, hint)
    except InvalidArgument as error:
        raise InvalidArgument(f"{where}: {error.message}") from None
