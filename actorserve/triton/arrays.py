# SPDX-License-Identifier: Apache-2.0
"""numpy arrays to tensors of the protocol and back, for whoever embeds the server."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from actorserve.errors import InvalidArgument
from actorserve.triton.inference import InferTensor
from actorserve.wire.messages import INLINE_BYTES
from actorserve.wire.tensors import BY_NUMBER, DataType, decode_bytes, encode_bytes

_NATIVE = {
    datatype.numpy_dtype: datatype.wire_name
    for datatype in BY_NUMBER
    if datatype.numpy_dtype is not None and datatype.element_bytes
}
_BODY_DTYPES = {
    datatype.wire_name: datatype.body_dtype for datatype in BY_NUMBER if datatype.element_bytes
}


def tensor_of(name: str, value: npt.ArrayLike) -> tuple[InferTensor, npt.NDArray[np.uint8] | None]:
    """Return the tensor of an array, and its body where that has to be put into shared memory.

    Strings and bytes become BYTES. Raises InvalidArgument for a dtype that the protocol lacks.
    """
    if type(value) is np.ndarray and value.nbytes <= INLINE_BYTES:
        wire_name = _NATIVE.get(value.dtype)
        if wire_name is not None:
            return InferTensor(name, wire_name, value.shape, value.tobytes()), None
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
    dtype = _BODY_DTYPES.get(tensor.datatype)
    array = decode_bytes(body) if dtype is None else np.frombuffer(body, dtype)
    return array if len(tensor.shape) == 1 else array.reshape(tensor.shape)
