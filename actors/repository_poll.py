# SPDX-License-Identifier: Apache-2.0
"""Poll mode: what is added to the repository, changed or deleted there is loaded or unloaded.

    look (a thread) ─► due (pure) ─► ModelControl.begin / unload

A change counts when two looks in a row have seen the same: a model that is still being written is
left alone until it is quiet. While a look hangs in a dead file system there is no other, and
nothing else waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping

from actorserve.actors.disk import on_disk
from actorserve.actors.fingerprint import Stamp
from actorserve.actors.model_control import ModelControl
from actorserve.actors.repository import Repository
from actorserve.errors import ActorserveError

Look = Mapping[str, dict[str, Stamp] | None]
"""Each model's directory as it is, by name; None for one that cannot be loaded."""

SLOW_LOOK_S = 30.0

_log = logging.getLogger("actorserve")


def due(known: Look, last: Look, now: Look) -> tuple[list[str], list[str]]:
    """Return which models to load and which to unload, given three looks.

    `known` is what was acted on, `last` the look before this one.
    """
    load = [
        name
        for name, seen in now.items()
        if not _same(known, name, seen) and _same(last, name, seen)
    ]
    unload = [name for name in known if name not in now and name not in last]
    return load, unload


def _same(look: Look, name: str, seen: dict[str, Stamp] | None) -> bool:
    return name in look and look[name] == seen


class RepositoryPoll:
    """See the module's head. Belongs to the supervisor's loop."""

    def __init__(self, repository: Repository, control: ModelControl, interval_s: float) -> None:
        self._repository = repository
        self._control = control
        self._interval_s = interval_s
        self._known: Look = {}
        self._last: Look = {}

    async def first_look(self) -> None:
        """Note how the repository is before everything in it is loaded."""
        self._known = self._last = await self._look() or {}

    async def run(self) -> None:
        """Look again and again, for ever."""
        while True:
            await _pause(self._interval_s)
            try:
                now = await self._look()
                if now is not None:
                    self._act(now)
            except Exception:
                _log.exception("polling the repository failed once; it goes on")

    async def _look(self) -> Look | None:
        looking = asyncio.ensure_future(on_disk(self._repository.look))
        done, _ = await asyncio.wait([looking], timeout=max(SLOW_LOOK_S, self._interval_s))
        if not done:
            _log.warning("the model repository does not answer; its models go on as they are")
        return await looking

    def _act(self, now: Look) -> None:
        load, unload = due(self._known, self._last, now)
        known = {name: seen for name, seen in self._known.items() if name not in unload}
        for name in load:
            known[name] = now[name]
            _log.info("'%s' has changed in the repository and is loaded", name)
            with contextlib.suppress(ActorserveError):
                self._control.begin(name)
        for name in unload:
            _log.info("'%s' is gone from the repository and is unloaded", name)
            self._control.begin_unload(name)
        self._known, self._last = known, now


async def _pause(delay_s: float) -> None:
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    await asyncio.wait([never], timeout=delay_s)
