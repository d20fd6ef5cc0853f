# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters: a change of low rank to some of a model's matrices, for some rows of a batch.

File (npz): for each changed matrix NAME, which maps inputs to outputs, the arrays "NAME.a"
[inputs, rank] and "NAME.b" [rank, outputs], and optionally "scale", one number. A row that has
the adapter gets (x @ a) @ b * scale on top of x @ NAME.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from actorserve.actors.generation.engine import RequestError
from actorserve.actors.generation.engines.array_file import read_arrays
from actorserve.actors.generation.engines.decoder import Batch, FloatArray

__all__ = ["Lora", "add_adapters", "read_lora", "write_lora"]

Lora = dict[str, tuple[FloatArray, FloatArray]]
"""By name of the matrix: `a`, and `b` with the scale in it."""


def read_lora(path: str, shapes: Mapping[str, tuple[int, int]]) -> Lora:
    """Read an adapter for matrices of these shapes, (inputs, outputs) by name.

    Raises RequestError for a file that cannot be read, or does not fit the model.
    """
    try:
        arrays = {key: np.asarray(each, np.float32) for key, each in read_arrays(path).items()}
    except (OSError, ValueError) as error:
        raise RequestError(f"adapter {path!r} cannot be read: {error}") from error
    scale = arrays.pop("scale", np.ones((), np.float32))
    if scale.size != 1:
        raise RequestError(f"adapter {path!r}: scale has the shape {scale.shape}; expected one")
    lora: Lora = {}
    for name in sorted({key.rpartition(".")[0] for key in arrays}):
        a, b = arrays.pop(f"{name}.a", None), arrays.pop(f"{name}.b", None)
        if name not in shapes:
            raise RequestError(f"adapter {path!r} changes {name!r}, which this model has not")
        _check(path, name, shapes[name], a, b)
        assert a is not None and b is not None
        lora[name] = (a, b * scale.reshape(()))
    if arrays:
        raise RequestError(f"adapter {path!r} has arrays of no meaning: {sorted(arrays)}")
    if not lora:
        raise RequestError(f"adapter {path!r} changes nothing")
    return lora


def _check(
    path: str, name: str, shape: tuple[int, int], a: FloatArray | None, b: FloatArray | None
) -> None:
    if a is None or b is None:
        raise RequestError(f"adapter {path!r}: {name} has no {'a' if a is None else 'b'}")
    fits = a.ndim == b.ndim == 2 and a.shape[1] == b.shape[0]
    if not fits or (a.shape[0], b.shape[1]) != shape:
        raise RequestError(
            f"adapter {path!r}: {name} has the shapes {a.shape} and {b.shape}; expected "
            f"[{shape[0]}, rank] and [rank, {shape[1]}]"
        )


def write_lora(path: str | Path, lora: Lora, scale: float = 1.0) -> None:
    """Write an adapter as `read_lora` reads it."""
    arrays: dict[str, Any] = {"scale": np.float32(scale)}
    for name, (a, b) in lora.items():
        arrays[f"{name}.a"], arrays[f"{name}.b"] = a, b
    np.savez(path, **arrays)


def add_adapters(batch: Batch, name: str, x: FloatArray, y: FloatArray) -> None:
    """Add to y = x @ NAME what each row's adapter changes, in place."""
    for adapter, rows in batch.adapters:
        change = adapter.get(name)
        if change is not None:
            a, b = change
            y[rows] += (x[rows] @ a) @ b
