# SPDX-License-Identifier: Apache-2.0
"""An engine as a rank drives it: the calls of one step, in one order on every rank.

    rank 0's pump   Step ─► (broadcast) ─► Driver.apply ─► outputs, to whoever asked
    other ranks              Step ───────► Follower.apply ─► outputs, dropped

An error that is a request's own is an output; any other exception of the engine leaves `apply`,
and the engine is dead then. Calls are the exception: what one raises is its answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from actorserve.actors.generation.engine import Engine, RequestError
from actorserve.errors import InvalidArgument, Unsupported
from actorserve.wire.generation import GenRequest, Output, Step

PREPARE, COMMIT, ROLLBACK = "prepare", "commit", "rollback"
_PROTOCOL_METHODS = frozenset({"start", "add", "abort", "poll", "close", "capacity", "call"})


class Applied(msgspec.Struct, frozen=True):
    """What came of a step. `call_error` is "" for a call that went well, or none."""

    outputs: Sequence[Output] = ()
    refused: tuple[tuple[int, str], ...] = ()
    call_result: Any = None
    call_error: str = ""


class Driver:
    """Make the engine's calls."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._is_closed = False

    def apply(self, step: Step, timeout_s: float = 0.0) -> Applied:
        """Make the calls of a step: aborts, adds, the call, poll, close."""
        if step.aborts:
            self.engine.abort(step.aborts)
        refused = self._add(step.adds) if step.adds else ()
        result, error = None, ""
        if step.call is not None:
            result, error = self.call(step.call)
        outputs = self.engine.poll(timeout_s) if step.poll else ()
        if step.close:
            self.close()
        return Applied(outputs, refused, result, error)

    def call(self, call: tuple[int, str, str, list[Any]]) -> tuple[Any, str]:
        """Make one phase of a call; returns its result and its error as text."""
        _, phase, method, args = call
        try:
            return _PHASES[phase](self.engine, method, args), ""
        except (InvalidArgument, Unsupported) as error:  # what it says is for its caller
            return None, error.message
        except Exception as error:
            return None, f"{type(error).__name__}: {error}" if str(error) else repr(error)

    def close(self) -> None:
        """Close the engine, once."""
        if not self._is_closed:
            self._is_closed = True
            self.engine.close()

    def _add(self, requests: Sequence[GenRequest]) -> tuple[tuple[int, str], ...]:
        refused = []
        for request in requests:
            try:
                self.engine.add(request)
            except RequestError as error:
                refused.append((request.id, error.message))
        return tuple(refused)


class Follower(Driver):
    """A rank that does as rank 0 does."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.steps = 0
        self.is_closed = False

    def follow(self, step: Step) -> str:
        """Apply a step; returns "" or what its call says against itself, for rank 0's decision.

        An engine that leads its other ranks itself (`ranks` "leader") is called by its own rules:
        only calls and the end reach it here.
        """
        self.steps = step.number
        if self.engine.ranks == "leader":
            step = msgspec.structs.replace(step, adds=[], aborts=[], poll=False)
        applied = self.apply(step)
        self.is_closed = step.close
        return applied.call_error


def _prepare(engine: Any, method: str, args: list[Any]) -> Any:
    """Do what can fail and be undone: loading an adapter, or what the engine's `prepare` does."""
    _target(engine, method)
    if method == "load_adapter":
        return engine.load_adapter(*args)
    prepare = getattr(engine, "prepare", None)
    return None if prepare is None else prepare(method, *args)


def _commit(engine: Any, method: str, args: list[Any]) -> Any:
    return None if method == "load_adapter" else _target(engine, method)(*args)


def _rollback(engine: Any, method: str, args: list[Any]) -> Any:
    if method == "load_adapter":
        unload = getattr(engine, "unload_adapter", None)
        return None if unload is None else unload(args[0])
    rollback = getattr(engine, "rollback", None)
    return None if rollback is None else rollback(method, *args)


_PHASES = {PREPARE: _prepare, COMMIT: _commit, ROLLBACK: _rollback}


def _target(engine: Any, method: str) -> Any:
    """Return what a call reaches: the engine's method of that name for adapters, else `call`."""
    if method in ("load_adapter", "unload_adapter"):
        found = getattr(engine, method, None)
        if found is None:
            raise InvalidArgument("this engine has no adapters")
        return found
    if method in _PROTOCOL_METHODS or method.startswith("_"):
        raise InvalidArgument(f"{method!r} is not for calls: the pump makes it")
    call = getattr(engine, "call", None)
    if call is None:
        raise InvalidArgument(f"this engine has no calls; asked for {method!r}")
    return lambda *args: call(method, *args)
