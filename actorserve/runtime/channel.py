# SPDX-License-Identifier: Apache-2.0
"""The channel between the supervisor and one stub: what it is made of, and how it is handed over.

        supervisor (HostEnd)                                      stub (PeerEnd)
          work    ring  ── Initialize, Execute, Finalize ──►        main thread      main bell
          control ring  ── Ping, CallResponded, … ────────►         control thread   control bell
          up      ring  ◄── Executed, Infer, LogRecord, … ──        any thread       host bell
          room bell: rung when the up ring has room again, or blocks came back to the stub
          page: beats and phase from the stub, cancel words from the supervisor

The segments belong to this one channel and die with it: a new incarnation gets new ones, so that
nothing a dead process left half-written is ever read. Hello carries their descriptors.
"""

from __future__ import annotations

import msgspec

from actorserve.shm.doorbell import Doorbell
from actorserve.shm.health import HealthPage
from actorserve.shm.lane import Lane

WORK_RING_BYTES = 1 << 20
CONTROL_RING_BYTES = 1 << 20
UP_RING_BYTES = 1 << 20
CONTROL_RELEASE_SLOTS = 8

LANES = ("work", "control", "up")
BELLS = ("main", "control", "host", "room")
HELLO_FDS = (*(f"{name} lane" for name in LANES), "page", "health lock")
"""The order of Hello's first descriptors; those of the four bells follow, in BELLS' order.

A bell is one descriptor (eventfd), or two (read and write end) where the supervisor's interpreter
has no eventfd: the number of descriptors tells.
"""


class ChannelStats(msgspec.Struct, frozen=True):
    """Counters of one end of a channel."""

    messages_sent: int
    messages_received: int
    backlog: int
    releases_waiting: int


class Parts:
    """The lanes, bells and page of a channel, as one end holds them."""

    __slots__ = ("bells", "control", "page", "up", "work")

    def __init__(
        self, work: Lane, control: Lane, up: Lane, page: HealthPage, bells: dict[str, Doorbell]
    ) -> None:
        self.work = work
        self.control = control
        self.up = up
        self.page = page
        self.bells = bells

    @classmethod
    def create(cls) -> Parts:
        """Create all of it. Raises ResourceExhausted, leaving nothing behind."""
        made: list[Lane | HealthPage | Doorbell] = []
        try:
            work = Lane.create(WORK_RING_BYTES)
            made.append(work)
            control = Lane.create(CONTROL_RING_BYTES, CONTROL_RELEASE_SLOTS)
            made.append(control)
            up = Lane.create(UP_RING_BYTES)
            made.append(up)
            page = HealthPage.create()
            made.append(page)
            bells = {}
            for name in BELLS:
                bells[name] = Doorbell.create()
                made.append(bells[name])
        except BaseException:
            for part in made:
                part.close()
            raise
        return cls(work, control, up, page, bells)

    def close(self) -> None:
        """Unmap and close everything; idempotent."""
        for lane in (self.work, self.control, self.up):
            lane.close()
        self.page.close()
        for bell in self.bells.values():
            bell.close()
