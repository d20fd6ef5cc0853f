# SPDX-License-Identifier: Apache-2.0
"""What an executor does with its engine itself: whether it serves, its calls, its adapters."""

from __future__ import annotations

from typing import Any

from actorserve.actors.generation.calls import awaited, result_of
from actorserve.actors.generation.engine import EngineInfo
from actorserve.actors.generation.executor_reading import ExecutorReading
from actorserve.actors.generation.request import LoRARequest
from actorserve.actors.generation.wait import wait_async, wait_here
from actorserve.errors import ActorserveError, WaitTimeout


class ExecutorEngine(ExecutorReading):
    """The methods of GenerationExecutor that are about its engine, and no request."""

    @property
    def info(self) -> EngineInfo | None:
        """What the engine says of itself; None while it loads."""
        return self._registry.info

    @property
    def error(self) -> ActorserveError | None:
        """Why nothing is served now; None if something is."""
        return self._registry.error

    def check_health(self) -> None:
        """Raise the error of a dead engine."""
        if self._registry.error is not None:
            raise self._registry.error.with_traceback(None)

    def wait_ready(self, timeout: float | None = None) -> EngineInfo:
        """Wait in this thread until the engine has loaded; its error if that fails."""
        limit_s = self._load_limit_s() if timeout is None else timeout
        if not wait_here(self._registry.ready, limit_s):
            raise WaitTimeout(f"the engine has not loaded in {limit_s:g} s")
        return self._ready_info()

    async def aready(self, timeout: float | None = None) -> EngineInfo:
        """As `wait_ready`, in an event loop."""
        limit_s = self._load_limit_s() if timeout is None else timeout
        if not await wait_async(self._registry.ready, limit_s):
            raise WaitTimeout(f"the engine has not loaded in {limit_s:g} s")
        return self._ready_info()

    def _load_limit_s(self) -> float | None:
        """How long to wait for the engine; who judges the loading itself says more, and later."""
        return self.config.load_timeout_s or None

    def _ready_info(self) -> EngineInfo:
        self.check_health()
        info = self._registry.info
        assert info is not None  # ready, and not dead
        return info

    def call(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        """Call a method of the engine on every rank and return rank 0's result.

        It takes effect on all ranks or on none. Raises RequestError with what the engine says.
        """
        return result_of(self._calls.start(method, list(args), timeout))

    async def acall(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        """As `call`, in an event loop."""
        return await awaited(self._calls.start(method, list(args), timeout))

    def load_adapter(self, lora: LoRARequest, timeout: float | None = None) -> None:
        """Load an adapter before requests ask for it."""
        result_of(self._adapters.load(lora), timeout)

    async def aload_adapter(self, lora: LoRARequest) -> None:
        """As `load_adapter`, in an event loop."""
        await awaited(self._adapters.load(lora))

    def unload_adapter(self, number: int, timeout: float | None = None) -> None:
        """Unload an adapter; requests may load another under its number then."""
        result_of(self._adapters.unload(number), timeout)

    async def aunload_adapter(self, number: int) -> None:
        """As `unload_adapter`, in an event loop."""
        await awaited(self._adapters.unload(number))

    @property
    def adapters(self) -> list[LoRARequest]:
        """The adapters that are loaded."""
        return self._adapters.loaded
