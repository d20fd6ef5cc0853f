# SPDX-License-Identifier: Apache-2.0
"""The actor system: where actors are spawned, supervised, shown and stopped.

    any thread, any loop ── ActorRef ──► mailboxes ──► actors in the system's loop
                                             ├───────► in threads
                                             └─ rings ► in processes

It lives in one asyncio loop of any kind: the one that it is entered in, or one in a thread of its
own (`ActorSystem.start()`). It installs no signal handlers and touches no process that it did not
start; several may live side by side.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import weakref
from types import TracebackType
from typing import Any

from actorserve.clock import monotonic_s
from actorserve.errors import ActorStopped, AlreadyExists, Unavailable
from actorserve.runtime.actor import DEFAULT_MAILBOX, Actor
from actorserve.runtime.answer import Answer
from actorserve.runtime.core import Core
from actorserve.runtime.door import SystemDoor, own_end
from actorserve.runtime.engine import actor_at_work
from actorserve.runtime.errand import Errand
from actorserve.runtime.family import Family
from actorserve.runtime.local_host import close_loop
from actorserve.runtime.naming import check_not_loading
from actorserve.runtime.news import is_past
from actorserve.runtime.nursery import Nursery
from actorserve.runtime.placement import Placement
from actorserve.runtime.ref import ActorRef
from actorserve.runtime.stats import SystemStats
from actorserve.runtime.waiting import limit_of
from actorserve.state.strategy import Strategy

_log = logging.getLogger("actorserve")

STOP_TIMEOUT_S = 30.0
_START_TIMEOUT_S = 10.0


class ActorSystem:
    """A tree of supervised actors.

    >>> async with ActorSystem() as system:              # in the running event loop
    ...     adder = await system.spawn(Adder, where=Process())
    ...     assert await adder.ask(Add(1, 2), timeout_s=1) == 3

    >>> with ActorSystem.start() as system:              # without any
    ...     adder = system.spawn(Adder, where=Process()).result()
    ...     assert adder.ask(Add(1, 2)).result(timeout_s=1) == 3

    `strategy` and `intensity` supervise the actors at the top, as an actor's own do its children:
    with `intensity=(n, seconds)`, more than n restarts in that time end the system (`failure`).
    """

    def __init__(
        self,
        name: str = "actors",
        *,
        strategy: Strategy = Strategy.ONE_FOR_ONE,
        intensity: tuple[int, float] | None = None,
    ) -> None:
        check_not_loading()
        self.name = name
        self._strategy = strategy
        self._intensity = intensity
        self._core: Core | None = None
        self._nursery: Nursery | None = None
        self._top: Family | None = None
        self._stop_answers: list[Answer[None]] = []
        self._is_stopped = False
        self._thread: threading.Thread | None = None
        self._owner = os.getpid()

    # --- life ------------------------------------------------------------------------------------

    @classmethod
    def start(
        cls,
        name: str = "actors",
        *,
        strategy: Strategy = Strategy.ONE_FOR_ONE,
        intensity: tuple[int, float] | None = None,
    ) -> ActorSystem:
        """Return a system that runs in a thread of its own; use it in a `with`, or `stop` it."""
        system = cls(name, strategy=strategy, intensity=intensity)
        is_up = threading.Event()
        thread = threading.Thread(
            target=system._run_thread, args=(is_up,), name=f"actorserve-{name}", daemon=True
        )
        system._thread = thread
        thread.start()
        if not is_up.wait(_START_TIMEOUT_S):
            raise Unavailable(f"the thread of the actor system {name!r} does not start")
        return system

    def _run_thread(self, is_up: threading.Event) -> None:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        loop.call_soon(self._open)
        loop.call_soon(is_up.set)
        try:
            loop.run_forever()
        finally:
            close_loop(loop)
            if self._core is not None and not self._is_stopped:
                self._core.lose_loop()  # something in it has ended it

    async def __aenter__(self) -> ActorSystem:
        """Start in the running loop."""
        self._open_here()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop; after an error without working off what waits."""
        await self.stop(drain=kind is None)

    def __enter__(self) -> ActorSystem:
        """Use a system that `start` returned."""
        if self._thread is None:
            raise Unavailable("use `async with`, or `with ActorSystem.start() as system`")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop; after an error without working off what waits."""
        self.stop(drain=kind is None).result()
        if self._thread is not None:
            self._thread.join(_START_TIMEOUT_S)

    def _open(self) -> None:
        core = Core(self.name)
        door = SystemDoor(core)
        self._top = Family(core, self, self._strategy, self._intensity, is_top=True)
        self._nursery = Nursery(core, door, self._top, self)
        self._core = core
        _systems.add(self)

    def _open_here(self) -> None:
        if self._core is not None:
            raise AlreadyExists(f"the actor system {self.name!r} was started before")
        asyncio.get_running_loop()
        self._open()

    # --- orders ----------------------------------------------------------------------------------

    def spawn(
        self,
        actor: type[Actor],
        *args: Any,
        where: Placement | None = None,
        name: str | None = None,
        mailbox: int = DEFAULT_MAILBOX,
        **kwargs: Any,
    ) -> Answer[ActorRef]:
        """Start an actor, constructed with the arguments; the Answer is its reference.

        `where` is Loop() (the default), Thread() or Process(). `mailbox` is how many messages may
        wait for it. Raises InvalidArgument for what cannot be, and AlreadyExists; the Answer fails
        with ActorDead where the constructor or `started` raises, with the reason.
        """
        return self._running().spawn(None, actor, args, kwargs, where, name, mailbox)

    def stop(self, *, drain: bool = True, timeout_s: float | None = STOP_TIMEOUT_S) -> Answer[None]:
        """Stop all actors, the latest first, and all processes.

        With `drain`, first wait until nobody has anything to do, for `timeout_s` at most; actors
        may send each other messages meanwhile. Idempotent. From any thread.
        """
        core, limit_s = self._core_or_raise(), limit_of(timeout_s)
        answer: Answer[None] = Answer(Errand(SystemDoor(core), "the end of the actor system"))
        if self._is_stopped or self._owner != os.getpid():
            answer.settle(None)
        else:
            if actor_at_work() in core.cells:
                answer.fail(own_end(self.name))
            # Where its loop is closed, whatever lived there is gone.
            settle = lambda: answer.settle(None)  # noqa: E731
            core.post(self._begin_stop, answer, drain, limit_s, if_lost=settle)
        return answer

    def _begin_stop(self, answer: Answer[None], is_drained: bool, limit_s: float | None) -> None:
        self._stop_answers.append(answer)
        if len(self._stop_answers) == 1:
            deadline_s = None if limit_s is None else monotonic_s() + limit_s
            self._core_or_raise().run(self._stop(is_drained, deadline_s))

    async def _stop(self, is_drained: bool, deadline_s: float | None) -> None:
        core, top = self._core_or_raise(), self._top
        assert top is not None
        try:
            if is_drained:
                await self._quiesce(core, deadline_s)
            await top.stop()
            await core.close()
        finally:
            core.is_closed = self._is_stopped = True
            answers, self._stop_answers = self._stop_answers, []
            for answer in answers:
                answer.settle(None)
            _systems.discard(self)
            if self._thread is not None:
                core.loop.call_soon(core.loop.stop)

    async def _quiesce(self, core: Core, deadline_s: float | None) -> None:
        """Wait until no actor has anything to do: each may give another something."""
        while not all(cell.is_idle() for cell in core.cells.values()):
            for cell in list(core.cells.values()):
                await cell.drained(deadline_s)
            if is_past(deadline_s):
                return
            await asyncio.sleep(0)

    def children_failed(self, reason: str) -> None:
        """See FamilyOwner: there is nobody above, so the system has failed and is empty."""
        self._core_or_raise().failure = reason
        _log.error("the actor system %r has failed: %s", self.name, reason)

    # --- the rest --------------------------------------------------------------------------------

    @property
    def failure(self) -> str:
        """Why the system has given up all its actors, "" if it has not."""
        return self._core.failure if self._core is not None else ""

    def stats(self) -> SystemStats:
        """Return the tree of actors with their states and counts. From any thread.

        What is said of `processes` is for the loop's own thread, None elsewhere.
        """
        core, top = self._core, self._top
        if core is None or top is None:
            return SystemStats(self.name, "", (), None)
        has_processes = core.has_processes() and not core.is_closed
        return SystemStats(
            self.name,
            core.failure,
            tuple(cell.stats() for cell in list(top.cells.values())),
            core.processes.stats() if has_processes and core.is_here() else None,
        )

    def _running(self) -> Nursery:
        if self._nursery is None:
            raise Unavailable("the actor system was not started: use `async with`, or start()")
        if self._owner != os.getpid():
            raise Unavailable(
                f"this process is a fork: the actor system belongs to process {self._owner}"
            )
        if self._is_stopped:
            raise ActorStopped(f"the actor system {self.name!r} was stopped")
        return self._nursery

    def _core_or_raise(self) -> Core:
        if self._core is None:
            raise Unavailable("the actor system was not started: use `async with`, or start()")
        return self._core

    def sever(self) -> None:
        """Be of no use in a process that was forked from the system's."""
        if self._core is not None:
            error = ActorStopped("this process is a fork of the one that has the actor system")
            for cell in list(self._core.cells.values()):
                cell.mailbox.sever(error)


_systems: weakref.WeakSet[ActorSystem] = weakref.WeakSet()


def _sever_all() -> None:
    for system in list(_systems):
        system.sever()


os.register_at_fork(after_in_child=_sever_all)
