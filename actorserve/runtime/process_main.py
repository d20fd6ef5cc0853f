# SPDX-License-Identifier: Apache-2.0
"""The process of an actor, from its first message to its exit.

    boot socket ─► ChildEnd ─► Begin ─► load the class, first hook ─► Started
                                         ThreadEngine, or LoopEngine where there is async code
                                         the end ─► Leaving ─► exit

The main thread runs the actor, and a control thread beats and brings the outcomes of calls that
other threads have made. What the actor logs for "actorserve" appears in the system's log, what
it prints on the system's streams.
"""

from __future__ import annotations

import asyncio
import logging
import os
import traceback
from typing import Any

from actorserve.errors import ActorserveError, BootError
from actorserve.process.boot import BootSocket, PeerGone
from actorserve.runtime import naming
from actorserve.runtime.actor import DEFAULT_MAILBOX, Actor, ActorContext
from actorserve.runtime.answer import Answer
from actorserve.runtime.child_door import ChildDoor
from actorserve.runtime.child_end import ChildEnd
from actorserve.runtime.control_thread import start_control_thread
from actorserve.runtime.engine import Engine
from actorserve.runtime.failure import clip, start_reason
from actorserve.runtime.inbox import Inbox
from actorserve.runtime.life import Life, is_async
from actorserve.runtime.local_host import close_loop
from actorserve.runtime.loop_engine import LoopEngine
from actorserve.runtime.payload import packed_of
from actorserve.runtime.placement import Placement
from actorserve.runtime.ref import ActorRef
from actorserve.runtime.spec import spec_of, unpack_arguments
from actorserve.runtime.thread_engine import ThreadEngine
from actorserve.wire.actors import Begin, Leaving, Started
from actorserve.wire.messages import BootFailed, LogRecord, PhaseEntered

_log = logging.getLogger("actorserve")


def main(boot: BootSocket) -> None:
    """Be one life of one actor. The child's entry function; SystemExit(1) says that it failed."""
    try:
        end = ChildEnd(boot)
    except PeerGone:
        os._exit(0)
    door = ChildDoor(end)
    end.on_control = door.take
    start_control_thread(end)
    _log.addHandler(_LogHandler(end))
    _log.propagate = False
    try:
        is_well = Resident(end, door).run()
    except PeerGone:
        # Nobody is left to hear; the actor's threads and exit functions must not keep us here.
        os._exit(0)
    if not is_well:
        raise SystemExit(1)


class Resident:
    """The actor of this process: the owner of its engine, and its home (see actor.Self)."""

    def __init__(self, end: ChildEnd, door: ChildDoor) -> None:
        self.system = _System(door)
        self._end = end
        self._door = door
        self._inbox = Inbox(end, door)
        self._engine: Engine | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_well = True
        door.read = self._inbox.read

    def run(self) -> bool:
        """Live; whether the actor ended as it should."""
        begin = self._first_message()
        life = self._load(begin)
        if life is None:
            return False
        self._end.send(PhaseEntered("initializing"))
        if is_async(life.kind):
            self._run_loop(life)
        else:
            engine = ThreadEngine(life, self._inbox, self)
            self._engine = self._inbox.engine = engine
            engine.run()
        return self._is_well

    def _run_loop(self, life: Life) -> None:
        loop = self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        engine = LoopEngine(loop, life, self._inbox, self)
        self._engine = self._inbox.engine = engine
        self._door.has_loop = True

        def on_news() -> None:
            self._inbox.read()
            engine.wake()

        engine.start()
        self._end.listen(loop, on_news)
        try:
            loop.run_forever()
        finally:
            self._end.stop_listening(loop)
            close_loop(loop)

    # --- loading ---------------------------------------------------------------------------------

    def _first_message(self) -> Begin:
        while self._inbox.begin is None:
            self._inbox.read()
            if self._inbox.begin is None:
                self._end.doze(None)
        return self._inbox.begin

    def _load(self, begin: Begin) -> Life | None:
        """Import the actor's class; None where that failed, with the reason sent."""
        self._end.send(PhaseEntered("importing"))
        naming.set_main_path(begin.main_path)
        try:
            kind = naming.resolve(begin.class_name)
            if not issubclass(kind, Actor):
                raise BootError(f"{begin.class_name} is no class of actors")
            packed = packed_of(begin.arguments, self._end.look)
            args, kwargs = unpack_arguments(kind, packed, self._door)
        except BaseException as error:
            self._refuse(error, f"{begin.class_name} cannot be loaded")
            return None
        own = ActorRef(self._door, begin.actor, begin.name)
        parent = None
        if begin.parent is not None:
            parent = ActorRef(self._door, *begin.parent)
        context = ActorContext(self, own, parent, begin.restarts, begin.reason)
        return Life(kind, args, kwargs, context)

    def _refuse(self, error: BaseException, what: str) -> None:
        """Say why there is no actor."""
        self._is_well = False
        reason = start_reason(error)
        if not isinstance(error, ActorserveError):
            reason = f"{what}: {reason}"
            traceback.print_exception(type(error), error, error.__traceback__)
        self._end.send(BootFailed(reason))

    # --- EngineOwner -----------------------------------------------------------------------------

    def on_started(self) -> None:
        """See EngineOwner."""
        self._end.send(Started())

    def on_start_failed(self, reason: str, error: BaseException) -> None:
        """See EngineOwner."""
        self._is_well = False
        if not isinstance(error, ActorserveError):
            traceback.print_exception(type(error), error, error.__traceback__)
        self._end.send(BootFailed(reason))
        self._stop_loop()

    def on_ended(self, reason: str, is_normal: bool) -> None:
        """See EngineOwner."""
        self._is_well = is_normal
        self._inbox.rest()
        self._end.send(Leaving(reason, is_normal))
        self._stop_loop()

    def on_idle(self) -> None:
        """See EngineOwner."""
        self._inbox.rest()

    def _stop_loop(self) -> None:
        if self._loop is not None:
            self._loop.stop()

    # --- actor.Self ------------------------------------------------------------------------------

    def spawn_child(
        self,
        actor: type[Actor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        where: Placement | None,
        name: str | None,
        mailbox: int,
    ) -> Answer[ActorRef]:
        """See actor.Self."""
        spec = spec_of(self._door, actor, args, kwargs, where, name, mailbox, is_packed=True)
        return self._door.spawn(spec, is_child=True)

    def end(self) -> None:
        """See actor.Self."""
        if self._engine is not None:
            self._engine.end("ended of itself")


class _System:
    """The system, seen from here."""

    def __init__(self, door: ChildDoor) -> None:
        self._door = door

    def spawn(
        self,
        actor: type[Actor],
        *args: Any,
        where: Placement | None = None,
        name: str | None = None,
        mailbox: int = DEFAULT_MAILBOX,
        **kwargs: Any,
    ) -> Answer[ActorRef]:
        """See ActorSystem.spawn."""
        spec = spec_of(self._door, actor, args, kwargs, where, name, mailbox, is_packed=True)
        return self._door.spawn(spec, is_child=False)


class _LogHandler(logging.Handler):
    """Send what this package logs here to the system's log."""

    def __init__(self, end: ChildEnd) -> None:
        super().__init__(logging.INFO)
        self._end = end

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        if record.levelno >= logging.ERROR:
            level = 2
        else:
            level = 1 if record.levelno >= logging.WARNING else 0
        try:
            text = clip(self.format(record), is_end_kept=True)
            self._end.send(LogRecord(level, clip(record.pathname), record.lineno, text))
        except PeerGone:
            raise
        except Exception:  # arguments that do not fit, and whatever they may do
            self.handleError(record)
