# SPDX-License-Identifier: Apache-2.0
"""One rank's process, seen from its parent: how it is started, what it says, how it ends."""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import Any, Protocol

from actorserve.actors.generation.logits import unpack
from actorserve.errors import ActorserveError, BootError, error_for
from actorserve.ids import Serial
from actorserve.runtime.child import Child, Exit, Spawner, SpawnSpec
from actorserve.runtime.exchange import Exchange
from actorserve.runtime.fragments import Assembler, fragments_of
from actorserve.runtime.group_parts import GroupParts, RankNote, Status
from actorserve.runtime.host_channel import HostChannel
from actorserve.runtime.watch import Watch
from actorserve.state.lifecycle import Budgets, Phase
from actorserve.wire.codec import encode
from actorserve.wire.generation import (
    Closed,
    EngineFailed,
    EngineInfo,
    Fragment,
    FromRank,
    Loaded,
    LoadFailed,
    Loading,
    Outputs,
    decode_from_rank,
)
from actorserve.wire.messages import Attached, Message, Pong

_log = logging.getLogger("actorserve")


class RankOwner(Protocol):
    """The life of the group that a rank belongs to. All calls come in the loop."""

    def rank_loaded(self, rank: int, info: EngineInfo) -> None:
        """Hear that a rank is ready."""

    def rank_failed(
        self,
        rank: int,
        reason: str,
        traceback: str,
        *,
        is_final: bool,
        refusal: ActorserveError | None = None,
        is_accident: bool = False,
    ) -> None:
        """Hear that a rank is dead or has to be; `is_final`: another start would end the same.

        `refusal` is what its engine said against what was asked of it; `is_accident`: its process
        ended, and nobody had meant it to.
        """

    def rank_exited(self, rank: int) -> None:
        """Hear that the process is gone."""

    def rank_said(self, message: FromRank) -> None:
        """Take what rank 0 has for the executor; arrays are numpy's again."""


