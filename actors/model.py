# SPDX-License-Identifier: Apache-2.0
"""A model by name: its versions, and its way through load, reload and unload.

A load brings the new versions up beside the old ones and only then takes the old ones down; one
that fails leaves what served as it was. Where only the number of instances changes, or which
versions serve, what need not change is not touched.
"""

from __future__ import annotations

import asyncio
import logging
import shutil

import msgspec

from actorserve.actors.disk import on_disk
from actorserve.actors.fingerprint import Stamp, of_version, outside_versions
from actorserve.actors.instance import Instance
from actorserve.actors.load_error import VersionsFailed, public_error
from actorserve.actors.loader import ModelPlan, plan_model
from actorserve.actors.model_version import ModelVersion, VersionState, VersionStats
from actorserve.actors.node import Node
from actorserve.actors.repository import CONFIG_FILE, ModelSource
from actorserve.actors.version_plan import VersionPlan
from actorserve.errors import ActorserveError, BootError, NotFound, Unavailable
from actorserve.triton.inference import IndexEntry
from actorserve.triton.model_config import ModelConfig

_log = logging.getLogger("actorserve")


class ModelStats(msgspec.Struct, frozen=True):
    """Where a model stands; `reason` says why the last load failed, if it did."""

    name: str
    state: str
    reason: str
    versions: tuple[VersionStats, ...]


class _Served(msgspec.Struct, frozen=True):
    """What the versions that serve were loaded from."""

    source: ModelSource
    config: ModelConfig


class Model:
    """One model, of the repository or not, loaded or not.

    Whoever loads or unloads it holds `turn` meanwhile.
    """

    def __init__(self, node: Node, name: str) -> None:
        self._node = node
        self.name = name
        self.should_serve = False
        self.reason = ""
        self.turn = asyncio.Lock()
        self._served: _Served | None = None
        self._versions: dict[int, ModelVersion] = {}  # the highest first
        self._loading: dict[int, ModelVersion] = {}
        self._failed: dict[str, str] = {}  # the versions of a load that failed, with reasons
        self._is_loading = False
        self._retiring: list[ModelVersion] = []  # replaced or unloaded, and not gone yet
        self._retirements: set[asyncio.Task[None]] = set()

    # --- life ------------------------------------------------------------------------------------

    async def load(self, source: ModelSource) -> None:
        """Load or reload; returns when the new versions serve. See `gone` for the old ones.

        Raises what `public_error` makes of what went wrong; it is logged and stands in `reason`.
        """
        self._is_loading = True
        try:
            plan = await plan_model(self._node, source)
            plans = sorted(plan.versions, key=lambda each: -int(each.info.version))
            by_number = {int(each.info.version): each for each in plans}
            await self._bring_up(by_number, self._kept(source, plan, by_number))
        except ActorserveError as error:
            if source.entry.is_private:
                await _remove(source)
            raise self.fail(error) from None
        except BaseException:
            if source.entry.is_private:
                await _remove(source)
            raise
        finally:
            self._is_loading = False
        self._served = _Served(source, plan.config)
        self.reason, self._failed = "", {}

    def fail(self, error: ActorserveError) -> ActorserveError:
        """Note why the model cannot be loaded; returns what to tell who wanted it."""
        self.reason = error.message
        self._failed = dict(error.reasons) if isinstance(error, VersionsFailed) else {}
        _log.error("failed to load '%s': %s", self.name, self.reason)
        return public_error(self.name, error)

    def _kept(
        self, source: ModelSource, plan: ModelPlan, plans: dict[int, VersionPlan]
    ) -> dict[int, ModelVersion]:
        """Return the versions that can go on as they are, but for the number of instances.

        None of them where nothing has changed at all: somebody wants a new start then.
        """
        served = self._served
        if served is None or _identity(served.source, served.config) != _identity(
            source, plan.config
        ):
            return {}
        old, new = served.source.stamps, source.stamps
        kept = {
            number: version
            for number, version in self._versions.items()
            if number in plans
            and of_version(old, number) == of_version(new, number)
            and version.can_become(plans[number])
        }
        is_same = (
            served.config == plan.config and kept.keys() == plans.keys() == self._versions.keys()
        )
        return {} if is_same else kept

    async def _bring_up(self, plans: dict[int, VersionPlan], kept: dict[int, ModelVersion]) -> None:
        """Start what is new, and only then let go of what is old. Raises VersionsFailed."""
        fresh = {
            number: ModelVersion(self._node, plan)
            for number, plan in plans.items()
            if number not in kept
        }
        self._loading = fresh
        try:
            grown = await _start_all(fresh, kept, plans)
        finally:
            self._loading = {}
        for number, added in grown.items():
            kept[number].adopt(plans[number], added)
        old = [each for number, each in self._versions.items() if number not in kept]
        private = self._private_source()
        self._versions = {number: kept.get(number) or fresh[number] for number in plans}
        for number in fresh:
            _log.info("successfully loaded '%s' version %d", self.name, number)
        self._retire(old, private)

    def _private_source(self) -> ModelSource | None:
        served = self._served
        return served.source if served is not None and served.source.entry.is_private else None

    def begin_unload(self) -> None:
        """Take no new requests, and let those that were accepted end. See `gone`."""
        private, self._served = self._private_source(), None
        self.reason, self._failed = "", {}
        self._retire(list(self._versions.values()), private)

    def _retire(self, versions: list[ModelVersion], private: ModelSource | None) -> None:
        for version in versions:
            version.refuse()
        self._retiring += versions
        task = self._node.run(self._take_down(versions, private))
        self._retirements.add(task)
        task.add_done_callback(self._retirements.discard)

    async def _take_down(self, versions: list[ModelVersion], private: ModelSource | None) -> None:
        try:
            await _retire(versions)
        finally:
            self._retiring = [each for each in self._retiring if each not in versions]
            if private is not None:
                await _remove(private)

    async def gone(self) -> None:
        """Wait until nothing is left of versions that were replaced or unloaded."""
        if self._retirements:
            await asyncio.wait(list(self._retirements))

    def _serving(self) -> list[ModelVersion]:
        """Return the versions that may have requests."""
        return list(dict.fromkeys([*self._versions.values(), *self._retiring]))

    async def unload(self, *, is_quick: bool = False) -> None:
        """End every version with the server; requests in flight end first, unless it is quick."""
        loading = [each.unload(is_quick=True) for each in self._loading.values()]
        await asyncio.gather(*loading, _retire(self._serving(), is_quick=is_quick))
        await self.gone()

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

    async def check_ready(self, max_age_s: float = 0.0) -> bool:
        """Whether it is ready, and what it serves says so, at most `max_age_s` ago."""
        versions = list(self._versions.values())
        said = await asyncio.gather(*[each.check_ready(max_age_s) for each in versions])
        return all(said) and self.is_ready

    def versions(self) -> list[ModelVersion]:
        """Return the versions that serve or have served, lowest first."""
        return [self._versions[number] for number in sorted(self._versions)]

    def serving(self) -> list[ModelVersion]:
        """Return the versions that may have requests, those that are being retired too."""
        return self._serving()

    def shown(self) -> list[ModelVersion]:
        """Return the versions that metrics are shown of: all that have a stub, the oldest first."""
        live = [each for each in self._serving() if each.state is not VersionState.UNAVAILABLE]
        return [*reversed(live), *self._loading.values()]

    def watch(self, now_s: float) -> None:
        """Look after hanging stubs, those of a load in progress too."""
        for version in (*self._serving(), *self._loading.values()):
            version.watch(now_s)

    def pump(self) -> None:
        """Read what stubs have written and not yet rung for."""
        for version in self._serving():
            version.pump()

    @property
    def has_versions(self) -> bool:
        """Whether it has been loaded, or is being."""
        return bool(self._versions or self._loading or self._is_loading)

    def index(self) -> list[IndexEntry]:
        """Return how its versions stand, in the repository index's terms, the lowest first."""
        states = dict.fromkeys(self._loading, (VersionState.LOADING.value, ""))
        for failed, reason in self._failed.items():
            states[int(failed)] = (VersionState.UNAVAILABLE.value, reason)
        for number, version in self._versions.items():
            if number not in states or version.state is VersionState.READY:
                reason = self.reason if version.state is VersionState.READY else version.reason
                states[number] = (version.state.value, reason)
        if not states and (self._is_loading or self.reason):
            state = VersionState.LOADING if self._is_loading else VersionState.UNAVAILABLE
            return [IndexEntry(self.name, "", state.value, self.reason)]
        return [IndexEntry(self.name, str(number), *states[number]) for number in sorted(states)]

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


