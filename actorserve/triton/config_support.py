# SPDX-License-Identifier: Apache-2.0
"""Say what of a configuration this version cannot honour: nothing is ever ignored in silence.

What changes which answers a client gets, or whether files may be trusted, is an error and fails
the model's load; what only costs speed or leaves out a convenience is a warning. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

from actorserve.triton.config_completion import PYTHON
from actorserve.triton.generation_tensors import GENERATION
from actorserve.triton.metric_options import metric_problems, metric_warnings
from actorserve.triton.model_config import ModelConfig, ModelInstanceGroup
from actorserve.triton.optimization_config import ModelOptimizationPolicy
from actorserve.triton.scheduling_config import ModelDynamicBatching, ModelQueuePolicy
from actorserve.triton.tensor_config import ModelInput, ModelOutput


def unsupported(
    config: ModelConfig, *, is_python_based: bool = False
) -> tuple[list[str], list[str]]:
    """Return what of a completed configuration cannot be honoured: (errors, warnings).

    An error must fail the model's load; a warning says what is ignored. Each is a sentence that
    names the model. `is_python_based` says that its backend was found and is a Python-based one.
    """
    errors = [
        f"model '{config.name}': {text}" for text in _unsupported_errors(config, is_python_based)
    ]
    warnings = [f"model '{config.name}': {text}" for text in _unsupported_warnings(config)]
    return errors, warnings


def _unsupported_errors(config: ModelConfig, is_python_based: bool) -> Iterator[str]:
    if config.ensemble_scheduling is not None or config.platform == "ensemble":
        yield (
            "ensemble_scheduling is not supported by this version: call the models from a Python "
            "model instead (InferenceRequest.exec)"
        )
    elif is_python_based:
        pass  # with the runtime that its backend has
    elif config.backend != PYTHON:
        wanted = (
            f"backend '{config.backend}'" if config.backend else f"platform '{config.platform}'"
        )
        yield (
            f"{wanted} is not supported: only the backend '{PYTHON}' is, '{GENERATION}', and those "
            "written in Python that --backend-directory has"
        )
    elif config.runtime not in ("", "model.py", "libtriton_python.so"):
        yield f"runtime '{config.runtime}' is not supported: leave it out, or set 'model.py'"
    if config.sequence_batching is not None:
        yield "sequence_batching is not supported by this version"
    if config.model_repository_agents is not None and config.model_repository_agents.agents:
        names = ", ".join(f"'{agent.name}'" for agent in config.model_repository_agents.agents)
        yield f"model_repository_agents are not supported, and {names} may have to check the files"
    yield from metric_problems(config)


def _unsupported_warnings(config: ModelConfig) -> Iterator[str]:
    if config.model_warmup:
        yield (
            "model_warmup is ignored when serving, the first requests run on a cold model; a dry "
            "run of check sends it"
        )
    if config.response_cache is not None and config.response_cache.enable:
        yield "response_cache is ignored: every request is executed"
    if config.dynamic_batching is not None:
        yield from _ignored_of_batching(config.dynamic_batching)
    if config.batch_input:
        yield "batch_input is ignored: a Python model gets a list of requests, not one batch"
    if config.batch_output:
        yield "batch_output is ignored: a Python model answers request by request"
    if config.optimization is not None:
        for part in _ignored_optimizations(config.optimization):
            yield f"optimization.{part} is ignored: it has no meaning for a Python model here"
    for group in config.instance_group:
        for part, why in _ignored_of_group(group):
            yield f"instance_group '{group.name}': {part} is ignored: {why}"
    tensors: tuple[ModelInput | ModelOutput, ...] = (*config.input, *config.output)
    for tensor in tensors:
        if tensor.is_shape_tensor or tensor.is_non_linear_format_io:
            yield f"tensor '{tensor.name}': is_shape_tensor and is_non_linear_format_io are ignored"
    if config.cc_model_filenames:
        yield "cc_model_filenames is ignored: it has no meaning for a Python model"
    if config.model_operations is not None and config.model_operations.op_library_filename:
        yield "model_operations is ignored: it has no meaning for a Python model"
    yield from metric_warnings(config)


def _ignored_of_batching(batching: ModelDynamicBatching) -> Iterator[str]:
    if batching.priority_queue_policy and not batching.priority_levels:
        yield "dynamic_batching.priority_queue_policy is ignored: priority_levels is not set"
    policies = [*batching.priority_queue_policy.values()]
    if batching.default_queue_policy is not None:
        policies.append(batching.default_queue_policy)
    delays = ModelQueuePolicy.TimeoutAction.DELAY
    if batching.preserve_ordering and any(each.timeout_action is delays for each in policies):
        yield (
            "dynamic_batching: timeout_action DELAY is ignored: with preserve_ordering no request "
            "is moved behind others"
        )


def _ignored_optimizations(optimization: ModelOptimizationPolicy) -> Iterator[str]:
    """Yield the wishes that go beyond the defaults; pinned memory is one that every model has."""
    for part in ("graph", "cuda", "execution_accelerators"):
        if getattr(optimization, part) is not None:
            yield part
    for part in ("priority", "gather_kernel_buffer_threshold", "eager_batching"):
        if getattr(optimization, part):
            yield part


def _ignored_of_group(group: ModelInstanceGroup) -> Iterator[tuple[str, str]]:
    if group.rate_limiter is not None:
        yield "rate_limiter", "an instance runs as soon as it is free"
    if group.passive:
        yield "passive", "its instances serve requests as all others do"
    if group.host_policy:
        yield "host_policy", "its instances run on any CPU"
    if group.secondary_devices:
        yield "secondary_devices", "no such devices are known"
    if group.profile:
        yield "profile", "it has no meaning for a Python model"
