# SPDX-License-Identifier: Apache-2.0
"""Read a file of named arrays (npz), whatever is wrong with it; nothing is ever unpickled."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["read_arrays"]


def read_arrays(
    path: str | Path, wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays whose names are wanted; the others are not read.

    Raises OSError for a file that cannot be opened, ValueError for one that is no such file.
    """
    with open(path, "rb") as stream:
        try:
            with zipfile.ZipFile(stream) as archive:
                names = [name.removesuffix(".npy") for name in archive.namelist()]
            stream.seek(0)
            with np.load(stream, allow_pickle=False) as file:
                return {name: file[name] for name in names if wanted(name)}
        except (zipfile.BadZipFile, EOFError, KeyError, NotImplementedError) as error:
            raise ValueError(f"no file of arrays (npz): {error}") from error
