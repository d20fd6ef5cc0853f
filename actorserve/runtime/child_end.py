# SPDX-License-Identifier: Apache-2.0
"""The channel's end in the process of an actor.

The main thread reads the work lane, sleeping on its bell or having an event loop listen to it;
the control thread beats, and reads the outcomes of calls that other threads have made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from actorserve.process.boot import BootSocket
from actorserve.runtime.payload import Array, Packed, parcel_of
from actorserve.runtime.peer_end import PeerChannel
from actorserve.wire.actors import Parcel, ToActor, decode_to_actor
from actorserve.wire.messages import Handle

HOLDING_SLEEP_S = 1.0
IDLE_SLEEP_S = 10.0


class ChildEnd(PeerChannel[ToActor]):
    """See PeerChannel."""

    def __init__(self, boot: BootSocket) -> None:
        super().__init__(boot, decode_to_actor)
        self.on_control: Callable[[ToActor], None] = lambda message: None
        self._is_trimmed = False

    # --- reading, in the main thread -------------------------------------------------------------

    def read(self) -> list[ToActor]:
        """Return all messages that have come on the work lane."""
        frames = self._work.drain()
        if not frames:
            return []
        self._received += len(frames)
        self._is_trimmed = False
        decode = self._decode
        return [decode(data) for _, data in frames]

    def doze(self, timeout_s: float | None) -> None:
        """Sleep until something comes or somebody rings, but no longer than `timeout_s` seconds.

        May return early. Views that die meanwhile are given back, idle memory as well. Raises
        PeerGone when the system is gone.
        """
        longest_s = self._longest_s()
        if timeout_s is not None and (longest_s is None or timeout_s < longest_s):
            longest_s = timeout_s
        if self._work.park():
            if not self._sleep(self._main_bell, longest_s) and timeout_s is None:
                self.tidy()
            self._work.unpark()

    def _longest_s(self) -> float | None:
        """Return how long nothing here needs attention; None for ever."""
        if self._views.stats().leases:
            return HOLDING_SLEEP_S
        return None if self._is_trimmed else IDLE_SLEEP_S

    def tidy(self) -> None:
        """Give back what nobody uses any more: blocks of others, and pages of our own."""
        self.settle()
        if not self._views.stats().leases and not self._is_trimmed:
            self._is_trimmed = True
            self._trim()

    def ring(self) -> None:
        """End the main thread's sleep. From any thread."""
        self._main_bell.ring()

    # --- reading, in an event loop of the main thread --------------------------------------------

    def listen(self, loop: asyncio.AbstractEventLoop, on_news: Callable[[], None]) -> None:
        """Have `on_news` called in the loop when something comes.

        The control thread watches for the system's end.
        """

        def on_bell() -> None:
            self._main_bell.clear()
            self._work.unpark()
            on_news()
            park()

        def park() -> None:
            if not self._work.park():
                loop.call_soon(on_bell)

        loop.add_reader(self._main_bell.fileno(), on_bell)
        park()

    def stop_listening(self, loop: asyncio.AbstractEventLoop) -> None:
        """Undo `listen`."""
        loop.remove_reader(self._main_bell.fileno())

    # --- values ----------------------------------------------------------------------------------

    def on_control_message(self, message: ToActor) -> None:
        """See PeerChannel."""
        self.on_control(message)

    def parcel(self, packed: Packed) -> Parcel:
        """Place what is large in shared memory. Raises ResourceExhausted."""
        return parcel_of(packed, self.place)

    def look(self, handle: Handle) -> Array:
        """Return the bytes of a handle, read-only and without a copy."""
        return self.view(handle, writable=False)
