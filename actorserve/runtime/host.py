# SPDX-License-Identifier: Apache-2.0
"""What keeps one life of an actor: in the loop, in a thread or in a process.

    Cell ── start, wake, finish, abort, kill ──► Host ── reports ──► Cell

A host lives for one incarnation. It takes calls from the cell's mailbox, answers them, and when
it ends, fails what it had begun; what it had not begun goes back to the mailbox.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from actorserve.errors import ActorserveError
from actorserve.runtime.mailbox import Mailbox
from actorserve.state.lifecycle import Phase


class HostStats(msgspec.Struct, frozen=True):
    """Counts of one life: messages done, those that raised, and the process (0: none)."""

    handled: int = 0
    failed: int = 0
    pid: int = 0

    def plus(self, later: HostStats) -> HostStats:
        """Return the counts of both, with the process of the later one."""
        return HostStats(self.handled + later.handled, self.failed + later.failed, later.pid)


class Host(Protocol):
    """One life of an actor; all methods belong to the system's loop but `wake`."""

    def start(self) -> None:
        """Begin; the cell hears how it went."""

    def wake(self) -> None:
        """Look into the mailbox. From any thread."""

    def drop_waiting(self, error: ActorserveError) -> None:
        """Fail what it has taken from the mailbox, and not begun."""

    def finish(self) -> None:
        """End after the message in hand, with the last hook."""

    def abort(self) -> None:
        """End though it hangs, with a trace if possible."""

    def resume(self) -> None:
        """Let a stopped process go on, so that it can end."""

    def kill(self, reason: str) -> None:
        """End at once, whatever it does."""

    def is_traced(self) -> bool:
        """Whether a debugger has it."""

    def is_idle(self) -> bool:
        """Whether nothing is in hand."""

    def stats(self) -> HostStats:
        """Return the counts."""


class HostOwner(Protocol):
    """The cell, as a host needs it. All calls but `idle` come in the system's loop."""

    mailbox: Mailbox
    name: str

    def spawned(self, incarnation: int) -> None:
        """There is something that lives."""

    def spawn_failed(self, incarnation: int, reason: str) -> None:
        """Nothing could be made; it may be tried again."""

    def phase_began(self, incarnation: int, phase: Phase, label: str) -> None:
        """It entered a phase of loading."""

    def ready(self, incarnation: int) -> None:
        """It takes messages."""

    def start_failed(self, incarnation: int, reason: str) -> None:
        """It says why it does not get ready; its exit follows."""

    def hung(self, incarnation: int, reason: str) -> None:
        """It was judged to hang."""

    def exited(self, incarnation: int, reason: str, *, is_normal: bool) -> None:
        """It is gone, and all that it had begun has failed."""

    def idle(self) -> None:
        """Nothing is in hand. From any thread."""
