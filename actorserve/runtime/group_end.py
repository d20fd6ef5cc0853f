# SPDX-License-Identifier: Apache-2.0
"""A rank's end: its channel to the parent, and its place among the other ranks.

    work lane ─► read                     rank 0: requests; every rank: its first message
    rank 0: broadcast ══ ring ══► receive_broadcast, on the others
    up lane   ◄─ send                     long messages as Fragments
    world     all_reduce, all_gather, broadcast, barrier

All calls but `send` and `serve_control` belong to the main thread. Every wait of it ends when
there is what it waits for, when the group is marked as dead (GroupDead), or with the parent
(PeerGone).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from actorserve.errors import ProtocolError
from actorserve.process.boot import BootSocket, PeerGone
from actorserve.runtime.fragments import Assembler, fragments_of
from actorserve.runtime.group_parts import GROUP_FDS
from actorserve.runtime.peer_end import HELLO_TIMEOUT_S, TRIM_AFTER_S, PeerChannel
from actorserve.shm.board import Board, GroupDead, Status
from actorserve.shm.broadcast import BroadcastReader, BroadcastRing, BroadcastWriter
from actorserve.shm.collective import Collective, CollectiveSpace
from actorserve.shm.doorbell import Doorbell, wait_for
from actorserve.shm.segment import Segment
from actorserve.wire.codec import encode
from actorserve.wire.generation import Fragment, ToRank, decode_to_rank
from actorserve.wire.messages import JoinGroup, Message

WHOLE, PART, LAST_PART = 0, 1, 2
"""Kinds of frames on the broadcast ring."""


class RankEnd(PeerChannel[ToRank]):
    """See the module's head."""

    def __init__(self, boot: BootSocket) -> None:
        """Take Hello and JoinGroup from the boot socket and map everything.

        Raises as PeerChannel.
        """
        super().__init__(boot, decode_to_rank)
        message, fds = boot.recv(HELLO_TIMEOUT_S)
        if not isinstance(message, JoinGroup):
            raise ProtocolError(f"expected JoinGroup, got {type(message).__name__}")
        self.rank, self.size, self.epoch = message.rank, message.size, message.epoch
        board, ring, space, council, bells = _attach(message, fds)
        self._board = board
        self._bells = bells
        self._bell = bells[self.rank]
        self._parking = board.parking(bells)
        self._writer = BroadcastWriter(ring) if self.rank == 0 else None
        self._reader = BroadcastReader(ring, self.rank - 1) if self.rank else None
        self._assembler = Assembler(decode_to_rank)
        self._parts_of_step: list[bytes] = []
        self._note = (0, Status.LOADING)
        self._is_trimmed = False
        self.told = 0
        self.world = self._collective(space) if self.size > 1 else None
        self._council = self._collective(council)

    def _collective(self, space: CollectiveSpace) -> Collective:
        return Collective(space, self.rank, wait=self._wait_for_ranks, wake=self._wake_ranks)

    # --- the parent -------------------------------------------------------------------------------

    def read(self) -> list[ToRank]:
        """Return all messages that have come on the work lane."""
        if self._board.is_dead:
            raise GroupDead("the group was ended by its parent")
        frames = self._work.drain()
        if not frames:
            return []
        self._received += len(frames)
        self._is_trimmed = False
        decode = self._decode
        messages = []
        for _, data in frames:
            message: ToRank | None = decode(data)
            if isinstance(message, Fragment):
                message = self._assembler.add(message)
            if message is not None:
                messages.append(message)
        return messages

    def send(self, message: Message, *, wakes: bool = True) -> None:
        """Send on the up lane, in pieces where it has to be. Raises PeerGone.

        `wakes` is as in `send_encoded`.
        """
        data = encode(message)
        if len(data) <= self.max_frame_bytes:
            self.send_encoded(data, wakes=wakes)
            return
        for piece in fragments_of(data, self.max_frame_bytes):
            self.send_encoded(piece, wakes=wakes)

    # --- waiting ----------------------------------------------------------------------------------

    def wait(self, timeout_s: float | None = None, also: Sequence[int] = ()) -> None:
        """Sleep until something comes from the parent or the other ranks; may return early.

        `also` are descriptors whose being readable ends the sleep, too.
        """
        first_s = timeout_s if self._is_trimmed or timeout_s is not None else TRIM_AFTER_S
        if not self._doze(first_s, also) and timeout_s is None:
            self._is_trimmed = True
            self._trim()

    def _doze(self, timeout_s: float | None, also: Sequence[int]) -> bool:
        """Sleep; False if nothing happened in time."""
        is_news = not self._work.park()
        self._parking.park(self.rank)
        try:
            if self._board.is_dead:
                raise GroupDead("the group was ended by its parent")
            if is_news or (self._reader is not None and self._reader.has_news()):
                return True
            return self._sleep_on([self._main_bell, self._bell], timeout_s, also)
        finally:
            self._parking.unpark(self.rank)
            self._work.unpark()

    def _wait_for_ranks(self, is_there: Callable[[], bool]) -> None:
        """Wait for other ranks in the middle of a step."""
        step, status = self._note
        self._board.note(self.rank, step, Status.WAITING, self.told)
        while True:
            self._parking.park(self.rank)
            try:
                if is_there():
                    break
                if self._board.is_dead:
                    raise GroupDead("the group was ended by its parent")
                self._sleep_on([self._bell], None)
            finally:
                self._parking.unpark(self.rank)
        self._board.note(self.rank, step, status, self.told)

    def _sleep_on(
        self, bells: list[Doorbell], timeout_s: float | None, also: Sequence[int] = ()
    ) -> bool:
        awaited = [*(bell.fileno() for bell in bells), *also]
        gone = self._boot.supervisor_pidfd
        if gone is not None:
            awaited.append(gone)
        ready = wait_for(awaited, [self._boot.fileno()], timeout_s)
        if self._boot.fileno() in ready or gone in ready:
            raise PeerGone("the parent is gone")
        for bell in bells:
            if bell.fileno() in ready:
                bell.clear()
        return bool(ready)

    def _wake_ranks(self) -> None:
        self._parking.wake_others(self.rank)

    # --- the other ranks --------------------------------------------------------------------------

    def broadcast(self, message: Message) -> None:
        """Send to all other ranks (rank 0); waits for room. Wakes those that sleep."""
        if self._writer is None:
            raise ProtocolError(f"rank {self.rank} has no broadcast ring to write to")
        if self.size == 1:
            return
        data = encode(message)
        most = self._writer.max_frame_bytes
        if len(data) <= most:
            self._put(self._writer, data, WHOLE)
        else:
            for start in range(0, len(data), most):
                kind = PART if start + most < len(data) else LAST_PART
                self._put(self._writer, data[start : start + most], kind)
        self._writer.flush()
        self._wake_ranks()

    def _put(self, writer: BroadcastWriter, data: bytes, kind: int) -> None:
        if writer.try_put(data, kind):
            return
        writer.flush()
        self._wake_ranks()
        writer.want_room(True)
        self._wait_for_ranks(lambda: writer.try_put(data, kind))
        writer.want_room(False)

    def receive_broadcast(self) -> list[bytes]:
        """Return what rank 0 has sent, as it was encoded (the other ranks)."""
        if self._reader is None:
            raise ProtocolError("rank 0 does not read the broadcast ring")
        frames = self._reader.drain()
        if frames and self._reader.wants_room():
            self._parking.wake(0)
        messages = []
        for kind, data in frames:
            if kind == WHOLE:
                messages.append(data)
                continue
            self._parts_of_step.append(data)
            if kind == LAST_PART:
                messages.append(b"".join(self._parts_of_step))
                self._parts_of_step.clear()
        return messages

    def agree(self, opinion: str) -> list[str]:
        """Return what every rank thinks of what they have just done; all have to ask."""
        text = np.frombuffer(opinion.encode("utf-8", "replace"), np.uint8)
        opinions = self._council.all_gather(text)
        return [each.tobytes().decode("utf-8", "replace") for each in opinions]

    # --- the board --------------------------------------------------------------------------------

    def note(self, step: int, status: Status) -> None:
        """Write on the board what this rank does from now on, with `told` (see board.py)."""
        self._note = (step, status)
        self._board.note(self.rank, step, status, self.told)

    @property
    def is_dead(self) -> bool:
        """Whether the parent has ended the group."""
        return self._board.is_dead

    def write_page(self, data: bytes) -> bool:
        """Replace the page of statistics (rank 0); False where it is too long."""
        return self._board.write_page(data)


