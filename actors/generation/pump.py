# SPDX-License-Identifier: Apache-2.0
"""The pump: one engine, one thread, and the rule of each turn.

    take: Submit, Abort, Call, Close          (from a deque, or from a ring)
            │
            ▼
    turn:  expire ─► admit ─► Step ─► lead ─► engine ─► sift ─► sink.outputs
                                      (other ranks)            sink.stats, kv_events, call_ended

It knows no transport: whoever drives it takes everything that has come, calls `turn`, and sleeps
when that says so, at most `idle_s` long. What a turn raises is the engine's death.

What always holds: every request that was taken gets exactly one final output; what an engine
says of a request after that is dropped and counted; aborts are never stuck behind requests,
since everything that has come is taken, and waits here for the engine's room.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from actorserve.actors.generation.driver import COMMIT, PREPARE, ROLLBACK, Applied, Driver
from actorserve.actors.generation.engine import Engine
from actorserve.actors.generation.merge import merged
from actorserve.clock import monotonic_s
from actorserve.errors import InternalError, ProtocolError
from actorserve.state.admission import Admission, AdmissionStats
from actorserve.wire.generation import Abort, Call, Close, GenRequest, Output, Step, Submit

ABORT_GRACE_S = 5.0
"""How long an engine has for the final output of a request that it was told to end."""

SHUT_DOWN = "the executor was shut down before the request was finished"

_SNAPSHOTS_KEPT = 1000  # until they are handed on
_HELD = 32  # outputs kept back for a request before they are merged

Taken = Submit | Abort | Call | Close


class Sink(Protocol):
    """Where what comes of turns goes. Called in the pump's thread."""

    def outputs(self, outputs: list[Output]) -> None:
        """Take what one turn brought, for all requests together."""

    def stats(self, snapshots: list[dict[str, Any]], dropped: int) -> None:
        """Take the snapshots since the last ones; `dropped` were left out in all."""

    def kv_events(self, first: int, events: list[Any]) -> None:
        """Take events of the key-value cache; the first has the number `first`."""

    def call_ended(self, number: int, result: Any, error: str | None) -> None:
        """Take the end of a call."""


class PumpStats(msgspec.Struct, frozen=True):
    """What a pump has done. `iterations` are polls; the rest speaks for itself."""

    iterations: int
    refused: int
    duplicates: int
    kv_events: int
    snapshots_dropped: int
    admission: AdmissionStats


