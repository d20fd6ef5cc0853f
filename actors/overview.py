# SPDX-License-Identifier: Apache-2.0
"""What a supervisor tells: which models serve, who is ready, what was counted. Changes nothing.

Half of the door that front ends are handed (triton.inference.Door); supervisor.py has the other
half, which takes requests and loads models. Everything is computed from real state when asked.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

import msgspec

from actorserve.actors.model import Model, ModelStats
from actorserve.actors.model_version import ModelVersion, VersionState
from actorserve.actors.node import Node
from actorserve.clock import monotonic_s
from actorserve.config import Settings
from actorserve.errors import ActorserveError, InvalidArgument, NotFound, Unavailable
from actorserve.runtime.device_desk import BrokerStats
from actorserve.runtime.exchange import ExchangeStats
from actorserve.state.metrics import Family
from actorserve.state.statistics import ModelStatistics
from actorserve.triton.inference import ModelInfo

READINESS_AGE_S = 1.0
"""How old a model's word may be for the readiness of the server: several probers cost one check."""


class SupervisorStats(msgspec.Struct, frozen=True):
    """Where the server stands; `devices` is None while no driver is in use."""

    is_live: bool
    is_ready: bool
    models: tuple[ModelStats, ...]
    exchange: ExchangeStats
    devices: BrokerStats | None = None


class Overview(ABC):
    """What a supervisor offers to those who only look; it sets the attributes."""

    settings: Settings
    _models: dict[str, Model]
    _node_or_none: Node | None
    _is_stopping: bool
    _is_loaded: bool
    _is_loading: bool

    @property
    @abstractmethod
    def _node(self) -> Node:
        """Return what all actors share. Raises Unavailable where nothing runs."""

    # --- models ----------------------------------------------------------------------------------

    def _version(self, name: str, version: str) -> ModelVersion:
        """Return the version that serves a request. Raises NotFound or Unavailable.

        While the server loads its first models, what is not there may come yet.
        """
        try:
            model = self._models.get(name)
            if model is None:
                raise NotFound(f"Request for unknown model: '{name}' is not found")
            return model.version(version)
        except NotFound:
            if not self._is_loading:
                raise
        raise Unavailable(f"model '{name}' is not ready: the server is loading its models", 1.0)

    def model_info(self, name: str, version: str = "") -> ModelInfo:
        """Describe a version that is loaded. Raises NotFound or Unavailable."""
        return self._version(name, version).info

    def served_models(self) -> list[ModelInfo]:
        """Describe every version that serves now."""
        return [
            version.info
            for model in self._models.values()
            for version in model.versions()
            if version.is_ready
        ]

    def model_config(self, name: str, version: str = "") -> bytes:
        """Return a model's configuration as JSON. Raises as model_info."""
        return self._version(name, version).config_json

    def is_model_ready(self, name: str, version: str = "") -> bool:
        """Whether every instance of the version is initialized now; see check_model_ready."""
        try:
            return not self._is_stopping and self._version(name, version).is_ready
        except ActorserveError:
            return False

    async def check_model_ready(self, name: str, version: str = "") -> bool:
        """Whether the version is ready, and the `is_ready` of every instance says so now.

        Probes that come at the same time share a check; one that takes more than 5 s says no.
        """
        try:
            return await self._version(name, version).check_ready() and not self._is_stopping
        except ActorserveError:
            return False

    def statistics(self, name: str = "", version: str = "") -> bytes:
        """Return what was counted as JSON; see triton.inference.Door."""
        return msgspec.json.encode({"model_stats": self.model_statistics(name, version)})

    def model_statistics(self, name: str = "", version: str = "") -> list[ModelStatistics]:
        """Return what was counted of all versions that serve, or of those that are named.

        Counts go on over restarts and reloads. Raises InvalidArgument for what does not serve.
        """
        self._pump()
        models = [self._models[name]] if name in self._models else []
        found = [
            each.statistics()
            for model in (models if name else self._models.values())
            for each in model.versions()
            if each.state is VersionState.READY and version in ("", each.info.version)
        ]
        if name and not found:
            which = f"requested model '{name}'" + (f" version {version}" if version else "")
            raise InvalidArgument(f"{which} is not available")
        return found

    def metrics(self) -> list[Family]:
        """Return all metrics; `frontend.metrics_text.exposition` writes them down."""
        node = self._node
        self._pump()
        views = [each.view() for model in self._models.values() for each in model.shown()]
        return node.metrics.families(views, node.exchange.stats(), monotonic_s())

    def _pump(self) -> None:
        """Read what stubs have written and not yet rung for."""
        for model in self._models.values():
            model.pump()

    # --- the server ------------------------------------------------------------------------------

    async def status(self) -> bytes:
        """Return `stats` as JSON; ready is what `check_ready` says, as for probes."""
        is_ready = await self.check_ready()
        return msgspec.json.encode(msgspec.structs.replace(self.stats(), is_ready=is_ready))

    def is_live(self) -> bool:
        """Whether the loop turns: who asks on the loop has the answer."""
        return self._node_or_none is not None

    def is_ready(self) -> bool:
        """Whether every model that should serve does so with all its instances.

        Without strict readiness: whether the first loads are over, however they ended. The models'
        own `is_ready` are not asked; see check_ready.
        """
        if self._is_stopping or self._node_or_none is None:
            return False
        if not self.settings.strict_readiness:
            return self._is_loaded
        models = self._models.values()
        return self._is_loaded and all(m.is_ready for m in models if m.should_serve)

    async def check_ready(self) -> bool:
        """Whether it `is_ready`, and the models' own `is_ready` say so, at most a second ago.

        Without strict readiness no model is asked.
        """
        if not self.is_ready() or not self.settings.strict_readiness:
            return self.is_ready()
        models = [model for model in self._models.values() if model.should_serve]
        said = await asyncio.gather(*[model.check_ready(READINESS_AGE_S) for model in models])
        return all(said) and self.is_ready()

    def stats(self) -> SupervisorStats:
        """Return where the server stands, from real state."""
        node = self._node
        self._pump()
        return SupervisorStats(
            self.is_live(),
            self.is_ready(),
            tuple(model.stats() for model in self._models.values()),
            node.exchange.stats(),
            node.exchange.devices.stats() if node.exchange.devices is not None else None,
        )
