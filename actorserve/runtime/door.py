# SPDX-License-Identifier: Apache-2.0
"""The door of the system's own process: from a reference straight to the mailbox."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from actorserve.errors import ActorStopped, InvalidArgument
from actorserve.runtime.answer import Answer
from actorserve.runtime.call import ASK, STREAM, TELL, LocalCall
from actorserve.runtime.core import Core
from actorserve.runtime.engine import actor_at_work
from actorserve.runtime.errand import Errand
from actorserve.runtime.mailbox import Mailbox
from actorserve.runtime.message import Message
from actorserve.runtime.ref import ActorRef
from actorserve.runtime.stream import Stream
from actorserve.runtime.waiting import Waiting

R = TypeVar("R")


class Gone:
    """What a reference leads to when nothing is known of its actor any more."""

    def __init__(self, name: str) -> None:
        self.is_remote = False
        self.mailbox = Mailbox(name, 1, lambda: None)
        who = f"actor {name!r}" if name else "the actor"
        self.mailbox.refuse(ActorStopped(f"{who} is not there any more"))

    def stop(self, answer: Answer[None], *, is_drained: bool, timeout_s: float | None) -> None:
        """Be stopped."""
        answer.settle(None)


def own_end(name: str) -> InvalidArgument:
    """Return the error for an actor that would wait for an end which waits for its own."""
    return InvalidArgument(
        f"{name!r} is stopping, but cannot end while the message in hand waits for that: "
        "do not wait for it here"
    )


class SystemDoor:
    """See ref.Door. Any thread and any loop of the system's process may use it."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def tell(self, ref: ActorRef, message: Message[Any], deadline_s: float | None) -> Answer[None]:
        """See Door."""
        call = LocalCall(self, ref.name, TELL, message, deadline_s)
        answer: Answer[None] = call.expect_answer()
        self._put(ref, call, False)
        return answer

    def tell_nowait(self, ref: ActorRef, message: Message[Any]) -> None:
        """See Door."""
        call = LocalCall(self, ref.name, TELL, message)
        answer: Answer[None] = call.expect_answer()
        self._put(ref, call, True)
        answer.outcome()

    def ask(
        self, ref: ActorRef, message: Message[R], deadline_s: float | None, *, is_nowait: bool
    ) -> Answer[R]:
        """See Door."""
        call = LocalCall(self, ref.name, ASK, message, deadline_s)
        answer: Answer[R] = call.expect_answer()
        self._put(ref, call, is_nowait)
        return answer

    def stream(self, ref: ActorRef, message: Message[R], item_timeout_s: float | None) -> Stream[R]:
        """See Door."""
        call = LocalCall(self, ref.name, STREAM, message)
        stream: Stream[R] = call.expect_stream(item_timeout_s)
        self._put(ref, call, False)
        return stream

    def _put(self, ref: ActorRef, call: LocalCall, is_nowait: bool) -> None:
        target = ref.target
        if target.is_remote:
            call.leaves()  # here, where an error still meets its author
        target.mailbox.put(call, is_nowait=is_nowait)

    def stop(self, ref: ActorRef, *, is_drained: bool, timeout_s: float | None) -> Answer[None]:
        """See Door."""
        answer: Answer[None] = Answer(Errand(self, f"the end of {ref.name!r}"))
        at_work = actor_at_work()
        if at_work and self._core.waits_for(at_work, ref.id):
            answer.fail(own_end(ref.name))

        def stop() -> None:
            ref.target.stop(answer, is_drained=is_drained, timeout_s=timeout_s)

        # Where its loop is closed, nobody lives there.
        self._core.post(stop, if_lost=lambda: answer.settle(None))
        return answer

    def ref(self, number: int, name: str) -> ActorRef:
        """See Door."""
        cell = self._core.cells.get(number)
        return cell.ref if cell is not None else ActorRef(self, number, name, Gone(name))

    def later(self, function: Callable[[], None]) -> None:
        """See Door."""
        self._core.post(function)

    def block(self, waiting: Waiting, timeout_s: float | None) -> bool:
        """See Blocker: any thread may wait, but for the one that everything here goes through."""
        if self._core.is_here():
            raise InvalidArgument(
                "this is the thread of the actor system's event loop: `await` the answer, "
                "its result() would wait for ever"
            )
        return waiting.wait_in_thread(timeout_s)
