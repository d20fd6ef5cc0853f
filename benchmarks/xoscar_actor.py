# SPDX-License-Identifier: Apache-2.0
"""The same actor for xoscar: methods instead of messages. Import it where xoscar is known to be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import xoscar as xo


class XoscarActor(xo.Actor):  # type: ignore[misc]
    """Answer what our actors of the measurements answer."""

    def __init__(self) -> None:
        super().__init__()
        self._seen = 0

    def add(self, a: int, b: int) -> int:
        """Return the sum."""
        return a + b

    def note(self, a: int, b: int) -> None:
        """Count a call."""
        self._seen += 1

    def tally(self) -> int:
        """Return how many there were so far."""
        return self._seen

    @xo.generator
    def count(self, most: int) -> Iterator[Any]:
        """Yield so many numbers."""
        yield from range(most)

    def ends(self, values: npt.NDArray[np.float32]) -> float:
        """Return the sum of the array's first and last number."""
        return float(values[0] + values[-1])
