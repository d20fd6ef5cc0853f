# SPDX-License-Identifier: Apache-2.0
"""What would load, what would not and why: `actorserve check`, without serving anything.

By itself nothing of a model's code runs: configuration, versions and files are looked at. A dry
run starts a server without a front end, in which every model in turn is loaded, answers the
warm-up samples of its configuration and is unloaded. Nothing of it stays, however it ends.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from actorserve.actors import server_log
from actorserve.actors.loader import check_source
from actorserve.actors.repository import Repository
from actorserve.actors.supervisor import Supervisor
from actorserve.clock import monotonic_s
from actorserve.config import Settings
from actorserve.errors import ActorserveError, DeadlineExceeded, InvalidArgument
from actorserve.triton.config_json import model_config_from_json
from actorserve.triton.inference import InferRequest, InferResponse, ModelInfo
from actorserve.triton.model_config import ModelConfig
from actorserve.triton.request_validation import UNKNOWN_ID
from actorserve.triton.tensor_config import ModelWarmup
from actorserve.triton.version_policy import missing_versions
from actorserve.triton.warm_up import sample_title, warm_up_problems, warm_up_tensors

OnProgress = Callable[[Sequence[str], int], None]
"""Hears the names of the models that are being tried, and how many have been."""


class SampleRun(msgspec.Struct, frozen=True):
    """How a warm-up sample went; an empty `problem` means that each run of it was answered."""

    title: str
    runs: int
    duration_s: float
    problem: str = ""
    skipped: str = ""


class Finding(msgspec.Struct, frozen=True):
    """What was found of one model; an empty `problem` means that it would load.

    `bad_samples` says which warm-up samples do not fit, as far as the configuration tells;
    `load_s` (None without a dry run) is the time until every instance was initialized.
    """

    model: str
    versions: str
    problem: str
    warnings: tuple[str, ...] = ()
    bad_samples: tuple[str, ...] = ()
    load_s: float | None = None
    samples: tuple[SampleRun, ...] = ()

    @property
    def is_ok(self) -> bool:
        """Whether it would load, and answered every sample."""
        return not self.problem and not any(each.problem for each in self.samples)


def check(settings: Settings) -> list[Finding]:
    """Look at every model of the settings' repositories. Raises NotFound for a missing one."""
    repository = Repository(settings.model_repository)
    repository.check()
    with _silent_log():
        return [_look(repository, name, settings) for name in repository.scan()]


def dry_run(
    settings: Settings,
    findings: Sequence[Finding],
    *,
    timeout_s: float,
    shows_log: bool = False,
    on_progress: OnProgress = lambda trying, done: None,
) -> list[Finding]:
    """Try the models that would load; returns the findings with what came of it.

    A model has `timeout_s` to initialize and again for each run of a sample. SIGINT and SIGTERM
    end all of it: raises KeyboardInterrupt or SystemExit when nothing is left.
    """
    with server_log.installed(settings) if shows_log else _silent_log():
        trial = _Trial(settings, findings, timeout_s, on_progress)
        found = asyncio.run(trial.run())
    if trial.signal == signal.SIGINT:
        raise KeyboardInterrupt
    if trial.signal is not None:
        raise SystemExit(128 + trial.signal)
    return found


@contextlib.contextmanager
def _silent_log() -> Iterator[None]:
    """Keep the server's log off the screen: what matters of it is in the findings."""
    logger = logging.getLogger("actorserve")
    handler, propagates = logging.NullHandler(), logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = propagates
        logger.removeHandler(handler)


# --- without running anything --------------------------------------------------------------------


