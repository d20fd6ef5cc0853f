# SPDX-License-Identifier: Apache-2.0
"""A group of ranks: one engine in one or several processes, over all its lives.

    RankGroup ── start ─► GroupLife, epoch 1 ─ dies ─► delay ─► GroupLife, epoch 2 ─► …
        │                                        └─► listener.group_died
        └── send, close

Belongs to one loop, of any kind, in any thread. What always holds: between a `group_died` and the
next `group_ready` nothing is sent to anybody; after the last `group_died` nothing comes any more.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from actorserve.actors.generation.group_life import GroupLife, GroupPlan
from actorserve.actors.generation.rank_process import Ground
from actorserve.clock import monotonic_s
from actorserve.errors import ActorserveError, EngineDeadError, Unavailable
from actorserve.runtime.child import Spawner
from actorserve.state.restart import History, Restart
from actorserve.wire.generation import Abort, EngineInfo, FromRank
from actorserve.wire.messages import Message

CLOSE_S = 5.0
"""How long ranks have for closing their engines, beside the time for draining."""
END_S = 5.0
"""How long the processes of a dead group are waited for; they are killed after a second."""

RETRY_AFTER_S = 1.0
"""What the clients of a group that comes back are told to wait, at least."""

_log = logging.getLogger("actorserve")
_decode_page: Callable[[bytes], dict[str, Any]] = msgspec.msgpack.Decoder(dict[str, Any]).decode


class GroupListener(Protocol):
    """Who uses a group. All calls come in its loop."""

    def group_said(self, message: FromRank) -> None:
        """Take outputs, statistics, events, ends of calls."""

    def group_died(self, error: EngineDeadError, *, is_last: bool) -> None:
        """Hear that all that was sent is lost; with `is_last`, there is no other life to come."""

    def group_ready(self, info: EngineInfo, epoch: int) -> None:
        """Hear that another life takes requests; not of the first, which `start` returns."""


class RankStats(msgspec.Struct, frozen=True):
    """One rank: its process, its step, and what it does."""

    rank: int
    pid: int | None
    step: int
    doing: str


class GroupStats(msgspec.Struct, frozen=True):
    """A group now. `deaths` counts all its lives' ends but the orderly one."""

    epoch: int
    state: str
    deaths: int
    ranks: list[RankStats]


