# SPDX-License-Identifier: Apache-2.0
"""The supervisor for synchronous apps: its loop runs in a thread, its methods wait.

    any thread ── infer ──► run_coroutine_threadsafe ──► the loop's thread (Supervisor)

Safe to call from any number of threads. Forgotten, it is stopped when the interpreter exits. In a
forked child it is not running: threads do not fork, and what there is belongs to the parent.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy.typing as npt

from actorserve.actors.embedding import Outputs
from actorserve.actors.supervisor import Supervisor, SupervisorStats
from actorserve.actors.sync_stream import SyncStream
from actorserve.config import Settings
from actorserve.errors import Unavailable
from actorserve.forking import sever_after_fork
from actorserve.state.metrics import Family
from actorserve.state.statistics import ModelStatistics
from actorserve.triton.inference import IndexEntry, Parameter

T = TypeVar("T")


class SyncSupervisor:
    """A model server that is used without asyncio.

    >>> with SyncSupervisor("repo/") as server:
    ...     outputs = server.infer("add_sub", {"INPUT0": a, "INPUT1": b})

    Arguments, results and errors are those of Supervisor.
    """

    def __init__(
        self,
        repository: str | Path | Sequence[str | Path],
        settings: Settings | None = None,
    ) -> None:
        self._server = Supervisor(repository, settings)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._waits: set[concurrent.futures.Future[Any]] = set()

    # --- life ------------------------------------------------------------------------------------

    def __enter__(self) -> SyncSupervisor:
        """Start; models that fail to load are logged, see `failures`."""
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop, waiting for accepted requests as long as the settings allow."""
        self.stop()

    def start(self) -> None:
        """Start the loop's thread and the server; returns when each model is ready or failed."""
        with self._lock:
            if self._loop is not None:
                raise Unavailable("the server is running already")
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._run,
                args=(self._loop, self._waits),
                name="actorserve-supervisor",
                daemon=True,
            )
            self._thread.start()
            atexit.register(self.stop)
            sever_after_fork(self)
        try:
            self._wait(self._server.start())
        except BaseException:
            self.stop(grace_s=0)
            raise

    def stop(self, grace_s: float | None = None) -> None:
        """Refuse new requests, let accepted ones end for `grace_s`, end everything. Idempotent."""
        with self._lock:
            loop, thread = self._loop, self._thread
            if loop is None or thread is None:
                return
            atexit.unregister(self.stop)
            try:
                asyncio.run_coroutine_threadsafe(self._server.stop(grace_s), loop).result()
            finally:
                self._loop = self._thread = None
                loop.call_soon_threadsafe(loop.stop)
                thread.join()

    def sever(self) -> None:
        """Run nothing, in a child that the host forked; the lock may be held there for ever."""
        self._lock = threading.Lock()
        self._loop = self._thread = None
        atexit.unregister(self.stop)

    @staticmethod
    def _run(loop: asyncio.AbstractEventLoop, waits: set[concurrent.futures.Future[Any]]) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
        finally:
            loop.close()
            for future in list(waits):  # came too late for the loop's last turn
                future.cancel()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop and wait for it; an interrupted wait cancels it."""
        loop = self._loop
        if loop is None:
            work.close()
            raise Unavailable("the server is not running")
        try:
            future = asyncio.run_coroutine_threadsafe(work, loop)
        except RuntimeError:  # it was stopped, and the loop closed, since the look above
            work.close()
            raise Unavailable("the server was stopped") from None
        self._waits.add(future)
        future.add_done_callback(self._waits.discard)
        if loop.is_closed():  # nobody runs it any more, nor cancels it
            future.cancel()
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            if inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
                work.close()
            raise Unavailable("the server was stopped") from None
        except BaseException:
            future.cancel()
            raise

    # --- inference -------------------------------------------------------------------------------

    def infer(
        self,
        model: str,
        inputs: Mapping[str, npt.ArrayLike],
        *,
        version: str = "",
        outputs: Sequence[str] = (),
        timeout_s: float | None = None,
        request_id: str = "",
        priority: int = 0,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> Outputs:
        """Run one inference and return the outputs by name; see Supervisor.infer."""
        return self._wait(
            self._server.infer(
                model,
                inputs,
                version=version,
                outputs=outputs,
                timeout_s=timeout_s,
                request_id=request_id,
                priority=priority,
                parameters=parameters,
            )
        )

    def stream(
        self,
        model: str,
        inputs: Mapping[str, npt.ArrayLike],
        *,
        version: str = "",
        outputs: Sequence[str] = (),
        timeout_s: float | None = None,
        request_id: str = "",
        priority: int = 0,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> Iterator[Outputs]:
        """Yield the responses to one request as they come; see Supervisor.stream."""
        loop = self._loop
        if loop is None:
            raise Unavailable("the server is not running")
        responses = SyncStream(
            loop,
            self._server.stream(
                model,
                inputs,
                version=version,
                outputs=outputs,
                timeout_s=timeout_s,
                request_id=request_id,
                priority=priority,
                parameters=parameters,
            ),
            self._waits,
        )
        try:
            while True:
                response = responses.next()
                if response is None:
                    return
                yield response
        except (concurrent.futures.CancelledError, RuntimeError):
            if self._loop is loop:
                raise
            raise Unavailable("the server was stopped") from None
        finally:
            responses.close()

    # --- models ----------------------------------------------------------------------------------

    def load(
        self, name: str, *, config: str = "", files: Mapping[str, bytes] | None = None
    ) -> None:
        """Load or reload a model."""
        self._wait(self._server.load(name, config=config, files=files))

    def unload(self, name: str, *, unload_dependents: bool = False) -> None:
        """Unload a model; requests in flight end first."""
        self._wait(self._server.unload(name, unload_dependents=unload_dependents))

    def repository_index(self, *, ready: bool = False) -> list[IndexEntry]:
        """Return every model of the repositories and how it stands, or only what is ready."""
        return self._wait(self._server.repository_index(ready=ready))

    def is_ready(self) -> bool:
        """Whether every model that should serve does so with all its instances."""
        return self._wait(_on_loop(self._server.is_ready))

    def is_model_ready(self, name: str, version: str = "") -> bool:
        """Whether every instance of a version is initialized now."""
        return self._wait(_on_loop(lambda: self._server.is_model_ready(name, version)))

    def check_ready(self) -> bool:
        """Whether that is so and the models' own `is_ready` say so; see Supervisor.check_ready."""
        return self._wait(self._server.check_ready())

    def check_model_ready(self, name: str, version: str = "") -> bool:
        """Whether a version is ready, and its `is_ready` says so; see Supervisor."""
        return self._wait(self._server.check_model_ready(name, version))

    @property
    def failures(self) -> dict[str, str]:
        """The models that should serve and do not, with the reason."""
        return self._wait(_on_loop(lambda: self._server.failures))

    def model_statistics(self, name: str = "", version: str = "") -> list[ModelStatistics]:
        """Return what was counted of all versions that serve, or of those that are named."""
        return self._wait(_on_loop(lambda: self._server.model_statistics(name, version)))

    def metrics(self) -> list[Family]:
        """Return all metrics; `frontend.metrics_text.exposition` writes them down."""
        return self._wait(_on_loop(self._server.metrics))

    def stats(self) -> SupervisorStats:
        """Return where the server stands."""
        return self._wait(_on_loop(self._server.stats))


async def _on_loop(look: Callable[[], T]) -> T:
    return look()
