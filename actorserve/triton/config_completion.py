# SPDX-License-Identifier: Apache-2.0
"""Fill in what a configuration leaves out, as the reference server does.

    config.pbtxt ──► complete() ──► [auto_complete_config: merge_auto_completed()] ──► validate()

Nothing is changed in place. Nothing is read from disk either: the caller says what the model's
folder holds.
"""

from __future__ import annotations

import copy

from actorserve.errors import ConfigError
from actorserve.triton.generation_tensors import GENERATION, complete_generation
from actorserve.triton.instance_group import complete_groups
from actorserve.triton.model_config import ModelConfig, ModelVersionPolicy
from actorserve.triton.optimization_config import ModelOptimizationPolicy

PYTHON = "python"
MODEL_FILE = "model.py"


def complete(
    config: ModelConfig,
    directory: str,
    *,
    has_model_py: bool,
    gpu_count: int = 0,
    strict: bool = False,
) -> ModelConfig:
    """Return the configuration with all defaults filled in.

    `directory` is the name of the model's folder, `has_model_py` says whether one of its version
    folders holds a model.py. `strict` leaves out what `--disable-auto-complete-config` switches
    off: name and backend. Raises ConfigError where the name is not the folder's, or where nothing
    tells the backend.
    """
    done = copy.deepcopy(config)
    if not strict:
        done.name = done.name or directory
    if done.name and done.name != directory:
        raise ConfigError(
            f"unexpected directory name '{directory}' for model '{done.name}', "
            "directory name must equal model name"
        )
    if not strict:
        _complete_backend(done, has_model_py)
    if done.backend == PYTHON:
        done.default_model_filename = done.default_model_filename or MODEL_FILE
    elif done.backend == GENERATION:
        done = complete_generation(done)
    _complete_version_policy(done)
    if done.ensemble_scheduling is None:
        done.instance_group = complete_groups(done, gpu_count)
        _complete_optimization(done)
    return done


def merge_auto_completed(config: ModelConfig, returned: ModelConfig) -> ModelConfig:
    """Return the configuration with what a model's `auto_complete_config` may decide.

    These are max_batch_size, inputs, outputs, the transaction policy and, where no scheduler was
    chosen before, dynamic batching; whatever else the model changed is ignored.
    """
    done = copy.deepcopy(config)
    theirs = copy.deepcopy(returned)
    done.max_batch_size = theirs.max_batch_size
    done.input = theirs.input
    done.output = theirs.output
    if theirs.model_transaction_policy is not None:
        done.model_transaction_policy = theirs.model_transaction_policy
    if done.sequence_batching is None and done.ensemble_scheduling is None:
        done.dynamic_batching = done.dynamic_batching or theirs.dynamic_batching
    return done


def _complete_backend(config: ModelConfig, has_model_py: bool) -> None:
    """Find out which backend a configuration means that names none."""
    if config.backend or config.ensemble_scheduling is not None:
        return
    names_nothing = not config.platform and not config.default_model_filename
    if config.default_model_filename == MODEL_FILE or (names_nothing and has_model_py):
        config.backend = PYTHON
    elif not config.platform:
        _, dot, suffix = config.name.partition(".")
        if not dot:
            raise ConfigError(
                f"Invalid model name: Could not determine backend for model '{config.name}' with "
                "no backend in model configuration. Expected model name of the form "
                "'model.<backend_name>'."
            )
        config.backend = suffix


def _complete_version_policy(config: ModelConfig) -> None:
    """Serve the highest version unless something else is said; an empty policy stays wrong."""
    if config.version_policy is None:
        config.version_policy = ModelVersionPolicy(latest=ModelVersionPolicy.Latest())
    latest = config.version_policy.latest
    if latest is not None:
        latest.num_versions = latest.num_versions or 1


def _complete_optimization(config: ModelConfig) -> None:
    """State the default of pinned memory, which clients see at the config endpoint."""
    buffer = ModelOptimizationPolicy.PinnedMemoryBuffer
    optimization = config.optimization or ModelOptimizationPolicy()
    optimization.input_pinned_memory = optimization.input_pinned_memory or buffer(enable=True)
    optimization.output_pinned_memory = optimization.output_pinned_memory or buffer(enable=True)
    config.optimization = optimization
