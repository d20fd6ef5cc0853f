# SPDX-License-Identifier: Apache-2.0
"""One life of a group of ranks, from its start to the end of the last process.

    start: parts ─► spawn all ─► Start to each ─► every rank Loaded ─► its info
    fail:  any rank dead, stalled, broken or not loaded in time ─► the whole group is: the board
           says so, whoever waits wakes and ends, SIGTERM; after a second SIGKILL
    close: Close to rank 0, which tells the others in the order of steps

What always holds: there is one error, the first; the listener hears of it before any process is
waited for; `over` is set when every process is gone and all memory is back.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol

import msgspec

from actorserve.actors.generation.rank_process import Ground, RankProcess
from actorserve.clock import monotonic_s
from actorserve.errors import ActorserveError, EngineDeadError
from actorserve.runtime.child import SpawnSpec
from actorserve.runtime.group_parts import GroupParts, RankNote, Status
from actorserve.runtime.import_path import import_path
from actorserve.state.lifecycle import Budgets
from actorserve.state.stall import Doing, Look, StallJudge
from actorserve.wire.generation import Close, EngineInfo, FromRank, Start
from actorserve.wire.messages import Message

RANK_MODULE = "actorserve.actors.generation.rank"
KILL_AFTER_S = 1.0
"""How long the ranks of a dead group have to end by themselves."""
WATCH_S = 1.0
STOPPED_S = 10.0
TITLE_CHARS = 15
_log = logging.getLogger("actorserve")
_SMALLEST_RING_BYTES = 4096
_DOING = {status: Doing[status.name] for status in Status}


class GroupPlan(msgspec.Struct, frozen=True):
    """What a group is. Times in seconds, 0 for no limit."""

    engine: str
    options: dict[str, Any]
    size: int = 1
    name: str = "engine"
    load_timeout_s: float = 600.0
    hang_timeout_s: float = 60.0
    env: dict[str, str] = {}
    python: str | None = None


def title_of(name: str, rank: int) -> str:
    """Return what ps and top show of a rank; they have no more room, and the number stays."""
    end = f" rank {rank}"
    return name[: TITLE_CHARS - len(end)].rstrip("_- ") + end


class LifeListener(Protocol):
    """Who hears of a life. All calls come in the loop."""

    def life_said(self, message: FromRank) -> None:
        """Take what rank 0 has for the executor."""

    def life_failed(self, error: EngineDeadError, *, is_final: bool) -> None:
        """Hear, once, that the group is dead; `is_final`: another start would end the same."""


class GroupLife:
    """See the module's head. Belongs to one loop."""

    def __init__(self, plan: GroupPlan, ground: Ground, epoch: int, listener: LifeListener) -> None:
        """Make all that the ranks share. Raises ResourceExhausted."""
        self.epoch = epoch
        self.error: EngineDeadError | None = None
        self.over = asyncio.Event()
        self.infos: dict[int, EngineInfo] = {}
        self._plan = plan
        self._ground = ground
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._is_closing = False
        self._exited = 0
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._spawning: asyncio.Task[None] | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._watch_s = min(WATCH_S, plan.hang_timeout_s / 4 or WATCH_S)
        self._judge = StallJudge(
            plan.size,
            step_s=plan.hang_timeout_s,
            call_s=plan.load_timeout_s,
            interval_s=self._watch_s,
        )
        ring = {} if plan.size > 1 else {"ring_bytes": _SMALLEST_RING_BYTES, "slot_bytes": 64}
        self._parts = GroupParts.create(plan.size, epoch, **ring)
        self._ranks: list[RankProcess] = []
        try:
            for rank in range(plan.size):
                self._ranks.append(RankProcess(rank, plan.name, self, ground, self._budgets()))
        except BaseException:
            for made in self._ranks:
                made.close()
            self._parts.close()
            raise

    def _budgets(self) -> Budgets:
        plan = self._plan
        stopped_s = min(STOPPED_S, plan.hang_timeout_s or STOPPED_S)
        load_s = plan.load_timeout_s or 1e9
        return Budgets(initialize_s=load_s, stopped_s=stopped_s, finalize_s=1e9)

    @property
    def pids(self) -> list[int | None]:
        """The processes of the ranks, in order."""
        return [rank.pid for rank in self._ranks]

    # --- beginning --------------------------------------------------------------------------------

    async def start(self) -> EngineInfo:
        """Return when every rank is ready. Raises EngineDeadError; the life is ending then."""
        self._spawning = self._loop.create_task(self._spawn())
        try:
            await asyncio.shield(self._ready)
        except asyncio.CancelledError:
            self.fail(EngineDeadError("its start was cancelled"))
            raise
        if self.error is not None:  # it died between that and now
            raise self.error
        return self.infos[0]

    async def _spawn(self) -> None:
        spawns = [rank.spawn(self._spec(rank.rank)) for rank in self._ranks]
        results = await asyncio.gather(*spawns, return_exceptions=True)
        for rank, result in zip(self._ranks, results):
            if isinstance(result, BaseException):
                self._exited += 1
                text = result.message if isinstance(result, ActorserveError) else repr(result)
                self.rank_failed(rank.rank, f"it could not be started: {text}", "", is_final=False)
        try:
            if self.error is None:
                self._open()
        except Exception as error:  # a fault of ours must not leave anybody waiting
            _log.exception("starting ranks failed")
            self.fail(EngineDeadError(f"its ranks could not be started: {error!r}"))
        if self.error is not None:
            self.kill()
            self._check_over()

    def _spec(self, rank: int) -> SpawnSpec:
        plan = self._plan
        name = title_of(plan.name, rank)
        env = dict(plan.env)
        return SpawnSpec(
            f"{RANK_MODULE}:main", name, plan.python, env, "", import_path(plan.python)
        )

    def _open(self) -> None:
        plan = self._plan
        for rank in self._ranks:
            start = Start(plan.engine, plan.options, rank.rank, plan.size, self.epoch)
            rank.open(self._parts, start)
        if plan.load_timeout_s:
            self._later(plan.load_timeout_s, self._on_load_timeout)
        self._later(self._watch_s, self._watch)

    def _on_load_timeout(self) -> None:
        slow = [rank for rank in self._ranks if not rank.is_loaded]
        if slow and self.error is None:
            ranks = ", ".join(str(rank.rank) for rank in slow)
            reason = f"not loaded within {self._plan.load_timeout_s:g} s (ranks: {ranks})"
            slow[0].ask_to_end(with_stacks=True)
            self.rank_failed(slow[0].rank, reason, "", is_final=False)

    # --- what ranks say (RankOwner) ---------------------------------------------------------------

    def rank_loaded(self, rank: int, info: EngineInfo) -> None:
        """See RankOwner."""
        self.infos[rank] = info
        if len(self.infos) == self._plan.size and not self._ready.done():
            self._ready.set_result(None)

    def rank_said(self, message: FromRank) -> None:
        """See RankOwner; nothing of a dead group is heard any more."""
        if self.error is None:
            self._listener.life_said(message)

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
        """See RankOwner."""
        error = EngineDeadError(
            reason,
            rank=rank,
            pid=self._ranks[rank].pid,
            traceback=traceback,
            refusal=refusal,
            is_accident=is_accident,
        )
        self.fail(error, is_final=is_final)

    def rank_exited(self, rank: int) -> None:
        """See RankOwner."""
        self._exited += 1
        if not self._is_closing:
            # It said that it closes, and nobody had asked for it.
            self.rank_failed(rank, "it ended of itself", "", is_final=False)
        self._check_over()

    # --- sending and watching ---------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Send to rank 0. Raises TooLarge."""
        if self.error is None and not self._ranks[0].is_over:
            self._ranks[0].send(message)

    def notes(self) -> list[RankNote]:
        """Return what every rank does now; none when it is over. For a look from any thread."""
        try:
            return [] if self.over.is_set() else self._parts.stats().ranks
        except ValueError:  # it was closed meanwhile
            return []

    def latest_page(self) -> bytes | None:
        """Return the latest snapshot, encoded; None when there is none."""
        return None if self.over.is_set() else self._parts.board.read_page()

    def _watch(self) -> None:
        self._later(self._watch_s, self._watch)
        now_s = monotonic_s()
        notes = self._parts.stats().ranks
        for rank, note in zip(self._ranks, notes):
            reason = rank.look(note, now_s)
            if reason:
                self._on_stall(rank.rank, reason)
        if len(self.infos) == self._plan.size and not self._is_closing:
            looks = [Look(note.step, _DOING[note.status], note.told) for note in notes]
            stalled = self._judge.judge(now_s, looks)
            if stalled is not None:
                self._on_stall(*stalled)
        self._ground.exchange.settle()

    def _on_stall(self, rank: int, reason: str) -> None:
        if self.error is None:
            self._ranks[rank].ask_to_end(with_stacks=True)
            self.rank_failed(rank, reason, "", is_final=False)

    # --- the end ----------------------------------------------------------------------------------

    def close(self, *, drain: bool) -> None:
        """Ask the ranks to end in order; they may take their time."""
        self._is_closing = True
        self.send(Close(drain))

    def fail(self, error: EngineDeadError, *, is_final: bool = False) -> None:
        """End the group: everybody who waits for it hears this error now. Idempotent."""
        if self._is_dead() or self.over.is_set():
            return
        for rank in self._ranks:
            rank.pump()  # what was published before the death counts, an earlier error too
        if self._is_dead():
            return
        self.error = error
        self._parts.fail()
        for rank in self._ranks:
            rank.ask_to_end(with_stacks=False)
        self._later(KILL_AFTER_S, self.kill)
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # seen, should nobody await it
        self._listener.life_failed(error, is_final=is_final)

    def _is_dead(self) -> bool:
        return self.error is not None

    def kill(self) -> None:
        """End every process at once."""
        for rank in self._ranks:
            rank.kill()

    def _later(self, delay_s: float, call: Any) -> None:
        self._timers = [timer for timer in self._timers if timer.when() > self._loop.time()]
        self._timers.append(self._loop.call_later(delay_s, call))

    def _check_over(self) -> None:
        if self._exited < self._plan.size or self.over.is_set():
            return
        for timer in self._timers:
            timer.cancel()
        self._parts.close()
        self._ground.exchange.settle()
        self.over.set()
