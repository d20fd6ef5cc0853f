# SPDX-License-Identifier: Apache-2.0
"""Say a configuration in the terms of the v2 protocol: what front ends and checks work with."""

from __future__ import annotations

from collections.abc import Iterable

from actorserve.triton.generation_tensors import GENERATION
from actorserve.triton.inference import ModelInfo, TensorSpec
from actorserve.triton.model_config import ModelConfig
from actorserve.triton.request_validation import InputRule
from actorserve.triton.tensor_config import ModelInput, ModelOutput
from actorserve.wire.tensors import BY_NUMBER

PLATFORM = "python"


def model_info(config: ModelConfig, version: int, versions: Iterable[int]) -> ModelInfo:
    """Describe a version of a validated configuration; `versions` are all that serve."""
    return ModelInfo(
        name=config.name,
        version=str(version),
        versions=tuple(str(one) for one in sorted(versions)),
        platform=GENERATION if config.backend == GENERATION else PLATFORM,
        max_batch_size=config.max_batch_size,
        decoupled=config.is_decoupled,
        inputs=tuple(tensor_spec(one, config.max_batch_size) for one in config.input),
        outputs=tuple(tensor_spec(one, config.max_batch_size) for one in config.output),
    )


def tensor_spec(tensor: ModelInput | ModelOutput, max_batch_size: int) -> TensorSpec:
    """Describe an input or output as clients see it: -1 in front where the model batches."""
    return TensorSpec(
        name=tensor.name,
        datatype=BY_NUMBER[tensor.data_type].wire_name,
        shape=((-1,) if max_batch_size > 0 else ()) + tuple(tensor.dims),
        optional=isinstance(tensor, ModelInput) and tensor.optional,
    )


def input_rules(config: ModelConfig) -> list[InputRule]:
    """Return what requests are checked against, for `RequestRules`."""
    return [
        InputRule(
            name=one.name,
            datatype=BY_NUMBER[one.data_type],
            dims=tuple(one.dims),
            optional=one.optional,
            reshape=tuple(one.reshape.shape) if one.reshape is not None else None,
            allow_ragged_batch=one.allow_ragged_batch,
        )
        for one in config.input
    ]
