# SPDX-License-Identifier: Apache-2.0
"""The model API's plain functions: data types, BYTES bodies, and look-ups by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from actorserve.triton.request import InferenceRequest
from actorserve.triton.response import InferenceResponse
from actorserve.triton.tensor import Tensor
from actorserve.wire.tensors import decode_bytes, encode_bytes

TRITON_STRING_TO_NUMPY: dict[str, type[Any]] = {
    "TYPE_BOOL": bool,
    "TYPE_UINT8": np.uint8,
    "TYPE_UINT16": np.uint16,
    "TYPE_UINT32": np.uint32,
    "TYPE_UINT64": np.uint64,
    "TYPE_INT8": np.int8,
    "TYPE_INT16": np.int16,
    "TYPE_INT32": np.int32,
    "TYPE_INT64": np.int64,
    "TYPE_FP16": np.float16,
    "TYPE_FP32": np.float32,
    "TYPE_FP64": np.float64,
    "TYPE_STRING": np.object_,
}

TRITON_TO_NUMPY_TYPE: dict[int, type[Any]] = {
    1: np.bool_,
    2: np.uint8,
    3: np.uint16,
    4: np.uint32,
    5: np.uint64,
    6: np.int8,
    7: np.int16,
    8: np.int32,
    9: np.int64,
    10: np.float16,
    11: np.float32,
    12: np.float64,
    13: np.object_,
}

NUMPY_TO_TRITON_TYPE: dict[type[Any], int] = {
    **{numpy_type: number for number, numpy_type in TRITON_TO_NUMPY_TYPE.items()},
    np.bytes_: 13,
}


def triton_string_to_numpy(triton_type_string: str) -> type[Any]:
    """Return numpy's type for a configuration's (`TYPE_FP32`). Raises KeyError."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> type[Any] | None:
    """Return numpy's type for a data type's number, or None where there is none."""
    return TRITON_TO_NUMPY_TYPE.get(data_type)


def numpy_to_triton_type(data_type: type[Any]) -> int:
    """Return the data type's number for one of numpy's types. Raises KeyError."""
    return NUMPY_TO_TRITON_TYPE[data_type]


def serialize_byte_tensor(input_tensor: npt.NDArray[Any]) -> bytes | tuple[()] | None:
    """Return the BYTES body of an object or `S` array: () for no elements, None for other arrays.

    Elements that are not exactly `bytes` are encoded as the UTF-8 of their `str()`.
    """
    if input_tensor.size == 0:
        return ()
    if input_tensor.dtype != np.object_ and input_tensor.dtype.type is not np.bytes_:
        return None
    return encode_bytes(input_tensor)


def deserialize_bytes_tensor(encoded_tensor: bytes) -> npt.NDArray[np.object_]:
    """Return the elements of a BYTES body as a one-dimensional array of `bytes`."""
    return decode_bytes(encoded_tensor)


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """Return the request's first input of that name, or None."""
    for tensor in inference_request.inputs():
        if tensor.name() == name:
            return tensor
    return None


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """Return the response's first output of that name, or None."""
    for tensor in inference_response.output_tensors():
        if tensor.name() == name:
            return tensor
    return None


def get_input_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return the configuration of the input of that name, or None."""
    return _named(model_config.get("input"), name)


def get_output_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return the configuration of the output of that name, or None."""
    return _named(model_config.get("output"), name)


def _named(properties: list[dict[str, Any]] | None, name: str) -> dict[str, Any] | None:
    for entry in properties or ():
        if entry.get("name") == name:
            return entry
    return None


def using_decoupled_model_transaction_policy(model_config: dict[str, Any]) -> bool:
    """Tell whether a configuration says that the model is decoupled."""
    policy = model_config.get("model_transaction_policy") or {}
    return bool(policy.get("decoupled", False))
