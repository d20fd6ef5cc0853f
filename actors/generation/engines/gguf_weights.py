# SPDX-License-Identifier: Apache-2.0
"""From the blocks of a GGUF tensor to float32.

    Q8_0   scale │ 32 signed bytes                     value = scale · q
    Q4_1   scale │ least │ 16 bytes, two values each   value = scale · q + least
           the low halves are the first 16 values, the high halves the last

Common types are done here, in pieces that stay in the processor's cache, straight into the
caller's array: 135 million numbers in a good half second. The others go through the `gguf`
package where it is installed. Values equal that package's, bit by bit.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from actorserve.actors.generation.engines.gguf_file import Bytes, Tensor
from actorserve.errors import InvalidArgument

Floats = npt.NDArray[np.float32]

# A piece has so many rows at most: with its temporaries it fits the second-level cache.
PIECE_ROWS = 2048


def rows(tensor: Tensor, numbers: npt.NDArray[np.intp]) -> Floats:
    """Return some rows of a tensor of two dimensions, as float32."""
    return _natural(tensor, tensor.data[numbers])


def dense(tensor: Tensor) -> Floats:
    """Return the whole of a tensor, in its shape."""
    step = PIECE_ROWS * 32 // tensor.shape[-1] + 1
    out = np.empty((len(tensor.data), tensor.shape[-1]), np.float32)
    for begin in range(0, len(out), step):
        out[begin : begin + step] = _natural(tensor, tensor.data[begin : begin + step])
    return out.reshape(tensor.shape)


def fill_transposed(tensor: Tensor, data: Bytes, out: Floats) -> None:
    """Write rows of a tensor as columns: `data` has the bytes of the rows, `out` [columns, rows].

    Raises InvalidArgument for a type that needs the `gguf` package, where that is missing.
    """
    convert = CONVERTERS.get(tensor.type.name)
    _, values, nbytes = tensor.type
    for begin in range(0, len(data), PIECE_ROWS):
        piece = data[begin : begin + PIECE_ROWS]
        target = out[:, begin : begin + PIECE_ROWS]
        if convert is None:
            target[:] = _by_package(tensor, piece).T
            continue
        for block in range(data.shape[1] // nbytes):
            raw = np.ascontiguousarray(piece[:, block * nbytes : (block + 1) * nbytes].T)
            convert(raw, target[block * values : (block + 1) * values])


def _natural(tensor: Tensor, data: Bytes) -> Floats:
    convert = CONVERTERS.get(tensor.type.name)
    if convert is None:
        return _by_package(tensor, data)
    raw = np.ascontiguousarray(data.reshape(-1, tensor.type.nbytes).T)
    out = np.empty((tensor.type.values, raw.shape[1]), np.float32)
    convert(raw, out)
    return np.ascontiguousarray(out.T).reshape(len(data), -1)


# Each takes the bytes of many blocks as [bytes of a block, blocks] and fills [values of a block,
# blocks], so that all arithmetic runs along many blocks and not along the few values of one.


def _words(raw: Bytes, dtype: type[np.generic]) -> npt.NDArray[Any]:
    """Return the bytes of each block as numbers: one a block."""
    return np.ascontiguousarray(raw.T).view(dtype)[:, 0]


def _scale(raw: Bytes) -> Floats:
    return _words(raw, np.float16).astype(np.float32)


def _nibbles(packed: Bytes, out: Floats) -> None:
    out[:16] = packed & 15
    out[16:] = packed >> 4


def _fifth_bits(raw: Bytes, out: Floats) -> None:
    """Add 16 where the bit of a value is set among the 32 of its block."""
    out += np.unpackbits(raw, axis=0, bitorder="little") * np.float32(16)


def _f32(raw: Bytes, out: Floats) -> None:
    out[0] = _words(raw, np.float32)


def _f16(raw: Bytes, out: Floats) -> None:
    out[0] = _words(raw, np.float16)


def _bf16(raw: Bytes, out: Floats) -> None:
    out[0] = (_words(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)


def _q4_0(raw: Bytes, out: Floats) -> None:
    _nibbles(raw[2:], out)
    out -= 8
    out *= _scale(raw[:2])


def _q4_1(raw: Bytes, out: Floats) -> None:
    _nibbles(raw[4:], out)
    out *= _scale(raw[:2])
    out += _scale(raw[2:4])


def _q5_0(raw: Bytes, out: Floats) -> None:
    _nibbles(raw[6:], out)
    _fifth_bits(raw[2:6], out)
    out -= 16
    out *= _scale(raw[:2])


def _q5_1(raw: Bytes, out: Floats) -> None:
    _nibbles(raw[8:], out)
    _fifth_bits(raw[4:8], out)
    out *= _scale(raw[:2])
    out += _scale(raw[2:4])


def _q8_0(raw: Bytes, out: Floats) -> None:
    out[:] = raw[2:].view(np.int8)
    out *= _scale(raw[:2])


CONVERTERS: dict[str, Callable[[Bytes, Floats], None]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
}


def _by_package(tensor: Tensor, raw: Bytes) -> Floats:
    try:
        package = importlib.import_module("gguf")
    except ImportError as error:
        raise InvalidArgument(
            f"tensor {tensor.name!r} is of type {tensor.type.name}, which needs the gguf package"
            f" ({error}): pip install gguf"
        ) from error
    kind = package.GGMLQuantizationType(tensor.number)
    values: Floats = package.dequantize(np.ascontiguousarray(raw), kind)
    return values
