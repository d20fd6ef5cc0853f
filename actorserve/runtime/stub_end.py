# SPDX-License-Identifier: Apache-2.0
"""A stub's end of its channel: any thread may read, wait for answers, and hand tensors on.

    work lane ─► take_in ─┬─► take_work   what somebody in this process waits for
                          └─► receive     what is the main thread's to do
    control lane ─► the control thread ─► take_control

The main thread reads the work lane: in `receive`, while it waits for an answer (`wait`), or from
its event loop (`attach`). The control thread does so for others when that lane holds what they
need. The control thread settles too, so that what a model's own threads let go of goes back soon:
therefore a block that is handed on is not released before the message with its handle is on its
way. From `place` until `forwarded`, its release is kept back.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from actorserve.clock import monotonic_s
from actorserve.process.boot import BootSocket
from actorserve.runtime.peer_end import TRIM_AFTER_S, PeerEnd
from actorserve.shm.patience import Patience
from actorserve.wire.messages import Handle, ToStub, WireTensor

Key = tuple[int, int]


class StubEnd(PeerEnd):
    """See the module's head. The three `take_…` and `reap` are set before `serve_control` runs."""

    def __init__(self, boot: BootSocket) -> None:
        """As PeerChannel."""
        super().__init__(boot)
        self.take_work: Callable[[ToStub], bool] = lambda message: False
        self.take_control: Callable[[ToStub], None] = lambda message: None
        self.reap: Callable[[], None] = lambda: None
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
            frames = self._work.drain()
            self._received += len(frames)
            for _, data in frames:
                message = self._decode(data)
                if not self.take_work(message):
                    self._pending.append(message)

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
        now_s = monotonic_s()
        if self._received != self._received_then:
            self._idle_since_s, self._received_then = now_s, self._received
        elif now_s - self._idle_since_s > TRIM_AFTER_S:
            self._idle_since_s = now_s
            self._trim()

    # --- tensor memory ---------------------------------------------------------------------------

    def place(self, body: npt.NDArray[np.generic]) -> Handle:
        """Return a handle of the body; has to be followed by `forwarded` or `unplace`."""
        handle = super().place(body)
        if handle.arena != self.arena_id:
            with self._release_lock:
                self._forwarding[handle.arena, handle.block] += 1
        return handle

    def forwarded(self, tensors: Iterable[WireTensor]) -> None:
        """Hear that a message with these tensors has been sent."""
        handles = [tensor.data for tensor in tensors if isinstance(tensor.data, Handle)]
        if handles:
            self._let_go(handles)

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