def _look(repository: Repository, name: str, settings: Settings) -> Finding:
    entry = repository.scan()[name]
    try:
        source = repository.read(entry)
        versions = ", ".join(map(str, source.versions)) or "-"
    except ActorserveError as error:
        return Finding(name, "-", error.message)
    try:
        warnings, files = check_source(source, settings)
    except ActorserveError as error:
        return Finding(name, versions, error.message)
    warnings = [warning.removeprefix(f"model '{name}': ") for warning in warnings]
    missing = missing_versions(source.config, source.versions)
    warnings += [f"version {version} has no folder" for version in missing]
    bad: tuple[str, ...] = ()
    if source.config.input:  # else its auto_complete_config may yet name them
        bad = tuple(warm_up_problems(source.config, entry.path))
    return Finding(name, versions, _syntax_problem(files), tuple(warnings), bad)


def _syntax_problem(files: list[Path]) -> str:
    """Return what is wrong with the text of a model file, or "" for nothing."""
    for path in files:
        try:
            ast.parse(path.read_bytes(), str(path))
        except SyntaxError as error:
            return f"{path}:{error.lineno}: {type(error).__name__}: {error.msg}"
        except (ValueError, OSError) as error:
            return f"{path}: {type(error).__name__}: {error}"
    return ""


# --- the dry run ---------------------------------------------------------------------------------

_HANGS = "an earlier one hangs"


class _Stuck(DeadlineExceeded):
    """A sample that is not answered."""


