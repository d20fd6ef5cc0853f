# SPDX-License-Identifier: Apache-2.0
"""GGUF files: what stands in them is found, what they claim beyond that is refused."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actorserve.actors.generation.engines.gguf_file import GgufFile
from actorserve.errors import InvalidArgument
from tests.unit.actors.generation.engines.gguf_maker import MadeTensor, floats, gguf_bytes

METADATA: dict[str, Any] = {
    "a.text": "wörd",
    "a.count": 7,
    "a.share": 0.5,
    "a.flag": True,
    "a.words": ["x", "yz"],
    "a.numbers": [1, 2, 3],
    "a.nested": [[1, 2], [3]],
}
MATRIX = np.arange(12, dtype=np.float32).reshape(3, 4)
TENSORS = {"m": floats(MATRIX), "v": floats(MATRIX[0])}


def _file(folder: Path, data: bytes) -> GgufFile:
    path = folder / "x.gguf"
    path.write_bytes(data)
    return GgufFile(path)


def test_metadata_of_every_kind_is_read(tmp_path: Path) -> None:
    """Texts, numbers, flags and arrays, also of arrays, come as Python values."""
    assert _file(tmp_path, gguf_bytes(METADATA, {})).metadata == METADATA


def test_tensors_are_found_by_name_with_their_rows_first(tmp_path: Path) -> None:
    """A tensor's bytes are those of its rows, at its place behind the head."""
    file = _file(tmp_path, gguf_bytes(METADATA, TENSORS))
    tensor = file.tensor("m", (3, 4))
    assert tensor.type.name == "F32"
    assert np.array_equal(tensor.data.view(np.float32), MATRIX)
    assert np.array_equal(file.tensor("v", (4,)).data.view(np.float32)[0], MATRIX[0])


def test_a_file_may_be_read_without_its_tensors(tmp_path: Path) -> None:
    """A tokenizer needs the metadata only."""
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_bytes(METADATA, TENSORS))
    file = GgufFile(path, tensors=False)
    assert (file.metadata["a.count"], file.tensors) == (7, {})


def test_a_missing_tensor_and_one_of_another_shape_are_named(tmp_path: Path) -> None:
    """The error says which tensor, and what was expected of it."""
    file = _file(tmp_path, gguf_bytes({}, TENSORS))
    with pytest.raises(InvalidArgument, match=r"'w' .* is missing; expected \[2\]"):
        file.tensor("w", (2,))
    with pytest.raises(InvalidArgument, match=r"'m' .* has the shape \[3, 4\]; expected \[4, 3\]"):
        file.tensor("m", (4, 3))


def test_an_entry_of_another_kind_is_refused(tmp_path: Path) -> None:
    """What is missing or of another type is not passed on."""
    file = _file(tmp_path, gguf_bytes(METADATA, {}))
    assert file.get("a.count", int) == 7
    for key in ("a.text", "a.none"):
        with pytest.raises(InvalidArgument, match=key):
            file.get(key, int)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    """No cut leads to anything but a clear error."""
    whole = gguf_bytes(METADATA, TENSORS)
    for size in [0, 3, *range(4, len(whole) - 16, 7)]:
        with pytest.raises(InvalidArgument, match=r"x\.gguf"):
            _file(tmp_path, whole[:size])


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"GGML" + bytes(60), "the word GGUF"),
        (gguf_bytes({}, {}, version=1), "version 2 or 3"),
        (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "little endian"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q", 1 << 63), "more bytes"),
        (struct.pack("<4sIQQQ1sI", b"GGUF", 3, 0, 1, 1, b"k", 99), "a known type of value"),
        (
            struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"k", 9, 10, 1 << 61),
            "more bytes",
        ),
        (gguf_bytes({"general.alignment": 0}, {"t": TENSORS["m"]}), "an alignment over 0"),
        (gguf_bytes({}, {"t": MadeTensor(99, (1,), b"")}), "type number 99; known: .*Q4_1"),
        (gguf_bytes({}, {"t": MadeTensor(8, (2, 33), b"")}), "whole blocks of 32"),
        (gguf_bytes({}, {"t": MadeTensor(0, (1 << 62, 1 << 62), b"")}), "bytes of tensor 't'"),
        (gguf_bytes({}, {"t": MadeTensor(0, (1,) * 5, bytes(4))}), "at most 4 dimensions"),
        (gguf_bytes({"k": [[[[[[1]]]]]]}, {}), "a known type of value"),
    ],
)
def test_a_lying_file_is_refused(tmp_path: Path, data: bytes, expected: str) -> None:
    """Lengths, types and shapes are held against what is there before they are used."""
    with pytest.raises(InvalidArgument, match=expected):
        _file(tmp_path, data)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    """The error names the file."""
    with pytest.raises(InvalidArgument, match=r"none\.gguf"):
        GgufFile(tmp_path / "none.gguf")
