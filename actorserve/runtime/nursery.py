# SPDX-License-Identifier: Apache-2.0
"""Where actors of one system come from: cells in their family, hosts for each of their lives."""

from __future__ import annotations

import logging
from typing import Any

from actorserve.errors import ActorserveError, ActorStopped, BootError
from actorserve.runtime.actor import DEFAULT_MAILBOX, Actor, ActorContext, Spawning
from actorserve.runtime.answer import Answer
from actorserve.runtime.cell import Cell
from actorserve.runtime.core import Core
from actorserve.runtime.door import SystemDoor
from actorserve.runtime.errand import Errand
from actorserve.runtime.family import Family
from actorserve.runtime.host import Host
from actorserve.runtime.local_host import Birth, LoopHost, ThreadHost
from actorserve.runtime.placement import Placement, Process, Thread
from actorserve.runtime.ref import ActorRef
from actorserve.runtime.spec import ActorSpec, load, spec_of

_log = logging.getLogger("actorserve")


class Nursery:
    """Make actors, at the top (`top`) or below another."""

    def __init__(self, core: Core, door: SystemDoor, top: Family, system: Spawning) -> None:
        self.core = core
        self.door = door
        self.system = system
        self._top = top

    def spawn(
        self,
        parent: Cell | None,
        actor: type[Actor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        where: Placement | None,
        name: str | None,
        mailbox: int = DEFAULT_MAILBOX,
    ) -> Answer[ActorRef]:
        """Start an actor. From any thread. Raises InvalidArgument for what cannot be."""
        spec = spec_of(self.door, actor, args, kwargs, where, name, mailbox)
        answer: Answer[ActorRef] = Answer(Errand(self.door, f"the start of {spec.short_name}"))
        lost = ActorStopped("the event loop of the actor system was closed")
        self.core.post(self.start, parent, spec, answer, if_lost=lambda: answer.fail(lost))
        return answer

    def start(self, parent: Cell | None, spec: ActorSpec, answer: Answer[ActorRef]) -> None:
        """Start an actor from its spec. In the loop."""
        try:
            cell = self._cell(parent, spec)
        except ActorserveError as error:
            answer.fail(error)
            return
        except Exception as error:  # its module, when it is imported here
            _log.exception("loading %s failed", spec.class_name)
            answer.fail(BootError(f"loading {spec.class_name}: {error!r}"))
            return
        cell.start(answer)

    def _cell(self, parent: Cell | None, spec: ActorSpec) -> Cell:
        if self.core.is_closed:
            raise ActorStopped(f"the actor system {self.core.name!r} was stopped")
        if self.core.failure:
            raise ActorStopped(f"the actor system has failed: {self.core.failure}")
        if parent is not None and not parent.has_life():
            raise ActorStopped(f"{parent.name!r}, the parent, is not there any more")
        family = self._top if parent is None else parent.family
        if not isinstance(spec.where, Process):
            load(spec, self.door)
        name = family.name_for(spec.name, spec.short_name)
        cell = Cell(self.core, self.door, spec, name, family, parent, self._host)
        self.core.cells[cell.id] = cell
        family.add(cell)
        return cell

    def _host(self, cell: Cell, incarnation: int) -> Host:
        """Make what keeps the next life of an actor."""
        spec = cell.spec
        if isinstance(spec.where, Process):
            from actorserve.runtime.process_host import ProcessHost

            return ProcessHost(self, cell, incarnation)
        home = _Home(self, cell)
        parent = cell.parent.ref if cell.parent is not None else None
        restarts = cell.machine.stats().restarts
        context = ActorContext(home, cell.ref, parent, restarts, cell.last_end)
        assert spec.kind is not None
        birth = Birth(incarnation, spec.kind, spec.args, spec.kwargs, context)
        host: LoopHost | ThreadHost
        if isinstance(spec.where, Thread):
            host = ThreadHost(birth, cell, self.core.post)
        else:
            host = LoopHost(birth, cell, self.core.post, self.core.loop)
        home.host = host
        return host


class _Home:
    """See actor.Self: for an actor in the system's own process."""

    def __init__(self, nursery: Nursery, cell: Cell) -> None:
        self.host: LoopHost | ThreadHost | None = None
        self._nursery = nursery
        self._cell = cell

    @property
    def system(self) -> Spawning:
        return self._nursery.system

    def spawn_child(
        self,
        actor: type[Actor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        where: Placement | None,
        name: str | None,
        mailbox: int,
    ) -> Answer[ActorRef]:
        return self._nursery.spawn(self._cell, actor, args, kwargs, where, name, mailbox)

    def end(self) -> None:
        if self.host is not None:
            self.host.end()
