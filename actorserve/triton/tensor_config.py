# SPDX-License-Identifier: Apache-2.0
"""The part of the model configuration that describes tensors: inputs, outputs, warm-up data.

Names, numbers and order are those of the v2 protocol's model_config.proto.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

from actorserve.triton.proto_schema import Int64, OneOf, Uint32


class DataType(enum.IntEnum):
    """The type of a tensor's elements."""

    TYPE_INVALID = 0
    TYPE_BOOL = 1
    TYPE_UINT8 = 2
    TYPE_UINT16 = 3
    TYPE_UINT32 = 4
    TYPE_UINT64 = 5
    TYPE_INT8 = 6
    TYPE_INT16 = 7
    TYPE_INT32 = 8
    TYPE_INT64 = 9
    TYPE_FP16 = 10
    TYPE_FP32 = 11
    TYPE_FP64 = 12
    TYPE_STRING = 13
    TYPE_BF16 = 14


class ModelTensorReshape(msgspec.Struct, kw_only=True):
    """The shape that the model sees, where it differs from the one that clients use."""

    shape: Annotated[list[Int64], 1] = []


class ModelInput(msgspec.Struct, kw_only=True):
    """A tensor that the model needs, or may be given."""

    class Format(enum.IntEnum):
        """The layout of an image."""

        FORMAT_NONE = 0
        FORMAT_NHWC = 1
        FORMAT_NCHW = 2

    name: Annotated[str, 1] = ""
    data_type: Annotated[DataType, 2] = DataType.TYPE_INVALID
    format: Annotated[Format, 3] = Format.FORMAT_NONE
    dims: Annotated[list[Int64], 4] = []
    reshape: Annotated[ModelTensorReshape | None, 5] = None
    is_shape_tensor: Annotated[bool, 6] = False
    allow_ragged_batch: Annotated[bool, 7] = False
    optional: Annotated[bool, 8] = False
    is_non_linear_format_io: Annotated[bool, 9] = False


class ModelOutput(msgspec.Struct, kw_only=True):
    """A tensor that the model returns."""

    name: Annotated[str, 1] = ""
    data_type: Annotated[DataType, 2] = DataType.TYPE_INVALID
    dims: Annotated[list[Int64], 3] = []
    reshape: Annotated[ModelTensorReshape | None, 5] = None
    label_filename: Annotated[str, 4] = ""
    is_shape_tensor: Annotated[bool, 6] = False
    is_non_linear_format_io: Annotated[bool, 7] = False


class BatchInput(msgspec.Struct, kw_only=True):
    """An input that a backend makes of the batch itself."""

    class Kind(enum.IntEnum):
        """What is told about the batch."""

        BATCH_ELEMENT_COUNT = 0
        BATCH_ACCUMULATED_ELEMENT_COUNT = 1
        BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO = 2
        BATCH_MAX_ELEMENT_COUNT_AS_SHAPE = 3
        BATCH_ITEM_SHAPE = 4
        BATCH_ITEM_SHAPE_FLATTEN = 5

    kind: Annotated[Kind, 1] = Kind.BATCH_ELEMENT_COUNT
    target_name: Annotated[list[str], 2] = []
    data_type: Annotated[DataType, 3] = DataType.TYPE_INVALID
    source_input: Annotated[list[str], 4] = []


class BatchOutput(msgspec.Struct, kw_only=True):
    """An output that a backend takes apart along the batch."""

    class Kind(enum.IntEnum):
        """How it is taken apart."""

        BATCH_SCATTER_WITH_INPUT_SHAPE = 0

    target_name: Annotated[list[str], 1] = []
    kind: Annotated[Kind, 2] = Kind.BATCH_SCATTER_WITH_INPUT_SHAPE
    source_input: Annotated[list[str], 3] = []


class ModelWarmup(msgspec.Struct, kw_only=True):
    """A request that is run on each instance before the model is ready."""

    class Input(msgspec.Struct, kw_only=True):
        """The data of one input."""

        data_type: Annotated[DataType, 1] = DataType.TYPE_INVALID
        dims: Annotated[list[Int64], 2] = []
        zero_data: Annotated[bool | None, 3, OneOf("input_data_type")] = None
        random_data: Annotated[bool | None, 4, OneOf("input_data_type")] = None
        input_data_file: Annotated[str | None, 5, OneOf("input_data_type")] = None

    name: Annotated[str, 1] = ""
    batch_size: Annotated[Uint32, 2] = 0
    inputs: Annotated[dict[str, Input], 3] = {}
    count: Annotated[Uint32, 4] = 0