def _identity(source: ModelSource, config: ModelConfig) -> tuple[object, ...]:
    """Return what has to be the same for a version to stay, whatever else has changed."""
    groups = [msgspec.structs.replace(group, count=0) for group in config.instance_group]
    rest = msgspec.structs.replace(config, instance_group=groups, version_policy=None)
    shared: tuple[tuple[str, Stamp], ...] = outside_versions(source.stamps, config=CONFIG_FILE)
    return (source.entry, rest, shared)


async def _start_all(
    fresh: dict[int, ModelVersion], kept: dict[int, ModelVersion], plans: dict[int, VersionPlan]
) -> dict[int, list[Instance]]:
    """Load versions, and let others grow, side by side; where one fails, nothing new stays.

    Returns the new instances of those that grew. Raises VersionsFailed.
    """
    starting: dict[int, asyncio.Future[list[Instance] | None]] = {
        number: asyncio.ensure_future(version.load()) for number, version in fresh.items()
    }
    for number, version in kept.items():
        starting[number] = asyncio.ensure_future(version.grow(plans[number]))
    try:
        await asyncio.wait(starting.values())
    except asyncio.CancelledError:
        for future in starting.values():
            future.cancel()
        await asyncio.gather(*starting.values(), return_exceptions=True)
        await _end_started(fresh, starting)
        raise
    errors = {number: future.exception() for number, future in starting.items()}
    problems = {number: error for number, error in errors.items() if error is not None}
    if not problems:
        return {number: starting[number].result() or [] for number in kept}
    await _end_started(fresh, starting)
    for error in problems.values():
        if not isinstance(error, BootError):
            raise error
    raise VersionsFailed({str(number): str(error) for number, error in sorted(problems.items())})


async def _end_started(
    fresh: dict[int, ModelVersion],
    starting: dict[int, asyncio.Future[list[Instance] | None]],
) -> None:
    """End what was started for a load that fails."""
    done = [each for each in starting.values() if not each.cancelled() and not each.exception()]
    added = [instance for each in done for instance in each.result() or []]
    await asyncio.gather(
        *[version.unload(is_quick=True) for version in fresh.values()],
        *[instance.stop(is_quick=True) for instance in added],
    )


async def _remove(source: ModelSource) -> None:
    """Remove a model directory that came with a request."""
    await on_disk(lambda: shutil.rmtree(source.entry.path.parent, ignore_errors=True))


async def _retire(versions: list[ModelVersion], *, is_quick: bool = False) -> None:
    """Take versions down: they refuse new requests, and those in flight end first."""
    if not is_quick:
        for version in versions:
            version.refuse()
        await asyncio.gather(*[each.ended() for each in versions])
    await asyncio.gather(*[each.unload(is_quick=is_quick) for each in versions])
