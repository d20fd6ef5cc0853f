# SPDX-License-Identifier: Apache-2.0
"""The stub's end of its channel to the supervisor.

The main thread reads the work lane and may block; a control thread reads the control lane, beats
and notices the supervisor's end; any thread may send on the up lane (one lock orders them).
Tensor memory: bodies that came by handle are views leased from their owner, returned on the work
lane's release ring when the last view dies; bodies that go out are copied once into this
process's own arena, or handed on where they already lie in a leased block.
"""

from __future__ import annotations

import contextlib
import os
import platform
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from actorserve.clock import monotonic_ns, monotonic_s, remaining_s
from actorserve.errors import DeadlineExceeded, ProtocolError, ResourceExhausted
from actorserve.forking import sever_after_fork
from actorserve.process.boot import BootSocket, PeerGone
from actorserve.process.lock import HealthLock
from actorserve.runtime.channel import BELLS, HELLO_FDS, LANES, ChannelStats, Parts
from actorserve.shm.arena import Arena
from actorserve.shm.doorbell import Doorbell, wait_for
from actorserve.shm.health import HealthPage
from actorserve.shm.lane import Consumer, Lane, Producer
from actorserve.shm.segment import Segment
from actorserve.shm.view import Views
from actorserve.wire.boot import FromBootSocket
from actorserve.wire.codec import decode_to_stub, encode
from actorserve.wire.messages import (
    PROTOCOL,
    Attached,
    Handle,
    Hello,
    MapSegment,
    Message,
    Ping,
    Pong,
    ToStub,
    WireTensor,
)

HELLO_TIMEOUT_S = 10.0
SEGMENT_TIMEOUT_S = 10.0
BEAT_S = 0.25
TRY_SEND_S = 0.005
TRIM_AFTER_S = 10.0
KEPT_BYTES = 32 << 20
"""A stub without work for TRIM_AFTER_S gives the pages of its arena back, beyond KEPT_BYTES."""


M = TypeVar("M")


