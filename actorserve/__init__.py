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
    "Actor": "actorserve.runtime.actor",
    "ActorDead": "actorserve.errors",
    "ActorDied": "actorserve.errors",
    "ActorRef": "actorserve.runtime.ref",
    "ActorRestarting": "actorserve.errors",
    "ActorserveError": "actorserve.errors",
    "ActorStopped": "actorserve.errors",
    "ActorSystem": "actorserve.runtime.system",
    "Answer": "actorserve.runtime.answer",
    "Crash": "actorserve.errors",
    "Full": "actorserve.errors",
    "Loop": "actorserve.runtime.placement",
    "Message": "actorserve.runtime.message",
    "Process": "actorserve.runtime.placement",
    "ReceiveError": "actorserve.errors",
    "Restart": "actorserve.state.restart",
    "Strategy": "actorserve.state.strategy",
    "Stream": "actorserve.runtime.stream",
    "Supervisor": "actorserve.actors.supervisor",
    "SyncSupervisor": "actorserve.actors.sync_supervisor",
    "Thread": "actorserve.runtime.placement",
}
__all__ = ["__version__", *_PUBLIC]  # noqa: PLE0604 (the keys are strings)

if TYPE_CHECKING:
    from actorserve.actors.supervisor import Supervisor as Supervisor
    from actorserve.actors.sync_supervisor import SyncSupervisor as SyncSupervisor
    from actorserve.errors import ActorDead as ActorDead
    from actorserve.errors import ActorDied as ActorDied
    from actorserve.errors import ActorRestarting as ActorRestarting
    from actorserve.errors import ActorserveError as ActorserveError
    from actorserve.errors import ActorStopped as ActorStopped
    from actorserve.errors import Crash as Crash
    from actorserve.errors import Full as Full
    from actorserve.errors import ReceiveError as ReceiveError
    from actorserve.runtime.actor import Actor as Actor
    from actorserve.runtime.answer import Answer as Answer
    from actorserve.runtime.message import Message as Message
    from actorserve.runtime.placement import Loop as Loop
    from actorserve.runtime.placement import Process as Process
    from actorserve.runtime.placement import Thread as Thread
    from actorserve.runtime.ref import ActorRef as ActorRef
    from actorserve.runtime.stream import Stream as Stream
    from actorserve.runtime.system import ActorSystem as ActorSystem
    from actorserve.state.restart import Restart as Restart
    from actorserve.state.strategy import Strategy as Strategy


def __getattr__(name: str) -> Any:
    """Import a public name from the room that defines it."""
    home = _PUBLIC.get(name)
    if home is None:
        raise AttributeError(f"module 'actorserve' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
