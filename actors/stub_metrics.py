# SPDX-License-Identifier: Apache-2.0
"""A stub's metrics: changes go to the server in bundles, and nobody waits for them.

    increment, set, observe ─► a deque ─► flush: before an answer leaves, and with every beat
    finalizers ─────────────────┘
    new families and metrics, value ─► flush, then a question

Appending needs no lock, so that finalizers and any thread may do it, at a price of a tenth of a
microsecond. What a stub has not flushed is lost with it: at most what it did in its last batch.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque

from actorserve.actors.questions import Questions
from actorserve.errors import Unavailable
from actorserve.runtime.control_thread import CONTROL_THREAD
from actorserve.runtime.stub_end import StubEnd
from actorserve.state.metric_registry import Change
from actorserve.state.metrics import MetricKind
from actorserve.wire.messages import MetricsChanged
from actorserve.wire.questions import OpenFamily, OpenMetric, ReadMetric

BUNDLE = 4096
"""Changes in one message; with so many waiting, the control thread is woken for them."""


class StubMetrics:
    """The store of a stub; see triton.metric.MetricStore."""

    def __init__(self, end: StubEnd, questions: Questions) -> None:
        self._end = end
        self._questions = questions
        questions.before = self.flush
        self._numbers = itertools.count(1)
        self._changes: deque[tuple[int, int, float]] = deque()
        # Reentrant: a finalizer may run, and ask for a value, while its thread flushes.
        self._flushing = threading.RLock()

    def open_family(self, name: str, description: str, kind: MetricKind) -> int:
        """Ask the server for a handle."""
        number = next(self._numbers)
        self._ask(OpenFamily(number, name, description, int(kind)))
        return number

    def open_metric(self, family: int, labels: dict[str, str], buckets: list[float] | None) -> int:
        """Ask the server for a handle."""
        number = next(self._numbers)
        self._ask(OpenMetric(number, family, labels, buckets))
        return number

    def value(self, metric: int) -> float:
        """Ask the server for a value; what was changed here is in it."""
        result = self._ask(ReadMetric(metric))
        assert isinstance(result, (int, float))
        return float(result)

    def _ask(self, question: OpenFamily | OpenMetric | ReadMetric) -> object:
        if threading.current_thread().name == CONTROL_THREAD:
            # A finalizer of the model's: the answer would come to this very thread.
            raise Unavailable("a finalizer on the control thread cannot wait for the server")
        return self._questions.ask(question)

    def change(self, change: Change, number: int, amount: float) -> None:
        """Note a change. Raises Unavailable in a forked child of the model."""
        if self._end.is_severed:
            raise Unavailable(
                "a process that the model has forked (a multiprocessing.Pool's, for one) has no "
                "connection to the server; return the number to the model's own process, and "
                "measure there"
            )
        changes = self._changes
        changes.append((change, number, amount))
        if len(changes) % BUNDLE == 0:
            self._end.wake_control()

    def close(self, change: Change, number: int) -> None:
        """Note the end of a handle."""
        if not self._end.is_severed:
            self._changes.append((change, number, 0.0))

    def flush(self) -> None:
        """Send what is noted. Any thread."""
        if not self._changes:
            return
        with self._flushing:
            for _ in range(0, len(self._changes), BUNDLE):
                self._end.send(MetricsChanged(_merged(self._changes)))


def _merged(changes: deque[tuple[int, int, float]]) -> list[tuple[int, int, float]]:
    """Take up to BUNDLE changes, with those of one metric in a row made one."""
    bundle: list[tuple[int, int, float]] = []
    for _ in range(BUNDLE):
        try:
            change, number, amount = changes.popleft()
        except IndexError:
            break
        if bundle and bundle[-1][1] == number:
            last, _, before = bundle[-1]
            if change == Change.INCREMENT and last <= Change.SET:
                bundle[-1] = (last, number, before + amount)
                continue
            if change == Change.SET and last <= Change.SET:
                bundle[-1] = (int(Change.SET), number, amount)
                continue
        bundle.append((int(change), number, amount))
    return bundle
