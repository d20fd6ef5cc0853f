# SPDX-License-Identifier: Apache-2.0
"""The part of the model configuration that tunes backends and their memory.

Names, numbers and order are those of the v2 protocol's model_config.proto.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

from actorserve.triton.proto_schema import Int32, Int64, Uint32


class ModelOptimizationPolicy(msgspec.Struct, kw_only=True):
    """Wishes about speed; hardly any means something to a Python model."""

    class ModelPriority(enum.IntEnum):
        """How much the model is preferred to others on a device."""

        PRIORITY_DEFAULT = 0
        PRIORITY_MAX = 1
        PRIORITY_MIN = 2

    class Graph(msgspec.Struct, kw_only=True):
        """How much a framework rewrites the model's graph."""

        level: Annotated[Int32, 1] = 0

    class Cuda(msgspec.Struct, kw_only=True):
        """CUDA graphs and streams."""

        class GraphSpec(msgspec.Struct, kw_only=True):
            """A CUDA graph to capture."""

            class Shape(msgspec.Struct, kw_only=True):
                """An input's shape in the graph."""

                dim: Annotated[list[Int64], 1] = []

            class LowerBound(msgspec.Struct, kw_only=True):
                """The least shape that may use the graph."""

                batch_size: Annotated[Int32, 1] = 0
                input: Annotated[dict[str, ModelOptimizationPolicy.Cuda.GraphSpec.Shape], 2] = {}

            batch_size: Annotated[Int32, 1] = 0
            input: Annotated[dict[str, Shape], 2] = {}
            graph_lower_bound: Annotated[LowerBound | None, 3] = None

        graphs: Annotated[bool, 1] = False
        busy_wait_events: Annotated[bool, 2] = False
        graph_spec: Annotated[list[GraphSpec], 3] = []
        output_copy_stream: Annotated[bool, 4] = False

    class ExecutionAccelerators(msgspec.Struct, kw_only=True):
        """Libraries that run a part of the model."""

        class Accelerator(msgspec.Struct, kw_only=True):
            """One of them."""

            name: Annotated[str, 1] = ""
            parameters: Annotated[dict[str, str], 2] = {}

        gpu_execution_accelerator: Annotated[list[Accelerator], 1] = []
        cpu_execution_accelerator: Annotated[list[Accelerator], 2] = []

    class PinnedMemoryBuffer(msgspec.Struct, kw_only=True):
        """Whether tensors pass through pinned memory on their way to a GPU."""

        enable: Annotated[bool, 1] = False

    graph: Annotated[Graph | None, 1] = None
    priority: Annotated[ModelPriority, 2] = ModelPriority.PRIORITY_DEFAULT
    cuda: Annotated[Cuda | None, 3] = None
    execution_accelerators: Annotated[ExecutionAccelerators | None, 4] = None
    input_pinned_memory: Annotated[PinnedMemoryBuffer | None, 5] = None
    output_pinned_memory: Annotated[PinnedMemoryBuffer | None, 6] = None
    gather_kernel_buffer_threshold: Annotated[Uint32, 7] = 0
    eager_batching: Annotated[bool, 8] = False


class ModelRateLimiter(msgspec.Struct, kw_only=True):
    """What an instance must hold before it may run."""

    class Resource(msgspec.Struct, kw_only=True):
        """A number of tokens, of one device or of the whole server."""

        name: Annotated[str, 1] = ""
        global_: Annotated[bool, 2] = False
        count: Annotated[Uint32, 3] = 0

    resources: Annotated[list[Resource], 1] = []
    priority: Annotated[Uint32, 2] = 0
