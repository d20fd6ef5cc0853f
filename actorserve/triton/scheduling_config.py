# SPDX-License-Identifier: Apache-2.0
"""The part of the model configuration that says how requests are queued, merged and routed.

Names, numbers and order are those of the v2 protocol's model_config.proto.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

from actorserve.triton.proto_schema import Float, Int32, Int64, OneOf, Uint32, Uint64
from actorserve.triton.tensor_config import DataType


class ModelQueuePolicy(msgspec.Struct, kw_only=True):
    """How long a request may wait, and how many may."""

    class TimeoutAction(enum.IntEnum):
        """What becomes of a request that waited too long."""

        REJECT = 0
        DELAY = 1

    timeout_action: Annotated[TimeoutAction, 1] = TimeoutAction.REJECT
    default_timeout_microseconds: Annotated[Uint64, 2] = 0
    allow_timeout_override: Annotated[bool, 3] = False
    max_queue_size: Annotated[Uint32, 4] = 0


class ModelDynamicBatching(msgspec.Struct, kw_only=True):
    """Requests are merged into batches; priority 1 is the highest."""

    preferred_batch_size: Annotated[list[Int32], 1] = []
    max_queue_delay_microseconds: Annotated[Uint64, 2] = 0
    preserve_ordering: Annotated[bool, 3] = False
    priority_levels: Annotated[Uint64, 4] = 0
    default_priority_level: Annotated[Uint64, 5] = 0
    default_queue_policy: Annotated[ModelQueuePolicy | None, 6] = None
    priority_queue_policy: Annotated[dict[Uint64, ModelQueuePolicy], 7] = {}


class ModelSequenceBatching(msgspec.Struct, kw_only=True):
    """Requests of one sequence all go to the same instance."""

    class Control(msgspec.Struct, kw_only=True):
        """A signal that the model gets as an input."""

        class Kind(enum.IntEnum):
            """What the signal says."""

            CONTROL_SEQUENCE_START = 0
            CONTROL_SEQUENCE_READY = 1
            CONTROL_SEQUENCE_END = 2
            CONTROL_SEQUENCE_CORRID = 3

        kind: Annotated[Kind, 1] = Kind.CONTROL_SEQUENCE_START
        int32_false_true: Annotated[list[Int32], 2] = []
        fp32_false_true: Annotated[list[Float], 3] = []
        bool_false_true: Annotated[list[bool], 5] = []
        data_type: Annotated[DataType, 4] = DataType.TYPE_INVALID

    class ControlInput(msgspec.Struct, kw_only=True):
        """The input that carries signals."""

        name: Annotated[str, 1] = ""
        control: Annotated[list[ModelSequenceBatching.Control], 2] = []

    class InitialState(msgspec.Struct, kw_only=True):
        """What a state holds at the start of a sequence."""

        data_type: Annotated[DataType, 1] = DataType.TYPE_INVALID
        dims: Annotated[list[Int64], 2] = []
        zero_data: Annotated[bool | None, 3, OneOf("state_data")] = None
        data_file: Annotated[str | None, 4, OneOf("state_data")] = None
        name: Annotated[str, 5] = ""

    class State(msgspec.Struct, kw_only=True):
        """An output that comes back as an input of the sequence's next request."""

        input_name: Annotated[str, 1] = ""
        output_name: Annotated[str, 2] = ""
        data_type: Annotated[DataType, 3] = DataType.TYPE_INVALID
        dims: Annotated[list[Int64], 4] = []
        initial_state: Annotated[list[ModelSequenceBatching.InitialState], 5] = []
        use_same_buffer_for_input_output: Annotated[bool, 6] = False
        use_growable_memory: Annotated[bool, 7] = False

    class StrategyDirect(msgspec.Struct, kw_only=True):
        """A sequence owns a row of an instance's batch."""

        max_queue_delay_microseconds: Annotated[Uint64, 1] = 0
        minimum_slot_utilization: Annotated[Float, 2] = 0.0

    class StrategyOldest(msgspec.Struct, kw_only=True):
        """Requests of the oldest sequences are batched dynamically."""

        max_candidate_sequences: Annotated[Int32, 1] = 0
        preferred_batch_size: Annotated[list[Int32], 2] = []
        max_queue_delay_microseconds: Annotated[Uint64, 3] = 0
        preserve_ordering: Annotated[bool, 4] = False

    direct: Annotated[StrategyDirect | None, 3, OneOf("strategy_choice")] = None
    oldest: Annotated[StrategyOldest | None, 4, OneOf("strategy_choice")] = None
    max_sequence_idle_microseconds: Annotated[Uint64, 1] = 0
    control_input: Annotated[list[ControlInput], 2] = []
    state: Annotated[list[State], 5] = []
    iterative_sequence: Annotated[bool, 6] = False


class ModelEnsembling(msgspec.Struct, kw_only=True):
    """The model is a graph of other models."""

    class Step(msgspec.Struct, kw_only=True):
        """One model of the graph; its maps go from the model's names to the graph's."""

        model_name: Annotated[str, 1] = ""
        model_version: Annotated[Int64, 2] = 0
        input_map: Annotated[dict[str, str], 3] = {}
        output_map: Annotated[dict[str, str], 4] = {}
        model_namespace: Annotated[str, 5] = ""

    step: Annotated[list[Step], 1] = []
    max_inflight_requests: Annotated[Uint32, 2] = 0
