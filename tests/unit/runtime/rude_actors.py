# SPDX-License-Identifier: Apache-2.0
"""Actors that do what nobody should, for the tests."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec

from actorserve import Actor, ActorRef, Message
from actorserve.errors import ActorserveError, Crash, InvalidArgument, NotFound


class Do(Message[Any]):
    what: str
    to: ActorRef | None = None
    path: str = ""


class StrangeError(Exception):
    """Has no text, and says so in the worst way."""

    def __str__(self) -> str:
        raise BaseException("not even a text")


ERRORS: dict[str, BaseException] = {
    "huge": ValueError("ü" * 1_000_000),
    "surrogate": ValueError("half of a pair: \ud800"),
    "strange": StrangeError(),
    "base": BaseException("of all"),
    "interrupt": KeyboardInterrupt("from within"),
    "huge of ours": NotFound("é" * 1_000_000),
    "surrogate of ours": NotFound("half of a pair: \ud800"),
    "huge crash": Crash("é" * 1_000_000),
    "surrogate crash": Crash("half of a pair: \ud800"),
    "huge exit": SystemExit("é" * 1_000_000),
}


class Rude(Actor):
    """Does what it is told, in plain functions."""

    def __init__(self, hook: str = "", error: str = "") -> None:
        if hook == "init":
            raise ERRORS[error]

    def receive(self, message: Do) -> Any:
        if message.what in ERRORS:
            raise ERRORS[message.what]
        return getattr(self, message.what)(message)

    def nothing(self, _message: Do) -> str:
        return "well"

    def fork_and_return(self, _message: Do) -> int:
        pid = os.fork()
        return os.waitpid(pid, 0)[1] if pid else 0

    def fork_and_exit(self, _message: Do) -> int:
        pid = os.fork()
        if not pid:
            raise SystemExit(3)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def ask_in_thread(self, message: Do) -> list[str]:
        """Ask another actor from a thread of this one, whose answers come on the control lane."""
        assert message.to is not None
        ref, said = message.to, []

        def ask() -> None:
            try:
                ref.ask(Do(message.path), timeout_s=20).result()
            except ActorserveError as error:
                said.append(type(error).__name__)

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join(25)
        return said

    def drop_stream(self, message: Do) -> None:
        assert message.to is not None
        next(message.to.stream(Do("count")))

    def count(self, _message: Do) -> Any:
        return iter(range(10_000))

    def stop_self(self, _message: Do) -> Any:
        return self.context.ref.stop().result()

    def stop_parent(self, _message: Do) -> Any:
        assert self.context.parent is not None
        return self.context.parent.stop().result()

    def stop_system(self, _message: Do) -> Any:
        return self.context.system.stop().result()  # type: ignore[attr-defined]

    def child(self, _message: Do) -> Any:
        return self.context.spawn(type(self), where=None).result()


class AsyncRude(Rude):
    """Does the same with async code."""

    async def receive(self, message: Do) -> Any:
        if message.what == "stop_self":
            return await self.context.ref.stop()
        if message.what == "stop_parent":
            assert self.context.parent is not None
            return await self.context.parent.stop()
        if message.what == "stop_system":
            return await self.context.system.stop()  # type: ignore[attr-defined]
        if message.what == "child":
            return await self.context.spawn(type(self))
        if message.what == "hand_on":
            assert message.to is not None
            return message.to.ask(Do("nothing"))
        if message.what == "wait_in_stream":
            return self.wait_in_stream(message.path)
        if message.what == "ask_in_thread":
            return await asyncio.to_thread(super().receive, message)
        return super().receive(message)

    async def wait_in_stream(self, path: str) -> AsyncIterator[int]:
        try:
            yield 1
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(0)
            Path(path).touch()


class Positive(msgspec.Struct):
    """A reply that its reader refuses, with an error of ours."""

    number: int

    def __post_init__(self) -> None:
        if self.number < 0:
            raise InvalidArgument(f"{self.number} is negative")


class Give(Message[Positive]):
    """Answered with this number, by way of another actor if one is named."""

    number: int
    of: ActorRef | None = None


class Giver(Actor):
    """Gives what its caller will refuse."""

    def receive(self, message: Give) -> Any:
        if message.of is not None:
            try:
                return message.of.ask(Give(message.number), timeout_s=20).result()
            except ActorserveError as error:
                raise NotFound(f"{type(error).__name__}: {error.message}") from None
        given = Positive(1)
        given.number = message.number
        return given