def _attach(
    message: JoinGroup, fds: list[int]
) -> tuple[Board, BroadcastRing, CollectiveSpace, CollectiveSpace, list[Doorbell]]:
    """Map what JoinGroup brought. Raises ProtocolError where anything does not fit."""
    fixed = len(GROUP_FDS)
    per_bell, odd = divmod(len(fds) - fixed, max(1, message.size))
    if odd or per_bell not in (1, 2) or not 0 <= message.rank < message.size:
        raise ProtocolError(
            f"JoinGroup for rank {message.rank} of {message.size} brought {len(fds)} descriptors"
        )
    board = Board.attach(Segment.attach(fds[0]))
    ring = BroadcastRing.attach(Segment.attach(fds[1]))
    space = CollectiveSpace.attach(Segment.attach(fds[2]))
    council = CollectiveSpace.attach(Segment.attach(fds[3]))
    for part in (board, ring, space, council):
        part.segment.close_fd()
    bells = [
        Doorbell.attach(fds[fixed + i * per_bell : fixed + (i + 1) * per_bell])
        for i in range(message.size)
    ]
    sizes = (board.size, ring.readers + 1, space.size, council.size)
    if sizes != (message.size,) * 4 or board.epoch != message.epoch:
        raise ProtocolError(
            f"a group of {message.size} ranks came with parts for {sizes}, epoch {board.epoch}"
        )
    return board, ring, space, council, bells
