# SPDX-License-Identifier: Apache-2.0
"""A stub's end of its channel: any thread may read, wait for answers, and hand tensors on.

    work lane ─► take_in ─┬─► take_work   what somebody in this process waits for
                          └─► receive     what is the main thread's to do
    control lane ─► the control thread ─► take_control

The main thread reads the work lane: in `receive`, while it waits for an answer (`wait`), or from
its event loop (`attach`). The control thread does so for others when that lane holds what they
need. The control thread settles too, so that what a model's own threads let go of goes back soon:
therefore a block that is handed on is not released before the message with its handle is on its
way. From `place` until `forwarded`, its release is kept back. Where the model works on a device,
`devices` is its memory there (stub_devices.py).
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from actorserve.clock import monotonic_s
from actorserve.errors import DeadlineExceeded, ProtocolError
from actorserve.process.boot import BootSocket
from actorserve.process.packet import close_all
from actorserve.runtime.peer_end import SEGMENT_TIMEOUT_S, TRIM_AFTER_S, PeerEnd
from actorserve.runtime.stub_devices import StubDevices
from actorserve.shm.patience import Patience
from actorserve.wire.boot import FromBootSocket
from actorserve.wire.codec import encode
from actorserve.wire.device import SlabOffer
from actorserve.wire.messages import Handle, Message, ToStub, WireTensor

Key = tuple[int, int]


class StubEnd(PeerEnd):
    """See the module's head. The three `take_…` and `reap` are set before `serve_control` runs."""

    def __init__(self, boot: BootSocket) -> None:
        """As PeerChannel."""
        super().__init__(boot)
        self.take_work: Callable[[ToStub], bool] = lambda message: False
        self.take_control: Callable[[ToStub], None] = lambda message: None
        self.reap: Callable[[], None] = lambda: None
        self.devices: StubDevices | None = None
        self._has_posted = False
        self._read_lock = threading.Lock()
        self._work_patience = Patience()
        self._answer_patience = Patience()
        self._forwarding: Counter[Key] = Counter()
        self._idle_since_s = monotonic_s()
        self._received_then = 0

    # --- reading ---------------------------------------------------------------------------------

    def receive(self) -> ToStub:
        """Return the main thread's next message, waiting for it. Raises PeerGone."""
        while not self._pending:
            self.take_in()
            if not self._pending:
                self.wait(lambda: bool(self._pending), self._work_patience)
        return self._pending.popleft()

    def receive_nowait(self) -> ToStub | None:
        """Return the main thread's next message if one is there."""
        if not self._pending:
            self.take_in()
        return self._pending.popleft() if self._pending else None

    def take_in(self) -> None:
        """Read what has come on the work lane; any thread."""
        with self._read_lock:
            self._take_in()

    def try_take_in(self) -> None:
        """Do so unless somebody does already; any thread.

        Where something has come, the main thread is made to look: it may just have begun to wait
        for what it does not find in the lane any more.
        """
        if not self._read_lock.acquire(blocking=False):
            return
        try:
            count = self._take_in()
        finally:
            self._read_lock.release()
        if count and (self._pending or threading.current_thread() is not threading.main_thread()):
            self.wake_main()

    def _take_in(self) -> int:
        frames = self._work.drain()
        self._received += len(frames)
        for _, data in frames:
            message = self._decode(data)
            if not self.take_work(message):
                self._pending.append(message)
        return len(frames)

    def wait(self, is_there: Callable[[], bool], patience: Patience | None = None) -> None:
        """Wait until something has come on the work lane, unless what is awaited is there.

        `patience` is that of other waits like this; None for that of waits for answers. Main
        thread only. Raises PeerGone. May return early.
        """
        patience = patience or self._answer_patience
        if not (patience.begin() and patience.look(self._work.has_news)):
            if self._work.park() and not is_there():
                self._sleep(self._main_bell, None)
            self._work.unpark()
        patience.end()
        if self._releasing:
            self.settle()  # the supervisor rang because its ring of releases has room

    def attach(self, loop: asyncio.AbstractEventLoop, on_news: Callable[[], None]) -> None:
        """Have `on_news` called in the main thread's loop when there may be something to receive.

        It has to end with `park`, by way of a Lookout. The supervisor's end is the control
        thread's to notice.
        """

        def on_bell() -> None:
            self._main_bell.clear()
            self._work.unpark()
            on_news()

        loop.add_reader(self._main_bell.fileno(), on_bell)

    def has_news(self) -> bool:
        """Whether there may be something to receive. Main thread's loop only, as the next two."""
        return bool(self._pending) or self._work.has_news()

    def park(self) -> bool:
        """Ask to be woken for the next message; False if one is there."""
        return not self._pending and self._work.park()

    def unpark(self) -> None:
        """Take `park` back."""
        self._work.unpark()

    def detach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Stop listening in a loop."""
        loop.remove_reader(self._main_bell.fileno())

    def wake_main(self) -> None:
        """Wake the main thread: another one has read something for it."""
        self._main_bell.ring()

    def wake_control(self) -> None:
        """Wake the control thread. Takes no lock, so that a finalizer may call it."""
        if not self._severed:
            self._control_bell.ring()

    def on_control_message(self, message: ToStub) -> None:
        """Let the stub take it."""
        self.take_control(message)

    def on_beat(self) -> None:
        """Do what finalizers have left to be done, and give back what nobody looks at."""
        self.reap()
        self.settle()
        if self.devices is not None:
            self.try_take_in()  # releases are sent without a ring, both ways
            if self._has_posted:
                self._has_posted = False
                with self._send_lock:
                    self._up.wake()
        now_s = monotonic_s()
        if self._received != self._received_then:
            self._idle_since_s, self._received_then = now_s, self._received
        elif now_s - self._idle_since_s > TRIM_AFTER_S:
            self._idle_since_s = now_s
            self._trim()
            if self.devices is not None:
                self.devices.trim()

    def post(self, message: Message) -> None:
        """Send what need not be read before this stub's next message, or its next beat."""
        data = encode(message)
        if not self._severed:
            with self._send_lock:
                # Not within a sending, where a finalizer may have come to be called.
                if not self._is_sending and self._up.try_post(data):
                    self._sent += 1
                    self._has_posted = True
                    return
        self.send_encoded(data)

    # --- tensor memory ---------------------------------------------------------------------------

    def place(self, body: npt.NDArray[np.generic]) -> Handle:
        """Return a handle of the body; has to be followed by `forwarded` or `unplace`."""
        handle = super().place(body)
        if handle.arena != self.arena_id:
            with self._release_lock:
                self._forwarding[handle.arena, handle.block] += 1
        return handle

    def place_filled(self, nbytes: int, fill: Callable[[memoryview], None]) -> Handle:
        """Return a handle of a new block that `fill` has written; see `place`."""
        with self._arena_lock:
            self._take_back()
            block = self._arena.allocate(nbytes)
            target = self._arena.buffer(block, nbytes)
            handle = self._arena.handle(block, nbytes)
        try:
            fill(target)
        except BaseException:
            self.unplace([handle])
            raise
        return handle

    def forwarded(self, tensors: Iterable[WireTensor]) -> None:
        """Hear that a message with these tensors has been sent."""
        if self.devices is not None:
            tensors = list(tensors)
            self.devices.sent(tensors)
        handles = [tensor.data for tensor in tensors if isinstance(tensor.data, Handle)]
        if handles:
            self._let_go(handles)

    def withdraw(self, tensors: Iterable[WireTensor]) -> None:
        """Give up what was placed for a message which is not sent after all."""
        tensors = list(tensors)
        super().withdraw(tensors)
        if self.devices is not None:
            self.devices.unsent(tensors)

    def settle(self) -> None:
        """Return what nobody looks at any more; see PeerChannel."""
        super().settle()
        if self.devices is not None:
            self.devices.settle()

    def unplace(self, handles: Iterable[Handle]) -> None:
        """Take `place` back for handles that are not sent after all."""
        handles = list(handles)
        super().unplace(handles)
        self._let_go(handles)

    def _let_go(self, handles: Iterable[Handle]) -> None:
        own = self.arena_id
        with self._release_lock:
            for handle in handles:
                if handle.arena != own:
                    key = (handle.arena, handle.block)
                    self._forwarding[key] -= 1
                    if self._forwarding[key] <= 0:
                        del self._forwarding[key]

    def _releasable(self, released: list[Handle]) -> list[Handle]:
        if not (self._forwarding or self._kept):
            return released
        candidates = self._kept + released
        forwarding = self._forwarding
        self._kept = [each for each in candidates if (each.arena, each.block) in forwarding]
        return [each for each in candidates if (each.arena, each.block) not in forwarding]

    # --- device memory ---------------------------------------------------------------------------

    def sever(self) -> None:
        """Cut a forked child off: a device's memory does not survive a fork."""
        super().sever()
        self.devices = None

    def offer_slab(self, offer: SlabOffer, fd: int) -> None:
        """Announce a slab of our own before any reference can name it; takes the descriptor."""
        try:
            self._boot.send(offer, [fd], SEGMENT_TIMEOUT_S)
        finally:
            close_all([fd])

    def receive_offers(self, is_there: Callable[[], bool]) -> None:
        """Read the boot socket until a slab that was offered there is known. ProtocolError."""
        try:
            self._read_boot(is_there)
        except DeadlineExceeded:
            raise ProtocolError("a reference names a slab that nobody has offered") from None

    def read_offers(self) -> None:
        """Take whatever lies on the boot socket by now."""
        with self._boot_lock:
            while (received := self._boot.recv_nowait()) is not None:
                self._take_announced(*received)

    def _take_announced(self, message: FromBootSocket, fds: list[int]) -> None:
        if not isinstance(message, SlabOffer):
            super()._take_announced(message, fds)
        elif self.devices is None or len(fds) != 1:
            close_all(fds)
            raise ProtocolError("a slab was offered to a process without device memory")
        else:
            self.devices.accept(message, fds[0])
