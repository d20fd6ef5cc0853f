# SPDX-License-Identifier: Apache-2.0
"""The allocations of one slab: who still needs which, and when its bytes may be used again.

    take ─► slot, generation, one hold of our own
              hold/drop ◄─ our own views        lend/returned ◄─ each reference that a peer got
              forget ◄─ a peer died: its loans wait in quarantine ─ settle(now) ─► given back
    nobody left ─► take_freed: the range; the slot is used again under the next generation

Pure: no I/O, no clock, no driver. What always holds: an allocation's total is its own holds, the
peers' loans and what lies in quarantine; a peer gives back only what it was lent, a dead one all
of it, once; a (slot, generation) names one allocation and never another one.
"""

from __future__ import annotations

from collections import deque

import msgspec

from actorserve.errors import ProtocolError

LAST_GENERATION = (1 << 32) - 1
"""A slot that reached it is not used again, so that no old reference ever fits by accident."""


class StaleReference(ProtocolError):
    """A reference to device memory that is free, was given to others, or whose owner is gone."""


class Allocation:
    """One range in use. `total` counts all who need it; 0 is free."""

    __slots__ = ("generation", "nbytes", "offset", "own", "slot", "total")

    def __init__(self, slot: int, generation: int, offset: int, nbytes: int) -> None:
        self.slot = slot
        self.generation = generation
        self.offset = offset
        self.nbytes = nbytes
        self.own = 1
        self.total = 1


class LeaseStats(msgspec.Struct, frozen=True):
    """Allocations that live, their bytes, our holds, peers' loans, what waits in quarantine.

    `refused` counts releases that fitted nothing: late, repeated or foreign ones.
    """

    blocks: int
    used_bytes: int
    held: int
    lent: int
    quarantined: int
    refused: int


class Lease:
    """The book of one slab, kept by its tenant alone. Every method is O(1) but those of a death."""

    def __init__(self) -> None:
        self._live: dict[int, Allocation] = {}
        self._spare: list[tuple[int, int]] = []  # slot, its last generation
        self._slots = 0
        self._lent: dict[int, dict[int, int]] = {}  # peer: {slot: how often}
        self._quarantine: deque[tuple[float, Allocation, int]] = deque()
        self._freed: list[tuple[int, int]] = []
        self._used_bytes = 0
        self._refused = 0

    # --- our own ----------------------------------------------------------------------------------

    def take(self, offset: int, nbytes: int) -> Allocation:
        """Enter a range that is free, with one hold of our own."""
        if self._spare:
            slot, generation = self._spare.pop()
        else:
            slot, generation = self._slots, 0
            self._slots += 1
        allocation = self._live[slot] = Allocation(slot, generation + 1, offset, nbytes)
        self._used_bytes += nbytes
        return allocation

    def find(self, slot: int, generation: int) -> Allocation:
        """Return the living allocation of that name; StaleReference if there is none."""
        allocation = self._live.get(slot)
        if allocation is None or allocation.generation != generation:
            raise self._stale(slot, generation)
        return allocation

    def covering(self, offset: int, nbytes: int) -> Allocation | None:
        """Return the allocation that holds all of a range. Looks at every one."""
        for each in self._live.values():
            if each.offset <= offset and offset + nbytes <= each.offset + each.nbytes:
                return each
        return None

    def hold(self, slot: int, generation: int) -> None:
        """Count one more need of our own; StaleReference if it is free already."""
        allocation = self.find(slot, generation)
        allocation.own += 1
        allocation.total += 1

    def drop(self, slot: int, generation: int) -> None:
        """Count a need of our own less; StaleReference if there is none."""
        allocation = self.find(slot, generation)
        if not allocation.own:
            raise self._stale(slot, generation)
        allocation.own -= 1
        self._lower(allocation, 1)

    # --- peers ------------------------------------------------------------------------------------

    def lend(self, peer: int, slot: int, generation: int) -> None:
        """Count one reference that a peer gets; StaleReference if it is free already."""
        allocation = self.find(slot, generation)
        allocation.total += 1
        loans = self._lent.get(peer)
        if loans is None:
            loans = self._lent[peer] = {}
        loans[slot] = loans.get(slot, 0) + 1

    def returned(self, peer: int, slot: int, generation: int) -> bool:
        """Count a peer's release; False, and counted, where that peer has no such loan."""
        loans = self._lent.get(peer)
        allocation = self._live.get(slot)
        # A loan keeps its allocation alive, so that the generation decides.
        if (
            loans is None
            or slot not in loans
            or allocation is None
            or allocation.generation != generation
        ):
            self._refused += 1
            return False
        if loans[slot] > 1:
            loans[slot] -= 1
        else:
            del loans[slot]
            if not loans:
                del self._lent[peer]
        self._lower(allocation, 1)
        return True

    def forget(self, peer: int, until_s: float) -> int:
        """Give a dead peer's loans back at `until_s`; return how many there are.

        What it had started on the device may still run for a moment, on memory that it knew.
        """
        loans = self._lent.pop(peer, {})
        for slot, count in loans.items():
            self._quarantine.append((until_s, self._live[slot], count))
        return sum(loans.values())

    def settle(self, now_s: float) -> None:
        """End the quarantines that are due."""
        waiting = self._quarantine
        for _ in range(len(waiting)):
            until_s, allocation, count = waiting.popleft()
            if until_s <= now_s:
                self._lower(allocation, count)
            else:
                waiting.append((until_s, allocation, count))

    def next_due_s(self) -> float | None:
        """Return when the next quarantine ends, or None."""
        return min((until_s for until_s, _, _ in self._quarantine), default=None)

    # --- the whole --------------------------------------------------------------------------------

    def take_freed(self) -> list[tuple[int, int]]:
        """Return the ranges (offset, nbytes) that nobody needs any more since the last call."""
        freed = self._freed
        if freed:
            self._freed = []
        return freed

    def is_idle(self) -> bool:
        """Tell whether nobody needs anything."""
        return not self._live

    def stats(self) -> LeaseStats:
        """Return the sums of all counts as of now."""
        return LeaseStats(
            blocks=len(self._live),
            used_bytes=self._used_bytes,
            held=sum(each.own for each in self._live.values()),
            lent=sum(sum(loans.values()) for loans in self._lent.values()),
            quarantined=sum(count for _, _, count in self._quarantine),
            refused=self._refused,
        )

    def _lower(self, allocation: Allocation, count: int) -> None:
        allocation.total -= count
        if allocation.total:
            return
        slot = allocation.slot
        del self._live[slot]
        self._used_bytes -= allocation.nbytes
        self._freed.append((allocation.offset, allocation.nbytes))
        if allocation.generation < LAST_GENERATION:
            self._spare.append((slot, allocation.generation))

    def _stale(self, slot: int, generation: int) -> StaleReference:
        allocation = self._live.get(slot)
        now = "is free" if allocation is None else f"is at generation {allocation.generation}"
        return StaleReference(
            f"reference to slot {slot}, generation {generation}, which is gone: the slot {now}"
        )
