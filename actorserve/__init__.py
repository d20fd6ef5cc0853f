# SPDX-License-Identifier: Apache-2.0
"""Actors on pure multiprocessing primitives, and the model server built on them.

Importing this package loads nothing but this file: public names are looked up on first use,
so that a stub process never pays for the server and a server never pays for a model.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if sys.platform != "linux":
    raise ImportError(
        f"actorserve needs Linux (eventfd, pidfd, memfd, SCM_RIGHTS); this is {sys.platform!r}"
    )

__version__ = "0.1.0"

_PUBLIC = {
    "ActorserveError": "actorserve.errors",
    "Supervisor": "actorserve.actors.supervisor",
    "SyncSupervisor": "actorserve.actors.sync_supervisor",
}
__all__ = ["__version__", *_PUBLIC]  # noqa: PLE0604 (the keys are strings)

if TYPE_CHECKING:
    from actorserve.actors.supervisor import Supervisor as Supervisor
    from actorserve.actors.sync_supervisor import SyncSupervisor as SyncSupervisor
    from actorserve.errors import ActorserveError as ActorserveError


def __getattr__(name: str) -> Any:
    """Import a public name from the room that defines it."""
    home = _PUBLIC.get(name)
    if home is None:
        raise AttributeError(f"module 'actorserve' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