class RankGroup:
    """See the module's head.

    `spawner` runs in the group's loop and stays the caller's. Without a `restart` policy a group
    that is dead stays so.
    """

    def __init__(
        self,
        plan: GroupPlan,
        spawner: Spawner,
        listener: GroupListener,
        *,
        restart: Restart | None = None,
    ) -> None:
        self.plan = plan
        self.info: EngineInfo | None = None
        self.error: EngineDeadError | None = None
        self._ground = Ground(spawner)
        self._listener = listener
        self._history = None if restart is None else History(restart)
        self._life: GroupLife | None = None
        self._epoch = 0
        self._state = "starting"
        self._deaths = 0
        self._ready_since_s: float | None = None
        self._reviving: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()

    # --- beginning --------------------------------------------------------------------------------

    async def start(self) -> EngineInfo:
        """Start all ranks; return what rank 0 says of the engine when all are ready.

        Raises EngineDeadError with the rank, its process, the reason and the traceback;
        ResourceExhausted. Nothing is left then, and the group cannot be used.
        """
        try:
            return await self._live()
        except BaseException:
            await self._end_life()
            self._ground.close()
            self._state = "dead"
            raise

    async def _live(self) -> EngineInfo:
        self._epoch += 1
        self._ready_since_s = None
        self._life = GroupLife(self.plan, self._ground, self._epoch, self)
        self.info = await self._life.start()
        self.error = None
        self._state = "ready"
        self._ready_since_s = monotonic_s()
        return self.info

    # --- use --------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Send to rank 0. Raises EngineDeadError while the group is dead, TooLarge.

        While it drains, requests can still be ended, and nothing else be begun.
        """
        may_send = self._state == "ready" or (self._state == "closing" and type(message) is Abort)
        if not may_send or self._life is None:
            raise self.error or Unavailable(f"the engine's ranks are {self._state}")
        self._life.send(message)

    @property
    def pids(self) -> list[int | None]:
        """The processes of the ranks, in order; those of the last life."""
        return [] if self._life is None else self._life.pids

    def latest_stats(self) -> dict[str, Any] | None:
        """Return the latest snapshot of an iteration, read from shared memory."""
        page = None if self._life is None else self._life.latest_page()
        return None if page is None else _decode_page(page)

    def stats(self) -> GroupStats:
        """Return what the group is and does now."""
        notes = [] if self._life is None else self._life.notes()
        ranks = [
            RankStats(rank, pid, note.step, note.status.name.lower())
            for rank, (pid, note) in enumerate(zip(self.pids, notes))
        ]
        return GroupStats(self._epoch, self._state, self._deaths, ranks)

    # --- LifeListener -----------------------------------------------------------------------------

    def life_said(self, message: FromRank) -> None:
        """See LifeListener."""
        self._listener.group_said(message)

    def life_failed(self, error: EngineDeadError, *, is_final: bool) -> None:
        """See LifeListener."""
        self._deaths += 1
        self.error = error
        was_ready = self._state == "ready"
        if self._state == "starting":
            return  # `start` raises it
        why = self._why_last(is_final)
        if self._state == "closing" or self._history is None or why:
            self._state = "dead" if self._state != "closing" else "closing"
            if why:
                _log.error("%s; it is not restarted: %s", error.message, why)
            self._listener.group_died(error, is_last=True)
            return
        self._state = "restarting"
        delay_s = self._history.next_delay_s(random.random())
        error.retry_after_s = max(RETRY_AFTER_S, delay_s)
        _log.error("%s; it is restarted in %.1f s", error.message.splitlines()[0], delay_s)
        if was_ready:
            self._listener.group_died(error, is_last=False)
        self._reviving = asyncio.get_running_loop().create_task(self._revive(delay_s))

    def _why_last(self, is_final: bool) -> str:
        if self._history is None:
            return ""
        if is_final:
            return "another start would end the same"
        if not self._history.restart.is_restarted_after(False):
            return f"its policy is {self._history.restart.kind!r}"
        return self._history.died(monotonic_s(), self._ready_since_s)

    async def _revive(self, delay_s: float) -> None:
        """Start another life once the last is over. Its failure makes another of these, or none."""
        assert self._life is not None and self._history is not None
        await self._life.over.wait()
        await asyncio.sleep(delay_s)
        if self._state != "restarting":
            return
        try:
            info = await self._live()
        except EngineDeadError:
            return  # life_failed has decided what follows
        except ActorserveError as error:
            self._state = "dead"
            self.error = EngineDeadError(f"it could not be started again: {error.message}")
            self._listener.group_died(self.error, is_last=True)
            return
        self._history.became_ready()
        self._listener.group_ready(info, self._epoch)

    # --- the end ----------------------------------------------------------------------------------

    async def close(self, *, drain_s: float = 0.0) -> None:
        """End all processes in order: after what was accepted, for up to `drain_s`, then without.

        What does not end within CLOSE_S more is killed. Idempotent; takes a bounded time.
        """
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close(drain_s))
        await asyncio.shield(self._closing)

    def hurry(self) -> None:
        """Drain no longer: what is left ends as cancelled."""
        self._hurry.set()

    def kill(self) -> None:
        """End all processes at once; `close` has still to be called."""
        if self._life is not None:
            self._life.fail(EngineDeadError("it was killed, since it did not close in time"))
            self._life.kill()

    async def _close(self, drain_s: float) -> None:
        was_ready = self._state == "ready"
        self._state = "closing"
        if self._reviving is not None:
            self._reviving.cancel()
            await asyncio.wait([self._reviving])
        life = self._life
        if life is not None and was_ready:
            life.close(drain=drain_s > 0)
            if drain_s > 0:
                await self._drain(life, drain_s)
            await _within(life.over, CLOSE_S)
        await self._end_life()
        self._ground.close()
        self._state = "closed"

    async def _drain(self, life: GroupLife, drain_s: float) -> None:
        """Wait for what runs, until all is over, the time is, or somebody is in a hurry."""
        waits = [asyncio.ensure_future(each.wait()) for each in (life.over, self._hurry)]
        await asyncio.wait(waits, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if not life.over.is_set():
            life.close(drain=False)

    async def _end_life(self) -> None:
        """Make sure that no process of the last life is left."""
        life = self._life
        if life is None or life.over.is_set():
            return
        life.fail(EngineDeadError("it did not close in time"))
        if not await _within(life.over, END_S):
            _log.error("processes of %s do not die: %s", self.plan.name, life.pids)


async def _within(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except (asyncio.TimeoutError, TimeoutError):
        return False
    return True
