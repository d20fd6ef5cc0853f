# SPDX-License-Identifier: Apache-2.0
"""A GGUF file: its metadata, and its tensors as mapped bytes.

    "GGUF" │ version │ tensors │ entries │ key, type, value … │ name, shape, type, offset … │ data

Own reading, because it is short and because the `gguf` package, which makes an array of every
word of a vocabulary, takes six seconds where this takes a tenth of one. Every length that the
file claims is held against what is there: a cut or lying file is an InvalidArgument with its
name, the place and what was expected. Nothing here knows what a model is.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from actorserve.errors import InvalidArgument

VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_NESTING = 4

STRING = 8
ARRAY = 9
# Types of single values, by their number in the format, as struct writes them.
SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd"))

Bytes = npt.NDArray[np.uint8]


class TensorType(NamedTuple):
    """How a type of tensor lies in the file: blocks of `values` numbers in `nbytes` bytes."""

    name: str
    values: int
    nbytes: int


# The types that files for inference use, by their number in the format.
TENSOR_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    20: TensorType("IQ4_NL", 32, 18),
    23: TensorType("IQ4_XS", 256, 136),
    30: TensorType("BF16", 1, 2),
}


class Tensor(NamedTuple):
    """One tensor: `data` is [rows, bytes of a row], mapped; `shape` has the rows first."""

    name: str
    number: int
    type: TensorType
    shape: tuple[int, ...]
    data: Bytes


class GgufFile:
    """The metadata and the tensors of one file, by name."""

    def __init__(self, path: str | Path, *, tensors: bool = True) -> None:
        """Read a file; without `tensors`, its metadata only.

        Raises InvalidArgument for a file that is missing, cut or no GGUF of a known version.
        """
        self.path = str(path)
        try:
            self._bytes: Bytes = np.memmap(self.path, np.uint8, "r")
        except (OSError, ValueError) as error:
            raise InvalidArgument(f"cannot read the GGUF file {self.path!r}: {error}") from error
        cursor = _Cursor(self.path, self._bytes)
        tensor_count, entry_count = cursor.head()
        self.metadata: dict[str, Any] = {}
        for _ in range(entry_count):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.number("I"))
        self.tensors: dict[str, Tensor] = {}
        if tensors:
            self._read_tensors(cursor, tensor_count)

    def get(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """Return an entry of the metadata. Raises InvalidArgument when missing or no `kind`."""
        value = self.metadata.get(key)
        if not isinstance(value, kind):
            raise InvalidArgument(
                f"the GGUF file {self.path!r} has no usable {key!r}: got {type(value).__name__}"
            )
        return value

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor. Raises InvalidArgument when missing or of another shape."""
        tensor = self.tensors.get(name)
        if tensor is None or tensor.shape != shape:
            found = "is missing" if tensor is None else f"has the shape {list(tensor.shape)}"
            raise InvalidArgument(
                f"tensor {name!r} of {self.path!r} {found}; expected {list(shape)}"
            )
        return tensor

    def _read_tensors(self, cursor: _Cursor, count: int) -> None:
        heads = [cursor.tensor_head() for _ in range(count)]
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            cursor.fail(f"an alignment over 0, got {alignment!r}")
        data_at = -(-cursor.at // alignment) * alignment
        for name, dimensions, number, offset in heads:
            kind = TENSOR_TYPES.get(number)
            if kind is None:
                known = ", ".join(sorted(each.name for each in TENSOR_TYPES.values()))
                raise InvalidArgument(
                    f"tensor {name!r} of {self.path!r} has type number {number}; known: {known}"
                )
            if not dimensions or dimensions[0] % kind.values:
                cursor.fail(f"rows of whole blocks of {kind.values} in tensor {name!r}")
            row_bytes = dimensions[0] // kind.values * kind.nbytes
            rows = int(np.prod(dimensions[1:], dtype=object)) if len(dimensions) > 1 else 1
            begin, nbytes = data_at + offset, rows * row_bytes
            if begin + nbytes > len(self._bytes):
                cursor.fail(f"{nbytes} bytes of tensor {name!r} at {begin}", len(self._bytes))
            data = self._bytes[begin : begin + nbytes].reshape(rows, row_bytes)
            shape = tuple(reversed(dimensions))
            self.tensors[name] = Tensor(name, number, kind, shape, data)


class _Cursor:
    """Reads the head of a file from front to back, within its bounds."""

    def __init__(self, path: str, data: Bytes) -> None:
        self.at = 0
        self._path = path
        self._view = data.data
        self._formats = {code: struct.Struct("<" + code) for code in SCALARS.values()}

    def head(self) -> tuple[int, int]:
        """Return how many tensors and how many entries of metadata there are."""
        if bytes(self._view[:4]) != b"GGUF":
            self.fail("the word GGUF at the front")
        self.at = 4
        version = self.number("I")
        if version not in VERSIONS:
            self.fail(f"version 2 or 3 of the format, little endian, got {version}")
        return self.number("Q"), self.number("Q")

    def number(self, code: str) -> Any:
        """Return a number of a struct format."""
        form = self._formats[code]
        at = self.at
        self._take(form.size)
        return form.unpack_from(self._view, at)[0]

    def string(self) -> str:
        """Return a string; bytes that are no UTF-8 are kept as surrogates."""
        nbytes = self.number("Q")
        at = self.at
        self._take(nbytes)
        return str(self._view[at : at + nbytes], "utf-8", "surrogateescape")

    def value(self, kind: int, depth: int = 0) -> Any:
        """Return a value of a type of the format; arrays are lists."""
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            return self.string()
        if kind != ARRAY or depth >= MAX_NESTING:
            self.fail(f"a known type of value, got {kind}")
        item, count = self.number("I"), self.number("Q")
        if item in SCALARS:
            at = self.at
            self._take(count * struct.calcsize("<" + SCALARS[item]))
            return list(struct.unpack_from(f"<{count}{SCALARS[item]}", self._view, at))
        read: Callable[[], Any] = (
            self.string if item == STRING else lambda: self.value(item, depth + 1)
        )
        return [read() for _ in range(count)]

    def tensor_head(self) -> tuple[str, list[int], int, int]:
        """Return the name, dimensions (the innermost first), type and offset of a tensor."""
        name = self.string()
        count = self.number("I")
        if count > MAX_DIMENSIONS:
            self.fail(f"at most {MAX_DIMENSIONS} dimensions of {name!r}, got {count}")
        dimensions = [self.number("Q") for _ in range(count)]
        return name, dimensions, self.number("I"), self.number("Q")

    def fail(self, expected: str, at: int | None = None) -> None:
        """Raise the error for what does not stand here."""
        place = self.at if at is None else at
        raise InvalidArgument(f"bad GGUF file {self._path!r} at byte {place}: expected {expected}")

    def _take(self, nbytes: int) -> None:
        if nbytes > len(self._view) - self.at:
            self.fail(f"{nbytes} more bytes, the file has {len(self._view) - self.at}")
        self.at += nbytes
