# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks for tests: started with an engine of rank_engines.py, and listened to."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from actorserve.actors.generation.group import RankGroup
from actorserve.actors.generation.group_life import RANK_MODULE, GroupPlan
from actorserve.errors import EngineDeadError
from actorserve.runtime.child import Spawner
from actorserve.state.restart import Restart
from actorserve.wire.generation import (
    CallEnded,
    EngineInfo,
    FromRank,
    GenRequest,
    Output,
    Outputs,
    Sampling,
    Submit,
)

PATIENCE_S = 40.0
ENGINES = "tests.generation.rank_engines"


class Group:
    """A RankGroup, its listener, and what was heard of it."""

    def __init__(
        self, spawner: Spawner, engine: str, size: int, options: dict[str, Any], **plan: Any
    ) -> None:
        restart: Restart | None = plan.pop("restart", None)
        self.outputs: dict[int, list[Output]] = {}
        self.calls: dict[int, CallEnded] = {}
        self.messages: list[FromRank] = []
        self.deaths: list[tuple[EngineDeadError, bool]] = []
        self.lives: list[tuple[EngineInfo, int]] = []
        self._changed = asyncio.Event()
        name = engine if ":" in engine else f"{ENGINES}:{engine}"
        self.group = RankGroup(
            GroupPlan(name, options, size, **plan), spawner, self, restart=restart
        )

    def group_said(self, message: FromRank) -> None:
        self.messages.append(message)
        if isinstance(message, Outputs):
            for output in message.outputs:
                self.outputs.setdefault(output.id, []).append(output)
        elif isinstance(message, CallEnded):
            self.calls[message.number] = message
        self._changed.set()

    def group_died(self, error: EngineDeadError, *, is_last: bool) -> None:
        self.deaths.append((error, is_last))
        self._changed.set()

    def group_ready(self, info: EngineInfo, epoch: int) -> None:
        self.lives.append((info, epoch))
        self._changed.set()

    def submit(self, number: int, first: int, tokens: int, prompt: int = 1) -> None:
        """Send a request for the tokens after `first`."""
        request = GenRequest(number, [first] * prompt, Sampling(max_tokens=tokens))
        self.group.send(Submit([request]))

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until what was heard fulfils the condition."""
        while not condition():
            self._changed.clear()
            await asyncio.wait_for(self._changed.wait(), PATIENCE_S)

    async def final(self, number: int) -> Output:
        """Wait for the end of a request."""
        await self.until(lambda: any(each.final for each in self.outputs.get(number, ())))
        return self.outputs[number][-1]

    def tokens(self, number: int) -> list[int]:
        """Return all tokens of a request so far."""
        return [token for output in self.outputs.get(number, ()) for token in output.tokens]

    def kill(self, rank: int, signo: int = signal.SIGKILL) -> int:
        """Signal a rank's process; return its pid."""
        pid = self.group.pids[rank]
        assert pid is not None
        os.kill(pid, signo)
        return pid


class Home:
    """A loop and a Spawner for the groups of a whole file: starting a zygote takes a while."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.loop = loop or asyncio.new_event_loop()
        self.spawner = Spawner(preload=(RANK_MODULE,), log=lambda level, text: None)
        self.loop.run_until_complete(self.spawner.start())

    def close(self) -> None:
        """End everything."""
        self.loop.run_until_complete(self.spawner.stop())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()


_homes: list[Home] = []


@contextlib.contextmanager
def at_home() -> Iterator[None]:
    """Have groups run in one loop, until the end."""
    home = Home()
    _homes.append(home)
    try:
        yield
    finally:
        _homes.remove(home)
        home.close()


def run_group(
    test: Callable[[Group], Awaitable[None]],
    engine: str = "Counting",
    size: int = 2,
    *,
    is_started: bool = True,
    home: Home | None = None,
    **plan: Any,
) -> None:
    """Run `test(group)`; `options` and what GroupPlan takes are for the group.

    Afterwards the group is closed, and no process of its is left.
    """
    options = plan.pop("options", {})
    where = home or _homes[-1]

    async def main() -> None:
        group = Group(where.spawner, engine, size, options, **plan)
        if is_started:
            await group.group.start()
        try:
            await asyncio.wait_for(test(group), PATIENCE_S)
        finally:
            await asyncio.wait_for(group.group.close(), PATIENCE_S)
        assert where.spawner.stats().children == 0

    where.loop.run_until_complete(main())


def journal(folder: Path, rank: int) -> list[str]:
    """Return what a rank was told, in order."""
    return (folder / str(rank)).read_text().splitlines()
