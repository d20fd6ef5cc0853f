# SPDX-License-Identifier: Apache-2.0
"""The supervisor's end of a channel to one child. Belongs to the supervisor's loop; never blocks.

Reading: the stub rings the host bell once per nap; one callback then takes everything that was
published, and looks for more where that pays (lookout.py). The release ring's head is read before
the messages and only those releases are applied after them, so that a release never overtakes the
message that forwards the block.
Writing: into the ring, else into that lane's bounded backlog, which is flushed when the stub has
made room. Each lane has its own: the control thread has to be heard when the main one is busy.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from actorserve import __version__
from actorserve.errors import (
    ActorserveError,
    BootError,
    InternalError,
    ProtocolError,
    ResourceExhausted,
)
from actorserve.forking import sever_after_fork
from actorserve.process.boot import BootSocket, PeerGone
from actorserve.process.lock import HealthLock
from actorserve.process.packet import close_all
from actorserve.runtime.channel import BELLS, ChannelStats, Parts
from actorserve.runtime.exchange import Exchange, Key
from actorserve.runtime.lookout import Lookout
from actorserve.shm.health import HealthPage
from actorserve.shm.lane import Consumer, Producer
from actorserve.shm.segment import Segment
from actorserve.wire.codec import encode
from actorserve.wire.messages import (
    PROTOCOL,
    Attached,
    Handle,
    Hello,
    MapSegment,
    Message,
    OnBootSocket,
    WireTensor,
)

BACKLOG_MESSAGES = 4096
_log = logging.getLogger("actorserve")

M = TypeVar("M")


class Listener(Protocol[M]):
    """Who is told of what the stub says. All calls come on the loop."""

    def on_attached(self, message: Attached) -> None:
        """The child mapped everything and speaks our protocol."""

    def on_messages(self, messages: list[M]) -> None:
        """Messages in the order in which the stub sent them."""

    def on_refused(self, error: BootError) -> None:
        """The stub says that it cannot start, whatever is tried; it ends by itself."""

    def on_hung_up(self) -> None:
        """The stub's end of the boot socket is closed: it is dead, or has to be."""

    def on_broken(self, error: ActorserveError) -> None:
        """The stub broke the wire; the channel is shut and the stub has to go."""


