# SPDX-License-Identifier: Apache-2.0
"""The supervisor: loads models, takes requests, restarts what dies, tells the truth about it.

    front ends ──► submit ──► ModelVersion ──► Scheduler ──► Instance ──► stub
    embedding app ► infer ────┘                     ▲            │
                                                    └── restarts ┘

Lives in one asyncio loop (its own, or an embedding app's; also off the main thread). It installs
no signal handlers, reaps no child but its zygote, and never blocks the loop: what may take long
(spawning, growing shared memory, reading a repository) is awaited.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from actorserve.actors.deadlock_watch import DeadlockWatch
from actorserve.actors.disk import on_disk
from actorserve.actors.embedding import Embedding
from actorserve.actors.incarnation import LEVELS
from actorserve.actors.instance import Instance
from actorserve.actors.metrics_settings import parse_metrics_config
from actorserve.actors.model import Model
from actorserve.actors.model_control import ModelControl
from actorserve.actors.node import Node
from actorserve.actors.overview import Overview, SupervisorStats
from actorserve.actors.repository import Repository
from actorserve.actors.repository_poll import RepositoryPoll
from actorserve.actors.response_factory import ResponseFactory
from actorserve.clock import monotonic_s
from actorserve.config import Settings, parse_backend_config
from actorserve.errors import (
    ActorserveError,
    NotFound,
    Unavailable,
)
from actorserve.forking import sever_after_fork
from actorserve.runtime.child import Spawner
from actorserve.runtime.exchange import ArenaSlab
from actorserve.triton.inference import (
    IndexEntry,
    InferRequest,
    InferResponse,
    Slab,
)

WATCH_INTERVAL_S = 1.0
IDLE_ARENA_BYTES = 64 << 20
IDLE_WATCHES = 10
STUB_MODULE = "actorserve.actors.stub"
QUICK_STOP_S = 2.0

_log = logging.getLogger("actorserve")


__all__ = ["Supervisor", "SupervisorStats"]


class Supervisor(Embedding, Overview):
    """The model server, to be embedded or to be served by front ends.

    >>> async with Supervisor("repo/") as server:
    ...     outputs = await server.infer("add_sub", {"INPUT0": a, "INPUT1": b})

    `repository` is one directory or several; `settings` are those of `actorserve start`. The
    methods belong to the loop in which `start` was awaited.
    """

    def __init__(
        self,
        repository: str | Path | Sequence[str | Path],
        settings: Settings | None = None,
    ) -> None:
        paths = [repository] if isinstance(repository, (str, Path)) else list(repository)
        self.settings = settings or Settings()
        self._repository = Repository(paths)
        self._models: dict[str, Model] = {}
        self._node_or_none: Node | None = None
        self._watch_timer: asyncio.TimerHandle | None = None
        self._is_stopping = False
        self._is_loaded = False
        self._is_loading = False
        self._is_opening = False
        self._is_stop_wanted = False
        self._used_bytes: list[int] = []
        self._hurried = asyncio.Event()
        self._control_or_none: ModelControl | None = None
        sever_after_fork(self)

    @property
    def _node(self) -> Node:
        if self._node_or_none is None:
            raise Unavailable("the server is not running")
        return self._node_or_none

    # --- life ------------------------------------------------------------------------------------

    async def __aenter__(self) -> Supervisor:
        """Start; models that fail to load are logged, see `failures`."""
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop, waiting for accepted requests as long as the settings allow."""
        await self.stop()

    async def start(self) -> None:
        """Start the processes and load the models; returns when each is ready or has failed.

        Raises NotFound for a missing repository, ConfigError for settings that make no sense,
        Unavailable when it is stopped meanwhile.
        """
        await self.open()
        try:
            await self.load_models()
        except BaseException:
            # Cancelled, most likely: nobody has to know that there is something to be stopped.
            await self.stop(grace_s=0)
            raise

    async def open(self) -> None:
        """Start without any model: the server is live, and ready only after `load_models`."""
        if self._node_or_none is not None or self._is_opening:
            raise Unavailable("the server is running already")
        self._is_opening = True
        try:
            await self._open()
        finally:
            self._is_opening = False
            is_unwanted, self._is_stop_wanted = self._is_stop_wanted, False
        if is_unwanted:
            await self.stop(grace_s=0)
            raise Unavailable("the server was stopped before it had started")

    async def _open(self) -> None:
        self._repository.check()
        backend, warnings = parse_backend_config(self.settings.backend_config)
        for warning in warnings:
            _log.warning("%s", warning)
        parse_metrics_config(self.settings.metrics_config)
        spawner = Spawner(preload=(STUB_MODULE,), log=_log_process)
        try:
            await spawner.start()
        except BaseException:
            await spawner.stop()
            raise
        loop = asyncio.get_running_loop()
        executor = ThreadPoolExecutor(2, "actorserve-memory")
        self._node_or_none = Node(loop, self.settings, backend, spawner, executor)
        self._node_or_none.route = self._version
        self._deadlocks = DeadlockWatch(loop, self._all_instances)
        self._node_or_none.watch_call = self._deadlocks.note
        self._models = {}
        self._control_or_none = ModelControl(self._node_or_none, self._repository, self._models)
        self._is_stopping = self._is_loaded = False
        self._hurried = asyncio.Event()
        self._watch_timer = loop.call_later(WATCH_INTERVAL_S, self._watch)

    async def load_models(self) -> None:
        """Load what the settings name, several at a time, and begin to poll where they say so."""
        self._is_loading = True
        try:
            await self._load_models()
        finally:
            self._is_loading = False

    async def _load_models(self) -> None:
        control = self.control
        poll: RepositoryPoll | None = None
        if self.settings.model_control_mode == "poll":
            poll = RepositoryPoll(self._repository, control, self.settings.repository_poll_s)
            await poll.first_look()
        entries = await on_disk(self._repository.scan)
        await control.load_all(self._wanted(set(entries)), entries)
        if control.is_closing:
            raise Unavailable("the server was stopped before its models had loaded")
        self._is_loaded = True
        if poll is not None:
            self._node.run(poll.run())

    def _wanted(self, known: set[str]) -> list[str]:
        """Return the names to load at start."""
        if self.settings.model_control_mode != "explicit":
            return sorted(known)
        named = list(dict.fromkeys(self.settings.load_model))
        return sorted(known) if "*" in named else named

    async def stop(self, grace_s: float | None = None) -> None:
        """Refuse new requests, let accepted ones end for `grace_s`, then end everything.

        Idempotent; the default grace is the settings' exit timeout. `hurry` cuts it short.
        """
        node = self._node_or_none
        if node is None:
            self._is_stop_wanted = self._is_opening  # `open` looks for it at its end
            return
        self.begin_stop()
        if self._control_or_none is not None:
            await self._control_or_none.cut_all()
        deadline_s = monotonic_s() + (self.settings.exit_timeout_s if grace_s is None else grace_s)
        models = list(self._models.values())
        await self._in_time(deadline_s, [model.drained() for model in models])
        left = sum(model.pending for model in models)
        if left:
            _log.warning("%d requests did not end in time and are failed", left)
        for model in models:
            model.fail_all(Unavailable("the server is exiting"))
        in_time = await self._in_time(deadline_s, [model.unload() for model in reversed(models)])
        if not in_time:
            _log.warning("some models did not finalize in time; their stubs are killed")
            await asyncio.wait(
                [asyncio.ensure_future(model.unload(is_quick=True)) for model in models],
                timeout=QUICK_STOP_S,
            )
        await self._close(node)

    async def _in_time(
        self, deadline_s: float, work: Sequence[Coroutine[None, None, None]]
    ) -> bool:
        """Wait for all of it until the deadline, or until somebody hurries; False if it is late."""
        if not work:
            return True
        tasks = [asyncio.ensure_future(each) for each in work]
        everything = asyncio.ensure_future(asyncio.wait(tasks))
        hurried = asyncio.ensure_future(self._hurried.wait())
        await asyncio.wait(
            [everything, hurried],
            timeout=max(0.0, deadline_s - monotonic_s()),
            return_when=asyncio.FIRST_COMPLETED,
        )
        hurried.cancel()
        is_done = everything.done()
        everything.cancel()
        for task in tasks:
            if not task.done():
                task.cancel()
        await asyncio.gather(*tasks, everything, hurried, return_exceptions=True)
        return is_done

    def begin_stop(self) -> None:
        """Be not ready and refuse new requests from now on; `stop` does the rest."""
        self._is_stopping = True
        if self._control_or_none is not None:
            self._control_or_none.is_closing = True

    def hurry(self) -> None:
        """Cut the grace time of a stop in progress short."""
        self._hurried.set()

    def sever(self) -> None:
        """Run nothing, in a child that the host forked: everything here is its parent's."""
        self._node_or_none = self._control_or_none = None

    async def _close(self, node: Node) -> None:
        if self._watch_timer is not None:
            self._watch_timer.cancel()
        self._deadlocks.close()
        await node.end_tasks()
        control, self._control_or_none = self._control_or_none, None
        if control is not None:
            await control.close()
        await node.spawner.stop()
        node.exchange.close()
        node.executor.shutdown(wait=False)
        self._node_or_none = None

    def _watch(self) -> None:
        """Look after stubs and memory, once per interval. A fault here must not end the watch."""
        node = self._node
        self._watch_timer = node.loop.call_later(WATCH_INTERVAL_S, self._watch)
        try:
            now_s = monotonic_s()
            for model in self._models.values():
                model.watch(now_s)
            self._give_memory_back(node)
        except Exception:
            _log.exception("the watch over the stubs failed once; it goes on")

    def _give_memory_back(self, node: Node) -> None:
        """Return pages to the system that nobody has needed for a while.

        Twice of what was in use at any look of the last IDLE_WATCHES is kept, so that steady
        traffic never waits for pages that it has just given back.
        """
        self._used_bytes.append(node.exchange.stats().arena.used_bytes)
        if len(self._used_bytes) == IDLE_WATCHES:
            node.exchange.trim(max(IDLE_ARENA_BYTES, 2 * max(self._used_bytes)))
            self._used_bytes.clear()

    # --- models ----------------------------------------------------------------------------------

    @property
    def failures(self) -> dict[str, str]:
        """The models that should serve and do not, with the reason."""
        return {
            name: model.reason
            for name, model in self._models.items()
            if model.should_serve and model.reason
        }

    @property
    def control(self) -> ModelControl:
        """Loading and unloading, as front ends see them; apps use `load` and `unload`."""
        if self._control_or_none is None:
            raise Unavailable("the server is not running")
        return self._control_or_none

    async def load(
        self, name: str, *, config: str = "", files: Mapping[str, bytes] | None = None
    ) -> None:
        """Load or reload a model; returns when it serves and what it replaces is gone.

        `config` is JSON that counts instead of the model's own configuration. `files`
        ("file:1/model.py") are then all that the model's directory holds, and the model need not
        be in a repository. Raises what is wrong; a version that served stays then.
        """
        self._refuse_while_polling()
        await self.control.load(name, config, files)
        await self._models[name].gone()

    async def unload(self, name: str, *, unload_dependents: bool = False) -> None:
        """Unload a model: requests in flight end first. Raises NotFound for an unknown one.

        A sender that the model has kept and that sends nothing for `exit_timeout_s` is not waited
        for. `unload_dependents` has no effect: no model depends on another without ensembles.
        """
        self._refuse_while_polling()
        model = await self.control.unload(name)
        if model is None:
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        await model.gone()

    async def repository_index(self, *, ready: bool = False) -> list[IndexEntry]:
        """Return every model of the repositories and how it stands, or only what is ready."""
        return await self.control.index(is_ready=ready)

    def _refuse_while_polling(self) -> None:
        if self.settings.model_control_mode == "poll":
            self.control.check_explicit()

    def _all_instances(self) -> Iterator[tuple[str, str, list[Instance]]]:
        for model in self._models.values():
            for version in model.serving():
                yield model.name, version.info.version, version.instances

    # --- triton.inference.Door; Overview has the rest ---------------------------------------------

    def submit(
        self, request: InferRequest, on_response: Callable[[InferResponse], None]
    ) -> ResponseFactory:
        """Validate and enqueue a request; see triton.inference.Door."""
        try:
            if self._is_stopping:
                raise Unavailable("the server is exiting and takes no new requests", 1.0)
            version = self._version(request.model_name, request.model_version)
            return version.submit(request, on_response)
        except ActorserveError:
            for tensor in request.inputs:
                if isinstance(tensor.data, ArenaSlab):
                    tensor.data.release()
            raise

    def allocate(self, nbytes: int) -> Slab | None:
        """Return shared memory for a tensor body, or None where `grow` has to be awaited."""
        return self._node.exchange.allocate(nbytes)

    async def grow(self, nbytes: int) -> None:
        """Make room for a body of `nbytes`. Raises ResourceExhausted."""
        node = self._node
        await node.exchange.grow(nbytes, node.executor)

    @property
    def zygote_pid(self) -> int | None:
        """The only process that is a child of this one; None while there is none."""
        node = self._node_or_none
        return None if node is None else node.spawner.stats().zygote_pid


def _log_process(level: int, text: str) -> None:
    _log.log(LEVELS[level], "%s", text)
