# SPDX-License-Identifier: Apache-2.0
"""Blocks to numbers: each type against its definition, one value at a time."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from actorserve.actors.generation.engines import gguf_weights
from actorserve.actors.generation.engines.gguf_file import TENSOR_TYPES, Tensor
from actorserve.errors import InvalidArgument

ROWS, BLOCKS = 5, 3
Block = Callable[[bytes, int], float]


def _half(block: bytes, at: int) -> float:
    return float(struct.unpack_from("<e", block, at)[0])


def _nibble(packed: bytes, number: int) -> int:
    return packed[number] & 15 if number < 16 else packed[number - 16] >> 4


def _fifth(bits: bytes, number: int) -> int:
    return (int.from_bytes(bits, "little") >> number & 1) << 4


DEFINITIONS: dict[str, Block] = {
    "F32": lambda b, n: float(struct.unpack("<f", b)[0]),
    "F16": lambda b, n: _half(b, 0),
    "BF16": lambda b, n: float(struct.unpack("<f", b"\0\0" + b)[0]),
    "Q4_0": lambda b, n: _half(b, 0) * (_nibble(b[2:], n) - 8),
    "Q4_1": lambda b, n: _half(b, 0) * _nibble(b[4:], n) + _half(b, 2),
    "Q5_0": lambda b, n: _half(b, 0) * (_nibble(b[6:], n) + _fifth(b[2:6], n) - 16),
    "Q5_1": lambda b, n: _half(b, 0) * (_nibble(b[8:], n) + _fifth(b[4:8], n)) + _half(b, 2),
    "Q8_0": lambda b, n: _half(b, 0) * struct.unpack_from("<b", b, 2 + n)[0],
}


def _tensor(name: str) -> Tensor:
    """Return a tensor of random blocks with sane scales."""
    number, kind = next(item for item in TENSOR_TYPES.items() if item[1].name == name)
    rng = np.random.default_rng(number)
    blocks = rng.integers(0, 256, (ROWS, BLOCKS, kind.nbytes), np.uint8)
    if name == "F32":
        blocks = rng.standard_normal((ROWS, BLOCKS, 1), np.float32).view(np.uint8)
    else:
        scales = rng.standard_normal((ROWS, BLOCKS, min(2, kind.nbytes // 2))).astype(np.float16)
        blocks[:, :, : scales.shape[2] * 2] = scales.view(np.uint8)
    data = np.ascontiguousarray(blocks).reshape(ROWS, BLOCKS * kind.nbytes)
    return Tensor("t", number, kind, (ROWS, BLOCKS * kind.values), data)


def _expected(tensor: Tensor) -> npt.NDArray[np.float32]:
    define = DEFINITIONS[tensor.type.name]
    blocks = tensor.data.reshape(-1, tensor.type.nbytes)
    values = [define(block.tobytes(), n) for block in blocks for n in range(tensor.type.values)]
    return np.array(values, np.float32).reshape(tensor.shape)


@pytest.mark.parametrize("name", sorted(DEFINITIONS))
def test_values_are_those_of_the_definition(name: str) -> None:
    """Whole, by rows and transposed, a tensor has the values that its type defines."""
    tensor = _tensor(name)
    expected = _expected(tensor)
    assert np.allclose(gguf_weights.dense(tensor), expected, rtol=1e-6, atol=1e-6)
    some = np.array([3, 0, 3])
    assert np.array_equal(gguf_weights.rows(tensor, some), gguf_weights.dense(tensor)[some])
    beside = np.full((tensor.shape[1], ROWS + 2), np.nan, np.float32)
    gguf_weights.fill_transposed(tensor, tensor.data, beside[:, 1:-1])
    assert np.array_equal(beside[:, 1:-1].T, gguf_weights.dense(tensor))
    assert np.isnan(beside[:, [0, -1]]).all()


@pytest.mark.parametrize("name", sorted(DEFINITIONS))
def test_values_equal_those_of_the_gguf_package_bit_by_bit(name: str) -> None:
    """The package of the format's makers, where it can be imported, gives the same floats."""
    package = pytest.importorskip("gguf", reason="gguf (and its pyyaml) is not installed")
    tensor = _tensor(name)
    theirs = tensor.data.view({"F32": np.float32, "F16": np.float16}.get(name, np.uint8))
    kind = package.GGMLQuantizationType(tensor.number)
    values = package.dequantize(theirs, kind)
    assert np.array_equal(values, gguf_weights.dense(tensor))


def test_many_rows_are_converted_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of the pieces changes nothing."""
    tensor = _tensor("Q4_1")
    whole = gguf_weights.dense(tensor)
    monkeypatch.setattr(gguf_weights, "PIECE_ROWS", 2)
    out = np.empty(tensor.shape[::-1], np.float32)
    gguf_weights.fill_transposed(tensor, tensor.data, out)
    assert np.array_equal(out.T, whole)
    assert np.array_equal(gguf_weights.dense(tensor), whole)


def test_other_types_ask_for_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the gguf package, the error says which type needs it and how to get it."""
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    tensor = _tensor("Q6_K")
    with pytest.raises(InvalidArgument, match="Q6_K.*pip install gguf"):
        gguf_weights.dense(tensor)


def test_other_types_go_through_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """With it, its values are taken, transposed too."""

    class Package:
        @staticmethod
        def GGMLQuantizationType(number: int) -> int:
            return number

        @staticmethod
        def dequantize(data: npt.NDArray[np.uint8], kind: int) -> npt.NDArray[np.float32]:
            assert kind == 14
            return np.arange(data.shape[0] * 768, dtype=np.float32).reshape(-1, 768)

    monkeypatch.setitem(__import__("sys").modules, "gguf", Package)
    tensor = _tensor("Q6_K")
    out = np.empty((768, ROWS), np.float32)
    gguf_weights.fill_transposed(tensor, tensor.data, out)
    assert np.array_equal(out.T, gguf_weights.dense(tensor))
