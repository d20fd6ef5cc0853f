# SPDX-License-Identifier: Apache-2.0
"""What a system shows of itself."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from actorserve.runtime.host import HostStats
from actorserve.runtime.mailbox import MailboxStats
from actorserve.runtime.processes import ProcessesStats
from actorserve.state.lifecycle import ChildStats


class ActorStats(msgspec.Struct, frozen=True):
    """One actor and those below it. `reason` says why it is in its state; `pid` 0 is none.

    `handled` counts messages that were worked at, `failed` those of them in which `receive`
    raised, both over all lives.
    """

    name: str
    actor: str
    where: str
    state: str
    reason: str
    pid: int
    restarts: int
    deaths: int
    handled: int
    failed: int
    mailbox: MailboxStats
    children: tuple[ActorStats, ...] = ()


def actor_stats(
    names: tuple[str, str, str],
    machine: ChildStats,
    counts: HostStats,
    mailbox: MailboxStats,
    children: Sequence[ActorStats],
) -> ActorStats:
    """Put together what the parts of an actor say; `names` are its own, its class's, its place."""
    return ActorStats(
        *names,
        state=machine.state.value,
        reason=machine.reason,
        pid=counts.pid,
        restarts=machine.restarts,
        deaths=machine.deaths,
        handled=counts.handled,
        failed=counts.failed,
        mailbox=mailbox,
        children=tuple(children),
    )


class SystemStats(msgspec.Struct, frozen=True):
    """The tree of actors. `failure` says why the system has given up, "" if it has not.

    As a text it is the tree, a line for each actor.
    """

    name: str
    failure: str
    actors: tuple[ActorStats, ...]
    processes: ProcessesStats | None

    def __str__(self) -> str:
        lines = [f"{self.name}{f' (failed: {self.failure})' if self.failure else ''}"]
        for actor in self.actors:
            lines += _lines(actor, 1)
        return "\n".join(lines)


def _lines(actor: ActorStats, depth: int) -> list[str]:
    where = f"{actor.where} {actor.pid}" if actor.pid else actor.where
    again = f", restarted {actor.restarts} times" if actor.restarts else ""
    line = f"{'  ' * depth}{actor.name}: {actor.actor} in {where}, {actor.state}{again}"
    found = [line]
    for child in actor.children:
        found += _lines(child, depth + 1)
    return found
