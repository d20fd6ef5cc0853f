# SPDX-License-Identifier: Apache-2.0
"""Where the turns of rank 0's pump go: messages to the executor, and a page of statistics."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from actorserve.actors.generation.logits import packed
from actorserve.runtime.group_end import RankEnd
from actorserve.wire.generation import CallEnded, IterationStats, KvEvents, Output, Outputs
from actorserve.wire.messages import Message

_encode_page = msgspec.msgpack.Encoder().encode


class RankSink:
    """See pump.Sink. What engines say may hold numbers of numpy; no wire takes those."""

    def __init__(self, end: RankEnd) -> None:
        self._end = end
        self._shown: dict[str, Any] | None = None

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
        """See Sink."""
        outputs = packed(outputs, self._end.place)
        try:
            self._end.send(Outputs(outputs))
        except TypeError:
            self._end.send(Outputs([_plain_output(output) for output in outputs]))

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
