# SPDX-License-Identifier: Apache-2.0
"""End calls that wait for each other: a model that calls itself with no instance left, A → B → A.

Looks only while a call waits in a queue, ten times a second, and ends one call per model at a
look: the newest, since its caller has waited least. What is certain ends at once, what is only
probable (state/deadlock.py) after PROBABLE_S.

A sender that waits for its caller to read may keep its instance from another call, for which that
caller waits, directly or not. So it gets credit for what it has sent, a window at each look.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable

from actorserve.actors.call_desk import CallDesk, StubCall
from actorserve.actors.instance import Instance
from actorserve.clock import monotonic_s
from actorserve.errors import Unavailable
from actorserve.state.deadlock import CallNode, InstanceNode, dead_calls
from actorserve.state.request import QUEUED

LOOK_S = 0.1
PROBABLE_S = 2.0

_log = logging.getLogger("actorserve")

Instances = Callable[[], Iterable[tuple[str, str, list[Instance]]]]
"""Every version that serves: its model's name, its number, its instances."""


class DeadlockWatch:
    """See the module's head. Belongs to the supervisor's loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, instances: Instances) -> None:
        self._loop = loop
        self._instances = instances
        self._timer: asyncio.TimerHandle | None = None
        self._suspects: dict[StubCall, float] = {}
        self.ended = 0

    def note(self, call: StubCall) -> None:
        """Hear of a call that was made or is held up; one that waits is looked after."""
        if self._timer is not None or call.factory is None:
            return
        if call.withheld or call.factory.state == QUEUED:
            self._timer = self._loop.call_later(LOOK_S, self._look)

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        try:
            if self._look_after():
                self._timer = self._loop.call_later(LOOK_S, self._look)
        except Exception:
            _log.exception("looking for calls that wait for each other failed")

    def _look_after(self) -> bool:
        """Do what can be done; False where no call waits."""
        nodes: list[InstanceNode] = []
        calls: list[tuple[StubCall, CallNode]] = []
        names: dict[object, list[str]] = {}
        for model, version, instances in self._instances():
            names[model, version] = [each.name for each in instances]
            for instance in instances:
                nodes.append(InstanceNode(instance, (model, version), instance.could_take))
                if instance.calls is not None:
                    calls += _nodes(instance, instance.calls)
        is_held_up = _release([call for call, _ in calls])
        return self._end_the_dead(nodes, calls, names) or is_held_up

    def _end_the_dead(
        self,
        nodes: list[InstanceNode],
        calls: list[tuple[StubCall, CallNode]],
        names: dict[object, list[str]],
    ) -> bool:
        """End what can never be served; False where no call waits in a queue."""
        queued = {call for call, node in calls if node.runs_at is None}
        if not queued:
            self._suspects.clear()
            return False
        edges = [node for _, node in calls]
        certain = set(dead_calls(nodes, edges, is_certain=True))
        probable = set(dead_calls(nodes, edges, is_certain=False)) - certain
        now_s = monotonic_s()
        self._suspects = {
            call: self._suspects.get(call, now_s) for call in queued if call in probable
        }
        ripe = {call for call, since_s in self._suspects.items() if now_s - since_s >= PROBABLE_S}
        newest: dict[object, StubCall] = {}
        for call, node in calls:
            if call in certain or call in ripe:
                best = newest.get(node.model)
                if best is None or _age(call) > _age(best):
                    newest[node.model] = call
        for model, call in newest.items():
            self._end(call, names.get(model, []))
        return True

    def _end(self, call: StubCall, instances: list[str]) -> None:
        self.ended += 1
        model = call.target[0]
        error = Unavailable(
            f"the call of '{call.desk.caller}' to model '{model}' can never be served: "
            f"every instance of it ({', '.join(instances)}) waits for calls that it has made "
            "itself. Give it more instances, or do not call it in a circle"
        )
        _log.error("%s", error.message)
        if call.factory is not None:
            call.factory.fail(error)


def _release(calls: list[StubCall]) -> bool:
    """Let senders go on that keep other calls from their model; False where none is held up."""
    held_up = [call for call in calls if call.withheld]
    if held_up:
        waiting = Counter(call.target for call in calls if not call.has_begun)
        for call in held_up:
            if waiting[call.target]:
                call.taken(call.withheld)
    return bool(held_up)


def _age(call: StubCall) -> int:
    return call.factory.key if call.factory is not None else 0


def _nodes(instance: Instance, desk: CallDesk) -> list[tuple[StubCall, CallNode]]:
    found = []
    for call in desk.calls():
        factory = call.factory
        if factory is not None:
            place = factory.place
            runs_at = place.owner if place is not None and factory.state != QUEUED else None
            found.append((call, CallNode(call, instance, call.target, runs_at, call.waits)))
    return found
