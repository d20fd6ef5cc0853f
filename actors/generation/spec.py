# SPDX-License-Identifier: Apache-2.0
"""Which engine, and how an executor runs it. Plain data: both travel to other processes."""

from __future__ import annotations

import inspect
from typing import Any, Literal

import msgspec

from actorserve.actors.generation.engine import Engine, Tokenizer
from actorserve.actors.generation.engines.registry import engine_class
from actorserve.actors.generation.main_script import importable_name
from actorserve.errors import InvalidArgument, Unsupported
from actorserve.state.restart import Restart

_WORDS = {"mode": ("step", "thread"), "ranks": ("leader", "lockstep")}
_NEEDED = ("start", "add", "abort", "poll", "close")


REFUSALS = (InvalidArgument, Unsupported)
"""What an engine raises while it loads when it is no fault, but the caller's to change."""


class EngineSpec(msgspec.Struct, frozen=True):
    """An engine by name, with its options: msgspec data, as they travel."""

    name: str
    options: dict[str, Any] = {}

    def check(self) -> None:
        """Raise InvalidArgument for an unknown engine, or options that it does not have."""
        try:
            parameters = inspect.signature(engine_class(self.name)).parameters.values()
        except (ValueError, TypeError):
            return  # a class that does not say what it takes; `make` will tell
        if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
            return
        known = [each.name for each in parameters]
        for name in self.options:
            if name not in known:
                raise InvalidArgument(
                    f"engine {self.name!r} has no option {name!r}: it has "
                    + (", ".join(known) or "none")
                )

    def make(self) -> Engine:
        """Return a new engine. Raises InvalidArgument for a wrong name or wrong options."""
        kind = engine_class(self.name)
        self.check()
        try:
            engine = kind(**self.options)
        except TypeError as error:
            raise InvalidArgument(f"engine {self.name!r}: {error}") from error
        return checked_engine(engine, self.name)

    def tokenizer(self) -> Tokenizer | None:
        """Return the engine's tokenizer, without loading its weights; None if it has none."""
        return tokenizer_of(engine_class(self.name), self.options)


class ExecutorConfig(msgspec.Struct, frozen=True):
    """How an executor works. Times are in seconds. Raises InvalidArgument for odd values.

    - `max_beam_width`: the widest beam search that requests may ask for.
    - `max_in_flight`: requests at once; one more is refused, or waits with `asubmit`.
    - `worker`: the engine in "process"es of its own, or in a "thread" of this one.
    - `load_timeout_s`: the time in which every rank must have loaded its engine; 0 is no limit.
    - `hang_timeout_s`: the longest that one iteration may take; 0 is no limit.
    - `drain_timeout_s`: how long a shutdown with drain waits for what is running.
    - `restart`: what happens to a group of processes after its death; None: nothing.
    - `stats_kept`, `kv_events_kept`: how many of them wait for a reader before the oldest go.
    - `env`, `python`: environment and interpreter of the processes.
    """

    max_beam_width: int = 1
    max_in_flight: int = 4096
    worker: Literal["process", "thread"] = "process"
    load_timeout_s: float = 600.0
    hang_timeout_s: float = 60.0
    drain_timeout_s: float = 10.0
    restart: Restart | None = None
    stats_kept: int = 1000
    kv_events_kept: int = 10_000
    env: dict[str, str] = {}
    python: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_beam_width", "max_in_flight", "stats_kept", "kv_events_kept"):
            if getattr(self, name) < 1:
                raise InvalidArgument(
                    f"executor config: {name} is {getattr(self, name)}, expected 1 or more"
                )
        for name in ("load_timeout_s", "hang_timeout_s", "drain_timeout_s"):
            if not getattr(self, name) >= 0:
                raise InvalidArgument(
                    f"executor config: {name} is {getattr(self, name)}, expected seconds"
                )
        if self.worker not in ("process", "thread"):
            raise InvalidArgument(
                f"executor config: worker is {self.worker!r}, expected 'process' or 'thread'"
            )


def spec_of(engine: EngineSpec | str) -> EngineSpec:
    """Return the spec of an engine that is given by name or as a spec already."""
    return EngineSpec(engine) if isinstance(engine, str) else engine


def importable(spec: EngineSpec) -> EngineSpec:
    """Return the spec as another process understands it. Raises InvalidArgument if it cannot."""
    return EngineSpec(importable_name(spec.name), spec.options)


def checked_engine(engine: object, name: str = "") -> Engine:
    """Return the engine; raise InvalidArgument for what lacks a method or word of the protocol."""
    missing = [each for each in _NEEDED if not callable(getattr(engine, each, None))]
    if missing or isinstance(engine, type):
        raise InvalidArgument(
            f"{name or repr(engine)} is no engine: it has no {', '.join(missing) or 'instance'}"
        )
    for attribute, allowed in _WORDS.items():
        if getattr(engine, attribute, None) not in allowed:
            raise InvalidArgument(
                f"{name or repr(engine)} is no engine: its {attribute} is "
                f"{getattr(engine, attribute, None)!r}, expected {' or '.join(map(repr, allowed))}"
            )
    return engine  # type: ignore[return-value]  # as far as can be seen from outside


def tokenizer_of(kind: type[Any], options: dict[str, Any]) -> Tokenizer | None:
    """Return the tokenizer that a class of engines has for these options; None if none."""
    make = getattr(kind, "tokenizer", None)
    return None if make is None else make(options)