class HostChannel(Generic[M]):
    """One child's channel, seen from the supervisor; `decode` reads what the child sends."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        exchange: Exchange,
        arena: int,
        listener: Listener[M],
        *,
        decode: Callable[[bytes], M],
        first_segment_bytes: int = 4 << 20,
        growth_bytes: int = 0,
    ) -> None:
        self.arena = arena
        self._sizes = (first_segment_bytes, growth_bytes)
        self._loop = loop
        self._exchange = exchange
        self._listener = listener
        self._decode = decode
        self._parts = Parts.create()
        try:
            self.lock = HealthLock.create()
        except BaseException:
            self._parts.close()
            raise
        bells = self._parts.bells
        self._work = Producer(self._parts.work, bells["main"])
        self._control = Producer(self._parts.control, bells["control"])
        self._up = Consumer(self._parts.up, bells["room"])
        self._bell = bells["host"]
        self._lookout = Lookout(loop, self._up, self._on_news)
        self._boot: BootSocket | None = None
        self._known: set[Key] = set()
        self._backlogs: dict[Producer, deque[bytes]] = {self._work: deque(), self._control: deque()}
        self._returning: deque[Key] = deque()
        self._pumping = False
        self._unanswered = 0
        self._is_wake_due = False
        self._closed = False
        self._sent = 0
        self._received = 0
        sever_after_fork(self)
        self.max_frame_bytes = self._work.max_frame_bytes

    @property
    def page(self) -> HealthPage:
        """The health page of this incarnation."""
        return self._parts.page

    @property
    def is_open(self) -> bool:
        """Whether messages can still go out."""
        return self._boot is not None and not self._closed

    # --- opening and closing ---------------------------------------------------------------------

    def open(self, boot: BootSocket, instance: str) -> None:
        """Send Hello with every descriptor over the boot socket and start to listen."""
        self._boot = boot
        parts = self._parts
        segments = [each.segment for each in (parts.work, parts.control, parts.up, parts.page)]
        fds = [*[segment.fd for segment in segments], self.lock.fd]
        for name in BELLS:
            fds.extend(parts.bells[name].fds)
        hello = Hello(PROTOCOL, instance, self.arena, *self._sizes, __version__)
        boot.send(hello, fds)
        for segment in segments:
            segment.close_fd()
        self._exchange.add_peer(self)
        self._loop.add_reader(boot.fileno(), self._on_boot_readable)
        self._loop.add_reader(self._bell.fileno(), self._on_bell)
        self._lookout.rest(is_due=False)

    def close(self) -> None:
        """Read what is left, give the stub's loans back, free everything; idempotent.

        Has to be called before the boot socket is closed: within the callback of the child's end.
        """
        if self._closed:
            return
        self.read_rest()
        self._closed = True
        self._lookout.close()
        if self._boot is not None:
            self._loop.remove_reader(self._boot.fileno())
            self._loop.remove_reader(self._bell.fileno())
            self._boot.close()
            self._boot = None
        self._exchange.remove_peer(self)
        for backlog in self._backlogs.values():
            backlog.clear()
        self._parts.close()
        self.lock.close()

    def sever(self) -> None:
        """Be closed in a child that the host forked: loop, rings and stub are its parent's."""
        self._closed = True

    # --- writing ---------------------------------------------------------------------------------

    def send(self, message: Message, tensors: Sequence[WireTensor] = ()) -> None:
        """Send on the work lane; `tensors` are those of the message that may hold handles.

        Raises ResourceExhausted when the backlog is full, ValueError for a frame that no ring
        could take (see max_frame_bytes).
        """
        self.send_encoded(encode(message), tensors)

    def send_encoded(
        self, data: bytes, tensors: Sequence[WireTensor] = (), *, wakes: bool = True
    ) -> None:
        """Send an encoded message on the work lane; see `send`.

        Where it `wakes` nobody, the stub finds it when it has done what it has; see `wake`.
        """
        handles = [tensor.data for tensor in tensors if isinstance(tensor.data, Handle)]
        if handles:
            self.send_with_handles(data, handles, wakes=wakes)
        else:
            self._push(self._work, data, wakes=wakes)

    def wake(self) -> None:
        """Ring for what was sent on the work lane, if the stub sleeps."""
        if not self._closed:
            self._work.wake()

    def send_with_handles(
        self,
        data: bytes,
        handles: Sequence[Handle],
        *,
        on_control: bool = False,
        is_bounded: bool = True,
        wakes: bool = True,
    ) -> None:
        """Send an encoded message that names these handles; see `send`.

        `is_bounded` is for messages that nobody could refuse any more: something else bounds
        their number.
        """
        if handles:
            self._exchange.announce(self, handles)
        producer = self._control if on_control else self._work
        self._push(producer, data, is_bounded, wakes=wakes)
        if handles:
            self._exchange.lend(self, handles)

    def send_control(self, message: Message) -> None:
        """Send on the control lane."""
        self._push(self._control, encode(message))

    def _push(
        self, producer: Producer, data: bytes, is_bounded: bool = True, *, wakes: bool = True
    ) -> None:
        if self._closed:
            return
        self._sent += 1
        backlog = self._backlogs[producer]
        if not backlog:
            if producer is not self._work:
                if producer.try_send(data):
                    return
            elif producer.try_post(data):
                if wakes:
                    self._wake_stub()
                return
        if is_bounded and len(backlog) >= BACKLOG_MESSAGES:
            raise ResourceExhausted(
                f"{BACKLOG_MESSAGES} messages wait for a stub that does not read; try again later"
            )
        backlog.append(data)
        self._flush_backlog(producer, backlog)

    def _wake_stub(self) -> None:
        """Ring for work: at once if the stub has none, else once for all of this turn's.

        A stub that still has something to do need not be woken for the next; by the end of the
        loop's turn there are often several.
        """
        self._unanswered += 1
        if self._unanswered == 1:
            self._work.wake()
            if not self._pumping:
                self._lookout.expect()
        elif not self._is_wake_due:
            self._is_wake_due = True
            self._loop.call_soon(self._wake_late)

    def _wake_late(self) -> None:
        self._is_wake_due = False
        if not self._closed:
            self._work.wake()

    def _flush_backlog(self, producer: Producer, backlog: deque[bytes]) -> None:
        """Write what waits; where the ring stays full, ask to be rung when there is room."""
        while backlog:
            if producer.try_send(backlog[0]):
                backlog.popleft()
            elif not producer.want_room():
                return
        producer.stop_wanting()

    # --- exchange.Peer ---------------------------------------------------------------------------

    def announce(self, arena: int, index: int, segment: Segment) -> None:
        """Send the descriptor of a segment that the stub does not know yet."""
        if self._boot is None:
            return
        try:
            self._boot.send(MapSegment(arena, index, segment.nbytes), [segment.fd])
        except PeerGone:
            return  # Its exit is on the way; what it never began goes to the next stub.
        self._known.add((arena, index))

    def knows(self, arena: int, index: int) -> bool:
        """Whether the stub can map that segment."""
        return (arena, index) in self._known

    def return_block(self, arena: int, block: int) -> None:
        """Put a block of the stub's own arena on its release ring, or keep it for later."""
        if self._closed:
            return
        if self._returning or not self._up.try_release(arena, block):
            self._returning.append((arena, block))
        self._up.flush_releases()

    def receive_segments(self) -> None:
        """Read the boot socket now."""
        self._on_boot_readable()

    def read_rest(self) -> None:
        """Take all that a dead stub has left, on the boot socket and in the ring."""
        self._on_boot_readable()
        self.pump()

    # --- reading ---------------------------------------------------------------------------------

    def pump(self) -> None:
        """Take all messages and releases that are there. Never re-enters itself."""
        if self._pumping or self._closed:
            return
        self._pumping = True
        try:
            mark = self._work.release_mark()
            frames = self._up.drain()
            if frames:
                self._received += len(frames)
                self._unanswered = max(0, self._unanswered - len(frames))
                decode = self._decode
                self._listener.on_messages([decode(data) for _, data in frames])
            if not self._closed:
                self._exchange.returned(self, self._work.take_releases(mark))
                self._return_waiting()
            self._exchange.settle()
        except ProtocolError as error:
            self._listener.on_broken(error)
        except Exception as error:
            # A fault of ours in one message must not leave the channel unread for ever.
            _log.exception("reading from a stub failed")
            self._listener.on_broken(InternalError(f"its message could not be processed: {error}"))
        finally:
            self._pumping = False

    def _return_waiting(self) -> None:
        while self._returning and self._up.try_release(*self._returning[0]):
            self._returning.popleft()
        self._up.flush_releases()

    def _on_bell(self) -> None:
        self._bell.clear()
        self._up.unpark()
        self._on_news()

    def _on_news(self) -> None:
        if self._closed:
            return
        self._lookout.patience.end()
        self.pump()
        if not self._closed:
            for producer, backlog in self._backlogs.items():
                if backlog:
                    self._flush_backlog(producer, backlog)
            self._lookout.rest(is_due=self._unanswered > 0)

    def _on_boot_readable(self) -> None:
        boot = self._boot
        try:
            while boot is not None and (received := boot.recv_nowait()) is not None:
                self._on_boot_message(*received)
        except BootError as error:
            self._listener.on_refused(error)
        except ProtocolError as error:
            self._listener.on_broken(error)
        except (OSError, ActorserveError):
            if boot is not None:
                with contextlib.suppress(OSError, ValueError, ActorserveError):
                    self._loop.remove_reader(boot.fileno())
            self._listener.on_hung_up()

    def _on_boot_message(self, message: OnBootSocket, fds: list[int]) -> None:
        if isinstance(message, MapSegment) and message.arena == self.arena and len(fds) == 1:
            segment = Segment.attach(fds[0], message.nbytes)
            self._known.add((message.arena, message.segment))
            self._exchange.add_segment(message.arena, message.segment, segment)
            return
        close_all(fds)
        if isinstance(message, Attached):
            if message.protocol != PROTOCOL:
                raise BootError(
                    f"the stub speaks protocol {message.protocol}, the supervisor {PROTOCOL}: "
                    "is another version of actorserve installed in its environment?"
                )
            self._listener.on_attached(message)
        elif isinstance(message, MapSegment):
            raise ProtocolError(f"a stub announced a segment of arena {message.arena}")
        else:
            raise ProtocolError(f"a stub sent {type(message).__name__}")

    def stats(self) -> ChannelStats:
        """Return the counters of this end."""
        waiting = sum(len(backlog) for backlog in self._backlogs.values())
        return ChannelStats(self._sent, self._received, waiting, len(self._returning))
