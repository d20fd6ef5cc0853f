# SPDX-License-Identifier: Apache-2.0
"""Our actors of the measurements, at the top of a module, where other processes find them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from actorserve import Actor, Message


class Add(Message[int]):
    """The small typed message: two numbers there, one back."""

    a: int
    b: int


class Tally(Message[int]):
    """Ask how many there were."""


class Count(Message[int]):
    """Ask for a stream of so many numbers."""

    most: int


class Ends(Message[float]):
    """Ask for the sum of an array's first and last number."""

    values: np.ndarray


class Adder(Actor):
    """Add two numbers."""

    def receive(self, message: Add) -> int:
        """Return the sum."""
        return message.a + message.b


class Counter(Actor):
    """Count what it is told."""

    def __init__(self) -> None:
        self._seen = 0

    def receive(self, message: Add | Tally) -> int:
        """Return how many there were so far."""
        if isinstance(message, Add):
            self._seen += 1
        return self._seen


class Source(Actor):
    """Send a stream."""

    def receive(self, message: Count) -> Iterator[int]:
        """Yield the numbers."""
        return iter(range(message.most))


class Looker(Actor):
    """Look at an array."""

    def receive(self, message: Ends) -> float:
        """Return the sum of the ends."""
        return ends(message.values)


def ends(values: npt.NDArray[np.float32]) -> float:
    """Return the sum of the first and the last number: all that is looked at."""
    return float(values[0] + values[-1])


def add(a: int, b: int) -> int:
    """Add two numbers, for peers that call functions."""
    return a + b
