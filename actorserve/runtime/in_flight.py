# SPDX-License-Identifier: Apache-2.0
"""The messages that one process has: sent ahead, in hand, streaming; and those it dies with.

A message's number counts up in the order of sending. What the process has answered, or reported,
says how far it has come; the health page says it exactly, once it is dead.
"""

from __future__ import annotations

from collections import deque

from actorserve.errors import ActorserveError
from actorserve.runtime.call import TELL, Call, Runner
from actorserve.runtime.outbox import Outbox
from actorserve.runtime.stream import WINDOW as STREAM_WINDOW
from actorserve.wire.actors import Deliver, Grant, Parcel, Revoke


class InFlight:
    """What is at one process. Belongs to the system's loop; `handled` counts what is done with."""

    def __init__(self, outbox: Outbox, runner: Runner) -> None:
        self.handled = 0
        self._outbox = outbox
        self._runner = runner
        self._number = 0
        self._sent: deque[tuple[int, Call]] = deque()  # not known to be done with
        self._open: dict[int, Call] = {}  # asks and streams without an end
        self._numbers: dict[Call, int] = {}  # of the same

    def __len__(self) -> int:
        """Return how many messages are not known to be done with, but for suspended streams."""
        return len(self._sent)

    def is_empty(self) -> bool:
        """Whether the process has nothing to do."""
        return not self._sent and not self._open

    # --- sending ---------------------------------------------------------------------------------

    def send(self, call: Call) -> None:
        """Send a message; where that cannot be, it fails."""
        try:
            packed = call.packed()
        except ActorserveError as error:
            call.fail(error)
            return
        self._number = number = self._number + 1
        kind = call.kind
        call.runner = self._runner
        self._sent.append((number, call))
        deadline_ns = 0
        if kind != TELL:
            self._open[number] = call
            self._numbers[call] = number
            if call.deadline_s is not None:
                deadline_ns = int(call.deadline_s * 1e9)

        def build(parcel: Parcel) -> Deliver:
            return Deliver(number, kind, parcel, deadline_ns, STREAM_WINDOW)

        def failed(error: ActorserveError) -> None:
            if self._take_back(number, call):
                call.fail(error)

        self._outbox.send(packed, build, failed)
        if kind != TELL and call.is_over:
            # Given up while it had left the mailbox and was not ours yet: neither was told.
            self.revoke(call)

    def _take_back(self, number: int, call: Call) -> bool:
        """Forget a message that could not be sent; False if the process was lost before."""
        is_ours = self.close(number) is not None
        try:
            self._sent.remove((number, call))
        except ValueError:
            return is_ours
        return True

    def grant(self, call: Call, count: int) -> None:
        """Let a stream go on."""
        number = self._numbers.get(call)
        if number is not None:
            self._outbox.send_plain(Grant(number, count))

    def revoke(self, call: Call) -> None:
        """Tell the process that nobody waits for a call; it says no more of it."""
        number = self._numbers.get(call)
        if number is not None:
            self.close(number)
            self._outbox.send_plain(Revoke(number))

    # --- what comes back -------------------------------------------------------------------------

    def came_to(self, number: int) -> None:
        """Note that the process has come to this message: those before it are done with."""
        sent = self._sent
        while sent and sent[0][0] <= number:
            _, call = sent.popleft()
            if call.kind == TELL:
                self.handled += 1

    def get(self, number: int) -> Call | None:
        """Return a stream that goes on."""
        return self._open.get(number)

    def close(self, number: int) -> Call | None:
        """Return a call that ends, and forget it; None where nobody waits for it any more."""
        call = self._open.pop(number, None)
        if call is not None:
            del self._numbers[call]
            self.handled += 1
        return call

    def lose(self, begun: int) -> tuple[list[Call], list[Call]]:
        """Return the calls that a dead process had begun, and those that it had not, in order.

        `begun` is the number of the last that it had. Tells that it had begun are lost in silence.
        """
        untouched = [call for number, call in self._sent if number > begun]
        lost = [call for number, call in self._open.items() if number <= begun]
        self._sent.clear()
        self._open.clear()
        self._numbers.clear()
        return lost, untouched
