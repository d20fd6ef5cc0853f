# SPDX-License-Identifier: Apache-2.0
"""From a model directory to a plan: read, complete, check, choose versions and instances.

    ModelSource ─► ask the model (throw-away stub) ─► validate ─► VersionPlan for each version

Decides nothing at run time and keeps no state: the supervisor carries the plans out.
"""

from __future__ import annotations

import asyncio
import logging
import random
from pathlib import Path

import msgspec

from actorserve.actors.auto_complete import StubDied, ask_model
from actorserve.actors.device_drivers import VISIBLE, DeviceUse, driver_of, visible_device
from actorserve.actors.disk import on_disk
from actorserve.actors.execution_environment import (
    ExecutionEnvironment,
    check_environment,
    prepare_environment,
)
from actorserve.actors.generation_entry import LOAD_MARGIN_S, is_generation, read_entry
from actorserve.actors.incarnation import InstancePlan
from actorserve.actors.load_error import NoVersion, VersionsFailed
from actorserve.actors.node import Node
from actorserve.actors.python_backend import PythonBackend, find_backend
from actorserve.actors.repository import ModelSource
from actorserve.actors.version_plan import VersionPlan
from actorserve.config import Settings
from actorserve.errors import BootError, ConfigError
from actorserve.state.backlog import QueuePolicy
from actorserve.state.batching import BatchPolicy
from actorserve.state.lifecycle import Budgets
from actorserve.state.restart import Restart
from actorserve.triton.config_completion import MODEL_FILE, complete, merge_auto_completed
from actorserve.triton.config_json import model_config_from_json, model_config_to_json
from actorserve.triton.config_support import unsupported
from actorserve.triton.config_validation import validate
from actorserve.triton.instance_group import expand_instances
from actorserve.triton.metric_options import first_response_buckets, metric_labels
from actorserve.triton.model_config import ModelConfig
from actorserve.triton.model_info import input_rules, model_info
from actorserve.triton.model_parameters import ModelParameters, read_model_parameters
from actorserve.triton.request_validation import RequestRules
from actorserve.triton.scheduling_config import ModelQueuePolicy
from actorserve.triton.version_policy import missing_versions, select_versions
from actorserve.wire.messages import AutoComplete, Initialize

PREFETCH_MOST = 16
CONCURRENT_STREAMS = 256
"""How many batches an asynchronous decoupled model has in execution, unless it says so itself."""
_log = logging.getLogger("actorserve")


class ModelPlan(msgspec.Struct, frozen=True):
    """What a load will bring up: one plan for each chosen version."""

    name: str
    config: ModelConfig
    versions: tuple[VersionPlan, ...]


class _Draft(msgspec.Struct):
    """A load that is being planned."""

    source: ModelSource
    config: ModelConfig
    parameters: ModelParameters
    restart: Restart
    chosen: list[int]
    backend: PythonBackend | None
    has_engine: bool
    devices: DeviceUse

    @property
    def name(self) -> str:
        """The model's name."""
        return self.source.entry.name

    @property
    def environment_path(self) -> str:
        """Where the stubs' environment is: the model's own word, or its backend's; "" for ours."""
        given = self.parameters.execution_env_path
        return given or (self.backend.environment if self.backend is not None else "")

    def model_dir(self, version: int) -> Path:
        """Return the folder of a version."""
        return self.source.entry.path / str(version)

    def model_path(self, version: int) -> Path:
        """Return the model file of a version: its own, or its backend's."""
        if self.backend is not None:
            return self.backend.model_file
        return self.model_dir(version) / self.config.default_model_filename


async def plan_model(node: Node, source: ModelSource) -> ModelPlan:
    """Plan a load. Raises ConfigError or BootError with the reason for people."""
    parameters = read_model_parameters(source.config, str(source.entry.path))
    devices = await node.drivers.use(node.settings, parameters)
    source = msgspec.structs.replace(source, config=source.completed(devices.gpu_count))
    draft = await on_disk(lambda: _draft(source, node.settings, devices))
    environment = await prepare_environment(node.spawner, draft.environment_path)
    if node.settings.auto_complete_config and not draft.has_engine:
        try:
            draft.config = await _auto_complete(node, draft, environment)
        except BootError as error:
            raise VersionsFailed({str(draft.chosen[-1]): error.message}) from None
        _refuse_unsupported(draft)
    validate(draft.config, devices.gpu_count)
    for warning in unsupported(draft.config)[1]:
        _log.warning("%s", warning)
    versions = tuple(_plan_version(draft, version, environment) for version in draft.chosen)
    return ModelPlan(draft.name, draft.config, versions)