class Pump:
    """Drive an engine that has been started.

    `lead(step)` is called before each step is applied here, to tell the other ranks;
    `verdict(step_number, deadline_s)` waits until all of them have answered that step (which
    carried a call) and returns "" or what one of them says against it.
    """

    def __init__(
        self,
        engine: Engine,
        sink: Sink,
        *,
        stats_every_s: float = 0.05,
        clock: Callable[[], float] = monotonic_s,
        lead: Callable[[Step], None] | None = None,
        verdict: Callable[[int, float], str] | None = None,
        abort_grace_s: float = ABORT_GRACE_S,
    ) -> None:
        self.is_closed = False
        self.iterations = 0
        self.busy_since_s = 0.0  # when the engine was called that has not come back; 0: it has
        self.latest: dict[str, Any] | None = None  # the snapshot of the last iteration
        self._driver = Driver(engine)
        self._sink = sink
        self._clock = clock
        self._lead = lead
        self._verdict = verdict
        self._abort_grace_s = abort_grace_s
        self._admission: Admission[GenRequest] = Admission(_rows_of, _tokens_of)
        self._made: list[Output] = []  # finals that no engine gives
        self._held: dict[int, list[Output]] = {}  # of requests whose client wants only the end
        self._calls: deque[Call] = deque()
        self._next_phase: tuple[Call, str] | None = None  # of a call whose first phase is over
        self._prepare_error = ""
        self._closing: Close | None = None
        self._steps = 0
        self._refused = self._duplicates = 0
        self._tokens = self._prompt_tokens = 0  # of this iteration, for its snapshot
        self._is_thread = engine.mode == "thread"
        self._capacity = getattr(engine, "capacity", None)
        self._engine_stats = getattr(engine, "stats", None)
        self._engine_kv_events = getattr(engine, "kv_events", None)
        self._engine_fileno = getattr(engine, "fileno", None) if self._is_thread else None
        self._kv_number = 0
        self._snapshots: list[dict[str, Any]] = []
        self._snapshots_dropped = 0
        self._stats_every_s = stats_every_s
        self._stats_due_s = 0.0

    # --- what comes in ---------------------------------------------------------------------------

    def take(self, message: Taken) -> None:
        """Take one message; nothing is done before the next turn."""
        if type(message) is Submit:
            for request in message.requests:
                self._take_request(request)
        elif type(message) is Abort:
            for gone in self._admission.abort(message.ids):
                self._end(gone.id, "cancelled")
        elif type(message) is Call:
            self._calls.append(message)
        elif type(message) is Close:
            if self._closing is None or self._closing.drain:
                self._closing = message
        else:
            raise ProtocolError(f"a pump cannot take {type(message).__name__}")

    def _take_request(self, request: GenRequest) -> None:
        if self._closing is not None:
            self._end(request.id, "cancelled", SHUT_DOWN)
        elif not self._admission.submit(request):
            self._duplicates += 1  # a final for it would end the one that has this id

    # --- turns -----------------------------------------------------------------------------------

    def turn(self, timeout_s: float = 0.0) -> bool:
        """Make one turn. False: nothing is left to do before a message comes, or `idle_s` passes.

        A thread-driven engine is waited for up to `timeout_s`. Raises what the engine raises.
        """
        if self.is_closed:
            return False
        now_s = self._clock()
        self._settle_late(now_s)
        step = self._next_step(now_s)
        if step is None:
            self._flush(now_s)
            return False
        if self._lead is not None:
            self._lead(step)
        self.busy_since_s = now_s
        applied = self._driver.apply(step, timeout_s)
        self.busy_since_s = 0.0
        outputs = self._sift(applied)
        self._tell(outputs)
        if step.poll:
            self._note_iteration(now_s)
        if step.call is not None:
            self._end_phase(step, applied)
        if step.close:
            self.is_closed = True
            self._hand_on_stats()
            return False
        if self._engine_fileno is not None and step.call is None:
            return bool(applied.outputs)  # its descriptor says when there is more
        return True

    def idle_s(self) -> float | None:
        """Return how long to sleep at most after a turn that said so; None: until a message."""
        due_s = self._admission.next_deadline_s()
        due_s = math.inf if due_s is None else due_s
        if self._admission.has_aborts:
            due_s = min(due_s, self._clock() + self._abort_grace_s / 4)
        return None if due_s == math.inf else max(0.0, due_s - self._clock())

    @property
    def engine_fileno(self) -> int | None:
        """What to watch while sleeping: readable when a thread-driven engine has something."""
        return None if self._engine_fileno is None else self._engine_fileno()

    def stats(self) -> PumpStats:
        """Return the counts."""
        return PumpStats(
            iterations=self.iterations,
            refused=self._refused,
            duplicates=self._duplicates,
            kv_events=self._kv_number,
            snapshots_dropped=self._snapshots_dropped,
            admission=self._admission.stats(),
        )

    # --- before the engine -----------------------------------------------------------------------

    def _settle_late(self, now_s: float) -> None:
        admission = self._admission
        due_s = admission.next_deadline_s()
        if due_s is not None and due_s <= now_s:
            for gone in admission.expire(now_s):
                self._end(gone.id, "timeout")
        if admission.has_aborts:
            for request, reason in admission.overdue(now_s, self._abort_grace_s):
                self._end(request.id, reason)

    def _next_step(self, now_s: float) -> Step | None:
        """Return what the engine is to do now; None for nothing."""
        admission = self._admission
        call = self._next_call(now_s)
        if self._closing is not None and self._is_closing_now():
            for request in admission.clear():
                self._end(request.id, "cancelled", SHUT_DOWN)
            return Step(self._count(), [], [], close=True, poll=False)
        aborts = admission.take_aborts(now_s) if admission.has_aborts else []
        adds = self._admit() if admission.waiting else []
        poll = admission.running > 0
        if not (poll or aborts or call is not None):
            return None
        return Step(self._count(), adds, aborts, call, poll)

    def _admit(self) -> list[GenRequest]:
        adds = self._admission.admit(None if self._capacity is None else self._capacity())
        for request in adds:
            self._prompt_tokens += len(request.prompt)
            if not request.stream:
                self._held[request.id] = []
        return adds

    def _is_closing_now(self) -> bool:
        assert self._closing is not None
        if not self._closing.drain:
            return True
        admission = self._admission
        return not (admission.running or admission.waiting or self._next_phase or self._calls)

    def _count(self) -> int:
        self._steps += 1
        return self._steps

    # --- after the engine ------------------------------------------------------------------------

    def _sift(self, applied: Applied) -> list[Output]:
        outputs = self._admission.sift(applied.outputs) if applied.outputs else []
        self._tokens = sum([len(each.tokens) for each in outputs])
        for number, text in applied.refused:
            if self._admission.drop(number) is not None:
                self._refused += 1
                self._end(number, "error", text)
        return self._hold_back(outputs) if self._held else outputs

    def _hold_back(self, outputs: list[Output]) -> list[Output]:
        """Keep the outputs of requests whose client wants the end, until that is there."""
        passed = []
        for output in outputs:
            held = self._held.get(output.id)
            if held is None:
                passed.append(output)
                continue
            held.append(output)
            if output.final:
                del self._held[output.id]
                passed += merged(held)
            elif len(held) >= _HELD + 2 * output.seq:
                held[:] = merged(held)
        return passed

    def _end(self, number: int, finish: str, error: str | None = None) -> None:
        """Make the final output of a request that no engine ends."""
        self._made += merged(self._held.pop(number, ()))
        self._made.append(Output(number, finish=finish, final=True, error=error))

    def _tell(self, outputs: list[Output]) -> None:
        if self._made:
            outputs = [*outputs, *self._made]
            self._made = []
        if outputs:
            self._sink.outputs(outputs)
        if self._engine_kv_events is not None and (events := self._engine_kv_events()):
            first = self._kv_number
            self._kv_number += len(events)
            self._sink.kv_events(first, list(events))

    def _flush(self, now_s: float) -> None:
        self._tell([])
        if self._snapshots:
            self._hand_on_stats()
            self._stats_due_s = now_s + self._stats_every_s

    # --- calls -----------------------------------------------------------------------------------

    def _next_call(self, now_s: float) -> tuple[int, str, str, list[Any]] | None:
        if self._next_phase is not None:
            call, phase = self._next_phase
            return call.number, phase, call.method, call.args
        while self._calls:
            call = self._calls.popleft()
            if call.deadline_s and call.deadline_s <= now_s:
                self._sink.call_ended(call.number, None, "it waited too long for its turn")
                continue
            self._next_phase = (call, PREPARE)
            return call.number, PREPARE, call.method, call.args
        return None

    def _end_phase(self, step: Step, applied: Applied) -> None:
        """Go on to the next phase, once all ranks have said what they think of this one."""
        assert self._next_phase is not None
        call, phase = self._next_phase
        error = applied.call_error
        against = "" if self._verdict is None else self._verdict(step.number, call.deadline_s)
        if phase == PREPARE:
            self._prepare_error = error or against
            self._next_phase = (call, ROLLBACK if self._prepare_error else COMMIT)
            return
        self._next_phase = None
        if phase == ROLLBACK:
            error = self._prepare_error
        elif self._verdict is not None and bool(against) != bool(error):
            said = f"rank 0: {error}; the others did it" if error else against
            raise InternalError(f"the ranks differ after the call {call.method!r}: {said}")
        self._sink.call_ended(call.number, applied.call_result, error or None)

    # --- statistics ------------------------------------------------------------------------------

    def _note_iteration(self, now_s: float) -> None:
        snapshot: dict[str, Any] = {
            "iter": self.iterations,
            "time_s": now_s,
            "waiting": self._admission.waiting,
            "running": self._admission.running,
            "tokens": self._tokens,
            "prompt_tokens": self._prompt_tokens,
        }
        if self._engine_stats is not None:
            snapshot.update(self._engine_stats())
        self.iterations += 1
        self._prompt_tokens = 0
        self.latest = snapshot
        self._snapshots.append(snapshot)
        if now_s >= self._stats_due_s or len(self._snapshots) >= _SNAPSHOTS_KEPT:
            self._stats_due_s = now_s + self._stats_every_s
            self._hand_on_stats()

    def _hand_on_stats(self) -> None:
        snapshots, self._snapshots = self._snapshots, []
        self._sink.stats(snapshots, self._snapshots_dropped)


def _rows_of(request: GenRequest) -> int:
    sampling = request.sampling
    return max(sampling.n, sampling.best_of, sampling.beam_width)


def _tokens_of(request: GenRequest) -> int:
    return (len(request.prompt) + request.sampling.max_tokens) * _rows_of(request)
