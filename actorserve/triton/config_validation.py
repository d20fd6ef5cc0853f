# SPDX-License-Identifier: Apache-2.0
"""Judge a completed configuration: whether it is right, in the texts that clients match on.

What is right and still cannot be served as written is config_support.py's subject. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import PurePosixPath

from actorserve.errors import ConfigError
from actorserve.triton.config_completion import PYTHON
from actorserve.triton.model_config import ModelConfig, ModelInstanceGroup
from actorserve.triton.scheduling_config import ModelDynamicBatching, ModelQueuePolicy
from actorserve.triton.tensor_config import DataType, ModelInput, ModelOutput

MAX_INSTANCES = 1000
"""The most instances that one group may ask for: more is a slip, and starts as many processes."""

_MIN_CAPABILITY = "6.000000"  # the lowest CUDA compute capability, as the reference prints it
_FORBIDDEN = frozenset(";|&$`<>()[]{}\\\"'*?~#!/")  # in names that become files and processes

Kind = ModelInstanceGroup.Kind


def validate(config: ModelConfig, gpu_count: int = 0) -> None:
    """Check a completed configuration; raises ConfigError with the first thing that is wrong."""
    name = config.name
    if not name:
        raise ConfigError("model configuration must specify 'name'")
    if not config.platform and not config.backend and config.ensemble_scheduling is None:
        raise ConfigError(f"must specify 'platform' or 'backend' for '{name}'")
    if config.max_batch_size < 0:
        raise ConfigError(f"'max_batch_size' must be non-negative value for {name}")
    policy = config.version_policy
    if policy is None or (policy.latest is None and policy.all is None and policy.specific is None):
        raise ConfigError(f"must specify 'version policy' for {name}")
    if config.dynamic_batching is not None:
        _validate_batching(config.dynamic_batching, config.max_batch_size, name)
    _validate_tensors("model input", config.input, config)
    _validate_tensors("model output", config.output, config)
    if config.ensemble_scheduling is None:
        if not config.instance_group:
            raise ConfigError(f"must specify one or more 'instance group's for {name}")
        for group in config.instance_group:
            _validate_group(group, name, gpu_count)
    _validate_cache(config)
    if config.backend == PYTHON:
        _validate_model_file(config)


def _validate_batching(batching: ModelDynamicBatching, max_batch_size: int, model: str) -> None:
    for size in batching.preferred_batch_size:
        if size <= 0:
            raise ConfigError(f"dynamic batching preferred size must be positive for {model}")
        if size > max_batch_size:
            raise ConfigError(
                f"dynamic batching preferred size must be <= max batch size for {model}"
            )
    levels = batching.priority_levels
    if levels:
        if not 1 <= batching.default_priority_level <= levels:
            raise ConfigError(f"default priority level must be in range [1, {levels}] for {model}")
        if not all(1 <= level <= levels for level in batching.priority_queue_policy):
            raise ConfigError(
                f"priority queue policy must have priority level in range [1, {levels}] for {model}"
            )
    if batching.preserve_ordering:
        _validate_ordering(batching, model)


def _validate_ordering(batching: ModelDynamicBatching, model: str) -> None:
    """Refuse what would let a later response overtake an earlier one."""
    if batching.priority_levels > 1:
        raise ConfigError(
            f"Only one priority level is allowed when 'preserve_ordering' is true for {model}"
        )
    default = batching.default_queue_policy
    for policy in (*([default] if default else ()), *batching.priority_queue_policy.values()):
        is_delayed = policy.timeout_action is ModelQueuePolicy.TimeoutAction.DELAY
        if is_delayed and policy.default_timeout_microseconds:
            raise ConfigError(
                "Queue policy can not have DELAY as timeout action when 'preserve_ordering' "
                f"is true for {model}"
            )


def _validate_tensors(
    what: str, tensors: Sequence[ModelInput | ModelOutput], config: ModelConfig
) -> None:
    seen: set[str] = set()
    for tensor in tensors:
        wrong = _tensor_fault(tensor, config.max_batch_size)
        if wrong is None and tensor.name in seen:
            wrong = "is configured more than once"
        if wrong is not None:
            named = f"{what} '{tensor.name}'" if tensor.name else what
            raise ConfigError(f"{named} {wrong} for {config.name}")
        seen.add(tensor.name)


def _tensor_fault(tensor: ModelInput | ModelOutput, max_batch_size: int) -> str | None:
    """Return what is wrong with an input or output, or None."""
    if not tensor.name:
        return "must specify 'name'"
    if tensor.data_type is DataType.TYPE_INVALID:
        return "must specify 'data_type'"
    if not tensor.dims:
        return "must specify 'dims'"
    shape = tensor.reshape.shape if tensor.reshape is not None else None
    if shape is not None and not shape and max_batch_size == 0:
        return (
            "cannot have empty reshape for non-batching model as scalar tensors are not supported"
        )
    wrong_extent = "must be integer >= 1, or -1 to indicate a variable-size dimension"
    if not all(extent >= 1 or extent == -1 for extent in tensor.dims):
        return f"dimension {wrong_extent}"
    if not all(extent >= 1 or extent == -1 for extent in shape or ()):
        return f"reshape dimensions {wrong_extent}"
    if shape is not None and _fixed_sizes(tensor.dims) != _fixed_sizes(shape):
        return "has different size for dims and reshape"
    return None


def _fixed_sizes(dims: Sequence[int]) -> list[int]:
    """Return the number of elements between one variable dimension and the next.

    A reshape may move elements only within those: [2, 4, -1, 6] fits [8, -1, 1, 6].
    """
    runs: list[list[int]] = [[]]
    for extent in dims:
        if extent == -1:
            runs.append([])
        else:
            runs[-1].append(extent)
    return [math.prod(run) for run in runs]


def _validate_group(group: ModelInstanceGroup, model: str, gpu_count: int) -> None:
    named = f"instance group {group.name} of model {model}"
    if group.kind is Kind.KIND_GPU:
        if gpu_count == 0:
            raise ConfigError(f"{named} has kind KIND_GPU but no GPUs are available")
        if not group.gpus:
            raise ConfigError(f"{named} has kind KIND_GPU but specifies no GPUs")
        for gpu in group.gpus:
            if not 0 <= gpu < gpu_count:
                known = ", ".join(map(str, range(gpu_count)))
                raise ConfigError(
                    f"{named} specifies invalid or unsupported gpu id {gpu}. GPUs with at least "
                    f"the minimum required CUDA compute compatibility of {_MIN_CAPABILITY} are: "
                    f"{known}"
                )
    elif group.gpus:
        raise ConfigError(f"{named} has kind {group.kind.name} but specifies one or more GPUs")
    if not 1 <= group.count <= MAX_INSTANCES:
        raise ConfigError(
            f"{named} has 'count' {group.count}: expected a number from 1 to {MAX_INSTANCES}"
        )
    if not group.name.isprintable() or _FORBIDDEN.intersection(group.name):
        raise ConfigError(f"{named!r}: Invalid stub name: contains invalid characters")


def _validate_cache(config: ModelConfig) -> None:
    if config.response_cache is None or not config.response_cache.enable:
        return
    obstacle = ""
    if config.is_decoupled:
        obstacle = "'decoupled' transaction policy"
    elif config.sequence_batching is not None:
        obstacle = "'Sequence Batching' scheduler type"
    if obstacle:
        raise ConfigError(
            f"Response Cache does not currently support model {config.name} with {obstacle}. "
            "Please disable the response cache."
        )


def _validate_model_file(config: ModelConfig) -> None:
    """Refuse a model file that is no Python file or lies outside the version's folder."""
    filename = config.default_model_filename
    if not filename.endswith(".py"):
        raise ConfigError(f"Model name must end with '.py'. Model name is \"{filename}\".")
    path = PurePosixPath(filename)
    if path.is_absolute() or ".." in path.parts:
        raise ConfigError(
            f"'default_model_filename' of model '{config.name}' must be a path inside the "
            f"version's folder, got '{filename}'"
        )
