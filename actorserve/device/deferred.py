# SPDX-License-Identifier: Apache-2.0
"""Streams for a device that has none: work that is done later, in order, as on a real device.

What always holds: one stream's work is done in the order in which it came, by one thread at a
time. A delay of 0 does it at once; an infinite one only when somebody waits for it.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable

from actorserve.clock import monotonic_s

Work = Callable[[], None]


class DeferredWork:
    """Queues of work by stream; a thread does what is due where the delay is finite."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._queues: dict[int, deque[tuple[float, Work]]] = {}
        self._changed = threading.Condition(threading.RLock())
        self._thread: threading.Thread | None = None
        self._stopped = False

    @property
    def is_deferred(self) -> bool:
        """Whether anything is done later at all."""
        return bool(self._delay_s)

    def add(self, stream: int, work: Work) -> None:
        """Do the work behind the stream's earlier work."""
        if not self._delay_s:
            work()
            return
        with self._changed:
            due_s = monotonic_s() + self._delay_s
            self._queues.setdefault(stream, deque()).append((due_s, work))
            if math.isinf(self._delay_s):
                return
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="actorserve-deferred", daemon=True
                )
                self._thread.start()
            self._changed.notify()

    def flush(self, stream: int | None = None) -> None:
        """Do all work of a stream now (None: of every stream)."""
        if not self._delay_s:
            return
        with self._changed:
            for each in [stream] if stream is not None else list(self._queues):
                queue = self._queues.pop(each, deque())
                while queue:
                    queue.popleft()[1]()

    def stop(self) -> None:
        """Do what is left and end the thread; idempotent."""
        self.flush()
        with self._changed:
            self._stopped = True
            self._changed.notify()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        with self._changed:
            while not self._stopped:
                stream, due_s = min(
                    ((stream, queue[0][0]) for stream, queue in self._queues.items()),
                    key=lambda each: each[1],
                    default=(0, math.inf),
                )
                left_s = due_s - monotonic_s()
                if left_s > 0:
                    self._changed.wait(None if math.isinf(left_s) else left_s)
                    continue
                queue = self._queues[stream]
                queue.popleft()[1]()
                if not queue:
                    del self._queues[stream]
