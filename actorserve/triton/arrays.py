# SPDX-License-Identifier: Apache-2.0
"""numpy arrays to tensors of the protocol and back, for whoever embeds the server."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from actorserve.errors import InvalidArgument
from actorserve.triton.inference import InferTensor
from actorserve.wire.messages import INLINE_BYTES
from actorserve.wire.tensors import BY_WIRE_NAME, DataType, decode_bytes, encode_bytes


def tensor_of(name: str, value: npt.ArrayLike) -> tuple[InferTensor, npt.NDArray[np.uint8] | None]:
    """Return the tensor of an array, and its body where that has to be put into shared memory.

    Strings and bytes become BYTES. Raises InvalidArgument for a dtype that the protocol lacks.
    """
    array = np.asarray(value)
    if array.dtype.kind in "OSU":
        body = encode_bytes(array.astype(object) if array.dtype.kind == "U" else array)
        tensor = InferTensor(name, DataType.BYTES.wire_name, array.shape, body)
        if len(body) <= INLINE_BYTES:
            return tensor, None
        return tensor, np.frombuffer(body, np.uint8)
    try:
        datatype = DataType.of_dtype(array.dtype)
    except InvalidArgument as error:
        raise InvalidArgument(f"input '{name}': {error.message}") from None
    shape = array.shape
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    if array.nbytes <= INLINE_BYTES:
        return InferTensor(name, datatype.wire_name, shape, array.tobytes()), None
    return InferTensor(name, datatype.wire_name, shape, b""), array.reshape(-1).view(np.uint8)


def array_of(tensor: InferTensor) -> npt.NDArray[Any]:
    """Return a response's tensor as an array: a read-only view, BYTES as an object array.

    BF16, which numpy lacks, comes as uint16 words.
    """
    body = tensor.data
    assert isinstance(body, (bytes, bytearray, memoryview))
    datatype = BY_WIRE_NAME[tensor.datatype]
    if datatype is DataType.BYTES:
        return decode_bytes(body).reshape(tensor.shape)
    return np.frombuffer(body, datatype.body_dtype).reshape(tensor.shape)
