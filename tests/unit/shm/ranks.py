# SPDX-License-Identifier: Apache-2.0
"""Ranks for tests: forked children that share a board, a ring and collectives."""

from __future__ import annotations

from collections.abc import Callable

from actorserve.shm.board import Board, GroupDead
from actorserve.shm.broadcast import BroadcastRing
from actorserve.shm.collective import Collective, CollectiveSpace
from actorserve.shm.doorbell import Doorbell, wait_for

PATIENCE_S = 50.0


class Ranks:
    """What a group shares; every process makes its own ends of it after the fork."""

    def __init__(self, size: int, *, ring_bytes: int = 4096, slot_bytes: int = 4096) -> None:
        self.size = size
        self.board = Board.create(size, 1)
        self.ring = BroadcastRing.create(size - 1, ring_bytes)
        self.space = CollectiveSpace.create(size, slot_bytes)
        self.bells = [Doorbell.create() for _ in range(size)]

    def close(self) -> None:
        """Let go of everything."""
        for part in (self.board, self.ring, self.space, *self.bells):
            part.close()

    def rank(self, rank: int) -> Rank:
        """Be one of them."""
        return Rank(self, rank)


class Rank:
    """One rank's ends, in its own process or thread."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.rank = rank
        self._ranks = ranks
        self.parking = ranks.board.parking(ranks.bells)
        self.world = Collective(
            ranks.space, rank, wait=self.wait, wake=lambda: self.parking.wake_others(rank)
        )
        self.sleeps = 0

    def wait(self, is_there: Callable[[], bool]) -> None:
        """Sleep until the condition holds; GroupDead, or an error after a long time."""
        bell = self._ranks.bells[self.rank]
        while True:
            self.parking.park(self.rank)
            try:
                if is_there():
                    return
                if self._ranks.board.is_dead:
                    raise GroupDead("dead")
                self.sleeps += 1
                if not wait_for([bell.fileno()], [], PATIENCE_S):
                    raise AssertionError(f"rank {self.rank} was never woken")
                bell.clear()
            finally:
                self.parking.unpark(self.rank)
