# SPDX-License-Identifier: Apache-2.0
"""Parents and children whose lives cross, for the tests."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from actorserve import Actor, ActorRef, Crash, Loop, Message, Process, Restart, Strategy, Thread

AT_ONCE = Restart(first_s=0.0, base_s=0.0, max_s=0.0, kind="transient")
PLACES = {"loop": Loop, "thread": Thread, "process": Process}


class Die(Message[int]):
    """End this life."""


class Say(Message[str]):
    """Say something."""


class SpawnKid(Message[str]):
    """Have a child, now."""


class Kid(Actor):
    """Says that it is there."""

    def __init__(self, log: list[str] | None = None) -> None:
        self._log = log if log is not None else []

    def started(self) -> None:
        self._log.append(f"{self.context.ref.name}: started")

    def restarted(self, _reason: str) -> None:
        self._log.append(f"{self.context.ref.name}: restarted")

    def stopping(self) -> None:
        self._log.append(f"{self.context.ref.name}: stopping")

    def receive(self, message: Die | Say) -> Any:
        if isinstance(message, Die):
            raise Crash("told to")
        return "here"


class LateParent(Actor):
    """Has a child when it should have none any more."""

    def __init__(self, place: str) -> None:
        self._place = place

    def receive(self, _message: Say) -> str:
        return "here"

    def stopping(self) -> None:
        self.context.spawn(Kid, name="late", where=PLACES[self._place]())


class BusyParent(Actor):
    """Has a child in the message in hand, while it is told to stop."""

    def __init__(self, is_in: threading.Event, may_go_on: threading.Event) -> None:
        self._is_in = is_in
        self._may_go_on = may_go_on

    def receive(self, _message: SpawnKid) -> str:
        self._is_in.set()
        self._may_go_on.wait()
        self.context.spawn(Kid, name="late", where=Thread())
        return "done"


class FaultyParent(Actor):
    """Fails in its hook, `failures` times from its life number `fails_from` on, with a child."""

    def __init__(self, place: str, fails_from: int, log: list[str]) -> None:
        self._place = place
        self._fails_from = fails_from
        self._log = log

    async def started(self) -> None:
        await self._begin()

    async def restarted(self, _reason: str) -> None:
        await self._begin()

    async def _begin(self) -> None:
        life = self.context.restarts
        await self.context.spawn(Kid, self._log, name="kid", where=PLACES[self._place]())
        self._log.append(f"life {life}")
        if life == self._fails_from:
            raise RuntimeError("the database is not there yet")

    def receive(self, message: Die | Say) -> Any:
        if isinstance(message, Die):
            raise Crash("told to")
        return "here"


class Escalating(Actor):
    """Gives its children up after one restart."""

    strategy = Strategy.ONE_FOR_ALL
    intensity = (1, 600.0)

    def __init__(self, log: list[str], kids: dict[str, ActorRef]) -> None:
        self._log = log
        self._kids = kids

    async def started(self) -> None:
        for name in ("a", "b"):
            where = Loop(restart=AT_ONCE)
            self._kids[name] = await self.context.spawn(Kid, self._log, name=name, where=where)
        self._log.append("parent: started")

    async def restarted(self, _reason: str) -> None:
        await self.started()

    def receive(self, _message: Say) -> str:
        return "here"


class Background(Actor):
    """Asynchronous; something that it left in its loop ends that loop."""

    def __init__(self, how: str) -> None:
        self._how = how
        self._task: Any = None

    async def started(self) -> None:
        if self._how == "start":
            await self._end("exit")

    async def restarted(self, _reason: str) -> None:
        pass

    async def receive(self, message: Die | Say) -> str:
        if isinstance(message, Die):
            if self._how == "leftover":
                self._task = asyncio.ensure_future(self._refuse_to_go())
                await asyncio.sleep(0)
                return "left something"
            await self._end(self._how)
        return "here"

    async def _end(self, how: str) -> None:
        if how == "stop":
            asyncio.get_running_loop().stop()
        else:
            self._task = asyncio.ensure_future(self._exit())
        await asyncio.Event().wait()

    async def _exit(self) -> None:
        raise SystemExit(3)

    async def _refuse_to_go(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise SystemExit(4)
