# SPDX-License-Identifier: Apache-2.0
"""What goes to one process actor, in order: values are placed in shared memory, then sent.

Most is small and goes at once. Where memory has to grow, or a large array has to be copied, that
happens off the loop, and what comes after waits in line.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import numpy as np

from actorserve.errors import (
    ActorserveError,
    InternalError,
    ResourceExhausted,
    TooLarge,
)
from actorserve.runtime.channel import CONTROL_RING_BYTES
from actorserve.runtime.exchange import ArenaSlab
from actorserve.runtime.host_channel import HostChannel
from actorserve.runtime.payload import Array, Packed, is_small, parcel_of
from actorserve.runtime.processes import Processes
from actorserve.wire.actors import FromActor, Parcel
from actorserve.wire.codec import encode
from actorserve.wire.messages import Handle, Message

COPY_ON_LOOP_BYTES = 1 << 20
"""A longer copy is made in a thread."""
_CONTROL_FRAME_BYTES = CONTROL_RING_BYTES // 2 - 8


class OutboxStats(msgspec.Struct, frozen=True):
    """Messages that wait to be placed and sent."""

    waiting: int


class _Slow(Exception):
    """Something cannot be placed in the loop at once."""


class _Letter:
    """A message that has to be placed; `build` makes it from the parcel."""

    __slots__ = ("build", "on_control", "on_error", "packed")

    def __init__(
        self,
        packed: Packed | None,
        build: Callable[[Parcel], Message],
        on_error: Callable[[ActorserveError], None],
        on_control: bool,
    ) -> None:
        self.packed = packed
        self.build = build
        self.on_error = on_error
        self.on_control = on_control


class Outbox:
    """The road to one process. Belongs to the system's loop."""

    def __init__(self, end: HostChannel[FromActor], processes: Processes) -> None:
        self._end = end
        self._processes = processes
        self._line: deque[_Letter] = deque()
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    def send(
        self,
        packed: Packed,
        build: Callable[[Parcel], Message],
        on_error: Callable[[ActorserveError], None],
        *,
        on_control: bool = False,
    ) -> None:
        """Send a message with a value in it; `on_error` hears if that cannot be."""
        letter = _Letter(packed, build, on_error, on_control)
        if self._line or not self._try(letter):
            self._queue(letter)

    def send_plain(self, message: Message, *, on_control: bool = False) -> None:
        """Send a message without a value, in its place in the order."""
        if self._line:
            self._queue(_Letter(None, lambda _: message, _ignore, on_control))
        elif not self._is_closed:
            self._end.send_with_handles(encode(message), (), on_control=on_control)

    def close(self) -> None:
        """Drop what waits in silence: the process is gone, and its host settles the calls.

        A copy that is under way ends first: its memory may not be given to others before.
        """
        self._is_closed = True
        self._line.clear()

    def stats(self) -> OutboxStats:
        """Return the counts."""
        return OutboxStats(len(self._line))

    # --- inside ----------------------------------------------------------------------------------

    def _queue(self, letter: _Letter) -> None:
        if self._is_closed:
            return
        self._line.append(letter)
        if self._task is None:
            self._begin_work()

    def _begin_work(self) -> None:
        # Not by the loop's task factory: an eager one would begin before `_task` is known.
        self._task = asyncio.Task(self._work_off(), loop=self._processes.loop)
        self._task.add_done_callback(self._worked_off)

    def _worked_off(self, task: asyncio.Task[None]) -> None:
        """Look again: a letter may have come between the task's end and this."""
        self._task = None
        if self._line and not task.cancelled():
            self._begin_work()

    def _try(self, letter: _Letter) -> bool:
        """Place and send at once; False where that takes time."""
        packed = letter.packed
        if packed is None or is_small(packed):
            self._transmit(letter, _no_place, [])
            return True
        slabs: list[ArenaSlab] = []
        try:
            self._transmit(letter, lambda array: self._place(array, slabs), slabs)
        except _Slow:
            return False
        return True

    def _transmit(
        self, letter: _Letter, place: Callable[[Array], Handle], slabs: list[ArenaSlab]
    ) -> None:
        """Encode and send, then give up our own holds: the receiver has its loans."""
        try:
            if self._is_closed:
                return
            parcel = _NOTHING if letter.packed is None else parcel_of(letter.packed, place)
            data = encode(letter.build(parcel))
            limit = _CONTROL_FRAME_BYTES if letter.on_control else self._end.max_frame_bytes
            if len(data) > limit:
                raise TooLarge(f"a message of {len(data)} bytes beside its arrays: {limit} at most")
            self._end.send_with_handles(data, parcel.handles(), on_control=letter.on_control)
        except ActorserveError as error:
            letter.on_error(error)
        finally:
            for slab in slabs:
                slab.release()

    def _place(self, array: Array, slabs: list[ArenaSlab]) -> Handle:
        exchange = self._processes.exchange
        handle = exchange.hand_on(array)
        if handle is not None:
            return handle
        if array.nbytes > COPY_ON_LOOP_BYTES:
            raise _Slow
        slab = exchange.allocate(array.nbytes)
        if slab is None:
            raise _Slow
        slabs.append(slab)
        _copy(array, slab)
        return slab.handle

    async def _work_off(self) -> None:
        while self._line:
            letter = self._line[0]
            slabs: list[ArenaSlab] = []
            try:
                handles = iter(await self._place_all(letter, slabs))
            except Exception as error:
                for slab in slabs:
                    slab.release()
                if not isinstance(error, ActorserveError):
                    error = InternalError(f"it could not be placed in shared memory: {error!r}")
                letter.on_error(error)
            else:
                self._transmit(letter, partial(_next, handles), slabs)
            if self._line:
                self._line.popleft()

    async def _place_all(self, letter: _Letter, slabs: list[ArenaSlab]) -> list[Handle]:
        """Place all arrays of a message, in the order in which `parcel_of` will ask for them."""
        if letter.packed is None:
            return []
        wanted: list[Array] = []
        parcel_of(letter.packed, lambda array: _note(array, wanted))
        return [await self._place_slowly(array, slabs) for array in wanted]

    async def _place_slowly(self, array: Array, slabs: list[ArenaSlab]) -> Handle:
        exchange, executor = self._processes.exchange, self._processes.executor
        handle = exchange.hand_on(array)
        if handle is not None:
            return handle
        slab = exchange.allocate(array.nbytes)
        while slab is None:
            await exchange.grow(array.nbytes, executor)
            slab = exchange.allocate(array.nbytes)
        slabs.append(slab)
        if array.nbytes > COPY_ON_LOOP_BYTES:
            loop = self._processes.loop
            await loop.run_in_executor(executor, _copy, array, slab)
        else:
            _copy(array, slab)
        return slab.handle


_NOTHING = Parcel("", b"")
_NO_HANDLE = Handle(0, 0, 0, 0, 0)


def _copy(array: Array, slab: ArenaSlab) -> None:
    target = np.frombuffer(slab.buffer, np.uint8)
    np.copyto(target, array.reshape(-1).view(np.uint8))


def _note(array: Array, wanted: list[Array]) -> Handle:
    wanted.append(array)
    return _NO_HANDLE


def _next(handles: Iterator[Handle], _array: Array) -> Handle:
    return next(handles)


def _no_place(_array: Any) -> Handle:
    raise ResourceExhausted("a small message needs no place in shared memory")


def _ignore(_error: ActorserveError) -> None:
    pass