class _Trial:
    """A server for the time of a dry run."""

    def __init__(
        self,
        settings: Settings,
        findings: Sequence[Finding],
        timeout_s: float,
        on_progress: OnProgress,
    ) -> None:
        self.signal: signal.Signals | None = None
        self._settings = settings
        self._findings = findings
        self._timeout_s = timeout_s
        self._on_progress = on_progress
        self._repository = Repository(settings.model_repository)
        self._server = Supervisor(settings.model_repository, settings)
        self._stuck: set[str] = set()
        self._trying: list[str] = []
        self._done = 0

    async def run(self) -> list[Finding]:
        """Try every model, several at a time; returns [] where a signal ended it."""
        task = asyncio.current_task()
        assert task is not None
        with self._signals_cancel(task):
            try:
                return await self._run_all()
            except asyncio.CancelledError:
                if self.signal is None:
                    raise
                return []

    @contextlib.contextmanager
    def _signals_cancel(self, task: asyncio.Task[list[Finding]]) -> Iterator[None]:
        """Let the first SIGINT or SIGTERM cancel the task; later ones wait for its end, too."""

        def on_signal(number: signal.Signals) -> None:
            if self.signal is None:
                self.signal = number
                task.cancel()

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, on_signal, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    async def _run_all(self) -> list[Finding]:
        gate = asyncio.Semaphore(self._settings.model_load_thread_count)
        tasks: list[asyncio.Task[Finding]] = []
        try:
            await self._server.open()
            if not self._findings:
                return []
            tasks += [asyncio.ensure_future(self._try(gate, each)) for each in self._findings]
            # Not gather: it cancels all on its own, and ends before they have.
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            return [each.result() for each in tasks]
        finally:
            are_done = bool(tasks) and all(each.done() for each in tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            # What is left by now hangs.
            await self._server.stop(None if are_done and not self._stuck else 0)

    async def _try(self, gate: asyncio.Semaphore, finding: Finding) -> Finding:
        if finding.problem:
            self._done += 1
            return finding
        async with gate:
            self._trying.append(finding.model)
            self._on_progress(self._trying, self._done)
            found = await self._try_model(finding)
            self._trying.remove(finding.model)
            self._done += 1
            self._on_progress(self._trying, self._done)
        return found

    async def _try_model(self, finding: Finding) -> Finding:
        """Load the model, send its samples, unload it."""
        name, begun_s = finding.model, monotonic_s()
        try:
            await asyncio.wait_for(self._server.load(name), self._timeout_s)
        except asyncio.TimeoutError:
            problem = f"it was not ready within {self._timeout_s:g} s"
            return msgspec.structs.replace(finding, problem=problem)
        except ActorserveError as error:
            problem = self._server.failures.get(name, error.message)
            return msgspec.structs.replace(finding, problem=problem)
        load_s = monotonic_s() - begun_s
        samples: list[SampleRun] = []
        versions = [each.version for each in self._server.served_models() if each.name == name]
        for version in versions:
            where = f"version {version}: " if len(versions) > 1 else ""
            samples += await self._run_samples(name, version, where)
        if name not in self._stuck:  # it would not finalize either, and is killed at the end
            await self._server.unload(name)
        return msgspec.structs.replace(finding, load_s=load_s, samples=tuple(samples))

    async def _run_samples(self, name: str, version: str, where: str) -> list[SampleRun]:
        """Send each sample to one version; after one that hangs the others are skipped."""
        text = self._server.model_config(name, version)
        config = model_config_from_json(text, f"the configuration of '{name}'")
        found: list[SampleRun] = []
        for number, sample in enumerate(config.model_warmup):
            title = where + sample_title(sample, number)
            if name in self._stuck:
                found.append(SampleRun(title, 0, 0.0, skipped=_HANGS))
                continue
            if config.max_batch_size and not sample.batch_size:
                found.append(SampleRun(title, 0, 0.0, skipped="its batch_size is 0"))
                continue
            runs, begun_s, problem = max(1, sample.count), monotonic_s(), ""
            try:
                await self._run_sample(config, version, sample, runs)
            except ActorserveError as error:
                problem = error.message.removeprefix(f"[request id: {UNKNOWN_ID}] ")
                if isinstance(error, _Stuck):
                    self._stuck.add(name)
            found.append(SampleRun(title, runs, monotonic_s() - begun_s, problem))
        return found

    async def _run_sample(
        self, config: ModelConfig, version: str, sample: ModelWarmup, runs: int
    ) -> None:
        """Raise what is wrong with the sample, or what the model answers."""
        folder = self._repository.find(config.name).path
        tensors = await asyncio.to_thread(warm_up_tensors, sample, config, folder)
        info = self._server.model_info(config.name, version)
        for _ in range(runs):
            request = InferRequest(config.name, tensors, version, takes_stream=True)
            await self._answer(request, info)

    async def _answer(self, request: InferRequest, info: ModelInfo) -> None:
        """Wait for the last response to a request.

        Raises its error, or _Stuck, or InvalidArgument for outputs that are not those of the
        configuration: clients would get them as they are.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[None] = loop.create_future()

        def acknowledge() -> None:
            factory.consumed()

        def take(response: InferResponse) -> None:
            loop.call_soon(acknowledge)  # the factory may not be there yet
            if answer.done():
                return
            misfit = "" if response.is_empty else _misfit(info, response)
            if response.error is not None:
                answer.set_exception(response.error)
            elif misfit:
                answer.set_exception(InvalidArgument(misfit))
            elif response.final:
                answer.set_result(None)

        factory = self._server.submit(request, take)
        try:
            await asyncio.wait_for(answer, self._timeout_s)
        except asyncio.TimeoutError:
            stuck = _Stuck(f"not answered within {self._timeout_s:g} s")
            factory.expire(stuck)
            raise stuck from None
        except asyncio.CancelledError:
            factory.disconnect()
            raise


def _misfit(info: ModelInfo, response: InferResponse) -> str:
    """Return how a response differs from the outputs of the configuration, or ""."""
    given = {tensor.name: tensor for tensor in response.outputs}
    for spec in info.outputs:
        tensor = given.get(spec.name)
        if tensor is None:
            has = ", ".join(f"'{name}'" for name in given) or "none"
            return (
                f"the response has no output '{spec.name}' (of the configured ones it has: {has})"
            )
        if tensor.datatype != spec.datatype:
            return (
                f"output '{spec.name}' is {tensor.datatype}, where the configuration says "
                f"{spec.datatype}"
            )
        fits = len(tensor.shape) == len(spec.shape) and all(
            wanted in (-1, size) for wanted, size in zip(spec.shape, tensor.shape)
        )
        if not fits:
            return (
                f"output '{spec.name}' has the shape {list(tensor.shape)}, where the configuration "
                f"says {list(spec.shape)}"
            )
    return ""