def check_source(source: ModelSource, settings: Settings) -> tuple[list[str], list[Path]]:
    """Check all that can be checked without running the model's code.

    Returns the warnings, and the model files that would run. Raises ConfigError with the reason
    why the model would not load.
    """
    draft = _draft(source, settings, None)
    check_environment(draft.environment_path)
    # Nobody has looked which devices there are: where a driver is named, they are taken for there.
    gpus = [gpu for group in draft.config.instance_group for gpu in group.gpus]
    validate(draft.config, 1 + max([0, *gpus]) if driver_of(settings, draft.parameters) else 0)
    files = dict.fromkeys(draft.model_path(version) for version in draft.chosen)
    return unsupported(draft.config)[1], list(files)


def _draft(source: ModelSource, settings: Settings, devices: DeviceUse | None) -> _Draft:
    """Begin a plan. Raises ConfigError for what can be told from the files alone."""
    first_s, max_s = settings.restart_backoff_s
    parameters = read_model_parameters(source.config, str(source.entry.path))
    draft = _Draft(
        source,
        source.config,
        parameters,
        Restart(first_s=first_s, max_s=max_s),
        select_versions(source.config, source.versions),
        find_backend(source.config, settings.backend_directory),
        is_generation(source.config),
        devices or DeviceUse(settings, parameters, []),
    )
    if draft.has_engine:
        _read_engine(draft)
    elif draft.backend is not None:
        draft.config = msgspec.structs.replace(draft.config, runtime=MODEL_FILE)
    _refuse_unsupported(draft)
    _check_versions(draft)
    return draft


def _read_engine(draft: _Draft) -> None:
    """Take what an engine's parameters say of its stub. Raises ConfigError."""
    own = draft.parameters
    entry = read_entry(
        draft.config,
        draft.source.entry.path,
        draft.chosen,
        has_own_python=bool(own.execution_env_path),
    )
    if entry is not None:
        draft.parameters = msgspec.structs.replace(
            own,
            concurrent_executes=entry.max_in_flight,
            initialize_timeout_s=max(
                own.initialize_timeout_s, entry.load_timeout_s + LOAD_MARGIN_S
            ),
        )


def _refuse_unsupported(draft: _Draft) -> None:
    problems = unsupported(draft.config, is_python_based=draft.backend is not None)[0]
    if problems:
        # The model is named already where a failed load is reported.
        raise ConfigError("; ".join([p.removeprefix(f"model '{draft.name}': ") for p in problems]))


def _check_versions(draft: _Draft) -> None:
    """Raise ConfigError where no version is there, or a chosen one has no model file."""
    for version in missing_versions(draft.config, draft.source.versions):
        _log.warning("model '%s': version %d has no folder", draft.name, version)
    if not draft.chosen:
        raise NoVersion(
            f"at least one version must be available under the version policy of model "
            f"'{draft.name}': expected a folder like '{draft.source.entry.path / '1'}'"
            + ("" if draft.has_engine else f", with {_file_name(draft)} in it")
        )
    for version in draft.chosen:
        path = draft.model_path(version)
        if not path.is_file():
            raise ConfigError(f"Python model file not found in '{path}'")


def _file_name(draft: _Draft) -> str:
    return draft.config.default_model_filename or MODEL_FILE


async def _auto_complete(
    node: Node, draft: _Draft, environment: ExecutionEnvironment
) -> ModelConfig:
    """Let the model complete its configuration; deaths are tried again as for an instance."""
    config, restart = draft.config, draft.restart
    version = draft.chosen[-1]
    spec = environment.spec(f"{draft.name}_auto")
    question = AutoComplete(
        str(draft.model_path(version)),
        draft.name,
        model_config_to_json(config).decode(),
        str(draft.model_dir(version)),
    )
    for attempt in range(1, restart.deaths_before_ready + 1):
        try:
            answer = await ask_model(node, spec, question, draft.parameters.initialize_timeout_s)
        except StubDied as error:
            if attempt == restart.deaths_before_ready:
                raise BootError(f"{attempt} deaths in a row: {error.message}") from None
            await _pause(restart.delay_s(attempt - 1, random.random()))
            continue
        if answer is None:
            return config
        completed = model_config_from_json(answer, f"auto_complete_config of '{draft.name}'")
        merged = merge_auto_completed(config, completed)
        return complete(merged, draft.name, has_model_py=True)
    raise AssertionError("deaths_before_ready is 1 or more")


