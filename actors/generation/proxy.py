# SPDX-License-Identifier: Apache-2.0
"""The executor whose engine runs in processes of its own: one, or several as ranks.

    any thread ─► GenerationProxy ─► Bridge, in a loop ─► RankGroup ─► rank processes

The loop is a private one in a thread, or one that is given together with its Spawner. The thread
holds the registry and not the executor, so that an executor which everybody has dropped ends.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from typing import Any

from actorserve.actors.generation.bridge import Bridge, Sendable
from actorserve.actors.generation.executor import GenerationExecutor
from actorserve.actors.generation.group import END_S, GroupStats
from actorserve.actors.generation.group_life import GroupPlan
from actorserve.actors.generation.spec import EngineSpec, ExecutorConfig
from actorserve.errors import InvalidArgument
from actorserve.runtime.child import Spawner
from actorserve.runtime.group_parts import MOST_RANKS
from actorserve.wire.codec import encode
from actorserve.wire.generation import Start

JOIN_S = END_S + 5.0
"""How long the thread has after its processes were killed."""


_JUDGED_LATER_S = 30.0
"""The group judges the loading from when its processes are made, and says which rank is late."""


class GenerationProxy(GenerationExecutor):
    """See GenerationExecutor. Returns at once; the ranks load meanwhile (`wait_ready`).

    With `spawner`, everything runs in the running loop, which has to be the spawner's and has to
    turn; the spawner stays the caller's. `name` is what ps and top show.
    """

    def __init__(
        self,
        engine: EngineSpec,
        config: ExecutorConfig,
        ranks: int = 1,
        *,
        spawner: Spawner | None = None,
        name: str = "",
    ) -> None:
        """Begin to start the ranks.

        Raises InvalidArgument for an engine that does not exist, or options that are no data.
        """
        if not 1 <= ranks <= MOST_RANKS:
            raise InvalidArgument(f"an engine has 1 to {MOST_RANKS} ranks, not {ranks}")
        tokenizer = engine.tokenizer()
        try:
            encode(Start(engine.name, engine.options, 0, ranks, 0))
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidArgument(
                f"the options of engine {engine.name!r} cannot be sent to a process: {error}"
            ) from None
        super().__init__(config, tokenizer)
        plan = GroupPlan(
            engine.name,
            engine.options,
            ranks,
            name or engine.name.rpartition(":")[2],
            config.load_timeout_s,
            config.hang_timeout_s,
            config.env,
            config.python,
        )
        self._bridge = Bridge(plan, self._registry, config.restart, _reviver(self))
        self._thread: threading.Thread | None = None
        self._task: asyncio.Task[None] | None = None
        if spawner is None:
            self._loop_thread = 0
            self._thread = threading.Thread(
                target=_run, args=(self._bridge,), name="generation", daemon=True
            )
            self._thread.start()
        else:
            self._loop_thread = threading.get_ident()
            self._task = asyncio.get_running_loop().create_task(self._bridge.run(spawner))

    def latest_stats(self) -> dict[str, Any] | None:
        """See GenerationExecutor; read from shared memory, without any message."""
        return self._bridge.latest_stats() or super().latest_stats()

    def group_stats(self) -> GroupStats | None:
        """See GenerationExecutor."""
        group = self._bridge.group
        return None if group is None else group.stats()

    # --- GenerationExecutor's transport -----------------------------------------------------------

    def _load_limit_s(self) -> float | None:
        limit_s = super()._load_limit_s()
        return None if limit_s is None else limit_s + _JUDGED_LATER_S

    def _send(self, message: Sendable) -> None:
        self._bridge.send(message)

    def _kill(self) -> None:
        self._bridge.kill()

    def _join(self) -> None:
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(JOIN_S)

    def _may_wait(self) -> bool:
        own = self._loop_thread if self._thread is None else self._thread.ident
        return threading.get_ident() != own


def _run(bridge: Bridge) -> None:
    """Run a bridge in a loop of this thread's own."""
    asyncio.run(bridge.run())


def _reviver(executor: GenerationExecutor) -> Any:
    """Return what makes an executor serve again, without holding it."""
    weak = weakref.WeakMethod(executor.revive)

    def revive() -> None:
        method = weak()
        if method is not None:
            method()

    return revive
