# SPDX-License-Identifier: Apache-2.0
"""Actors for the tests, at the top of a module, where other processes find them."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from actorserve import Actor, ActorRef, Answer, Crash, Loop, Message, Process, Strategy, Thread
from actorserve.errors import NotFound


class Add(Message[int]):
    a: int
    b: int


class Append(Message[None]):
    text: str


class Read(Message[list[str]]):
    pass


class Count(Message[int]):
    """Answered with a stream."""

    most: int


class Where(Message[tuple[int, str]]):
    """Answered with the process's id and the thread's name."""


class Fail(Message[int]):
    kind: str


class Block(Message[str]):
    """Works until a file appears, and makes another one, ".begun", when it begins."""

    path: str


class Scale(Message[np.ndarray[Any, Any]]):
    factor: float
    array: np.ndarray[Any, Any]


class Keep(Message[int]):
    array: np.ndarray[Any, Any]


class Forward(Message[int]):
    """Asks another actor."""

    to: ActorRef
    a: int
    b: int


class Raise(Message[list[str]]):
    """Makes a child, and answers with the names that it has."""

    kind: str


class Family(Message[list[ActorRef]]):
    pass


class Spawned(Message[ActorRef]):
    where: str
    is_child: bool = True


class Restarts(Message[tuple[int, str]]):
    pass


class Leave(Message[None]):
    pass


PLACES = {"loop": Loop, "thread": Thread, "process": Process}


class Worker(Actor):
    """Knows every message, in plain functions."""

    def __init__(self, start: int = 0) -> None:
        self.start = start
        self.texts: list[str] = []
        self.kept: list[Any] = []

    def started(self) -> None:
        self.texts.append("started")

    def restarted(self, reason: str) -> None:
        self.texts.append(f"restarted: {reason}")

    def receive(self, message: Any) -> Any:
        name = f"on_{type(message).__name__.lower()}"
        return getattr(self, name)(message)

    def on_add(self, message: Add) -> int:
        return self.start + message.a + message.b

    def on_append(self, message: Append) -> None:
        if message.text == "crash":
            raise Crash("was asked to")
        if message.text == "raise":
            raise ValueError("bad text")
        self.texts.append(message.text)

    def on_read(self, _message: Read) -> list[str]:
        return list(self.texts)

    def on_count(self, message: Count) -> Iterator[int]:
        for number in range(message.most):
            if number == 1000:
                raise ValueError("too far")
            yield number

    def on_where(self, _message: Where) -> tuple[int, str]:
        return os.getpid(), threading.current_thread().name

    def on_fail(self, message: Fail) -> int:
        return fail(message.kind)

    def on_block(self, message: Block) -> str:
        Path(f"{message.path}.begun").touch()
        wait_for_file(message.path)
        return "done"

    def on_scale(self, message: Scale) -> np.ndarray[Any, Any]:
        if message.factor == 1.0:
            return message.array
        return message.array * message.factor  # type: ignore[no-any-return]

    def on_keep(self, message: Keep) -> int:
        self.kept.append(message.array)
        if len(self.kept) > 2:
            self.kept.pop(0)
        return int(message.array.sum())

    def on_forward(self, message: Forward) -> int:
        return message.to.ask(Add(message.a, message.b), timeout_s=20).result()

    def on_spawned(self, message: Spawned) -> ActorRef:
        place = PLACES[message.where]()
        if message.is_child:
            return self.context.spawn(Worker, 1000, where=place).result()
        return self.context.system.spawn(Worker, start=2000, where=place).result()

    def on_restarts(self, _message: Restarts) -> tuple[int, str]:
        return self.context.restarts, self.context.last_end

    def on_leave(self, _message: Leave) -> None:
        self.context.stop()


class AsyncWorker(Worker):
    """The same with async code."""

    async def receive(self, message: Any) -> Any:
        if isinstance(message, Count):
            return self.count(message.most)
        if isinstance(message, Forward):
            return await message.to.ask(Add(message.a, message.b), timeout_s=20)
        if isinstance(message, Block):
            Path(f"{message.path}.begun").touch()
            while not Path(message.path).exists():
                await asyncio.sleep(0.005)
            return "done"
        if isinstance(message, Spawned):
            place = PLACES[message.where]()
            if message.is_child:
                return await self.context.spawn(Worker, 1000, where=place)
            return await self.context.system.spawn(Worker, start=2000, where=place)
        result = super().receive(message)
        await asyncio.sleep(0)
        return result

    async def count(self, most: int) -> AsyncIterator[int]:
        for number in range(most):
            if number == 1000:
                raise ValueError("too far")
            yield number


class Delegate(Actor):
    """Passes the answer of another actor on, without waiting for it itself."""

    def receive(self, message: Forward) -> Answer[int]:
        return message.to.ask(Add(message.a, message.b), timeout_s=20)


class Stubborn(Actor):
    """Fails in the hook that it is told to fail in."""

    def __init__(self, hook: str, kind: str = "value") -> None:
        self.hook = hook
        self.kind = kind
        if hook == "init":
            fail(kind)

    def started(self) -> None:
        if self.hook == "started":
            fail(self.kind)

    def stopping(self) -> None:
        if self.hook == "stopping":
            fail(self.kind)

    def receive(self, message: Any) -> Any:
        return fail(self.kind)


class Witness(Actor):
    """Tells another actor of every hook, as "name: hook"."""

    strategy = Strategy.ONE_FOR_ONE

    def __init__(self, log: ActorRef) -> None:
        self.log = log

    def _say(self, what: str) -> None:
        self.log.tell(Append(f"{self.context.name}: {what}"))

    def started(self) -> None:
        self._say("started")

    def restarted(self, reason: str) -> None:
        self._say("restarted")

    def stopping(self) -> None:
        self._say("stopping")

    def receive(self, message: Any) -> Any:
        if isinstance(message, Leave):
            self.context.stop()
            return None
        if isinstance(message, Fail):
            return fail(message.kind)
        if isinstance(message, Where):
            return os.getpid(), threading.current_thread().name
        return 0


class Typed(Actor):
    """Takes arguments of many types."""

    def __init__(self, options: Add, peers: list[ActorRef], array: np.ndarray[Any, Any]) -> None:
        self.answer = [type(options).__name__, *[type(peer).__name__ for peer in peers]]
        self.answer.append(f"{array.sum():g}")

    def receive(self, message: Read) -> list[str]:
        return self.answer


class Liar(Actor):
    """Answers with something else than it said."""

    def receive(self, message: Add) -> Any:
        return {3: "text", 4: object(), 5: [1, 2]}.get(message.a)


def fail(kind: str) -> int:
    """Raise, exit or die in one of many ways."""
    if kind == "value":
        raise ValueError("no good")
    if kind == "ours":
        raise NotFound("no such thing")
    if kind == "crash":
        raise Crash("lost the connection")
    if kind == "exit":
        raise SystemExit(3)
    if kind == "interrupt":
        raise KeyboardInterrupt
    if kind == "memory":
        raise MemoryError
    if kind == "recursion":
        return fail(kind)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "exit0":
        os._exit(0)
    if kind == "strange":
        raise _StrangeError
    raise AssertionError(kind)


class _StrangeError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even a text")


def wait_for_file(path: str) -> None:
    """Block the thread until the file is there."""
    event = threading.Event()
    while not Path(path).exists():
        event.wait(0.005)
