# SPDX-License-Identifier: Apache-2.0
"""The children that live, and how they end: each in exactly one `on_exit`.

    pidfd ──► on_death ─► its group is killed ─┬─ the status is known ─► finish
    zygote ─► on_status ───────────────────────┴─ it comes soon, or is unknown

Belongs to the loop of a Spawner (spawn.py), and to one life of it. The pidfd decides; what the
zygote says only adds the status, and may come before, afterwards or never.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from actorserve.process.link import ZygoteLink
from actorserve.process.watch import Child
from actorserve.wire.boot import ChildExited

STATUS_WAIT_S = 0.05
"""How long a death is held back for the zygote's report of its status."""

_KERNEL_STATUS_WAIT_S = 0.01


class Brood:
    """See the module's head."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_no_status: Callable[[], None],
        log: Callable[[int, str], None],
    ) -> None:
        """`on_no_status` is called where a zygote has not said how its child ended."""
        self.exited = self.unknown_statuses = 0
        self.childless = asyncio.Event()
        """Set while there is no child."""
        self._loop = loop
        self._on_no_report = on_no_status
        self._log = log
        self._children: dict[int, tuple[Child, ZygoteLink]] = {}  # with the zygote that made it
        self._waits: dict[int, asyncio.TimerHandle] = {}  # for the status of a dead child
        self.childless.set()

    def __len__(self) -> int:
        """Return how many children live."""
        return len(self._children)

    def add(self, child: Child, link: ZygoteLink) -> None:
        """Take a child that a zygote has made."""
        self._children[child.number] = child, link
        self.childless.clear()

    def disclaim(self, number: int) -> bool:
        """End a child that nobody wants any more, and tell nobody; False where there is none."""
        found = self._children.get(number)
        if found is None:
            return False
        child, _ = found
        child.silence()
        child.begin(self.on_death)
        child.signal(signal.SIGKILL)
        return True

    # --- deaths ----------------------------------------------------------------------------------

    def on_status(self, message: ChildExited) -> None:
        """Hear from a zygote how a child ended."""
        child, _ = self._children.get(message.number, (None, None))
        if child is not None:
            child.reported_status = message.status
            if message.number in self._waits:
                self._finish(child, message.status)

    def on_death(self, child: Child) -> None:
        """Act on a child's pidfd: end its group, then report as soon as the status is known."""
        child.kill_group()
        _, link = self._children[child.number]
        status = child.reported_status
        if status is None:
            status = child.last_status()
        if status is not None:
            self._finish(child, status)
            return
        wait_s = _KERNEL_STATUS_WAIT_S if link.is_gone else STATUS_WAIT_S
        timer = self._loop.call_later(wait_s, self._on_no_status, child)
        self._waits[child.number] = timer

    def _on_no_status(self, child: Child) -> None:
        self._on_no_report()
        self._finish(child, child.last_status())

    def _finish(self, child: Child, status: int | None) -> None:
        wait = self._waits.pop(child.number, None)
        if wait is not None:
            wait.cancel()
        del self._children[child.number]
        self.exited += 1
        self.unknown_statuses += status is None
        child.finish(status)
        if not self._children:
            self.childless.set()

    # --- the end ---------------------------------------------------------------------------------

    def kill_all(self) -> None:
        """Kill every child and its group."""
        for child, _ in self._children.values():
            child.kill_group()
            child.signal(signal.SIGKILL)  # one that does not lead its group yet

    def give_up(self) -> None:
        """Report those that do not die, with an unknown end."""
        for child, _ in list(self._children.values()):
            self._log(2, f"{child.name} (process {child.pid}) does not die")
            self._finish(child, None)

    def close(self) -> None:
        """Kill what lives and forget it, also without a loop: nobody is told. Idempotent."""
        for timer in self._waits.values():
            timer.cancel()
        self.kill_all()
        for child, _ in self._children.values():
            child.close()
        self._forget()

    def disown(self) -> None:
        """In a process forked from the owner: close the copies, and touch nothing else."""
        for child, _ in self._children.values():
            child.disown()
        self._forget()

    def _forget(self) -> None:
        self._children.clear()
        self._waits.clear()