async def _pause(delay_s: float) -> None:
    """Wait out a back-off; a cancelled load ends it."""
    if delay_s > 0:
        never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await asyncio.wait([never], timeout=delay_s)


def _plan_version(draft: _Draft, version: int, environment: ExecutionEnvironment) -> VersionPlan:
    config = draft.config
    config_json = model_config_to_json(config)
    batching = _batching(config)
    return VersionPlan(
        model_info(config, version, draft.chosen),
        config_json,
        RequestRules(
            draft.name, config.max_batch_size, input_rules(config), [o.name for o in config.output]
        ),
        batching,
        _plan_instances(draft, version, config_json.decode(), batching, environment),
        draft.parameters.retry_on_stub_death,
        frozenset(each.name for each in config.input if each.allow_ragged_batch),
        metric_labels(config, version),
        first_response_buckets(config),
        is_generation(config),
    )


def _plan_instances(
    draft: _Draft,
    version: int,
    config_json: str,
    batching: BatchPolicy,
    environment: ExecutionEnvironment,
) -> tuple[InstancePlan, ...]:
    parameters = draft.parameters
    path = draft.model_path(version)
    plans = []
    for each in expand_instances(draft.config):
        device = draft.devices.plan(each)
        is_isolated = device is not None and device.is_isolated
        args = {
            "model_config": config_json,
            "model_instance_kind": each.kind,
            "model_instance_name": each.name,
            "model_instance_device_id": "0" if is_isolated else str(each.device_id),
            "model_repository": str(draft.source.entry.path),
            "model_version": str(version),
            "model_name": draft.name,
        }
        initialize = Initialize(
            str(path),
            args,
            draft.config.is_decoupled,
            draft.config.max_batch_size,
            parameters.readonly_inputs,
            parameters.concurrent_executes
            or (CONCURRENT_STREAMS if draft.config.is_decoupled else 1),
            device,
        )
        spec = environment.spec(each.name)
        if is_isolated:
            spec.env = {**spec.env, VISIBLE: visible_device(each.device_id)}
        plan = InstancePlan(
            each.name,
            spec,
            initialize,
            _budgets(parameters),
            draft.restart,
            1 if batching.is_dynamic else PREFETCH_MOST,
        )
        plans.append(plan)
    return tuple(plans)


def _budgets(parameters: ModelParameters) -> Budgets:
    return Budgets(
        spawn_s=parameters.spawn_timeout_s,
        initialize_s=parameters.initialize_timeout_s,
        finalize_s=parameters.finalize_timeout_s,
        stopped_s=parameters.stopped_timeout_s,
        execute_s=parameters.execute_timeout_s,
    )


def _batching(config: ModelConfig) -> BatchPolicy:
    """Turn the configuration's batching into the queue's."""
    dynamic = config.dynamic_batching
    if dynamic is None:
        return BatchPolicy(max_batch_size=config.max_batch_size)
    return BatchPolicy(
        max_batch_size=config.max_batch_size,
        is_dynamic=True,
        preferred_batch_sizes=tuple(dynamic.preferred_batch_size),
        max_queue_delay_us=dynamic.max_queue_delay_microseconds,
        priority_levels=dynamic.priority_levels,
        default_priority_level=dynamic.default_priority_level,
        default_policy=_queue_policy(dynamic.default_queue_policy),
        level_policies={
            level: _queue_policy(policy) for level, policy in dynamic.priority_queue_policy.items()
        }
        if dynamic.priority_levels
        else {},
        preserve_ordering=dynamic.preserve_ordering,
    )


def _queue_policy(policy: ModelQueuePolicy | None) -> QueuePolicy:
    if policy is None:
        return QueuePolicy()
    return QueuePolicy(
        "DELAY" if policy.timeout_action == ModelQueuePolicy.TimeoutAction.DELAY else "REJECT",
        policy.default_timeout_microseconds,
        policy.allow_timeout_override,
        policy.max_queue_size,
    )
