# SPDX-License-Identifier: Apache-2.0
"""A model that `actorserve chat` loads for itself: stubs of this process, and no port."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from actorserve.actors.repository import Repository
from actorserve.actors.supervisor import Supervisor
from actorserve.config import Settings
from actorserve.errors import ActorserveError, Cancelled, ConfigError, InternalError, Unavailable
from actorserve.frontend.chat_source import Cancel, Manner, Message, Tell, choose_model
from actorserve.triton.generation_tensors import GENERATION

_STOP_S = 5.0

T = TypeVar("T")


class OwnServer:
    """A model of a repository, loaded for this conversation and for nobody else.

    Raises ConfigError or NotFound where the repository has no such model, and Unavailable where
    it does not load.
    """

    def __init__(self, repositories: Sequence[str], model: str) -> None:
        repository = Repository(repositories)
        repository.check()
        where = " and ".join(str(path) for path in repositories)
        self.model = choose_model(model, _generating(repository, model), where)
        settings = Settings(model_control_mode="explicit", load_model=(self.model,))
        self._server = Supervisor([Path(path) for path in repositories], settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="chat server", daemon=True
        )
        self._thread.start()
        try:
            self._wait(self._server.start())
            for reason in self._server.failures.values():
                raise Unavailable(reason)
        except BaseException:
            self.close()
            raise

    def ask(self, messages: Sequence[Message], manner: Manner, tell: Tell) -> Cancel:
        """Begin an answer; `tell` hears it."""
        inputs: dict[str, Any] = {
            "messages": [msgspec.json.encode(messages)],
            "stream": np.array([True]),
        }
        if manner.max_tokens is not None:
            inputs["max_tokens"] = np.array([manner.max_tokens], np.int32)
        if manner.temperature is not None:
            inputs["temperature"] = np.array([manner.temperature], np.float32)
        future = asyncio.run_coroutine_threadsafe(self._tell(inputs, tell), self._loop)

        def cancel() -> None:
            future.cancel()

        return cancel

    async def _tell(self, inputs: dict[str, Any], tell: Tell) -> None:
        try:
            async with contextlib.aclosing(self._server.stream(self.model, inputs)) as answer:
                async for outputs in answer:
                    text: bytes = outputs["text_output"][0]
                    if text:
                        tell(text.decode(errors="replace"))
        except asyncio.CancelledError:
            tell(Cancelled("the answer was cancelled"))
            raise
        except ActorserveError as error:
            tell(error)
        except Exception as error:
            tell(InternalError(f"the answer failed: {error!r}"))
        else:
            tell(None)

    def close(self) -> None:
        """End the model and its processes."""
        try:
            self._wait(self._server.stop(_STOP_S))
            self._wait(_others_end())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop and wait for it; an interrupted wait cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


async def _others_end() -> None:
    """Wait for what still runs in this loop: a start that was interrupted has its own end."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others, timeout=_STOP_S)


def _generating(repository: Repository, wanted: str) -> list[str]:
    """Return the models that generate text. Raises ConfigError for a wanted one that is broken."""
    found = []
    for name, entry in repository.scan().items():
        try:
            is_one = repository.read(entry).config.backend == GENERATION
        except ConfigError:
            if name == wanted:
                raise
            continue
        if is_one:
            found.append(name)
    return found