class Ground:
    """What the ranks of a group are started on; all of it belongs to one loop."""

    def __init__(self, spawner: Spawner) -> None:
        self.spawner = spawner
        self.arenas = Serial()
        self.exchange = Exchange(self.arenas.next())
        self._is_closed = False

    def close(self) -> None:
        """Let the shared memory go; arrays that are alive keep theirs. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self.exchange.settle()
            self.exchange.close()


class RankProcess:
    """One rank; made for one spawn, and over with its process."""

    def __init__(
        self, rank: int, engine: str, owner: RankOwner, ground: Ground, budgets: Budgets
    ) -> None:
        """Make the channel; `engine` is for people. Raises ResourceExhausted."""
        self.rank = rank
        self.is_loaded = False
        self.is_closed = False  # it said that it ends in order
        self.is_over = False
        self._owner = owner
        self._ground = ground
        self._child: Child | None = None
        self._name = f"{engine} rank {rank}"
        self._why = ""
        self._watch = Watch(budgets)
        self._assembler: Assembler[FromRank] = Assembler(decode_from_rank)
        self._end: HostChannel[FromRank] = HostChannel(
            asyncio.get_running_loop(),
            ground.exchange,
            ground.arenas.next(),
            self,
            decode=decode_from_rank,
        )

    @property
    def pid(self) -> int | None:
        """The process, as soon as there is one."""
        return None if self._child is None else self._child.pid

    # --- beginning --------------------------------------------------------------------------------

    async def spawn(self, spec: SpawnSpec) -> None:
        """Make the process. Raises what Spawner.spawn raises; this rank is over then."""
        try:
            self._child = await self._ground.spawner.spawn(spec, self.on_exit, self.on_output)
        except BaseException:
            self.is_over = True
            self._end.close()
            raise

    def open(self, parts: GroupParts, start: Message) -> None:
        """Hand the channel and the group's parts over, and have the engine loaded."""
        if self._child is None or self.is_over:
            return
        try:
            self._end.open(self._child.boot, self._name)
            parts.send(self._child.boot, self.rank)
            self.send(start)
        except (ActorserveError, OSError):
            pass  # It died already: its exit is on the way and says why.

    def send(self, message: Message) -> None:
        """Send on the work lane, in pieces where it has to be. Raises TooLarge."""
        data = encode(message)
        if len(data) <= self._end.max_frame_bytes:
            self._end.send_with_handles(data, (), is_bounded=False)
            return
        for piece in fragments_of(data, self._end.max_frame_bytes):
            self._end.send_with_handles(piece, (), is_bounded=False)

    # --- what it says (HostChannel's Listener) ----------------------------------------------------

    def on_attached(self, message: Attached) -> None:
        """Hear from the rank that it is there."""
        self._watch.enter(Phase.ATTACHED)

    def on_messages(self, messages: list[FromRank]) -> None:
        """Take what the rank sent, in order."""
        for each in messages:
            message: FromRank | None = each
            if isinstance(message, Fragment):
                message = self._assembler.add(message)
            if isinstance(message, Outputs):
                unpack(message.outputs, self._view)
                self._owner.rank_said(message)
            elif message is not None:
                self._take(message)

    def _take(self, message: FromRank) -> None:
        if isinstance(message, Loading):
            self._watch.enter(Phase.INITIALIZING)
        elif isinstance(message, Loaded):
            self.is_loaded = True
            self._watch.enter(Phase.IDLE)
            self._owner.rank_loaded(self.rank, message.info)
        elif isinstance(message, LoadFailed):
            reason = f"its engine could not be loaded: {message.error}"
            refusal = None if message.code is None else error_for(message.code, message.error)
            self._owner.rank_failed(
                self.rank, reason, message.traceback, is_final=True, refusal=refusal
            )
        elif isinstance(message, EngineFailed):
            self._fail(f"its engine failed: {message.error}", message.traceback)
        elif isinstance(message, Closed):
            self.is_closed = True
            self._watch.enter(Phase.FINALIZING)
        elif not isinstance(message, Pong):
            self._owner.rank_said(message)

    def _view(self, handle: Any) -> memoryview:
        return self._ground.exchange.receive(self._end, handle)

    def on_refused(self, error: BootError) -> None:
        """Take the word of a process that it cannot start."""
        self._owner.rank_failed(self.rank, error.message, "", is_final=True)

    def on_hung_up(self) -> None:
        """End a rank that closed its channel: most are dead already, and their exit is known."""
        self.kill()

    def on_broken(self, error: ActorserveError) -> None:
        """End a rank that broke the wire."""
        self._why = f"it broke the wire: {error.message}"
        self._fail(self._why)
        self.kill()

    def _fail(self, reason: str, traceback: str = "") -> None:
        self._owner.rank_failed(self.rank, reason, traceback, is_final=False)

    # --- what becomes of its process --------------------------------------------------------------

    def on_output(self, stream: str, line: str) -> None:
        """Log a line that the engine printed."""
        _log.info("%s", line, extra={"instance": self._name, "stream": stream})

    def on_exit(self, exit_: Exit) -> None:
        """Take the end of the process: read what it left, say why unless it ended in order."""
        self.is_over = True
        self._end.read_rest()
        if not (self.is_closed and exit_.code == 0):
            reason = self._why or exit_.describe()
            self._owner.rank_failed(
                self.rank, reason, "", is_final=False, is_accident=not self._why
            )
        self._end.close()
        self._owner.rank_exited(self.rank)

    def pump(self) -> None:
        """Read what the rank has written and not yet rung for."""
        if self._end.is_open:
            self._end.pump()

    def look(self, note: RankNote, now_s: float) -> str:
        """Return why the process has to be ended, by what can be seen from outside; "" if not."""
        if self._child is None or self.is_over or self.is_closed:
            return ""
        if self.is_loaded:
            self._watch.enter(Phase.IDLE if note.status is Status.IDLE else Phase.EXECUTING)
        return self._watch.look(self._child, self._end, now_s)

    # --- its end ----------------------------------------------------------------------------------

    def ask_to_end(self, *, with_stacks: bool) -> None:
        """Signal it to end; with SIGABRT its stacks are printed. Harmless after its end."""
        if self._child is not None and not self.is_over:
            self._child.signal(signal.SIGABRT if with_stacks else signal.SIGTERM)
            self._child.signal(signal.SIGCONT)

    def kill(self) -> None:
        """End the process and whatever it has started; harmless after its end."""
        if self._child is not None:
            self._child.kill_group()

    def close(self) -> None:
        """Free the channel of a rank that was never spawned."""
        self.is_over = True
        self._end.close()
