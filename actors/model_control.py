# SPDX-License-Identifier: Apache-2.0
"""Loads and unloads: who may ask for them, in which order they run, and what they say.

    embedding app, HTTP, models ─► load ─► a job ─► gate ─► the model's turn ─► Model.load
                                   unload ─► cuts the jobs before it ─► the model's turn

A model's loads and unloads run one after the other, in the order in which they were asked for;
those of different models side by side, as many loads at a time as the settings say. Whoever asks
for a load that waits already, of what lies in the repository, joins it: it has seen nothing of the
disk yet. A load that a model asks for while it is being loaded itself passes the gate, which its
own load may hold, and is refused where it would wait for itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Mapping

from actorserve.actors.answers import Answerer, Asker
from actorserve.actors.disk import on_disk
from actorserve.actors.model import Model
from actorserve.actors.node import Node
from actorserve.actors.override import Body, Override, PrivateFolders, read_override, sweep
from actorserve.actors.repository import ModelEntry, ModelSource, Repository, check_model_name
from actorserve.errors import ActorserveError, InvalidArgument, NotFound, Unavailable
from actorserve.runtime.exchange import ArenaSlab
from actorserve.triton.inference import IndexEntry
from actorserve.wire.messages import CheckModelReady, Handle, LoadModel, UnloadModel

CUT_TIMEOUT_S = 2.0

_log = logging.getLogger("actorserve")


class _Job:
    """A load that was asked for; `cut` says why it was ended before it had loaded."""

    def __init__(self, name: str, override: Override | None) -> None:
        self.name = name
        self.override = override
        self.waiting = 0
        self.cut: ActorserveError | None = None
        self.task: asyncio.Task[None] | None = None


class ModelControl:
    """See the module's head. Belongs to the supervisor's loop, and to one life of it."""

    def __init__(self, node: Node, repository: Repository, models: dict[str, Model]) -> None:
        self.is_closing = False
        self._node = node
        self._repository = repository
        self._models = models
        self._folders = PrivateFolders()
        self._gate = asyncio.Semaphore(node.settings.model_load_thread_count)
        self._jobs: set[_Job] = set()
        self._joinable: dict[str, _Job] = {}
        self._awaited: dict[str, Counter[str]] = {}
        kinds: dict[type, Answerer] = {
            LoadModel: self._answer_load,
            UnloadModel: self._answer_unload,
            CheckModelReady: self._answer_ready,
        }
        node.answerers.update(kinds)
        node.run(self._sweep())

    async def _sweep(self) -> None:
        await on_disk(sweep)

    # --- loading ---------------------------------------------------------------------------------

    async def load_all(self, names: list[str], entries: dict[str, ModelEntry]) -> None:
        """Load models at the start; what goes wrong stands in each one's `reason`."""
        for name in names:
            model = self._models.setdefault(name, Model(self._node, name))
            model.should_serve = True
            if name not in entries:
                model.fail(_missing(name))

        async def load(name: str) -> None:
            with contextlib.suppress(ActorserveError):
                await self.wait(self.begin(name))

        await asyncio.gather(*[load(name) for name in names if name in entries])

    async def load(
        self, name: str, config: str = "", files: Mapping[str, Body] | None = None
    ) -> None:
        """Load or reload, or join a load that waits; returns when it serves.

        Raises NotFound for a model that is nowhere, InvalidArgument for a request or a model with
        a fault, Unavailable where it was unloaded meanwhile or the server ends.
        """
        check_model_name(name)
        override = read_override(name, config, files or {})
        await self._check_known(name, override)
        await self.wait(self.begin(name, override))

    async def _check_known(self, name: str, override: Override | None) -> None:
        if name not in self._models and not (override and override.files):
            await on_disk(lambda: self._repository.find(name))

    def begin(
        self, name: str, override: Override | None = None, *, is_nested: bool = False
    ) -> _Job:
        """Start a load, or join one. Raises Unavailable while the server ends."""
        if self.is_closing:
            raise _exiting(name)
        joined = self._joinable.get(name)
        if joined is not None and override is None and not is_nested:
            return joined
        job = _Job(name, override)
        self._joinable.pop(name, None)
        if override is None and not is_nested:
            self._joinable[name] = job
        self._jobs.add(job)
        job.task = self._node.run(self._run(job, is_nested=is_nested))
        job.task.add_done_callback(lambda task: self._on_done(job, task))
        return job

    def _on_done(self, job: _Job, task: asyncio.Task[None]) -> None:
        self._jobs.discard(job)
        if self._joinable.get(job.name) is job:
            del self._joinable[job.name]
        if not task.cancelled():
            task.exception()  # it may be that nobody waits to hear of it

    async def wait(self, job: _Job) -> None:
        """Wait for a load. One that nobody waits for any more, because they gave up, is ended."""
        task = job.task
        assert task is not None
        job.waiting += 1
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if job.cut is not None:
                raise job.cut from None
            if job.waiting == 1 and not task.done():
                if self._joinable.get(job.name) is job:
                    del self._joinable[job.name]  # nobody may join what is about to end
                task.cancel()
                await asyncio.wait([task])
            raise
        finally:
            job.waiting -= 1

    async def _run(self, job: _Job, *, is_nested: bool) -> None:
        if is_nested:
            await self._load_in_turn(job)
            return
        async with self._gate:
            await self._load_in_turn(job)

    async def _load_in_turn(self, job: _Job) -> None:
        model = self._models.setdefault(job.name, Model(self._node, job.name))
        async with model.turn:
            if self._joinable.get(job.name) is job:
                del self._joinable[job.name]
            model.should_serve = True
            for left in range(self._node.settings.model_load_retry_count, -1, -1):
                try:
                    await self._load_once(model, job)
                    return
                except ActorserveError as error:
                    if not left:
                        raise
                    _log.warning("loading '%s' is tried again: %s", job.name, error.message)

    async def _load_once(self, model: Model, job: _Job) -> None:
        try:
            source = await self._source(job)
        except ActorserveError as error:
            raise model.fail(error) from None
        await model.load(source)

    async def _source(self, job: _Job) -> ModelSource:
        """Read what is to be loaded. Raises NotFound, ConfigError or ResourceExhausted."""
        repository, override = self._repository, job.override
        if override is not None and override.files:
            path = await self._folders.write(job.name, override.files)
            entry = ModelEntry(job.name, path, is_private=True)
            try:
                return await on_disk(lambda: repository.read(entry, override.config))
            except BaseException:
                await self._folders.remove(path)
                raise
        config = override.config if override is not None else None
        return await on_disk(lambda: repository.read(repository.find(job.name), config))

    # --- unloading -------------------------------------------------------------------------------

    async def unload(self, name: str) -> Model | None:
        """Unload a model; returns when it takes no new requests, None for one never heard of."""
        model = self._models.get(name)
        if model is None:
            return None
        self._cut(
            [job for job in self._jobs if job.name == name],
            Unavailable(f"failed to load '{name}': it was unloaded before it had loaded"),
        )
        async with model.turn:
            model.should_serve = False
            model.begin_unload()
        return model

    def begin_unload(self, name: str) -> None:
        """Unload a model without waiting for anything."""

        async def unload() -> None:
            await self.unload(name)

        self._node.run(unload())

    def _cut(self, jobs: list[_Job], why: ActorserveError) -> None:
        for job in jobs:
            self._joinable.pop(job.name, None)
            if job.cut is None and job.task is not None:
                job.cut = why
                job.task.cancel()

    async def cut_all(self) -> None:
        """End the loads in progress, and begin none any more: the server ends."""
        self.is_closing = True
        jobs = list(self._jobs)
        for job in jobs:
            self._cut([job], _exiting(job.name))
        tasks = [job.task for job in jobs if job.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=CUT_TIMEOUT_S)

    async def close(self) -> None:
        """Remove what loads have left on disk."""
        await self._folders.close()

    # --- triton.inference.ModelControl -----------------------------------------------------------

    def check_explicit(self) -> None:
        """Raise Unavailable unless models are loaded by request."""
        if self._node.settings.model_control_mode != "explicit":
            raise Unavailable(
                "explicit model load / unload is not allowed if polling is enabled "
                f"(--model-control-mode is {self._node.settings.model_control_mode}; with explicit "
                "it is allowed)"
            )

    async def load_model(self, name: str, config: str, files: Mapping[str, bytes]) -> None:
        """Load or reload; see triton.inference.ModelControl."""
        self.check_explicit()
        await self.load(name, config, files)

    async def unload_model(self, name: str, *, unload_dependents: bool = False) -> None:
        """Unload; there are no models yet that depend on others (ensembles)."""
        self.check_explicit()
        await self.unload(name)

    async def index(self, *, is_ready: bool = False) -> list[IndexEntry]:
        """Return the index; what was never loaded has a name, or the reason why it cannot be."""
        found: dict[str, list[IndexEntry]] = {}
        if not is_ready:
            for name, entry in (await on_disk(self._repository.scan)).items():
                state = "" if entry.problem is None else "UNAVAILABLE"
                found[name] = [IndexEntry(name, "", state, entry.problem or "")]
        for name, model in self._models.items():
            lines = model.index()
            if lines:
                found[name] = lines
        entries = [entry for name in sorted(found) for entry in found[name]]
        return [each for each in entries if not is_ready or each.state == "READY"]

    # --- what models ask -------------------------------------------------------------------------

    def _answer_load(self, question: LoadModel, asker: Asker) -> Awaitable[None]:
        """Take the files over at once: they are the stub's to reuse as soon as it is answered."""
        files: dict[str, Body] = {}
        slabs: list[ArenaSlab] = []
        try:
            for key, body in question.files.items():
                if isinstance(body, Handle):
                    slabs.append(self._node.exchange.borrow(asker.end, body))
                    files[key] = slabs[-1].buffer
                else:
                    files[key] = body
        except ActorserveError:
            _give_back(slabs)
            raise
        return self._load_for(question, asker, files, slabs)

    async def _load_for(
        self, question: LoadModel, asker: Asker, files: dict[str, Body], slabs: list[ArenaSlab]
    ) -> None:
        try:
            self.check_explicit()
            if asker.is_serving:
                await self.load(question.name, question.config, files)
            else:
                await self._load_nested(question, asker.model, files)
        finally:
            files.clear()
            _give_back(slabs)

    async def _load_nested(self, question: LoadModel, asker: str, files: dict[str, Body]) -> None:
        """Load for a model that is being initialized. Raises InvalidArgument for a circle."""
        name = question.name
        check_model_name(name)
        override = read_override(name, question.config, files)
        circle = self._circle(name, asker)
        if circle:
            raise InvalidArgument(
                f"model '{asker}' is being loaded and would wait for itself: "
                + " waits for ".join(f"'{each}'" for each in circle)
            )
        awaited = self._awaited.setdefault(asker, Counter())
        awaited[name] += 1
        try:
            await self._check_known(name, override)
            await self.wait(self.begin(name, override, is_nested=True))
        finally:
            awaited[name] -= 1
            awaited += Counter()
            if not awaited:
                self._awaited.pop(asker, None)

    def _circle(self, name: str, asker: str) -> list[str]:
        """Return the way from `asker` over `name` back to it, along loads that wait for loads."""
        ways, seen = [[asker, name]], {name}
        while ways:
            way = ways.pop()
            if way[-1] == asker:
                return way
            for each in self._awaited.get(way[-1], ()):
                if each not in seen:
                    seen.add(each)
                    ways.append([*way, each])
        return []

    async def _answer_unload(self, question: UnloadModel, asker: Asker) -> None:
        await self.unload_model(question.name, unload_dependents=question.unload_dependents)

    async def _answer_ready(self, question: CheckModelReady, asker: Asker) -> bool:
        """Whether a version is ready. Raises NotFound for a model that is nowhere."""
        name, version = question.name, question.version
        if version and not (version.isascii() and version.isdecimal() and int(version) > 0):
            raise InvalidArgument(
                f"failed to get model version from specified version string '{version}' "
                "(details: not a number), version should be an integral value > 0"
            )
        model = self._models.get(name)
        if model is None or not model.has_versions:
            if model is None and name not in await on_disk(self._repository.scan):
                raise NotFound(f"Request for unknown model: '{name}' is not found")
            return False
        try:
            return await model.version(version).check_ready() and not self.is_closing
        except ActorserveError:
            return False


def _give_back(slabs: list[ArenaSlab]) -> None:
    for slab in slabs:
        slab.release()


def _missing(name: str) -> NotFound:
    return NotFound(f"failed to load '{name}', failed to poll from model repository")


def _exiting(name: str) -> Unavailable:
    return Unavailable(f"the server is exiting and does not load '{name}'")
