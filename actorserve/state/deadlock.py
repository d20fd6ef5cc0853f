# SPDX-License-Identifier: Apache-2.0
"""Which calls between models can never be served. Pure.

    instance ── has made ──► call ── runs at ──► instance ── has made ──► …
                              └── is queued for a model: any of its instances would do

A queued call is dead when every instance of its model is stuck, and an instance is stuck when it
has no room and waits for dead calls only. What can move is found first, and all else is dead: so
a long chain, which ends somewhere, is not. What runs or waits at a place that is not among the
instances can move, as far as anybody knows.

Not every instance that has made calls waits for them. A stub whose main thread does nothing else
until the answer is there says so (`waits`), and then the verdict is certain. Of the others it is
only probable: they may be computing something meanwhile.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

import msgspec

Key = Hashable


class InstanceNode(msgspec.Struct, frozen=True):
    """An instance of `model`; `is_free` says that it could take a request now, or soon."""

    key: Key
    model: Key
    is_free: bool


class CallNode(msgspec.Struct, frozen=True):
    """A call that instance `caller` has made to `model`; queued while `runs_at` is None."""

    key: Key
    caller: Key
    model: Key
    runs_at: Key | None
    waits: bool


def dead_calls(
    instances: Sequence[InstanceNode], calls: Sequence[CallNode], *, is_certain: bool
) -> list[Key]:
    """Return the queued calls that can never be served, in the order given.

    With `is_certain`, an instance counts as stuck only if its main thread waits; otherwise also
    when all that it has called is dead.
    """
    made: dict[Key, list[CallNode]] = defaultdict(list)
    for call in calls:
        made[call.caller].append(call)
    of_model: dict[Key, list[Key]] = defaultdict(list)
    for instance in instances:
        of_model[instance.model].append(instance.key)
    blocking = {
        each.key: _awaited(made[each.key], is_certain) for each in instances if not each.is_free
    }
    known = {each.key for each in instances}
    alive = {key for key in known if not blocking.get(key)}
    living: set[Key] = set()
    while True:
        grown = [
            call.key
            for call in calls
            if call.key not in living
            and (
                call.runs_at in alive or call.runs_at not in known
                if call.runs_at is not None
                else not of_model[call.model] or any(key in alive for key in of_model[call.model])
            )
        ]
        living.update(grown)
        freed = [
            key
            for key, awaited in blocking.items()
            if key not in alive and any(call.key in living for call in awaited)
        ]
        alive.update(freed)
        if not grown and not freed:
            break
    return [call.key for call in calls if call.runs_at is None and call.key not in living]


def _awaited(calls: list[CallNode], is_certain: bool) -> list[CallNode]:
    """Return the calls of which one has to be answered before their caller can go on."""
    waiting = [call for call in calls if call.waits]
    if waiting or is_certain:
        return waiting
    return calls
