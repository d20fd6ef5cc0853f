# SPDX-License-Identifier: Apache-2.0
"""One life of an actor in a process of its own, seen from the system.

    mailbox ── take ──► Outbox ── Deliver ──► process     up to WINDOW messages ahead
    call    ◄─ reply ── HostChannel ◄─ Answered, Failed, ItemSent, Done, Progress
    other cells ◄─ PeerCall ◄─ PassOn, SpawnActor, StopActor         (guest.py)

Messages are sent ahead, so that the process need not sleep between two of them. The number of
the last that it has begun stands on the health page, written before any user code saw it: when
the process dies, what lies beyond that number goes back to the mailbox, untouched.
"""

from __future__ import annotations

import logging
import signal
from typing import TYPE_CHECKING

import numpy as np

from actorserve.errors import (
    ActorserveError,
    BootError,
    InvalidArgument,
    ProtocolError,
)
from actorserve.process.exit import Exit
from actorserve.process.watch import Child
from actorserve.runtime.call import Call
from actorserve.runtime.engine import died
from actorserve.runtime.failure import error_of, failure_of
from actorserve.runtime.guest import Guest
from actorserve.runtime.host import HostStats
from actorserve.runtime.host_channel import HostChannel
from actorserve.runtime.in_flight import InFlight
from actorserve.runtime.naming import main_path
from actorserve.runtime.outbox import Outbox
from actorserve.runtime.payload import Array, Packed, packed_of
from actorserve.runtime.processes import child_spec, print_line
from actorserve.runtime.watch import Watch
from actorserve.state.lifecycle import Phase
from actorserve.wire.actors import (
    Answered,
    Begin,
    Done,
    DropWaiting,
    EndActor,
    Failed,
    FromActor,
    Grant,
    ItemSent,
    Leaving,
    Parcel,
    PassOn,
    Progress,
    Revoke,
    SpawnActor,
    Started,
    StopActor,
    decode_from_actor,
)
from actorserve.wire.messages import Attached, BootFailed, Handle, LogRecord, PhaseEntered

if TYPE_CHECKING:
    from actorserve.runtime.cell import Cell
    from actorserve.runtime.nursery import Nursery

WINDOW = 128
"""Messages that are sent ahead of the one in hand."""

_log = logging.getLogger("actorserve")
_PHASES = {
    "importing": (Phase.IMPORTING, "importing its module"),
    "initializing": (Phase.INITIALIZING, "in its first hook"),
}
_LEVELS = {0: logging.INFO, 1: logging.WARNING, 2: logging.ERROR, 3: logging.DEBUG}


