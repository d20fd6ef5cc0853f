# SPDX-License-Identifier: Apache-2.0
"""A rank: one process that runs an engine, alone or as one of several.

    Start ─► load the engine ─► Loaded, or LoadFailed with the traceback
    rank 0:  requests ─► Pump ─► Step ══► the other ranks
                           └─► Outputs, IterationStats, KvEvents, CallEnded
    others:  Step ─► Follower, whose outputs nobody needs

The main thread does all of it, one thing after the other. A control thread beats and notices the
parent's end. An engine that raises what is no request's error is dead, and with it its group: the
rank says so (EngineFailed) and ends.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable
from functools import partial

from actorserve.actors.generation.blas import limit_blas_threads
from actorserve.actors.generation.driver import COMMIT, Follower
from actorserve.actors.generation.engine import Engine
from actorserve.actors.generation.main_script import importing
from actorserve.actors.generation.pump import Pump
from actorserve.actors.generation.rank_sink import RankSink
from actorserve.actors.generation.spec import REFUSALS, EngineSpec
from actorserve.clock import monotonic_s
from actorserve.errors import ProtocolError
from actorserve.fault import fault_point
from actorserve.runtime.child import BootSocket, PeerGone
from actorserve.runtime.control_thread import start_control_thread
from actorserve.runtime.group_end import RankEnd
from actorserve.runtime.group_parts import GroupDead, Status
from actorserve.wire.generation import (
    Abort,
    Call,
    Close,
    Closed,
    EngineFailed,
    Loaded,
    LoadFailed,
    Loading,
    Start,
    Step,
    Submit,
    decode_step,
)

POLL_S = 0.005
"""How long a thread-driven engine without a descriptor is waited for at a time."""


def main(boot: BootSocket) -> None:
    """Be a rank until the parent says so, or is gone. The child's entry function."""
    try:
        end = RankEnd(boot)
    except PeerGone:
        os._exit(0)
    start_control_thread(end)
    try:
        is_well = Rank(end).run()
    except PeerGone:
        os._exit(0)
    except GroupDead:
        os._exit(1)
    if not is_well:
        raise SystemExit(1)


class Rank:
    """The main thread's life."""

    def __init__(self, end: RankEnd) -> None:
        self._end = end
        self._step = 0
        self._phase = ""  # of the call in the step at hand

    def run(self) -> bool:
        """Live; whether the engine was well to its end. Raises PeerGone, GroupDead."""
        engine = self._load(self._first_message())
        if engine is None:
            return False
        fault_point("rank.loaded")
        try:
            if self._end.rank == 0:
                self._pump(engine)
            else:
                self._follow(engine)
        except PeerGone:
            raise
        except BaseException as error:
            return self._fail(engine, error)
        self._end.note(self._step, Status.CLOSED)
        self._end.send(Closed(self._end.rank))
        return True

    # --- loading ----------------------------------------------------------------------------------

    def _first_message(self) -> Start:
        while True:
            for message in self._end.read():
                if isinstance(message, Start):
                    return message
                raise ProtocolError(f"expected Start, got {type(message).__name__}")
            self._end.wait()

    def _load(self, start: Start) -> Engine | None:
        end = self._end
        end.send(Loading(end.rank))
        fault_point("rank.loading")
        try:
            with importing(start.engine):
                engine = EngineSpec(start.engine, start.options).make()
            limit_blas_threads()
            info = engine.start(end.rank, end.world)
            end.send(Loaded(end.rank, info))
        except (PeerGone, GroupDead):
            raise
        except BaseException as error:
            if end.is_dead:
                raise GroupDead("the group was ended while the engine loaded") from error
            end.send(_load_failed(end.rank, error))
            return None
        return engine

    def _fail(self, engine: Engine, error: BaseException) -> bool:
        """Say why the engine is dead; where that is only because its group is, say nothing."""
        end = self._end
        if not (end.is_dead or isinstance(error, GroupDead)):
            end.send(EngineFailed(end.rank, _text_of(error), traceback.format_exc()))
            return False
        with contextlib.suppress(Exception):
            engine.close()
        raise GroupDead("the group was ended by its parent") from error

    # --- rank 0 -----------------------------------------------------------------------------------

    def _pump(self, engine: Engine) -> None:
        end = self._end
        is_leader = engine.ranks == "leader"
        sink = RankSink(end)
        pump = Pump(
            engine,
            sink,
            lead=partial(self._before_step, sink, self._lead_calls if is_leader else self._lead),
            verdict=self._verdict if end.size > 1 else None,
        )
        while not pump.is_closed:
            for message in end.read():
                if not isinstance(message, (Submit, Abort, Call, Close)):
                    raise ProtocolError(f"rank 0 got {type(message).__name__}")
                pump.take(message)
            is_busy = pump.turn(POLL_S)
            sink.show(pump.latest)
            if not is_busy:
                sink.wake()
            if not is_busy and not pump.is_closed:
                end.note(self._step, Status.IDLE)
                fd = pump.engine_fileno
                end.wait(pump.idle_s(), () if fd is None else (fd,))

    def _before_step(self, sink: RankSink, lead: Callable[[Step], None], step: Step) -> None:
        if step.adds or step.aborts or step.call is not None:
            sink.wake()  # it may take longer than the last one
        lead(step)

    def _lead(self, step: Step) -> None:
        """Tell the other ranks of a step, before it is done here."""
        self._begin(step)
        if self._end.size > 1:
            self._end.broadcast(step)

    def _lead_calls(self, step: Step) -> None:
        """Tell them of calls and the end alone: the engine tells them the rest."""
        if step.call is None and not step.close:
            self._step = step.number
            self._end.note(step.number, Status.BUSY)
        else:
            self._lead(step)

    def _begin(self, step: Step) -> None:
        self._step = step.number
        self._phase = "" if step.call is None else step.call[1]
        self._end.told += 1
        self._end.note(step.number, Status.BUSY if step.call is None else Status.LOADING)

    def _verdict(self, number: int, deadline_s: float) -> str:
        """Return what the other ranks say against the call of a step, "" for nothing."""
        opinions = self._end.agree("")
        against = [f"rank {rank}: {text}" for rank, text in enumerate(opinions) if text]
        if not against and self._phase != COMMIT and 0 < deadline_s < monotonic_s():
            return "not all ranks were ready in time"
        return "; ".join(against)

    # --- the other ranks --------------------------------------------------------------------------

    def _follow(self, engine: Engine) -> None:
        end = self._end
        follower = Follower(engine)
        while not follower.is_closed:
            steps = end.receive_broadcast()
            for data in steps:
                if end.is_dead:
                    raise GroupDead("the group was ended by its parent")
                step = decode_step(data)
                self._begin(step)
                error = follower.follow(step)
                if step.call is not None:
                    end.agree(error)
            if not steps:
                end.note(self._step, Status.IDLE)
                end.wait()


def _load_failed(rank: int, error: BaseException) -> LoadFailed:
    if isinstance(error, REFUSALS):
        return LoadFailed(rank, error.message, "", int(error.code))
    return LoadFailed(rank, _text_of(error), traceback.format_exc())


def _text_of(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
