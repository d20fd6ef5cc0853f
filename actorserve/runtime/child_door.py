# SPDX-License-Identifier: Apache-2.0
"""The door in the process of an actor: every call to another goes through the system's process.

What the main thread asks comes back on the work lane, which it reads itself while it waits; what
other threads ask comes back on the control lane, so that they never wait for the main thread.
At most BUDGET calls are under way at a time; more wait here.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from actorserve.clock import monotonic_s
from actorserve.errors import (
    ActorserveError,
    ActorStopped,
    InternalError,
    InvalidArgument,
    ProtocolError,
    TooLarge,
)
from actorserve.ids import Serial
from actorserve.runtime.answer import Answer
from actorserve.runtime.call import ASK, STREAM, TELL
from actorserve.runtime.child_end import ChildEnd
from actorserve.runtime.failure import error_of
from actorserve.runtime.message import Message
from actorserve.runtime.payload import Packed, pack_message, packed_of, unpack, unpack_reply
from actorserve.runtime.placement import encode_placement
from actorserve.runtime.ref import ActorRef
from actorserve.runtime.spec import ActorSpec
from actorserve.runtime.stream import Stream
from actorserve.runtime.waiting import Waiting
from actorserve.wire.actors import (
    Answered,
    Done,
    Failed,
    Grant,
    ItemSent,
    Parcel,
    PassOn,
    Revoke,
    SpawnActor,
    StopActor,
    ToActor,
)
from actorserve.wire.codec import encode
from actorserve.wire.messages import Message as WireMessage

R = TypeVar("R")

BUDGET = 3072
STREAM_COST = 64


class Errand:
    """One call under way: the owner of its Answer or Stream (see answer.Owner)."""

    __slots__ = ("_answer", "_stream", "_what", "cost", "door", "number", "read", "send")

    def __init__(
        self,
        door: ChildDoor,
        number: int,
        what: str,
        send: Callable[[], None],
        read: Callable[[Packed], Any],
        cost: int = 1,
    ) -> None:
        self.door = door
        self.number = number
        self.send = send
        self.read = read
        self.cost = cost
        self._what = what
        self._answer: Answer[Any] | None = None
        self._stream: weakref.ref[Stream[Any]] | None = None

    def expect_answer(self, deadline_s: float | None) -> Answer[Any]:
        """Return the Answer that it will end in."""
        self._answer = Answer(self, deadline_s)
        return self._answer

    def expect_stream(self, item_timeout_s: float | None) -> Stream[Any]:
        """Return the Stream that it will end in; it lives as long as its reader wants it."""
        stream: Stream[Any] = Stream(self, item_timeout_s)
        self._stream = weakref.ref(stream)
        return stream

    def describe(self) -> str:
        """See Owner."""
        return self._what

    def given_up(self) -> None:
        """See Owner."""
        self.door.revoke(self)

    def dropped(self) -> None:
        """See StreamOwner."""
        self.door.later(self.given_up)

    def granted(self, count: int) -> None:
        """See StreamOwner."""
        self.door.grant(self, count)

    def take(self, message: Answered | ItemSent | Done | Failed, packed: Packed | None) -> None:
        """Settle what waits for this, or push an item."""
        try:
            value = self.read(packed) if packed is not None else None
        except ProtocolError as error:
            self.fail(InternalError(f"{self._what} was answered with something else: {error}"))
            return
        stream = self._stream() if self._stream is not None else None
        if isinstance(message, Failed):
            self.fail(error_of(message.failure))
        elif self._answer is not None:
            self._answer.settle(value)
        elif stream is not None:
            if isinstance(message, ItemSent):
                stream.push(value)
            else:
                stream.finish()

    def fail(self, error: ActorserveError) -> None:
        """End it with an error."""
        stream = self._stream() if self._stream is not None else None
        if self._answer is not None:
            self._answer.fail(error)
        elif stream is not None:
            stream.fail(error)


class ChildDoor:
    """See ref.Door."""

    def __init__(self, end: ChildEnd) -> None:
        self.read: Callable[[], None] = lambda: None  # the inbox's
        self.has_loop = False
        self._end = end
        self._main = threading.get_ident()
        self._numbers = Serial()
        self._lock = threading.Lock()
        self._errands: dict[int, Errand] = {}
        self._waiting: deque[Errand] = deque()
        self._spent = 0
        self._later: deque[Callable[[], None]] = deque()

    # --- Door ------------------------------------------------------------------------------------

    def tell(self, ref: ActorRef, message: Message[Any], deadline_s: float | None) -> Answer[None]:
        """See Door."""
        errand = self._message_errand(ref, TELL, message, deadline_s, is_nowait=False)
        answer: Answer[None] = errand.expect_answer(deadline_s)
        self._begin(errand)
        return answer

    def tell_nowait(self, ref: ActorRef, message: Message[Any]) -> None:
        """See Door: the system's process has the mailbox, and answers at once."""
        errand = self._message_errand(ref, TELL, message, None, is_nowait=True)
        answer: Answer[None] = errand.expect_answer(None)
        self._begin(errand)
        while not answer.is_over():
            self._block(answer, None)
        answer.outcome()

    def ask(
        self, ref: ActorRef, message: Message[R], deadline_s: float | None, *, is_nowait: bool
    ) -> Answer[R]:
        """See Door."""
        errand = self._message_errand(ref, ASK, message, deadline_s, is_nowait=is_nowait)
        answer: Answer[R] = errand.expect_answer(deadline_s)
        self._begin(errand)
        return answer

    def stream(self, ref: ActorRef, message: Message[R], item_timeout_s: float | None) -> Stream[R]:
        """See Door."""
        errand = self._message_errand(ref, STREAM, message, None, is_nowait=False)
        stream: Stream[R] = errand.expect_stream(item_timeout_s)
        self._begin(errand)
        return stream

    def stop(self, ref: ActorRef, *, is_drained: bool, timeout_s: float | None) -> Answer[None]:
        """See Door."""
        number, on_control = self._numbers.next(), self._is_on_control()
        message = StopActor(number, on_control, ref.id, is_drained, timeout_s)
        errand = Errand(
            self, number, f"the end of {ref.name!r}", lambda: self._end.send(message), _nothing
        )
        answer: Answer[None] = errand.expect_answer(None)
        self._begin(errand)
        return answer

    def spawn(self, spec: ActorSpec, *, is_child: bool) -> Answer[ActorRef]:
        """Have the system start an actor."""
        number, on_control = self._numbers.next(), self._is_on_control()
        assert spec.packed is not None
        packed = spec.packed

        def build(parcel: Parcel) -> SpawnActor:
            return SpawnActor(
                number,
                on_control,
                spec.class_name,
                parcel,
                encode_placement(spec.where),
                spec.name or "",
                spec.mailbox,
                spec.strategy.value,
                spec.intensity,
                is_child,
            )

        errand = Errand(
            self,
            number,
            f"the start of {spec.short_name}",
            lambda: self._send(packed, build),
            lambda answer: unpack(answer, ActorRef, self),
        )
        answer: Answer[ActorRef] = errand.expect_answer(None)
        self._begin(errand)
        return answer

    def ref(self, number: int, name: str) -> ActorRef:
        """See Door."""
        return ActorRef(self, number, name)

    def later(self, function: Callable[[], None]) -> None:
        """See Door."""
        self._later.append(function)
        self._end.ring()

    def catch_up(self) -> None:
        """Do what was put off. In the main thread."""
        while self._later:
            self._later.popleft()()

    def block(self, waiting: Waiting, timeout_s: float | None) -> bool:
        """See Blocker."""
        if self.has_loop and threading.get_ident() == self._main:
            raise InvalidArgument(
                "this is the thread of the actor's event loop: `await` the answer, "
                "its result() would keep everything else waiting"
            )
        return self._block(waiting, timeout_s)

    def _block(self, waiting: Waiting, timeout_s: float | None) -> bool:
        if threading.get_ident() != self._main:
            return waiting.wait_in_thread(timeout_s)
        deadline_s = None if timeout_s is None else monotonic_s() + timeout_s
        waiting.listen(self._ring)
        try:
            while True:
                self.read()
                if waiting.has_news():
                    return True
                left_s = None if deadline_s is None else deadline_s - monotonic_s()
                if left_s is not None and left_s <= 0:
                    return False
                self._end.doze(left_s)
        finally:
            waiting.leave(self._ring)

    def _ring(self) -> None:
        """Wake the main thread for news that another one has brought."""
        if threading.get_ident() != self._main:
            self._end.ring()

    # --- calls under way -------------------------------------------------------------------------

    def _message_errand(
        self,
        ref: ActorRef,
        kind: int,
        message: Message[Any],
        deadline_s: float | None,
        *,
        is_nowait: bool,
    ) -> Errand:
        packed = pack_message(message, self)
        number, on_control = self._numbers.next(), self._is_on_control()
        deadline_ns = 0 if deadline_s is None else int(deadline_s * 1e9)
        message_class = type(message)

        def build(parcel: Parcel) -> PassOn:
            return PassOn(number, on_control, ref.id, kind, parcel, deadline_ns, is_nowait)

        return Errand(
            self,
            number,
            f"{message_class.__name__} for {ref.name!r}",
            lambda: self._send(packed, build),
            lambda answer: unpack_reply(answer, message_class, self),
            STREAM_COST if kind == STREAM else 1,
        )

    def _begin(self, errand: Errand) -> None:
        """Send a call, now or when others have ended."""
        if self._end.is_severed:
            errand.fail(ActorStopped("this process is a fork of the actor's: it has no channel"))
            return
        with self._lock:
            if self._spent + errand.cost > BUDGET and self._spent:
                self._waiting.append(errand)
                return
            self._spent += errand.cost
            self._errands[errand.number] = errand
        self._launch(errand)

    def _launch(self, errand: Errand) -> None:
        try:
            errand.send()
        except ActorserveError as error:
            self._close(errand)
            errand.fail(error)

    def _close(self, errand: Errand) -> None:
        """Forget a call that has ended, and let others begin."""
        ready: list[Errand] = []
        with self._lock:
            if self._errands.pop(errand.number, None) is not None:
                self._spent -= errand.cost
            while self._waiting and self._spent + self._waiting[0].cost <= BUDGET:
                following = self._waiting.popleft()
                self._spent += following.cost
                self._errands[following.number] = following
                ready.append(following)
        for following in ready:
            self._launch(following)

    def take(self, message: ToActor) -> None:
        """Take what came back. In the main thread, or in the control thread."""
        if not isinstance(message, (Answered, ItemSent, Done, Failed)):
            raise ProtocolError(f"{type(message).__name__} came as the outcome of a call")
        packed = None
        if isinstance(message, (Answered, ItemSent)):
            packed = packed_of(message.parcel, self._end.look)
        errand = self._errands.get(message.number)
        if errand is not None:
            if not isinstance(message, ItemSent):
                self._close(errand)
            errand.take(message, packed)

    def revoke(self, errand: Errand) -> None:
        """Tell the system that nobody waits for a call any more."""
        with self._lock:
            is_under_way = errand.number in self._errands
            if not is_under_way and errand in self._waiting:
                self._waiting.remove(errand)
        if is_under_way:
            self._close(errand)
            self._end.send(Revoke(errand.number))

    def grant(self, errand: Errand, count: int) -> None:
        """Let a stream go on."""
        if errand.number in self._errands:
            self._end.send(Grant(errand.number, count))

    def _is_on_control(self) -> bool:
        return threading.get_ident() != self._main

    def _send(self, packed: Packed, build: Callable[[Parcel], WireMessage]) -> None:
        data = encode(build(self._end.parcel(packed)))
        if len(data) > self._end.max_frame_bytes:
            raise TooLarge(f"a message of {len(data)} bytes beside its arrays")
        self._end.send_encoded(data)


def _nothing(_packed: Packed) -> None:
    return None
