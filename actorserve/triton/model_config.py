# SPDX-License-Identifier: Apache-2.0
"""The model configuration (config.pbtxt) as typed Structs; this file holds its root.

    tensor_config.py         inputs, outputs, warm-up          ┐
    scheduling_config.py     queues, batching, sequences       ├─► ModelConfig
    optimization_config.py   optimization, rate limiter        ┘

Names, numbers and order are those of the v2 protocol's model_config.proto. Who reads and writes
it: text_format.py, config_json.py. Who completes and judges it: config_completion.py,
config_validation.py. None means absent; every other field has proto3's default.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

from actorserve.triton.optimization_config import ModelOptimizationPolicy, ModelRateLimiter
from actorserve.triton.proto_schema import Double, Int32, Int64, OneOf, Uint32
from actorserve.triton.scheduling_config import (
    ModelDynamicBatching,
    ModelEnsembling,
    ModelSequenceBatching,
)
from actorserve.triton.tensor_config import (
    BatchInput,
    BatchOutput,
    ModelInput,
    ModelOutput,
    ModelWarmup,
)


class ModelInstanceGroup(msgspec.Struct, kw_only=True):
    """A number of instances of the model on one kind of device."""

    class Kind(enum.IntEnum):
        """Where the instances run."""

        KIND_AUTO = 0
        KIND_GPU = 1
        KIND_CPU = 2
        KIND_MODEL = 3

    class SecondaryDevice(msgspec.Struct, kw_only=True):
        """A further device that an instance uses."""

        class SecondaryDeviceKind(enum.IntEnum):
            """The kind of a further device."""

            KIND_NVDLA = 0

        kind: Annotated[SecondaryDeviceKind, 1] = SecondaryDeviceKind.KIND_NVDLA
        device_id: Annotated[Int64, 2] = 0

    name: Annotated[str, 1] = ""
    kind: Annotated[Kind, 4] = Kind.KIND_AUTO
    count: Annotated[Int32, 2] = 0
    rate_limiter: Annotated[ModelRateLimiter | None, 6] = None
    gpus: Annotated[list[Int32], 3] = []
    secondary_devices: Annotated[list[SecondaryDevice], 8] = []
    profile: Annotated[list[str], 5] = []
    passive: Annotated[bool, 7] = False
    host_policy: Annotated[str, 9] = ""


class ModelVersionPolicy(msgspec.Struct, kw_only=True):
    """Which of the version folders are served."""

    class Latest(msgspec.Struct, kw_only=True):
        """The highest ones."""

        num_versions: Annotated[Uint32, 1] = 0

    class All(msgspec.Struct, kw_only=True):
        """All of them."""

    class Specific(msgspec.Struct, kw_only=True):
        """Those named."""

        versions: Annotated[list[Int64], 1] = []

    latest: Annotated[Latest | None, 1, OneOf("policy_choice")] = None
    all: Annotated[All | None, 2, OneOf("policy_choice")] = None
    specific: Annotated[Specific | None, 3, OneOf("policy_choice")] = None


class ModelParameter(msgspec.Struct, kw_only=True):
    """A value for the model or for the server, see model_parameters.py."""

    string_value: Annotated[str, 1] = ""


class ModelOperations(msgspec.Struct, kw_only=True):
    """Libraries of custom operations."""

    op_library_filename: Annotated[list[str], 1] = []


class ModelTransactionPolicy(msgspec.Struct, kw_only=True):
    """Whether a request may have any number of responses."""

    decoupled: Annotated[bool, 1] = False


class ModelRepositoryAgents(msgspec.Struct, kw_only=True):
    """Plug-ins that check or change a model's files before it is loaded."""

    class Agent(msgspec.Struct, kw_only=True):
        """One of them."""

        name: Annotated[str, 1] = ""
        parameters: Annotated[dict[str, str], 2] = {}

    agents: Annotated[list[Agent], 1] = []


class ModelResponseCache(msgspec.Struct, kw_only=True):
    """Whether equal requests may be answered from a cache."""

    enable: Annotated[bool, 1] = False


class ModelMetrics(msgspec.Struct, kw_only=True):
    """Changes to the metrics of this model."""

    class MetricControl(msgspec.Struct, kw_only=True):
        """Options of one metric family."""

        class MetricIdentifier(msgspec.Struct, kw_only=True):
            """Names the family."""

            family: Annotated[str, 1] = ""

        class HistogramOptions(msgspec.Struct, kw_only=True):
            """Its buckets."""

            buckets: Annotated[list[Double], 1] = []

        metric_identifier: Annotated[MetricIdentifier | None, 1] = None
        histogram_options: Annotated[HistogramOptions | None, 2, OneOf("metric_options")] = None

    metric_control: Annotated[list[MetricControl], 1] = []


class ModelConfig(msgspec.Struct, kw_only=True):
    """All that is configured about a model."""

    name: Annotated[str, 1] = ""
    platform: Annotated[str, 2] = ""
    backend: Annotated[str, 17] = ""
    runtime: Annotated[str, 25] = ""
    version_policy: Annotated[ModelVersionPolicy | None, 3] = None
    max_batch_size: Annotated[Int32, 4] = 0
    input: Annotated[list[ModelInput], 5] = []
    output: Annotated[list[ModelOutput], 6] = []
    batch_input: Annotated[list[BatchInput], 20] = []
    batch_output: Annotated[list[BatchOutput], 21] = []
    optimization: Annotated[ModelOptimizationPolicy | None, 12] = None
    dynamic_batching: Annotated[ModelDynamicBatching | None, 11, OneOf("scheduling_choice")] = None
    sequence_batching: Annotated[ModelSequenceBatching | None, 13, OneOf("scheduling_choice")] = (
        None
    )
    ensemble_scheduling: Annotated[ModelEnsembling | None, 15, OneOf("scheduling_choice")] = None
    instance_group: Annotated[list[ModelInstanceGroup], 7] = []
    default_model_filename: Annotated[str, 8] = ""
    cc_model_filenames: Annotated[dict[str, str], 9] = {}
    metric_tags: Annotated[dict[str, str], 10] = {}
    parameters: Annotated[dict[str, ModelParameter], 14] = {}
    model_warmup: Annotated[list[ModelWarmup], 16] = []
    model_operations: Annotated[ModelOperations | None, 18] = None
    model_transaction_policy: Annotated[ModelTransactionPolicy | None, 19] = None
    model_repository_agents: Annotated[ModelRepositoryAgents | None, 23] = None
    response_cache: Annotated[ModelResponseCache | None, 24] = None
    model_metrics: Annotated[ModelMetrics | None, 26] = None

    @property
    def is_decoupled(self) -> bool:
        """Whether a request may have any number of responses."""
        policy = self.model_transaction_policy
        return policy is not None and policy.decoupled
