# SPDX-License-Identifier: Apache-2.0
"""What the ranks of one group share, as their parent holds it, and how it is handed over.

    board            what each rank does; whether the group is dead; the latest statistics
    broadcast ring   rank 0 ══► the others
    collectives      arrays among all ranks
    council          the same, small: what each thinks of a step
    bells            one a rank: "look again"

All of it belongs to one life of the group (its epoch) and dies with it. The parent uses the board
alone, in its loop's thread.
"""

from __future__ import annotations

from actorserve.process.boot import BootSocket
from actorserve.shm.board import MOST_RANKS, Board, BoardStats, GroupDead, RankNote, Status
from actorserve.shm.broadcast import BroadcastRing
from actorserve.shm.collective import SLOT_BYTES, CollectiveSpace
from actorserve.shm.doorbell import Doorbell
from actorserve.wire.messages import JoinGroup

__all__ = ["MOST_RANKS", "GroupDead", "GroupParts", "RankNote", "Status"]

RING_BYTES = 1 << 20
_COUNCIL_BYTES = 1024
GROUP_FDS = ("board", "broadcast ring", "collectives", "council")
"""The order of JoinGroup's first descriptors; those of the bells follow, in the order of ranks."""


class GroupParts:
    """The parent's hold on one life of a group."""

    def __init__(
        self,
        board: Board,
        ring: BroadcastRing,
        space: CollectiveSpace,
        council: CollectiveSpace,
        bells: list[Doorbell],
    ) -> None:
        self.board = board
        self._ring = ring
        self._space = space
        self._council = council
        self._bells = bells
        self._parking = board.parking(bells)
        self._is_closed = False

    @classmethod
    def create(
        cls,
        size: int,
        epoch: int,
        *,
        ring_bytes: int = RING_BYTES,
        slot_bytes: int = SLOT_BYTES,
    ) -> GroupParts:
        """Create all of it. Raises ResourceExhausted, leaving nothing behind."""
        made: list[Board | BroadcastRing | CollectiveSpace | Doorbell] = []
        try:
            board = Board.create(size, epoch)
            made.append(board)
            ring = BroadcastRing.create(size - 1, ring_bytes)
            made.append(ring)
            space = CollectiveSpace.create(size, slot_bytes)
            made.append(space)
            council = CollectiveSpace.create(size, _COUNCIL_BYTES)
            made.append(council)
            bells = []
            for _ in range(size):
                bells.append(Doorbell.create())
                made.append(bells[-1])
        except BaseException:
            for part in made:
                part.close()
            raise
        return cls(board, ring, space, council, bells)

    def send(self, boot: BootSocket, rank: int) -> None:
        """Let a rank join; the first message after Hello."""
        parts = (self.board, self._ring, self._space, self._council)
        fds = [part.segment.fd for part in parts]
        for bell in self._bells:
            fds.extend(bell.fds)
        boot.send(JoinGroup(rank, self.board.size, self.board.epoch), fds)

    def fail(self) -> None:
        """Mark the group as dead and wake every rank that sleeps. Idempotent."""
        if not self._is_closed:
            self.board.mark_dead()
            self._parking.wake_others()

    def stats(self) -> BoardStats:
        """Return one look at the board."""
        return self.board.stats()

    def close(self) -> None:
        """Unmap and close everything; idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self.board.close()
        self._ring.close()
        self._space.close()
        self._council.close()
        for bell in self._bells:
            bell.close()