class ProcessHost:
    """See host.Host. It is the Listener of its channel, and the Runner of what it has sent."""

    def __init__(self, nursery: Nursery, cell: Cell, incarnation: int) -> None:
        self._nursery = nursery
        self._core = nursery.core
        self._cell = cell
        self._incarnation = incarnation
        self._processes = nursery.core.processes
        self._child: Child | None = None
        self._end: HostChannel[FromActor] | None = None
        self._outbox: Outbox | None = None
        self._guest: Guest | None = None
        self._watch = Watch(cell.spec.where.budgets())
        self._in_flight: InFlight | None = None
        self._python: str | None = None
        self._is_attached = self._is_ready = False
        self._is_due = False
        self._end_reason = ""  # beats what the exit status says
        self._leaving: Leaving | None = None
        self._handled = 0  # when it is over
        self._failed = 0

    # --- beginning -------------------------------------------------------------------------------

    def start(self) -> None:
        """See Host."""
        self._core.run(self._spawn())

    async def _spawn(self) -> None:
        """Make the channel and the process; the cell hears how that went."""
        end: HostChannel[FromActor] | None = None
        processes = self._processes
        try:
            await processes.start()
            end = HostChannel(
                self._core.loop,
                processes.exchange,
                processes.arenas.next(),
                self,
                decode=decode_from_actor,
            )
            spec = child_spec(self._cell.name, self._cell.spec.where)
            self._python = spec.python
            child = await processes.spawner.spawn(spec, self.on_exit, print_line)
        except Exception as error:
            # Whatever it was: each Spawn has to be answered, or the machine waits for ever.
            if not isinstance(error, ActorserveError):
                _log.exception("spawning %r failed", self._cell.name)
            if end is not None:
                end.close()
            if isinstance(error, (BootError, InvalidArgument)):
                self._cell.start_failed(self._incarnation, error.message)
            self._cell.spawn_failed(self._incarnation, str(error))
            return
        self._child, self._end = child, end
        self._outbox = Outbox(end, processes)
        self._in_flight = InFlight(self._outbox, self)
        self._guest = Guest(self._nursery, self._cell, self._outbox)
        processes.add(self)
        try:
            end.open(child.boot, self._cell.name)
            self._begin(self._outbox)
        except (ActorserveError, OSError):
            pass  # it died already: its exit is on the way and says why
        self._cell.spawned(self._incarnation)

    def _begin(self, outbox: Outbox) -> None:
        cell = self._cell
        parent = (cell.parent.id, cell.parent.name) if cell.parent is not None else None
        restarts = cell.machine.stats().restarts
        assert cell.spec.packed is not None

        def build(parcel: Parcel) -> Begin:
            return Begin(
                cell.id,
                cell.name,
                cell.spec.class_name,
                main_path(),
                parcel,
                parent,
                restarts,
                cell.last_end,
            )

        outbox.send(cell.spec.packed, build, self._could_not_begin)

    def _could_not_begin(self, error: ActorserveError) -> None:
        self._cell.start_failed(self._incarnation, error.message)
        self.kill(error.message)

    # --- sending ahead ---------------------------------------------------------------------------

    def wake(self) -> None:
        """See Host."""
        if not self._is_due:
            self._is_due = True
            self._core.post(self._dispatch)

    def _dispatch(self) -> None:
        """Send messages from the mailbox, as far as the window goes."""
        self._is_due = False
        in_flight, mailbox = self._in_flight, self._cell.mailbox
        if not self._is_ready or in_flight is None:
            return
        while len(in_flight) < WINDOW and (call := mailbox.take(len(in_flight))) is not None:
            in_flight.send(call)
        mailbox.set_ahead(max(0, len(in_flight) - 1))

    def grant(self, call: Call, count: int) -> None:
        """See Runner."""
        self._core.post(self._grant, call, count)

    def _grant(self, call: Call, count: int) -> None:
        if self._in_flight is not None:
            self._in_flight.grant(call, count)

    def revoke(self, call: Call) -> None:
        """See Runner."""
        self._core.post(self._revoke, call)

    def _revoke(self, call: Call) -> None:
        if self._in_flight is not None:
            self._in_flight.revoke(call)
            self._tell_if_idle()

    # --- Listener --------------------------------------------------------------------------------

    def on_attached(self, message: Attached) -> None:
        """See Listener."""
        self._is_attached = True
        self._phase(Phase.ATTACHED, "attached")

    def on_messages(self, messages: list[FromActor]) -> None:
        """See Listener."""
        for message in messages:
            if isinstance(message, (Answered, ItemSent, Done, Failed)):
                self._on_outcome(message)
            elif isinstance(message, Progress):
                if self._in_flight is not None:
                    self._in_flight.came_to(message.number)
            elif isinstance(message, (PassOn, Revoke, Grant, SpawnActor, StopActor)):
                if self._guest is not None:
                    self._guest.take(message, self._packed)
            else:
                self._on_report(message)
        if self._is_ready:
            self._dispatch()
            self._tell_if_idle()

    def _on_outcome(self, message: Answered | ItemSent | Done | Failed) -> None:
        in_flight, number = self._in_flight, message.number
        if in_flight is None:
            raise ProtocolError("it answered before it was asked")
        in_flight.came_to(number)
        if isinstance(message, ItemSent):
            packed = self._packed(message.parcel)  # also when nobody waits: to give it back
            call = in_flight.get(number)
            if call is not None:
                call.item_packed(packed)
        elif isinstance(message, Answered):
            packed = self._packed(message.parcel)
            call = in_flight.close(number)
            if call is not None:
                call.reply_packed(packed)
        else:
            call = in_flight.close(number)
            self._failed += isinstance(message, Failed)
            if call is not None:
                if isinstance(message, Failed):
                    call.fail(error_of(message.failure))
                else:
                    call.end()

    def _on_report(self, message: FromActor) -> None:
        if isinstance(message, LogRecord):
            _log.log(_LEVELS.get(message.level, logging.INFO), "%s", message.message)
        elif isinstance(message, PhaseEntered):
            if message.phase in _PHASES:
                self._phase(*_PHASES[message.phase])
        elif isinstance(message, Started):
            self._is_ready = True
            self._watch.enter(Phase.IDLE)
            self._cell.ready(self._incarnation)
        elif isinstance(message, BootFailed):
            self._end_reason = self._end_reason or message.reason
            self._cell.start_failed(self._incarnation, message.reason)
        elif isinstance(message, Leaving):
            self._leaving = message

    def _phase(self, phase: Phase, label: str) -> None:
        self._watch.enter(phase)
        self._cell.phase_began(self._incarnation, phase, label)

    def on_refused(self, error: BootError) -> None:
        """See Listener."""
        self._end_reason = self._end_reason or error.message
        self._cell.start_failed(self._incarnation, error.message)

    def on_hung_up(self) -> None:
        """See Listener: most are dead already, and their exit is known."""
        if self._child is not None:
            self._child.kill_group()

    def on_broken(self, error: ActorserveError) -> None:
        """See Listener."""
        _log.error("actor %r: %s; its process is replaced", self._cell.name, error.message)
        self.kill(error.message)

    def _packed(self, parcel: Parcel) -> Packed:
        return packed_of(parcel, self._view)

    def _view(self, handle: Handle) -> Array:
        if self._end is None:
            raise ProtocolError("a handle came before the channel was open")
        return np.frombuffer(self._processes.exchange.receive(self._end, handle), np.uint8)

    # --- the end ---------------------------------------------------------------------------------

    def drop_waiting(self, error: ActorserveError) -> None:
        """See Host."""
        if self._outbox is not None and not self.is_idle():
            self._outbox.send_plain(DropWaiting(failure_of(error)))

    def finish(self) -> None:
        """See Host."""
        if self._outbox is not None:
            self._watch.enter(Phase.FINALIZING)
            self._outbox.send_plain(EndActor())

    def abort(self) -> None:
        """See Host: SIGABRT has its stacks dumped."""
        if self._child is not None:
            self._child.signal(signal.SIGABRT)

    def resume(self) -> None:
        """See Host."""
        if self._child is not None:
            self._child.signal(signal.SIGCONT)

    def kill(self, reason: str) -> None:
        """See Host."""
        self._end_reason = self._end_reason or reason
        if self._child is not None:
            self._child.kill_group()

    def on_exit(self, exit_: Exit) -> None:
        """Take the end of the process: read what it left, settle what it had, tell the cell."""
        end, outbox = self._end, self._outbox
        if end is not None:
            end.read_rest()
        refusal = None if self._is_attached else exit_.as_refusal(self._python)
        if refusal is not None and not self._end_reason:
            self.on_refused(BootError(refusal))
        reason, is_normal = self._why(exit_)
        self._is_ready = False
        self._processes.remove(self)
        if end is not None and outbox is not None:
            self._lose(end.page.last_begun(), reason)
            outbox.close()
            end.close()
        self._child = self._end = self._outbox = self._in_flight = None
        if self._guest is not None:
            self._guest.leave()
        self._cell.exited(self._incarnation, reason, is_normal=is_normal)

    def _why(self, exit_: Exit) -> tuple[str, bool]:
        if self._end_reason:
            return self._end_reason, False
        leaving = self._leaving
        if leaving is None or (leaving.is_normal and exit_.code != 0):
            return exit_.describe(), False
        return leaving.reason, leaving.is_normal

    def _lose(self, begun: int, reason: str) -> None:
        """Fail what the dead process had begun, and put the rest back."""
        if self._in_flight is None:
            return
        self._handled = self._in_flight.handled
        lost, untouched = self._in_flight.lose(begun)
        mailbox = self._cell.mailbox
        mailbox.put_back(untouched)
        mailbox.set_ahead(0)
        for call in lost:
            call.fail(died(self._cell.name, reason))

    # --- looks from outside ----------------------------------------------------------------------

    def watch(self, now_s: float) -> None:
        """See processes.Watched."""
        if self._child is not None and self._end is not None:
            reason = self._watch.look(self._child, self._end, now_s)
            if reason:
                self._cell.hung(self._incarnation, reason)

    def _tell_if_idle(self) -> None:
        if self.is_idle():
            self._cell.idle()

    def is_traced(self) -> bool:
        """See Host."""
        return self._child is not None and self._child.sample().state == "t"

    def is_idle(self) -> bool:
        """See Host."""
        return self._in_flight is None or self._in_flight.is_empty()

    def stats(self) -> HostStats:
        """See Host."""
        child, in_flight = self._child, self._in_flight
        handled = self._handled if in_flight is None else in_flight.handled
        return HostStats(handled, self._failed, child.pid if child is not None else 0)
