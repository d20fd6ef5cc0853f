# SPDX-License-Identifier: Apache-2.0
"""A model by name: its versions, and its way through load, reload and unload.

A load brings the new versions up beside the old ones and only then takes the old ones down; one
that fails leaves what served as it was.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from actorserve.actors.loader import plan_model
from actorserve.actors.model_version import ModelVersion, VersionState, VersionStats
from actorserve.actors.node import Node
from actorserve.actors.repository import ModelEntry, Repository
from actorserve.errors import ActorserveError, NotFound, Unavailable

_log = logging.getLogger("actorserve")


class ModelStats(msgspec.Struct, frozen=True):
    """Where a model stands; `reason` says why the last load failed, if it did."""

    name: str
    state: str
    reason: str
    versions: tuple[VersionStats, ...]


class Model:
    """One model of the repository, loaded or not."""

    def __init__(self, node: Node, name: str) -> None:
        self._node = node
        self.name = name
        self.should_serve = False
        self.reason = ""
        self._versions: dict[int, ModelVersion] = {}  # the highest first
        self._loading: dict[int, ModelVersion] = {}
        self._retiring: list[ModelVersion] = []  # replaced by a reload and not gone yet
        self._lock = asyncio.Lock()

    # --- life ------------------------------------------------------------------------------------

    async def load(self, repository: Repository, entry: ModelEntry) -> None:
        """Load or reload; what went wrong is logged and stands in `reason` afterwards."""
        async with self._lock:
            try:
                await self._load(repository, entry)
                self.reason = ""
            except ActorserveError as error:
                self.fail(error.message)

    async def _load(self, repository: Repository, entry: ModelEntry) -> None:
        loop = asyncio.get_running_loop()
        source = await loop.run_in_executor(None, repository.read, entry)
        plan = await plan_model(self._node, source)
        plans = sorted(plan.versions, key=lambda each: -int(each.info.version))
        fresh = {int(each.info.version): ModelVersion(self._node, each) for each in plans}
        self._loading = fresh
        try:
            await _load_all(list(fresh.values()))
        finally:
            self._loading = {}
        old, self._versions = list(self._versions.values()), fresh
        self._retiring += old
        for version in fresh.values():
            _log.info("successfully loaded '%s' version %s", self.name, version.info.version)
        await _retire(old)
        self._retiring = [each for each in self._retiring if each not in old]

    def _serving(self) -> list[ModelVersion]:
        """Return the versions that may have requests."""
        return [*self._versions.values(), *self._retiring]

    def fail(self, reason: str) -> None:
        """Note why the model cannot be loaded."""
        self.reason = reason
        _log.error("failed to load '%s': %s", self.name, reason)

    async def unload(self, *, is_quick: bool = False) -> None:
        """Take every version down; requests in flight end first, unless it has to be quick."""
        loading = [each.unload(is_quick=True) for each in self._loading.values()]
        await asyncio.gather(*loading, _retire(self._serving(), is_quick=is_quick))

    async def drained(self) -> None:
        """Wait until no accepted request is without its end."""
        await asyncio.gather(*[each.drained() for each in self._serving()])

    @property
    def pending(self) -> int:
        """How many accepted requests have no end yet."""
        return sum(each.pending for each in self._serving())

    def fail_all(self, error: Unavailable) -> None:
        """End every accepted request now."""
        for version in self._serving():
            version.fail_all(error)

    # --- looks -----------------------------------------------------------------------------------

    def version(self, text: str) -> ModelVersion:
        """Return the version that a request means; an empty text means the highest that serves.

        Raises NotFound or Unavailable, with the texts that clients match on.
        """
        if text in ("", "-1"):
            for version in self._versions.values():
                if version.state is VersionState.READY:
                    return version
            raise NotFound(f"Request for unknown model: '{self.name}' has no available versions")
        named = self._versions.get(int(text)) if text.isdecimal() else None
        if named is None:
            raise NotFound(f"Request for unknown model: '{self.name}' version {text} is not found")
        if named.state is not VersionState.READY:
            raise Unavailable(
                f"Request for unknown model: '{self.name}' version {text} is not at ready state"
            )
        return named

    @property
    def is_ready(self) -> bool:
        """Whether every version serves with all instances, and there is one."""
        return bool(self._versions) and all(each.is_ready for each in self._versions.values())

    def versions(self) -> list[ModelVersion]:
        """Return the versions that serve or have served, lowest first."""
        return [self._versions[number] for number in sorted(self._versions)]

    def serving(self) -> list[ModelVersion]:
        """Return the versions that may have requests, those that are being retired too."""
        return self._serving()

    def watch(self, now_s: float) -> None:
        """Look after hanging stubs, those of a load in progress too."""
        for version in (*self._serving(), *self._loading.values()):
            version.watch(now_s)

    def pump(self) -> None:
        """Read what stubs have written and not yet rung for."""
        for version in self._serving():
            version.pump()

    def stats(self) -> ModelStats:
        """Return where it stands."""
        versions = self._loading or self._versions
        if self._loading:
            state = VersionState.LOADING
        elif any(each.state is VersionState.READY for each in self._versions.values()):
            state = VersionState.READY
        else:
            state = VersionState.UNAVAILABLE
        return ModelStats(
            self.name,
            state.value,
            self.reason,
            tuple(versions[number].stats() for number in sorted(versions)),
        )


async def _load_all(versions: list[ModelVersion]) -> None:
    """Load versions side by side; where one fails, none stays. Raises the first error."""
    results = await asyncio.gather(*[each.load() for each in versions], return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:
        await asyncio.gather(*[each.unload(is_quick=True) for each in versions])
        raise errors[0]


async def _retire(versions: list[ModelVersion], *, is_quick: bool = False) -> None:
    """Take versions down: they refuse new requests, and those in flight end first."""
    if not is_quick:
        for version in versions:
            version.refuse()
        await asyncio.gather(*[each.drained() for each in versions])
    await asyncio.gather(*[each.unload(is_quick=is_quick) for each in versions])
