# SPDX-License-Identifier: Apache-2.0
"""What happens to our objects in a child that somebody forks: they let go of everything.

Channel ends, views, arenas and beats belong to the process that made them. A forked child has
copies of the objects, and its garbage collection would give back what its parent still uses.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Severable(Protocol):
    """What must let go of its parent's things in a forked child."""

    def sever(self) -> None:
        """Forget everything without giving anything back."""


_severables: weakref.WeakSet[Severable] = weakref.WeakSet()


def sever_after_fork(thing: Severable) -> None:
    """Have `thing.sever()` called in every child that this process forks from now on."""
    _severables.add(thing)


def _sever_all() -> None:
    for thing in list(_severables):
        thing.sever()
    _severables.clear()


# Once per process tree: children inherit the hook, and what they build themselves comes after it.
os.register_at_fork(after_in_child=_sever_all)
