# SPDX-License-Identifier: Apache-2.0
"""Where the turns of rank 0's pump go: messages to the executor, and a page of statistics."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from actorserve.actors.generation.logits import packed
from actorserve.clock import monotonic_s
from actorserve.runtime.group_end import RankEnd
from actorserve.wire.generation import CallEnded, IterationStats, KvEvents, Output, Outputs
from actorserve.wire.messages import Message

WAKE_EVERY_S = 1e-3
"""How long outputs of steps that are quicker than that may lie before the executor is woken."""

_encode_page = msgspec.msgpack.Encoder().encode


class RankSink:
    """See pump.Sink. What engines say may hold numbers of numpy; no wire takes those."""

    def __init__(self, end: RankEnd) -> None:
        self._end = end
        self._shown: dict[str, Any] | None = None
        self._told_s = 0.0  # when the last outputs were sent
        self._woken_s = 0.0
        self._owes_wake = False

    def show(self, snapshot: dict[str, Any] | None) -> None:
        """Write the latest snapshot on the group's page, where anybody can read it at any time."""
        if snapshot is self._shown or snapshot is None:
            return
        self._shown = snapshot
        try:
            page = _encode_page(snapshot)
        except TypeError:
            page = _encode_page(plain(snapshot))
        self._end.write_page(page)

    def outputs(self, outputs: list[Output]) -> None:
        """See Sink. Of quick steps not each wakes the executor: that costs both sides more."""
        outputs = packed(outputs, self._end.place)
        now_s = monotonic_s()
        is_quick = now_s - self._told_s < WAKE_EVERY_S and now_s - self._woken_s < WAKE_EVERY_S
        self._told_s = now_s
        try:
            self._end.send(Outputs(outputs), wakes=not is_quick)
        except TypeError:
            plain_outputs = [_plain_output(output) for output in outputs]
            self._end.send(Outputs(plain_outputs), wakes=not is_quick)
        self._owes_wake = is_quick
        if not is_quick:
            self._woken_s = now_s

    def wake(self) -> None:
        """Wake the executor for what it was not woken for: nothing may follow for a while."""
        if self._owes_wake:
            self._owes_wake = False
            self._woken_s = monotonic_s()
            self._end.wake()

    def stats(self, snapshots: list[dict[str, Any]], dropped: int) -> None:
        """See Sink."""
        self._send(IterationStats(plain(snapshots), dropped))

    def kv_events(self, first: int, events: list[Any]) -> None:
        """See Sink."""
        self._send(KvEvents(first, plain(events)))

    def call_ended(self, number: int, result: Any, error: str | None) -> None:
        """See Sink; a result that cannot travel is an error of its call."""
        try:
            ended = CallEnded(number, plain(result), error)
        except (TypeError, ValueError) as wrong:
            ended = CallEnded(number, None, f"its result cannot be sent: {wrong}")
        self._send(ended)

    def _send(self, message: Message) -> None:
        self._end.send(message)


def plain(value: Any) -> Any:
    """Return what can be sent of a value: numpy's numbers and arrays as Python's.

    Raises TypeError for what cannot.
    """
    return msgspec.to_builtins(value, builtin_types=(bytes,), enc_hook=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is no plain data")


def _plain_output(output: Output) -> Output:
    changes = {
        name: plain(getattr(output, name)) for name in output.__struct_fields__ if name != "arrays"
    }
    return msgspec.structs.replace(output, **changes)
