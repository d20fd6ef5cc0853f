# SPDX-License-Identifier: Apache-2.0
"""Arrays of outputs on their way from a rank to the executor: small inline, large by handle."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from actorserve.errors import ActorserveError, InvalidArgument, ProtocolError
from actorserve.wire.generation import Output
from actorserve.wire.messages import INLINE_BYTES, Handle, WireTensor
from actorserve.wire.tensors import BY_NUMBER, DataType, byte_size

Array = npt.NDArray[Any]


def packed(outputs: list[Output], place: Callable[[Array], Handle]) -> list[Output]:
    """Return the outputs with WireTensors for arrays; `place` puts a body into shared memory.

    A request whose arrays cannot travel, for their dtype or for want of memory, ends in an error.
    """
    if all(output.arrays is None for output in outputs):
        return outputs
    return [output if output.arrays is None else _packed(output, place) for output in outputs]


def _packed(output: Output, place: Callable[[Array], Handle]) -> Output:
    assert output.arrays is not None
    try:
        arrays = {name: _tensor(name, array, place) for name, array in output.arrays.items()}
    except ActorserveError as error:
        # What the engine says of it after this final is late, and dropped where it arrives.
        text = f"its arrays cannot be sent: {error.message}"
        return Output(output.id, output.seq, finish="error", final=True, error=text)
    return msgspec.structs.replace(output, arrays=arrays)


def _tensor(name: str, value: Any, place: Callable[[Array], Handle]) -> WireTensor:
    array = np.asarray(value)
    datatype = DataType.of_dtype(array.dtype)
    body = np.ascontiguousarray(array, datatype.body_dtype)
    data = body.tobytes() if body.nbytes <= INLINE_BYTES else place(body)
    return WireTensor(name, int(datatype), array.shape, data)


def unpack(outputs: Iterable[Output], view: Callable[[Handle], Any]) -> None:
    """Put read-only numpy arrays in the place of WireTensors; `view` maps a handle's bytes.

    Raises ProtocolError for what is none.
    """
    for output in outputs:
        if output.arrays is not None:
            output.arrays = {name: _array(each, view) for name, each in output.arrays.items()}


def _array(value: Any, view: Callable[[Handle], Any]) -> Array:
    try:
        tensor = msgspec.convert(value, WireTensor)
        dtype = BY_NUMBER[tensor.datatype].body_dtype
        body = tensor.data if isinstance(tensor.data, bytes) else view(tensor.data)
        if len(body) != byte_size(tensor.datatype, tensor.shape):
            raise ProtocolError(f"array {tensor.name!r} has {len(body)} bytes for {tensor.shape}")
        return np.frombuffer(body, dtype).reshape(tensor.shape)
    except (msgspec.ValidationError, InvalidArgument, ValueError, IndexError) as error:
        raise ProtocolError(f"an output's array is no tensor: {error}") from None