class PeerChannel(Generic[M]):
    """One child's channel, seen from the child; `decode` reads what the supervisor sends."""

    def __init__(self, boot: BootSocket, decode: Callable[[bytes], M]) -> None:
        """Take Hello from the boot socket, map everything and answer Attached.

        Raises ProtocolError for another protocol, PeerGone where the supervisor is gone.
        """
        self._boot = boot
        self._decode = decode
        hello, fds = self._receive_hello()
        self.instance = hello.instance
        parts = _attach_parts(fds)
        self._parts = parts
        self.page = parts.page
        self._lock = HealthLock.attach(fds[len(LANES) + 1])
        self._lock.take()
        bells = parts.bells
        self._main_bell = bells["main"]
        self._control_bell = bells["control"]
        self._room_bell = bells["room"]
        self._work = Consumer(parts.work, bells["host"])
        self._control = Consumer(parts.control, bells["host"])
        self._up = Producer(parts.up, bells["host"])
        self._arena = Arena(
            hello.arena,
            first_segment_bytes=hello.first_segment_bytes,
            growth_bytes=hello.growth_bytes,
            on_segment=self._on_own_segment,
        )
        self._views = Views()
        # Taken again where a finalizer or signal handler of the user's sends within a sending.
        self._send_lock = threading.RLock()
        self._is_sending = False
        self._unsent: deque[bytes] = deque()
        self._boot_lock = threading.Lock()
        self._arena_lock = threading.Lock()
        self._release_lock = threading.Lock()
        self._pending: deque[M] = deque()
        self._releasing: deque[Handle] = deque()
        self._kept: list[Handle] = []  # released, but not yet to be sent; see `_releasable`
        self._sent = 0
        self._received = 0
        self._severed = False
        sever_after_fork(self)
        boot.send(Attached(PROTOCOL, platform.python_version(), os.getpid()))

    def _receive_hello(self) -> tuple[Hello, list[int]]:
        message, fds = self._boot.recv(HELLO_TIMEOUT_S)
        if not isinstance(message, Hello):
            raise ProtocolError(f"expected Hello, got {type(message).__name__}")
        if message.protocol != PROTOCOL:
            raise ProtocolError(
                f"the supervisor ({message.version}) speaks protocol {message.protocol}, "
                f"this stub {PROTOCOL}"
            )
        return message, fds

    def sever(self) -> None:
        """Cut a forked child of the model off: it owns no end of this channel."""
        self._severed = True

    @property
    def arena_id(self) -> int:
        """The number of this process's own arena."""
        return self._arena.arena_id

    @property
    def is_severed(self) -> bool:
        """Whether this process is a fork of the stub."""
        return self._severed

    # --- reading ---------------------------------------------------------------------------------

    def serve_control(self) -> None:
        """Beat and answer pings until the supervisor is gone. The control thread's whole life."""
        while True:
            for _, data in self._control.drain():
                message = self._decode(data)
                if isinstance(message, Ping):
                    self.send(Pong(message.number, self._used_bytes()))
                else:
                    self.on_control_message(message)
            self.page.beat(monotonic_ns())
            self.on_beat()
            if self._control.park():
                self._sleep(self._control_bell, BEAT_S)
                self._control.unpark()

    def on_control_message(self, message: M) -> None:
        """Take what came on the control lane and is no Ping; nothing, unless a subclass does."""

    def on_beat(self) -> None:
        """Do what is due on the control thread, several times a second; as above."""

    def _sleep(self, bell: Doorbell, timeout_s: float | None) -> bool:
        """Sleep until the bell rings; False after `timeout_s`. Raises PeerGone."""
        ready = wait_for(self._awaited(bell), [self._boot.fileno()], timeout_s)
        if bell.fileno() in ready:
            bell.clear()
            return True
        if ready:
            raise PeerGone("the supervisor is gone")
        return False

    def _awaited(self, bell: Doorbell) -> list[int]:
        """What is readable when there is news: the bell, or the supervisor's pidfd at its end."""
        pidfd = self._boot.supervisor_pidfd
        return [bell.fileno()] if pidfd is None else [bell.fileno(), pidfd]

    def _trim(self) -> None:
        """Give idle pages back to the system."""
        with self._arena_lock:
            self._take_back()
            self._arena.trim(KEPT_BYTES)

    # --- writing ---------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Send on the up lane from any thread; waits for room. Raises PeerGone, ValueError."""
        self.send_encoded(encode(message))

    def send_encoded(self, data: bytes, *, wakes: bool = True) -> None:
        """Send an encoded message; see `send`.

        Where it `wakes` nobody, whoever calls this has to `wake` soon.
        """
        if self._severed:
            return
        with self._send_lock:
            if self._is_sending:
                self._unsent.append(data)
                return
            self._is_sending = True
            try:
                self._sent += 1
                send = self._up.try_send if wakes else self._up.try_post
                while not send(data):
                    if not wakes:
                        self._up.wake()
                    if not self._up.want_room():
                        self._sleep(self._room_bell, None)
                    self._up.stop_wanting()
            finally:
                self._is_sending = False
            if self._unsent:
                self.send_encoded(self._unsent.popleft())

    def wake(self) -> None:
        """Wake the other side, if it sleeps, for what was sent and woke nobody."""
        with self._send_lock:
            if not self._severed:
                self._up.wake()

    def try_send_encoded(self, data: bytes) -> bool:
        """Send an encoded message if there is room for it at once; False if there is none.

        May be called by a finalizer in the very thread that is sending just now: False, too.
        """
        if self._severed or not self._send_lock.acquire(timeout=TRY_SEND_S):
            return False
        try:
            if self._is_sending or not self._up.try_send(data):
                return False
            self._sent += 1
            return True
        finally:
            self._send_lock.release()

    @property
    def max_frame_bytes(self) -> int:
        """The longest encoded message that `send` takes."""
        return self._up.max_frame_bytes

    # --- tensor memory ---------------------------------------------------------------------------

    def view(self, handle: Handle, *, writable: bool) -> npt.NDArray[np.uint8]:
        """Return the bytes that a handle names, without a copy; leased until the view dies."""
        if not self._views.has_segment(handle.arena, handle.segment):
            self._receive_segment(handle)
        return self._views.view(handle, _BYTE, (handle.nbytes,), writable=writable)

    def give_back(self, handles: Iterable[Handle]) -> None:
        """Return blocks that came in a message and that nobody looks at, at the next `settle`."""
        self._releasing.extend(handles)

    def _receive_segment(self, handle: Handle) -> None:
        """Read the boot socket until the handle's segment has come: it was sent before it."""
        try:
            self._read_boot(lambda: self._views.has_segment(handle.arena, handle.segment))
        except DeadlineExceeded:
            raise ProtocolError(
                f"a handle names segment {handle.segment} of arena {handle.arena}, "
                "which nobody announced"
            ) from None

    def _read_boot(self, is_there: Callable[[], bool]) -> None:
        """Read the boot socket until what was sent on it before is there; DeadlineExceeded."""
        deadline_s = monotonic_s() + SEGMENT_TIMEOUT_S
        with self._boot_lock:
            while not is_there():
                try:
                    self._take_announced(*self._boot.recv(remaining_s(deadline_s)))
                except ResourceExhausted as error:
                    # It is sent once, and so would be missing for ever: an heir has to do the work.
                    with contextlib.suppress(OSError):
                        os.write(2, f"this process cannot go on: {error.message}\n".encode())
                    os._exit(1)

    def _take_announced(self, message: FromBootSocket, fds: list[int]) -> None:
        """Take what came on the boot socket."""
        if not isinstance(message, MapSegment) or len(fds) != 1:
            raise ProtocolError(f"unexpected {type(message).__name__} on the boot socket")
        segment = Segment.attach(fds[0], message.nbytes)
        segment.close_fd()
        self._views.add_segment(message.arena, message.segment, segment)

    def place(self, body: npt.NDArray[np.generic]) -> Handle:
        """Return a handle of the body: handed on if it is leased, else copied once into the arena.

        `body` is C-contiguous and not empty. Raises ResourceExhausted when memory is full.
        """
        leased = self._views.handle_of(body)
        with self._arena_lock:
            self._take_back()
            if leased is not None:
                if leased.arena == self._arena.arena_id:
                    # Each sending of an own block is counted, since each will be released.
                    self._arena.hold(self._arena.block_of(leased))
                return leased
            nbytes = body.nbytes
            block = self._arena.allocate(nbytes)
            target = np.frombuffer(self._arena.buffer(block, nbytes), np.uint8)
            np.copyto(target, body.reshape(-1).view(np.uint8))
            return self._arena.handle(block, nbytes)

    def own(self, handle: Handle) -> Handle:
        """Return a handle whose bytes nobody here can change any more.

        A body that was handed on is copied if a view of it is still alive: whoever kept that view
        could write into an answer that has been given. Raises ResourceExhausted.
        """
        if not self._views.is_leased(handle):
            return handle
        body = np.frombuffer(self._views.peek(handle), np.uint8)
        with self._arena_lock:
            block = self._arena.allocate(handle.nbytes)
            target = np.frombuffer(self._arena.buffer(block, handle.nbytes), np.uint8)
            np.copyto(target, body)
            owned = self._arena.handle(block, handle.nbytes)
        self.unplace([handle])
        return owned

    def unplace(self, handles: Iterable[Handle]) -> None:
        """Take `place` back for handles that are not sent after all."""
        with self._arena_lock:
            for handle in handles:
                if handle.arena == self._arena.arena_id:
                    self._arena.drop_number(handle.block)

    def withdraw(self, tensors: Iterable[WireTensor]) -> None:
        """Give up the blocks that were placed for a message which is not sent after all."""
        self.unplace([tensor.data for tensor in tensors if isinstance(tensor.data, Handle)])

    def _on_own_segment(self, arena: int, index: int, segment: Segment) -> None:
        """Announce a new segment before any handle can name it."""
        self._boot.send(MapSegment(arena, index, segment.nbytes), [segment.fd])
        self._views.add_segment(arena, index, segment)

    def _used_bytes(self) -> int:
        with self._arena_lock:
            return self._arena.stats().used_bytes

    def settle(self) -> None:
        """Return the blocks whose last view has died, take back our own. Any thread.

        Not between `place` and the sending of what was placed, unless a subclass sees to it: a
        release must not overtake the message that hands the block on.
        """
        released = self._views.take_released()
        if released or self._releasing or self._kept:
            with self._release_lock:
                self._releasing.extend(self._releasable(released))
                while self._releasing and self._work.try_release(
                    self._releasing[0].arena, self._releasing[0].block
                ):
                    self._releasing.popleft()
                self._work.flush_releases()
        with self._arena_lock:
            self._take_back()

    def _releasable(self, released: list[Handle]) -> list[Handle]:
        """Return those whose release may be sent now."""
        return released

    def _take_back(self) -> None:
        """Free the own blocks that came back; the arena's lock is held."""
        for _, block in self._up.take_releases():
            self._arena.drop_number(block)

    def stats(self) -> ChannelStats:
        """Return the counters of this end."""
        return ChannelStats(self._sent, self._received, 0, len(self._releasing))


class PeerEnd(PeerChannel[ToStub]):
    """One stub's channel, seen from the stub: the model server's messages."""

    def __init__(self, boot: BootSocket) -> None:
        super().__init__(boot, decode_to_stub)


_BYTE = np.dtype(np.uint8)


def _attach_parts(fds: list[int]) -> Parts:
    """Map what Hello brought. Raises ProtocolError where the count or a layout is wrong."""
    fixed = len(HELLO_FDS)
    per_bell, odd = divmod(len(fds) - fixed, len(BELLS))
    if odd or per_bell not in (1, 2):
        raise ProtocolError(f"Hello brought {len(fds)} descriptors")
    work, control, up = (Lane.attach(Segment.attach(fd)) for fd in fds[: len(LANES)])
    page = HealthPage.attach(Segment.attach(fds[len(LANES)]))
    for part in (work, control, up, page):
        part.segment.close_fd()
    bells = {
        name: Doorbell.attach(fds[fixed + i * per_bell : fixed + (i + 1) * per_bell])
        for i, name in enumerate(BELLS)
    }
    return Parts(work, control, up, page, bells)
